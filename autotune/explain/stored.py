"""Subjects of the database: trials with their study's model as its measurements left it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import func, select

from autotune.digits import significant
from autotune.errors import UserError
from autotune.explain.subject import Repeat, StudyContext, Subject, pooled_counts
from autotune.modelling import StudyModel, draft_shape, target_shape
from autotune.records import Acceptance
from autotune.schemas import Study
from autotune.served import server_name
from autotune.store import codec
from autotune.store.store import Store
from autotune.store.tables import CALIBRATION, MEASUREMENT, PREDICTION
from autotune.store.views import StudyView, TrialView
from autotune.study_file import parse_study
from model.acceptance import AcceptanceModel
from model.calibration import Calibration, default_calibration
from model.machine import Machine
from model.observations import AcceptanceCounts
from model.predictor import Predictor
from model.spec import Prediction

#: a constant this far from its prior is doing something else's work
_STRAINED_SD = 4.0
#: different trees whose counts teach the acceptance model (the most verified ones)
_MAX_TREES = 12


def open_study(store: Store, name: str | None) -> StudyContext:
    """The study called ``name``, or the newest one. Raises ``UserError`` when there is none."""
    if name is not None:
        view = store.study(name)
    else:
        views = store.studies()
        if not views:
            raise UserError(
                f"the database {store.engine.url.render_as_string(hide_password=True)} holds no "
                f"study; start one, or name another with --database"
            )
        view = views[-1]
    loaded = parse_study(view.text, view.label, view.base_dir, view.name)
    study = loaded.study
    if view.machine is None:
        raise UserError(f"study {view.name} keeps no machine; predict from its study file instead")
    machine = Machine.from_dict(view.machine)
    target = target_shape(study)
    prior = AcceptanceModel.prior()
    trials = tuple(store.trials(view.id))
    calibration, calibration_notes = _calibration(store, view, study, machine)
    predictor = Predictor(
        target,
        draft_shape(study, target),
        machine,
        calibration,
        prior.update(_counts(store, view.id, trials)),
    )
    return StudyContext(
        store=store,
        view=view,
        study=study,
        trials=trials,
        predictor=predictor,
        prior=prior,
        notes=calibration_notes,
    )


def trial_subject(context: StudyContext, trial: TrialView, concurrency: int | None) -> Subject:
    """A trial at one concurrency: the one asked for, else the lowest that was measured.

    All trials of the same knobs count, failed ones excepted. Raises ``UserError`` for a level that
    the study does not have.
    """
    same = [t.id for t in context.trials if t.knobs == trial.knobs and t.state != "failed"]
    repeats = repeats_of(context.store, same or [trial.id])
    levels = sorted({repeat.concurrency for repeat in repeats}) or sorted(context.view.workloads)
    level = levels[0] if concurrency is None else concurrency
    if level not in context.view.workloads:
        known = ", ".join(map(str, sorted(context.view.workloads)))
        raise UserError(f"study {context.view.name} has no concurrency {level}; it has {known}")
    notes = list(context.notes)
    if trial.state == "failed":
        notes.append(f"trial {trial.number} failed ({trial.failure_kind}): see `study status`")
    base = context.baseline
    base_ids = [
        t.id for t in context.trials if t.role in ("baseline", "aa") and t.state != "failed"
    ]
    is_baseline = base is not None and base.id == trial.knobs.id
    others = () if is_baseline or not base_ids else repeats_of(context.store, base_ids)
    return Subject(
        title=f"trial {trial.number} of study {context.view.name} ({trial.knobs.id})",
        knobs=trial.knobs,
        workload=context.view.workloads[level],
        predictor=context.predictor,
        prior=context.prior,
        repeats=tuple(r for r in repeats if r.concurrency == level),
        stored=stored_predictions(context.store, trial).get(level),
        baseline=base,
        baseline_repeats=tuple(r for r in others if r.concurrency == level),
        context=context,
        trial=trial,
        notes=tuple(notes),
    )


def repeats_of(store: Store, trial_ids: Sequence[int]) -> list[Repeat]:
    """Valid repeats of some trials in the order taken, warm-up left out."""
    query = (
        select(MEASUREMENT.c.record)
        .where(
            MEASUREMENT.c.trial_id.in_(trial_ids),
            MEASUREMENT.c.repeat >= 0,
            MEASUREMENT.c.failure_kind.is_(None),
        )
        .order_by(MEASUREMENT.c.order)
    )
    with store.reading() as session:
        return [_repeat(record) for record in session.scalars(query)]


def stored_predictions(store: Store, trial: TrialView) -> dict[int, Prediction]:
    """Concurrency -> what was predicted before the trial was measured."""
    query = select(PREDICTION).where(PREDICTION.c.trial_id == trial.id).order_by(PREDICTION.c.id)
    found: dict[int, Prediction] = {}
    with store.reading() as session:
        for row in session.execute(query):
            prediction = codec.prediction_from_json(trial.knobs, row.record)
            found.setdefault(row.concurrency, prediction)
    return found


def _calibration(
    store: Store, view: StudyView, study: Study, machine: Machine
) -> tuple[Calibration, tuple[str, ...]]:
    """The newest calibration of a study (else the priors), and what to know of it."""
    study_id = view.id
    query = (
        select(CALIBRATION.c.record)
        .where(CALIBRATION.c.study_id == study_id)
        .order_by(CALIBRATION.c.id.desc())
        .limit(1)
    )
    with store.reading() as session:
        record = session.scalar(query)
    server = server_name(study, view.base_dir)
    default = default_calibration(machine, server)
    if record is None:
        return default, ("nothing was calibrated yet: predictions use the machine's priors",)
    try:
        found = Calibration.from_dict(record)
    except ValueError:
        found = None
    if found is None or found.names != default.names:
        # its constants mean nothing to this model, but the measurements do
        again = StudyModel(study, machine, view.workloads, server).refit(store, study_id)
        return again, (
            "the stored calibration is of another version of the model: made again from the stored "
            "measurements",
            *_strained(again),
        )
    return found, tuple(_strained(found))


def _strained(calibration: Calibration) -> Iterator[str]:
    """Constants that the fit moved far beyond their prior: something is missing in the model."""
    for constant in calibration.constants:
        if constant.scale != "log" or constant.value <= 0 or constant.prior <= 0:
            continue
        moved = abs(math.log(constant.value / constant.prior)) / constant.prior_sd
        if moved > _STRAINED_SD:
            yield (
                f"calibration moved {constant.name} from {significant(constant.prior)} to "
                f"{significant(constant.value)} {constant.unit}, "
                f"{moved:.0f} prior sd away: it stands in for something that the model lacks; "
                f"distrust predictions that change it"
            )


def _counts(store: Store, study_id: int, trials: Sequence[TrialView]) -> list[AcceptanceCounts]:
    """Acceptance counts by tree: one repeat of each trial and level (greedy repeats are alike)."""
    speculative = {
        t.id: t.knobs for t in trials if t.knobs.method != "off" and t.state == "complete"
    }
    if not speculative:
        return []
    first = (
        select(func.min(MEASUREMENT.c.id))
        .where(
            MEASUREMENT.c.study_id == study_id,
            MEASUREMENT.c.repeat >= 0,
            MEASUREMENT.c.failure_kind.is_(None),
            MEASUREMENT.c.accept_length > 1.0,
        )
        .group_by(MEASUREMENT.c.trial_id, MEASUREMENT.c.concurrency)
    )
    query = select(MEASUREMENT.c.trial_id, MEASUREMENT.c.record).where(MEASUREMENT.c.id.in_(first))
    sums: dict[tuple[int, int, int], list[Acceptance]] = {}
    with store.reading() as session:
        for trial_id, record in session.execute(query):
            knobs, counts = speculative.get(trial_id), record.get("acceptance")
            if knobs is None or not counts or counts["num_verifies"] <= 0:
                continue
            tree = (knobs.steps, knobs.topk, knobs.draft_tokens)
            sums.setdefault(tree, []).append(Acceptance.model_validate(counts))
    found = [pooled_counts(tree, counts) for tree, counts in sums.items()]
    found.sort(key=lambda counts: -counts.num_verifies)
    return found[:_MAX_TREES]


def _repeat(record: dict[str, Any]) -> Repeat:
    counts = record.get("acceptance")
    return Repeat(
        concurrency=record["concurrency"],
        tokens_per_s=record["tokens_per_s"],
        tpot_ms=record["tpot_ms"],
        ttft_ms=record["ttft_ms"],
        cycle_ms=record["cycle_ms"],
        accept_length=record["accept_length"],
        terms_ms=record["terms_ms"],
        acceptance=None if counts is None else Acceptance.model_validate(counts),
        output_check=record["output_check"],
    )
