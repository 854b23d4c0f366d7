"""The performance model of a study, kept in step with what was measured.

``StudyModel`` predicts with the newest calibration of the study and refits it after each trial
from decomposed observables: times of terms and acceptance counts, never tokens/s.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import UserError
from autotune.history import History
from autotune.records import Measurement
from autotune.schemas import ModelRef, Study
from autotune.store.store import Store
from autotune.store.views import TrialView
from model.acceptance import AcceptanceModel
from model.calibration import Calibration, default_calibration
from model.machine import Machine
from model.observations import AcceptanceCounts, ExpertsObservation, TermObservation
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Prediction, Workload

if TYPE_CHECKING:
    from autotune.search import Forecast

#: a 90 % interval is this many standard deviations wide
_SIGMAS_OF_90 = 2 * 1.6449
#: what a single repeat's term is believed to, at best
_MIN_REL_SD = 0.02
#: the experts of one cycle speak for all cycles within this
_EXPERTS_REL_SD = 0.1


class StudyModel:
    """Predictions of one study and the calibration behind them."""

    def __init__(self, study: Study, machine: Machine, workloads: Mapping[int, Workload]) -> None:
        """Raises ``UserError`` when the target or draft has no usable config.json."""
        self._study = study
        self._machine = machine
        self.workloads = dict(workloads)
        self.target = target_shape(study)
        self.draft = draft_shape(study, self.target)
        self._prior = AcceptanceModel.prior()
        self.predictor = Predictor(
            self.target, self.draft, machine, default_calibration(machine), self._prior
        )
        #: trials whose observations the present calibration holds
        self._learnt: set[int] = set()
        #: GiB a GPU that measured configurations took beyond what was predicted, their median
        self._memory_excess_gib = 0.0

    @property
    def calibration(self) -> Calibration:
        """The calibration that predictions use now."""
        return self.predictor.calibration

    def predict(self, knobs: Knobs) -> dict[int, Prediction]:
        """Concurrency -> prediction."""
        return {
            level: self.predictor.predict(knobs, workload)
            for level, workload in self.workloads.items()
        }

    def forecast(self, knobs: Sequence[Knobs]) -> "Forecast":
        """Speed of many knobs at every level; see ``autotune.search``."""
        log_speed, log_sd = {}, {}
        feasible = np.ones(len(knobs), dtype=bool)
        memory_gib = np.zeros(len(knobs))
        limit_gib = self._study.constraints.max_memory_gib
        for level, workload in self.workloads.items():
            many = self.predictor.predict_many(knobs, workload)
            low, median, high = np.log(np.maximum(many.tokens_per_s_quantiles, 1e-9))
            log_speed[level] = median
            log_sd[level] = np.maximum((high - low) / _SIGMAS_OF_90, 0.01)
            feasible &= many.feasible
            memory_gib = np.maximum(memory_gib, many.memory_gib + self._memory_excess_gib)
        if limit_gib is not None:
            feasible &= memory_gib <= limit_gib
        # explain and diff have no search
        from autotune.search import Forecast

        return Forecast(
            log_speed=log_speed,
            log_sd=log_sd,
            feasible=feasible,
            memory_gib=memory_gib,
            limit_gib=limit_gib,
        )

    def learn(self, store: Store, study_id: int) -> Calibration:
        """Refit on every finished trial of the study and store the calibration.

        The fit starts from the prior each time and takes all trials, so it does not depend on
        their order, and workers that share a study arrive at the same constants.
        """
        self.refit(store, study_id)
        self._keep(store, study_id)
        return self.calibration

    def refit(self, store: Store, study_id: int) -> Calibration:
        """As ``learn``, but nothing is stored."""
        history = History.read(store, study_id)
        finished = [trial for trial in history.trials if trial.state == "complete"]
        wanted = {trial.id for trial in finished}
        if wanted and wanted != self._learnt:
            records = store.measurements(sorted(wanted))
            self._refit(finished, records)
            self._learnt = wanted
        return self.calibration

    def _keep(self, store: Store, study_id: int) -> None:
        stored = store.calibrations(study_id)
        newest = stored[-1].get("id") if stored else None
        if newest != self.calibration.id:
            record = {**self.calibration.to_dict(), "id": self.calibration.id, "parent": newest}
            store.add_calibration(study_id, self.calibration.id, newest, record)

    def _refit(self, trials: Sequence[TrialView], records: Sequence[Measurement]) -> None:
        from model.calibrate import calibrate

        by_number = {trial.number: trial for trial in trials}
        counts: list[AcceptanceCounts] = []
        observations: list[TermObservation | ExpertsObservation] = []
        excess_gib: list[float] = []
        groups: dict[tuple[int, int], list[Measurement]] = {}
        for record in records:
            if record.trial in by_number and record.repeat >= 0 and record.failure is None:
                groups.setdefault((record.trial, record.concurrency), []).append(record)
        for (number, level), repeats in groups.items():
            knobs = by_number[number].knobs
            observations.extend(_term_observations(knobs, self.workloads[level], repeats))
            observations.extend(_experts_observation(self.target, knobs, level, repeats))
            if level == max(self.workloads):
                excess_gib.extend(self._memory_excess(knobs, level, repeats))
            counts.extend(_acceptance_counts(knobs, repeats))
        self._memory_excess_gib = float(np.median(excess_gib)) if excess_gib else 0.0
        acceptance = self._prior.update(counts) if counts else self._prior
        base = Predictor(
            self.target, self.draft, self._machine, default_calibration(self._machine), acceptance
        )
        calibration = calibrate(base.calibration, observations, base.step)
        self.predictor = Predictor(self.target, self.draft, self._machine, calibration, acceptance)

    def _memory_excess(
        self, knobs: Knobs, level: int, repeats: Sequence[Measurement]
    ) -> list[float]:
        """Measured minus predicted GiB of the fullest GPU; empty where nothing was measured."""
        taken = [r.memory_gib for r in repeats if r.memory_gib is not None]
        if not taken:
            return []
        predicted = self.predictor.predict(knobs, self.workloads[level]).memory_gib_per_gpu
        return [max(taken) - predicted]


def _experts_observation(
    target: ModelShape, knobs: Knobs, level: int, repeats: Sequence[Measurement]
) -> list[ExpertsObservation]:
    """Distinct experts of a layer, mean over the repeats that counted them."""
    counted = [r.distinct_experts for r in repeats if r.distinct_experts is not None]
    if not counted or target.experts_per_token < 1:
        return []
    tokens = 1 if knobs.method == "off" else knobs.draft_tokens
    distinct = float(np.mean(counted))
    most = min(target.experts, tokens * level * target.experts_per_token)
    # a batch padded to a captured size reads experts for its padding too: not this load's count
    if not target.experts_per_token <= distinct <= most:
        return []
    return [
        ExpertsObservation(
            tokens_per_request=tokens,
            requests=level,
            experts=target.experts,
            experts_per_token=target.experts_per_token,
            distinct=distinct,
            rel_sd=_EXPERTS_REL_SD / math.sqrt(len(counted)),
            source=f"trial {repeats[0].trial}, concurrency {level}",
        )
    ]


def _term_observations(
    knobs: Knobs, workload: Workload, repeats: Sequence[Measurement]
) -> list[TermObservation]:
    """Median of each term over the repeats, with its standard error."""
    found: list[TermObservation] = []
    names = {name for repeat in repeats for name, value in repeat.terms_ms.items() if value > 0}
    series = {name: [r.terms_ms[name] for r in repeats if name in r.terms_ms] for name in names}
    if not series:
        series = {"cycle": [r.cycle_ms for r in repeats if r.cycle_ms]}
    for term, values in series.items():
        if not values or np.median(values) <= 0:
            continue
        centre = float(np.median(values))
        error = float(np.std(values)) / centre / math.sqrt(len(values))
        source = f"trial {repeats[0].trial}, concurrency {workload.concurrency}"
        found.append(
            TermObservation(
                knobs=knobs,
                workload=workload,
                term=term,
                value_ms=centre,
                rel_sd=max(error, _MIN_REL_SD),
                source=source,
            )
        )
    return found


def _acceptance_counts(knobs: Knobs, repeats: Sequence[Measurement]) -> list[AcceptanceCounts]:
    """Counts of one repeat: greedy repeats of the same prompts accept the same tokens."""
    if knobs.method == "off":
        return []
    for repeat in repeats:
        counts = repeat.acceptance
        if counts is not None and counts.num_verifies > 0:
            return [
                AcceptanceCounts(
                    steps=knobs.steps,
                    topk=knobs.topk,
                    draft_tokens=knobs.draft_tokens,
                    num_verifies=counts.num_verifies,
                    accepted_by_depth=counts.accepted_by_depth,
                    accepted_by_depth_rank=counts.accepted_by_depth_rank,
                )
            ]
    return []


def config_folder(ref: ModelRef) -> Path:
    """Folder whose config.json describes a model. Raises ``UserError`` when it is not there."""
    folder = ref.path or Path(__file__).parents[1] / "studies" / "shapes" / str(ref.shape)
    if ref.path is None and not folder.is_dir():
        known = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
        raise UserError(f"shape {ref.shape!r} is unknown; known: {', '.join(known)}")
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give a Hugging Face checkpoint folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {folder}; give a Hugging Face checkpoint folder")
    return folder


def target_shape(study: Study) -> ModelShape:
    """Shape of the target. Raises ``UserError`` naming the key and the file."""
    try:
        folder = config_folder(study.target)
        if study.target.layers is None:
            return ModelShape.load(folder)
        config = json.loads((folder / "config.json").read_text())
        # families that nest the language model keep its depth there
        holder = config.get("text_config", config)
        depth = holder.get("num_hidden_layers")
        if isinstance(depth, int) and study.target.layers > depth:
            raise UserError(
                f"layers {study.target.layers} is more than the {depth} that {folder.name} has; "
                f"lower it, or leave it out for all"
            )
        holder["num_hidden_layers"] = study.target.layers
        return ModelShape.from_hf_config(
            config, name=f"{folder.name}, {study.target.layers} layers"
        )
    except (UserError, ValueError) as error:
        raise UserError(f"target: {error}") from None


def draft_shape(study: Study, target: ModelShape) -> DraftShape | None:
    """Shape of the draft, or None. Raises ``UserError``, also for a draft of another target."""
    if study.draft is None:
        return None
    if study.draft.path is None:
        return DraftShape.standard(target)
    try:
        return DraftShape.load(config_folder(study.draft), target=target)
    except (UserError, ValueError) as error:
        raise UserError(f"draft: {error}") from None
