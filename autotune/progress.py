"""Live progress of a study, on stderr: a status line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune.history import History
from autotune.records import Failure, Measurement
from autotune.store.views import NoiseFloor, TrialView
from model.spec import Knobs, Prediction


class Progress:
    """Shows one study at work. Use as a context; every method prints at most a few lines."""

    def __init__(self, console: Console, num_trials: int, levels: tuple[int, ...]) -> None:
        self._console, self._num_trials, self._levels = console, num_trials, levels
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._best: dict[int, float] = {}
        self._predicted: dict[int, float] = {}
        self._num_done = 0
        self._started = time.monotonic()
        self._doing = ""
        self._left = ""

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """One line that is no measurement."""
        self._console.print(Text(text), soft_wrap=True)

    def stage(self, name: str, knobs: Knobs) -> None:
        """A part of the study other than a search trial begins."""
        self._doing, self._predicted = name, {}
        self.note(f"{name}: {knobs.label()}")

    def trial(
        self,
        trial: TrialView,
        predictions: Mapping[int, Prediction],
        best: Mapping[int, float],
        time_left_s: float | None,
        num_done: int,
    ) -> None:
        """A search trial begins."""
        self._best = dict(best)
        self._num_done = num_done
        self._predicted = {lv: p.tokens_per_s.median for lv, p in predictions.items()}
        estimate = self._estimate_left_s(time_left_s)
        # before the first trial only the budget is known
        about = "about" if num_done else "at most"
        self._left = "" if estimate is None else f", {about} {duration(estimate)} left"
        # the number by which `explain`, `compare` and the report know it, then how far it is
        self._doing = f"trial {trial.number} ({num_done + 1} of {self._num_trials})"
        self.note(
            f"{self._doing}: {trial.knobs.label()} ({trial.origin}); predicted "
            f"{self._speeds(self._predicted)}, best so far {self._speeds(self._best)}{self._left}"
        )

    def repeat(self, trial: TrialView, measurement: Measurement) -> None:
        """A repeat is stored."""
        value = measurement.tokens_per_s
        shown = f"{value:.1f} tok/s" if measurement.failure is None and value else "failed"
        line = (
            f"{self._doing} · {trial.knobs.label()} · c={measurement.concurrency} repeat "
            f"{measurement.repeat + 1}: {shown} · predicted {self._speeds(self._predicted)} · "
            f"best {self._speeds(self._best)}{self._left}"
        )
        if self._console.is_terminal:
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True))

    def finished(self, trial: TrialView, history: History, failure: Failure | None) -> None:
        """A trial has ended."""
        if failure is not None:
            self.note(f"  failed: {failure.kind} at {failure.stage}: {failure.message}")
            return
        result = history.by_knobs[trial.knobs.id]
        parts = []
        for level in self._levels:
            values = history.trial_values(trial.id, level)
            summary = result.summary(level)
            if not values or summary is None:
                continue
            middle = sorted(values)[len(values) // 2]
            spread = f"{min(values):.1f}–{max(values):.1f}"
            parts.append(f"c={level}: {middle:.1f} tok/s ({spread}, n={len(values)})")
        whose = "measured" if trial.role == "search" else f"{trial.role} {trial.knobs.label()}:"
        self.note(f"  {whose} {'; '.join(parts)}")

    def noise_floors(self, floors: Mapping[int, NoiseFloor]) -> None:
        """The A/A pair is done."""
        for level, floor in sorted(floors.items()):
            self.note(
                f"  noise floor at c={level}: {100 * floor.rel_floor:.1f} % "
                f"(A/A, {floor.num_pairs} pairs)"
            )

    def _estimate_left_s(self, budget_left_s: float | None) -> float | None:
        if self._num_done == 0:
            return budget_left_s
        per_trial = (time.monotonic() - self._started) / self._num_done
        estimate = per_trial * (self._num_trials - self._num_done)
        return estimate if budget_left_s is None else min(estimate, budget_left_s)

    def _speeds(self, by_level: Mapping[int, float]) -> str:
        if not by_level:
            return "–"
        return " / ".join(f"{by_level[lv]:.1f}" for lv in self._levels if lv in by_level) + " tok/s"


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "5 h 59 min"."""
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
