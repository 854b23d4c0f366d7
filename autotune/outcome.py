"""What a study found: best knobs by level against the baseline, and what supports it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.history import History, KnobsResult
from autotune.pareto import Front, fronts
from autotune.schemas import Study
from autotune.search import Goal
from autotune.statistics import Ratio, Summary, Verdict, median_ratio, paired_ratio, summarise
from autotune.store.store import Store
from autotune.store.views import NoiseFloor, TrialView
from model.spec import Knobs, Prediction


@dataclass(frozen=True, kw_only=True)
class LevelOutcome:
    """One concurrency: the best knobs and the baseline, measured."""

    concurrency: int
    knobs: Knobs
    trial: int
    best: Summary
    baseline_trial: int
    baseline: Summary
    #: best / baseline in the sense of "faster"; None when the baseline itself is best
    ratio: Ratio | None
    #: the ratio comes from repeats taken in turns, not from pooled ones
    interleaved: bool
    verdict: Verdict
    noise_floor: float | None
    output_check: str
    accept_length: float | None
    predicted: Prediction | None

    @property
    def beats_baseline(self) -> bool:
        """Whether speculation (or another setting) is shown to be faster than the baseline."""
        return self.verdict == "faster"

    def knobs_text(self) -> str:
        """Label of the best knobs; says so where they are not shown to beat the baseline."""
        alone = self.beats_baseline or self.ratio is None
        return self.knobs.label() + ("" if alone else " (not shown to beat the baseline)")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer of a study so far."""

    study: str
    metric: Goal
    levels: tuple[LevelOutcome, ...]
    num_search_trials: int
    #: knobs other than the baseline with a valid measurement at some level
    num_alternatives: int
    num_failed: int
    num_repeats: int
    #: why the study ended
    ended: str
    #: why there is no baseline: "oom at warmup"; None where there is one, or none was tried
    baseline_failure: str | None = None
    #: with several objectives: what no other configuration beats in all of them, by concurrency
    fronts: tuple[Front, ...] = ()

    @property
    def anything_won(self) -> bool:
        """Whether any level beats the baseline."""
        return any(level.beats_baseline for level in self.levels)

    def verdict(self) -> str:
        """One honest sentence."""
        won = [level for level in self.levels if level.beats_baseline]
        if not self.levels and self.baseline_failure is not None:
            return f"the baseline could not be measured: {self.baseline_failure}"
        if not self.levels:
            return "no level has a measured baseline and a measured alternative yet"
        if self.num_alternatives == 0:
            tried = self.num_search_trials
            if tried == 0:
                return "only the baseline was measured: no other configuration was tried"
            return (
                f"only the baseline was measured: {tried} other trial{'s' if tried > 1 else ''} "
                f"gave no number"
            )
        if not won:
            count = f"{self.num_alternatives} other configuration"
            count += "s were measured" if self.num_alternatives > 1 else " was measured"
            if any(level.verdict == "undecided" for level in self.levels):
                apart = any(not lv.interleaved and lv.ratio is not None for lv in self.levels)
                why = (
                    "the best was not compared with it in turns" if apart
                    else "the differences are inside the noise"
                )  # fmt: skip
                return f"nothing is shown to beat the baseline: {why} ({count})"
            return f"nothing beats the baseline (plain decoding) here ({count})"
        gains = ", ".join(
            f"{level.concurrency} ({level.ratio.median:.2f} ×)"
            for level in won
            if level.ratio is not None
        )
        if len(won) == len(self.levels):
            every = "every concurrency measured: " if len(won) > 1 else "concurrency "
            return f"the best configuration beats the baseline at {every}{gains}"
        rest = [level for level in self.levels if not level.beats_baseline]
        open_ = [level.concurrency for level in rest if level.verdict == "undecided"]
        lost = [level.concurrency for level in rest if level.verdict != "undecided"]
        parts = [f"the best configuration beats the baseline at concurrency {gains}"]
        if lost:
            parts.append(f"nothing does at {_join(lost)}")
        if open_:
            apart = any(not level.interleaved for level in rest if level.concurrency in open_)
            why = "not compared in turns" if apart else "inside the noise"
            parts.append(f"it is undecided at {_join(open_)} ({why})")
        return "; ".join(parts)


def goal_of(study: Study) -> Goal:
    """The first metric decides; further ones make the fronts of ``autotune.pareto``."""
    name, direction = study.objective.metrics[0]
    return Goal(name=name, maximize=direction == "maximize")


def leaders(
    history: History, study: Study, limit_to: frozenset[str] | None = None
) -> dict[int, KnobsResult]:
    """Concurrency -> the best complete knobs there, by median of the deciding metric."""
    goal = goal_of(study)
    found: dict[int, KnobsResult] = {}
    for level in study.workload.concurrency:
        best_score = -math.inf
        for knobs_id, result in history.by_knobs.items():
            if limit_to is not None and knobs_id not in limit_to:
                continue
            # no summaries: an interval for each of thousands of knobs that lose takes seconds
            values = result.values(level, goal.name)
            if not values or not result.complete((level,)):
                continue
            if study.constraints.lossless and result.output_check(level) == "incorrect":
                continue
            score = goal.log_gain(statistics.median(values))
            if score > best_score:
                best_score, found[level] = score, result
    return found


def conclude(store: Store, study_id: int, study: Study, ended: str) -> Outcome:
    """Read everything and say what it shows."""
    history = History.read(store, study_id)
    floors = store.noise_floors(study_id)
    predictions = store.predictions(study_id)
    levels = []
    baseline = history.baseline
    chosen = finalists(history) or leaders(history, study)
    for level in study.workload.concurrency:
        best = chosen.get(level) or leaders(history, study).get(level)
        if best is not None and baseline is not None and baseline.values(level):
            levels.append(_level(history, study, best, baseline, level, floors, predictions))
    return Outcome(
        study=study.name,
        metric=goal_of(study),
        levels=tuple(levels),
        num_search_trials=history.num_search_trials,
        num_alternatives=sum(
            any(result.complete((level,)) for level in study.workload.concurrency)
            for knobs_id, result in history.by_knobs.items()
            if baseline is not None and knobs_id != baseline.knobs.id
        ),
        num_failed=sum(trial.state == "failed" for trial in history.trials),
        num_repeats=len(history.repeats),
        ended=ended,
        baseline_failure=_baseline_failure(store, study_id, history),
        fronts=fronts(history, study, _exported(levels, baseline)),
    )


def _baseline_failure(store: Store, study_id: int, history: History) -> str | None:
    """What the last failed baseline trial says; None where a baseline was measured."""
    trials = history.of_role("baseline")
    if any(trial.state != "failed" for trial in trials):
        return None
    ids = {trial.id for trial in trials}
    for stored in reversed(store.failures(study_id)):
        if stored.trial_id in ids:
            failure = stored.failure
            return f"{failure.kind} at {failure.stage}: {failure.message}"
    return None


def _exported(levels: Sequence[LevelOutcome], baseline: KnobsResult | None) -> dict[int, str]:
    """Concurrency -> knobs that the export takes: the best where it is shown to win."""
    kept = "" if baseline is None else baseline.knobs.id
    return {level.concurrency: level.knobs.id if level.beats_baseline else kept for level in levels}


def finalists(history: History) -> dict[int, KnobsResult]:
    """Concurrency -> knobs that the final comparison was begun for at that level."""
    found: dict[int, KnobsResult] = {}
    for trial in history.of_role("final"):
        if trial.state == "failed" or not trial.origin.startswith("final: best at "):
            continue
        for level in trial.origin.removeprefix("final: best at ").split(","):
            found[int(level)] = history.by_knobs[trial.knobs.id]
    return found


def winners(history: History, study: Study, baseline: Knobs) -> dict[str, list[int]]:
    """Knobs id -> levels where it is best; a comparison that was begun keeps its knobs."""
    chosen = {level: result.knobs.id for level, result in finalists(history).items()}
    for level, result in leaders(history, study).items():
        chosen.setdefault(level, result.knobs.id)
    found: dict[str, list[int]] = {}
    for level, knobs_id in sorted(chosen.items()):
        if knobs_id != baseline.id:
            found.setdefault(knobs_id, []).append(level)
    return found


def _level(
    history: History,
    study: Study,
    best: KnobsResult,
    baseline: KnobsResult,
    level: int,
    floors: Mapping[int, NoiseFloor],
    predictions: Mapping[int, Mapping[int, Prediction]],
) -> LevelOutcome:
    goal = goal_of(study)
    floor = floors[level].rel_floor if level in floors else None
    arms = _final_arms(history, best.knobs, level, goal)
    same = best.knobs.id == baseline.knobs.id
    best_summary, base_summary = best.summary(level, goal.name), baseline.summary(level, goal.name)
    assert best_summary is not None
    assert base_summary is not None
    ratio: Ratio | None = None
    if not same:
        first, second = arms or (best.values(level, goal.name), baseline.values(level, goal.name))
        if not goal.maximize:
            first, second = second, first
        ratio = paired_ratio(first, second) if arms else median_ratio(first, second)
    if arms:
        # the repeats that made it the best flatter it; those taken afterwards do not
        best_summary, base_summary = summarise(arms[0]), summarise(arms[1])
    verdict: Verdict = "same" if ratio is None else ratio.verdict(floor or 0.0)
    if arms is None and verdict in ("faster", "slower"):
        # only repeats taken in turns support such a claim
        verdict = "undecided"
    accepted = [row.accept_length for row in best.repeats[level] if row.accept_length is not None]
    predicted = _first_prediction(best.trials, level, predictions)
    return LevelOutcome(
        concurrency=level,
        knobs=best.knobs,
        trial=_main_trial(best).number,
        best=best_summary,
        baseline_trial=_main_trial(baseline).number,
        baseline=base_summary,
        ratio=ratio,
        interleaved=arms is not None,
        verdict=verdict,
        noise_floor=floor,
        output_check=best.output_check(level),
        accept_length=sum(accepted) / len(accepted) if accepted else None,
        predicted=predicted,
    )


def _final_arms(
    history: History, knobs: Knobs, level: int, goal: Goal
) -> tuple[list[float], list[float]] | None:
    """Repeats of the last final comparison of ``knobs``: its own and the baseline's, paired."""
    finals = [trial for trial in history.of_role("final") if trial.state == "complete"]
    ours = [trial for trial in finals if trial.knobs.id == knobs.id]
    for trial in reversed(ours):
        partner = next((t for t in finals if t.origin == f"final: against {trial.number}"), None)
        if partner is None:
            continue
        first = history.trial_values(trial.id, level, goal.name)
        second = history.trial_values(partner.id, level, goal.name)
        n = min(len(first), len(second))
        if n >= 2:
            return first[:n], second[:n]
    return None


def _main_trial(result: KnobsResult) -> TrialView:
    """The complete trial that best stands for knobs: its first one."""
    complete = [trial for trial in result.trials if trial.state == "complete"]
    return (complete or list(result.trials))[0]


def _first_prediction(
    trials: tuple[TrialView, ...], level: int, predictions: Mapping[int, Mapping[int, Prediction]]
) -> Prediction | None:
    """The prediction stored with the first trial: made before anything of it was measured."""
    for trial in trials:
        if level in predictions.get(trial.id, {}):
            return predictions[trial.id][level]
    return None


def _join(levels: list[int]) -> str:
    return ", ".join(map(str, levels))
