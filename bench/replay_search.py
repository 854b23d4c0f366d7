"""Judge the search and the model on a recorded space: every configuration's speed is known there.

    python -m bench.replay_search studies/h200-replay.yaml [--seeds 5] [--json]

Runs the study once a seed on its recording and follows the best configuration found, as a share of
the best recorded one (geometric mean over the levels), trial by trial, beside random search over
the same space (exact, by counting). Then the model: how far its predictions are off for all
configurations, before anything is measured and after the search, and whether it ranks them. Last
the knobs: what each value of them is worth where all others are equal.
"""

import argparse
import io
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from autotune.backends.recording import Recording, read_recording
from autotune.history import History
from autotune.modelling import StudyModel
from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import LoadedStudy, load_study
from bench.knob_effects import effects, pair_noise
from model.spec import Knobs

#: share of the best from which a configuration is one that somebody might choose
_CONTENDERS = 0.3


@dataclass(frozen=True, slots=True)
class Truth:
    """Recorded medians of every knobs: concurrency -> tokens/s."""

    knobs: Mapping[str, Knobs]
    speeds: Mapping[str, Mapping[int, float]]

    #: tokens/s of each repeat, by knobs and level
    repeats: tuple[tuple[float, ...], ...] = ()
    num_incorrect: int = 0

    @classmethod
    def of(cls, recording: Recording, *, lossless: bool = True) -> "Truth":
        """Medians over the repeats that did not fail; knobs that miss a level are left out.

        ``lossless``: also those whose output was wrong at some level, which a search must not find.
        """
        wrong = {
            recorded.knobs.id
            for recorded in recording.repeats
            if lossless and recorded.measurement.output_check == "incorrect"
        }
        all_levels = {recorded.workload.concurrency for recorded in recording.repeats}
        rows: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        knobs = {}
        for recorded in recording.repeats:
            measured = recorded.measurement
            if measured.failure is None and measured.tokens_per_s is not None:
                knobs[recorded.knobs.id] = recorded.knobs
                rows[recorded.knobs.id][measured.concurrency].append(measured.tokens_per_s)
        speeds = {
            each: {level: statistics.median(values) for level, values in levels.items()}
            for each, levels in rows.items()
            if each not in wrong and set(levels) == all_levels
        }
        repeats = tuple(tuple(v) for each in speeds for v in rows[each].values())
        kept = {each: knobs[each] for each in speeds}
        return cls(kept, speeds, repeats, len(wrong))

    def within(self, knobs_ids: Container[str]) -> "Truth":
        """The part of a space that is smaller than the recorded one."""
        speeds = {each: levels for each, levels in self.speeds.items() if each in knobs_ids}
        return replace(self, knobs={each: self.knobs[each] for each in speeds}, speeds=speeds)

    def score(self, knobs_id: str) -> float:
        """Mean log tokens/s over the levels."""
        return statistics.fmean(math.log(speed) for speed in self.speeds[knobs_id].values())

    def level_scores(self, level: int | None) -> dict[str, float]:
        """Log tokens/s of every knobs at a level, or the mean over the levels."""
        if level is None:
            return {each: self.score(each) for each in self.speeds}
        return {each: math.log(levels[level]) for each, levels in self.speeds.items()}

    def shares(self) -> dict[str, float]:
        """Each knobs' speed as a share of the best's."""
        best = max(self.score(each) for each in self.speeds)
        return {each: math.exp(self.score(each) - best) for each in self.speeds}


def random_search(shares: Sequence[float], num_trials: int) -> list[float]:
    """Mean best share after each number of trials drawn without return."""
    ordered = np.sort(np.asarray(shares))[::-1]
    n, found = len(ordered), []
    for count in range(1, num_trials + 1):
        # the best drawn is the i-th largest: it is drawn, and no larger one is
        none_before = [_log_comb(n - i, count) for i in range(n)]
        chance = [
            math.exp(a - none_before[0]) - math.exp(b - none_before[0])
            for a, b in zip(none_before, [*none_before[1:], -math.inf], strict=True)
        ]
        found.append(float(np.dot(chance, ordered)))
    return found


def _log_comb(n: int, k: int) -> float:
    if k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def searched(loaded: LoadedStudy, seed: int, truth: Truth) -> tuple[list[float], StudyModel]:
    """Best share after each search trial of one run, and the model as it ended."""
    study = loaded.study.model_copy(update={"seed": seed})
    run = LoadedStudy(study=study, source=loaded.source, base_dir=loaded.base_dir)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(f"sqlite:///{folder}/a.db")
        plan = make_plan(run)
        view = create_study(run, plan, store)
        progress = Progress(Console(file=io.StringIO()), study.budget.measured_trials, (1,))
        StudyRun(plan, view, store, progress, StopFlag()).run()
        trials = [
            trial
            for trial in History.read(store, view.id).trials
            if trial.role == "search" and trial.state != "running"
        ]
    shares, best, curve = truth.shares(), 0.0, []
    for trial in trials:
        best = max(best, shares.get(trial.knobs.id, 0.0))
        curve.append(best)
    return curve, plan.model


def accuracy(model: StudyModel, truth: Truth) -> dict[str, float]:
    """Predicted against recorded tokens/s over all knobs and levels."""
    errors, ranks, near = [], [], []
    chosen = sorted(truth.knobs)
    knobs = [truth.knobs[each] for each in chosen]
    inside = 0
    for level, workload in model.workloads.items():
        low, median, high = model.predictor.predict_many(knobs, workload).tokens_per_s_quantiles
        real = np.array([truth.speeds[each][level] for each in chosen])
        errors += list(np.abs(median / real - 1.0))
        near += list(np.abs(median / real - 1.0)[real >= _CONTENDERS * real.max()])
        inside += int(np.sum((low <= real) & (real <= high)))
        ranks.append(float(spearmanr(median, real).statistic))
    return {
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        #: of what anybody might choose
        "contenders_error": float(np.median(near)),
        "coverage90": inside / len(errors),
        "rank_correlation": min(ranks),
    }


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    loaded = load_study(args.study)
    path = loaded.base_dir / loaded.study.backend.args["path"]
    truth = Truth.of(read_recording(path), lossless=loaded.study.constraints.lossless)
    plan = make_plan(loaded)
    space = {plan.space.at(index).id for index in range(plan.space.size)}
    truth = truth.within(space | {plan.baseline.id})
    shares = truth.shares()
    prior = accuracy(plan.model, truth)
    curves, ends = [], []
    for seed in range(args.seeds):
        curve, model = searched(loaded, seed, truth)
        curves.append(curve)
        ends.append(accuracy(model, truth))
    length = min(len(curve) for curve in curves)
    by_chance = random_search(list(shares.values()), length)
    rows = [
        {"trials": n + 1, "search_median": statistics.median(c[n] for c in curves),
         "search_worst": min(c[n] for c in curves), "random_mean": by_chance[n]}
        for n in range(length)
    ]  # fmt: skip
    answer: dict[str, Any] = {
        "study": loaded.study.name,
        "num_knobs": len(shares),
        "seeds": args.seeds,
        "rows": rows,
        "model_before": prior,
        "model_after": {k: statistics.median(e[k] for e in ends) for k in prior},
        "pair_noise": pair_noise(truth.repeats),
        "num_incorrect": truth.num_incorrect,
        "effects": {
            f"{'all' if level is None else level} from {least:g} of the best": [
                asdict(each) for each in effects(truth.knobs, truth.level_scores(level), least)
            ]
            for level, least in tables(loaded)
        },
    }
    if args.json:
        print(json.dumps(answer))
        return 0
    print(
        f"{len(shares)} configurations recorded ({truth.num_incorrect} more with wrong output), "
        f"{args.seeds} seeds; speed as a share of the best"
    )
    print("trials  search, median  search, worst  random, mean")
    for row in rows:
        print(
            f"{row['trials']:6}  {row['search_median']:14.3f}  {row['search_worst']:13.3f}  "
            f"{row['random_mean']:12.3f}"
        )
    for name in ("model_before", "model_after"):
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in answer[name].items()))
    for level, least in tables(loaded):
        print_effects(truth, level, least)
    return 0


def tables(loaded: LoadedStudy) -> list[tuple[int | None, float]]:
    """(level, least share of the best) of each table of effects: all, then what is worth having."""
    levels = loaded.study.workload.concurrency
    return [(None, 0.0), *((level, _CONTENDERS) for level in (None, *levels))]


def print_effects(truth: Truth, level: int | None, least: float) -> None:
    """A line for each value of each knob: what is left with it, and pairs with the first value."""
    noise = pair_noise(truth.repeats)
    where = "all levels" if level is None else f"concurrency {level}"
    among = f"from {least:.0%} of the best" if least else "all configurations"
    print(f"\nknobs at {where}, {among} (a pair's own noise: {noise:.1%})")
    for each in effects(truth.knobs, truth.level_scores(level), least):
        line = f"{each.knob:26} {each.value!s:8} best with it {each.best_share:.3f}"
        if each.ratio is not None:
            mark = "" if each.matters(noise) else "  within noise"
            line += (
                f"  x{each.ratio:.3f} of {each.against} ({each.lowest:.3f} to {each.highest:.3f}, "
                f"{each.num_pairs} pairs){mark}"
            )
        print(line)


if __name__ == "__main__":
    sys.exit(main())
