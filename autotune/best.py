"""From a study's results to the best-config YAML (``autotune.export`` writes it)."""

from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.export import (
    Evidence,
    LaunchOptions,
    LevelBest,
    Throughput,
    choose_levels,
    write_best,
)
from autotune.history import History, KnobsResult
from autotune.outcome import Outcome
from autotune.plan import Plan
from autotune.records import Provenance
from autotune.statistics import Summary
from autotune.store.store import Store
from autotune.store.views import StudyView
from model.spec import Prediction

#: rows beyond prompt and output that a verify's tree may fill
_CONTEXT_MARGIN = 8


def write_study_best(
    path: Path,
    plan: Plan,
    view: StudyView,
    store: Store,
    outcome: Outcome,
    trial: int | None = None,
) -> tuple[Path, ...]:
    """Write the best configuration of a study by load level, with its evidence.

    ``trial`` exports the knobs of that trial at every level instead. Raises ``UserError`` when no
    configuration was measured at every level yet, or for a trial that cannot be exported.
    """
    history = History.read(store, view.id)
    baseline = history.baseline
    if baseline is None or not baseline.complete(plan.study.workload.concurrency):
        raise UserError(
            f"study {view.name}: the baseline is not measured yet; go on with "
            f"`autotune study resume {view.name}`"
        )
    predictions = store.predictions(view.id)
    candidates = [
        _level_best(result, baseline, level, outcome, _first(predictions, result, level))
        for result in history.by_knobs.values()
        for level in plan.study.workload.concurrency
        if result.complete((level,))
    ]
    if trial is None:
        levels = choose_levels(_preferred(candidates, outcome, plan))
    else:
        levels = _asked_for(candidates, history, plan, trial)
    provenance = _provenance(store, history, levels)
    floors = store.noise_floors(view.id)
    evidence = Evidence(
        study_id=str(view.id),
        machine_fingerprint=_fingerprint(provenance, plan),
        noise_floor=max((floor.rel_floor for floor in floors.values()), default=None),
        database=store.engine.url.render_as_string(hide_password=True),
        commit=None if provenance is None else provenance.commit,
        config_hash=None if provenance is None else provenance.config_hash,
        picked=_picked(outcome, trial),
    )
    return write_best(path, plan.study, levels, _options(provenance, plan), evidence)


def _picked(outcome: Outcome, trial: int | None) -> str:
    """How the exported configuration was picked, for the evidence."""
    if trial is not None:
        return f"trial {trial}, asked for with --trial"
    goal = outcome.metric
    told = f"{'highest' if goal.maximize else 'lowest'} {goal.name} at each concurrency"
    if not outcome.fronts:
        return told
    sizes = ", ".join(f"{front.num_best} at {front.concurrency}" for front in outcome.fronts)
    return f"{told}: the first of several objectives decides (on the Pareto front: {sizes})"


def _asked_for(
    candidates: list[LevelBest], history: History, plan: Plan, number: int
) -> tuple[LevelBest, ...]:
    """The knobs of one trial at every level. ``UserError`` where they cannot be exported."""
    trial = next((t for t in history.trials if t.number == number), None)
    if trial is None:
        last = max((t.number for t in history.trials), default=0)
        raise UserError(f"--trial {number}: there is no such trial; this study has 0 to {last}")
    if trial.state == "failed":
        raise UserError(
            f"--trial {number}: it failed ({trial.failure_kind}); choose one that was measured"
        )
    own = {c.concurrency: c for c in candidates if c.knobs.id == trial.knobs.id}
    missing = [level for level in plan.study.workload.concurrency if level not in own]
    if missing:
        raise UserError(
            f"--trial {number}: its knobs have no measurement at concurrency "
            f"{', '.join(map(str, missing))}; choose another trial, or go on with the study"
        )
    wrong = [level for level, one in own.items() if one.output_check == "incorrect"]
    if wrong and plan.study.constraints.lossless:
        raise UserError(
            f"--trial {number}: its output is wrong at concurrency {', '.join(map(str, wrong))}; "
            "a fast but wrong configuration is not exported (constraints.lossless)"
        )
    return tuple(own[level] for level in sorted(own))


def _preferred(candidates: list[LevelBest], outcome: Outcome, plan: Plan) -> list[LevelBest]:
    """Where the outcome does not show that anything beats the baseline, the baseline stays."""
    winners = {
        level.concurrency: level.knobs.id for level in outcome.levels if level.beats_baseline
    }
    kept = [
        candidate
        for candidate in candidates
        if candidate.knobs.id == winners.get(candidate.concurrency, plan.baseline.id)
    ]
    try:
        choose_levels(kept)
    except ValueError:
        # the winners of the levels need different starts: let the export weigh whole groups
        return candidates
    return kept


def _level_best(
    result: KnobsResult,
    baseline: KnobsResult,
    level: int,
    outcome: Outcome,
    predicted: Prediction | None,
) -> LevelBest:
    metric = "tokens_per_s"
    measured, base = result.summary(level, metric), baseline.summary(level, metric)
    assert measured is not None
    assert base is not None
    final = next(
        (o for o in outcome.levels if o.concurrency == level and o.knobs.id == result.knobs.id),
        None,
    )
    if final is not None and final.interleaved and outcome.metric.name == metric:
        measured, base = final.best, final.baseline
    accepted = [r.accept_length for r in result.repeats[level] if r.accept_length is not None]
    return LevelBest(
        concurrency=level,
        knobs=result.knobs,
        trial=result.trials[0].number,
        measured=_throughput(measured),
        baseline=_throughput(base),
        baseline_trial=baseline.trials[0].number,
        output_check=result.output_check(level),
        accept_length=sum(accepted) / len(accepted) if accepted else None,
        predicted_tokens_per_s=None if predicted is None else predicted.tokens_per_s.median,
        verdict="undecided" if final is None else final.verdict,
    )


def _throughput(summary: Summary) -> Throughput:
    return Throughput(
        tokens_per_s=summary.median, low=summary.low, high=summary.high, num_repeats=summary.n
    )


def _first(
    predictions: dict[int, dict[int, Prediction]], result: KnobsResult, level: int
) -> Prediction | None:
    for trial in result.trials:
        if level in predictions.get(trial.id, {}):
            return predictions[trial.id][level]
    return None


def _provenance(store: Store, history: History, levels: tuple[LevelBest, ...]) -> Provenance | None:
    wanted = {level.knobs.id for level in levels}
    for trial in history.trials:
        if trial.knobs.id in wanted and trial.state == "complete":
            found = store.provenance(trial.id)
            if found is not None:
                return found
    return None


def _fingerprint(provenance: Provenance | None, plan: Plan) -> str:
    if provenance is not None and provenance.machine_fingerprint:
        return provenance.machine_fingerprint
    # simulated measurements without provenance name no host that an engine could be on
    return plan.machine.host_fingerprint or f"sim:{plan.machine.fingerprint}"


def _options(provenance: Provenance | None, plan: Plan) -> LaunchOptions:
    """What the backend resolved; a backend that starts no engine leaves it to the machine."""
    engine: dict[str, Any] = {}
    if provenance is not None and isinstance(provenance.config.get("engine"), dict):
        engine = dict(provenance.config["engine"])  # type: ignore[call-overload]
    gpu = plan.machine.num_gpus > 0
    spec = plan.study.workload
    host = engine.get("host") or {}
    return LaunchOptions(
        device=engine.get("device") or ("cuda" if gpu else "cpu"),
        dtype=engine.get("dtype") or ("bfloat16" if gpu else "float32"),
        max_context=engine.get("max_context") or spec.input_len + spec.output_len + _CONTEXT_MARGIN,
        timeout_s=float(engine.get("timeout_s") or 300.0),
        threads=host.get("threads"),
    )
