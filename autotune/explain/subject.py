"""What is explained: knobs at a workload, the model of its study, and its measurements if any.

Nothing here needs the database: a study file is explained without it (``autotune.explain.stored``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import UserError
from autotune.modelling import draft_shape, target_shape
from autotune.records import Acceptance
from autotune.schemas import Study
from autotune.served import server_name
from autotune.store.views import StudyView, TrialView
from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import Machine
from model.observations import AcceptanceCounts
from model.predictor import Predictor
from model.spec import Knobs, Prediction, Workload

if TYPE_CHECKING:
    from autotune.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One valid repeat of a trial, as far as explaining needs it."""

    concurrency: int
    tokens_per_s: float | None
    tpot_ms: float | None
    ttft_ms: float | None
    cycle_ms: float | None
    accept_length: float | None
    terms_ms: dict[str, float]
    acceptance: Acceptance | None
    output_check: str


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """A stored study with the model as its measurements left it."""

    store: "Store"
    view: StudyView
    study: Study
    trials: tuple[TrialView, ...]
    predictor: Predictor
    #: what the acceptance model believed before any count
    prior: AcceptanceModel
    #: what a reader of the predictions must know of the calibration
    notes: tuple[str, ...] = ()

    def trial(self, what: str) -> TrialView:
        """The trial of a number or of a knobs id. Raises ``UserError`` naming those there are."""
        if not self.trials:
            raise UserError(
                f"study {self.view.name} has no trials yet; run it with `autotune study start` "
                f"or `autotune study resume {self.view.name}`"
            )
        if what.isdigit() and len(what) < 12:
            for trial in self.trials:
                if trial.number == int(what):
                    return trial
            raise UserError(
                f"study {self.view.name} has no trial {what}; it has trials "
                f"{self.trials[0].number} to {self.trials[-1].number}"
            )
        matches = [trial for trial in self.trials if trial.knobs.id.startswith(what)]
        if what and matches:
            ids = sorted({trial.knobs.id for trial in matches})
            if len(ids) > 1:
                raise UserError(f"knobs id {what!r} is ambiguous: {', '.join(ids)}")
            done = [trial for trial in matches if trial.state == "complete"]
            return (done or matches)[0]
        raise UserError(
            f"{what!r} is no trial number, knobs id or file; trials of study {self.view.name}: "
            f"{self.trials[0].number} to {self.trials[-1].number}"
        )

    @property
    def baseline(self) -> Knobs | None:
        """Knobs of the study's baseline, measured or planned."""
        for trial in self.trials:
            if trial.role == "baseline":
                return trial.knobs
        return None


def study_predictor(study: Study, machine: Machine, base_dir: Path) -> Predictor:
    """The model of a study file before any measurement."""
    target = target_shape(study)
    return Predictor(
        target,
        draft_shape(study, target),
        machine,
        default_calibration(machine, server_name(study, base_dir)),
        AcceptanceModel.prior(),
    )


def pooled_counts(tree: tuple[int, int, int], counts: Sequence[Acceptance]) -> AcceptanceCounts:
    """Sum of the counts of one tree (steps, topk, draft_tokens)."""
    steps, topk, draft_tokens = tree
    by_depth = [0] * steps
    by_rank = [[0] * topk for _ in range(steps)]
    for one in counts:
        for depth, value in enumerate(one.accepted_by_depth[:steps]):
            by_depth[depth] += value
        for depth, row in enumerate(one.accepted_by_depth_rank[:steps]):
            for rank, value in enumerate(row[:topk]):
                by_rank[depth][rank] += value
    has_ranks = all(one.accepted_by_depth_rank for one in counts)
    return AcceptanceCounts(
        steps=steps,
        topk=topk,
        draft_tokens=draft_tokens,
        num_verifies=sum(one.num_verifies for one in counts),
        accepted_by_depth=tuple(by_depth),
        accepted_by_depth_rank=tuple(tuple(row) for row in by_rank) if has_ranks else (),
    )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Knobs at one workload and everything known about them."""

    title: str
    knobs: Knobs
    workload: Workload
    predictor: Predictor
    prior: AcceptanceModel
    #: valid repeats at this concurrency; empty for a prediction only
    repeats: tuple[Repeat, ...] = ()
    #: predicted before measuring; None where nothing was stored
    stored: Prediction | None = None
    baseline: Knobs | None = None
    baseline_repeats: tuple[Repeat, ...] = ()
    context: StudyContext | None = None
    trial: TrialView | None = None
    notes: tuple[str, ...] = ()


def is_file(what: str) -> bool:
    """Whether an argument names a file rather than a trial."""
    return Path(what).suffix in (".yaml", ".yml", ".json") or Path(what).is_file()
