"""The performance model of a study, kept in step with what was measured.

``StudyModel`` predicts with the newest calibration of the study and refits it after each trial
from decomposed observables: times of terms and acceptance counts, never tokens/s.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import UserError
from autotune.observing import Observed, Observer
from autotune.schemas import ModelRef, Study
from model.acceptance import AcceptanceModel
from model.calibration import Calibration, default_calibration
from model.knobs_array import KnobsArray
from model.machine import Machine
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Prediction, Workload

if TYPE_CHECKING:
    from autotune.search import Forecast
    from autotune.store.store import Store

#: a 90 % interval is this many standard deviations wide
_SIGMAS_OF_90 = 2 * 1.6449
#: finished trials up to which the model is fitted after each
_FIT_EACH = 24


class StudyModel:
    """Predictions of one study and the calibration behind them."""

    def __init__(
        self,
        study: Study,
        machine: Machine,
        workloads: Mapping[int, Workload],
        server: str = "generic",
    ) -> None:
        """Raises ``UserError`` when the target or draft has no usable config.json.

        ``server``: whose numbers are predicted, see ``autotune.served``.
        """
        self._study, self._server = study, server
        self._machine = machine
        self.workloads = dict(workloads)
        self.target = target_shape(study)
        self.draft = draft_shape(study, self.target)
        self._prior = AcceptanceModel.prior()
        self.predictor = Predictor(
            self.target, self.draft, machine, default_calibration(machine, server), self._prior
        )
        self._observer = Observer(self.target, workloads)
        #: trials whose observations the present calibration holds
        self._learnt: set[int] = set()
        #: GiB a GPU that measured configurations took beyond what was predicted, their median
        self._memory_excess_gib = 0.0
        #: the last forecast and what it was made for: a search asks for its whole pool each trial
        self._forecast: tuple[Sequence[Knobs], Predictor, Forecast] | None = None
        self._array: tuple[Sequence[Knobs], KnobsArray] | None = None

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
        last = self._forecast
        if last is None or last[0] is not knobs or last[1] is not self.predictor:
            last = knobs, self.predictor, self._forecast_of(knobs)
            self._forecast = last
        return last[2]

    def _forecast_of(self, knobs: Sequence[Knobs]) -> "Forecast":
        if self._array is None or self._array[0] is not knobs:
            self._array = knobs, KnobsArray.of(knobs)
        array = self._array[1]
        log_speed, log_sd = {}, {}
        feasible = np.ones(len(knobs), dtype=bool)
        memory_gib = np.zeros(len(knobs))
        limit_gib = self._study.constraints.max_memory_gib
        for level, workload in self.workloads.items():
            many = self.predictor.predict_many(array, workload)
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

    def learn(self, store: "Store", study_id: int, *, every: bool = False) -> Calibration:
        """Refit on finished trials of the study and store the calibration.

        The fit starts from the prior each time and takes the first ``fitted_trials`` trials (all
        with ``every``), so it does not depend on the order they ended in, and workers that share a
        study arrive at the same constants.
        """
        self.refit(store, study_id, every=every)
        self._keep(store, study_id)
        return self.calibration

    def refit(self, store: "Store", study_id: int, *, every: bool = True) -> Calibration:
        """As ``learn``, but nothing is stored, and all trials are taken."""
        finished = [trial for trial in store.trials(study_id) if trial.state == "complete"]
        taken = finished if every else finished[: fitted_trials(len(finished))]
        wanted = {trial.id for trial in taken}
        if wanted and wanted != self._learnt:
            self._refit(self._observer.observed(store, taken))
            self._learnt = wanted
        return self.calibration

    def _keep(self, store: "Store", study_id: int) -> None:
        newest = store.newest_calibration_id(study_id)
        if newest != self.calibration.id:
            record = {**self.calibration.to_dict(), "id": self.calibration.id, "parent": newest}
            store.add_calibration(study_id, self.calibration.id, newest, record)

    def _refit(self, told: Observed) -> None:
        from model.calibrate import calibrate

        self._memory_excess_gib = self._excess_gib(told.memory_gib)
        acceptance = self._prior.update(told.counts) if told.counts else self._prior
        prior = default_calibration(self._machine, self._server)
        base = Predictor(self.target, self.draft, self._machine, prior, acceptance)
        calibration = calibrate(base.calibration, told.observations, base.step)
        self.predictor = Predictor(self.target, self.draft, self._machine, calibration, acceptance)

    def _excess_gib(self, measured: Sequence[tuple[Knobs, float]]) -> float:
        """Measured minus predicted GiB of the fullest GPU, the median of all trials."""
        if not measured:
            return 0.0
        workload = self.workloads[max(self.workloads)]
        # sizes alone decide it, no constant that is fitted
        predicted = self.predictor.predict_many([knobs for knobs, _ in measured], workload)
        taken = np.array([gib for _, gib in measured])
        return float(np.median(taken - predicted.memory_gib))


def fitted_trials(num_finished: int) -> int:
    """How many of the finished trials the model is fitted to: all of them while they are few.

    Each of the first trials teaches it much; later a refit waits until the trials have grown by a
    twelfth, so that a study of hundreds does not spend its time on refits. The search corrects the
    model by every single measurement in any case (``autotune.residual``).
    """
    fitted = min(num_finished, _FIT_EACH)
    while (grown := fitted + max(1, fitted // 12)) <= num_finished:
        fitted = grown
    return fitted


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
