"""``autotune model validate``: fit on some files, predict another, report the errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.model_validation.acceptance import predict_acceptance
from autotune.model_validation.allreduce import predict_allreduce
from autotune.model_validation.files import read_data_file
from autotune.model_validation.moe import predict_moe
from autotune.model_validation.scores import Outcome
from autotune.model_validation.step import predict_steps
from model.machine import Machine

_ALLREDUCE = ("allreduce_csv", "allreduce_jsonl")
#: kinds of --fit files that tell something about a kind of DATA
_HELPS = {
    "allreduce_csv": _ALLREDUCE,
    "allreduce_jsonl": _ALLREDUCE,
    "step_jsonl": (*_ALLREDUCE, "step_jsonl"),
    "moe_csv": ("moe_csv",),
    "acceptance_csv": ("acceptance_csv",),
}


@dataclass(frozen=True, slots=True)
class Validation:
    """Predictions of one data file."""

    kind: str
    data: Path
    fitted_on: tuple[Path, ...]
    machine: str
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys of the issue come first."""
        return {
            "kind": self.kind,
            **self.outcome.to_dict(),
            "data": str(self.data),
            "fit": [str(path) for path in self.fitted_on],
            "machine": self.machine,
        }


def validate(data: Path, train: Sequence[Path], machine: Machine) -> Validation:
    """Predict ``data`` from constants fitted on ``train`` only (priors of the machine without it).

    Raises ``UserError``, one line, for a file that cannot be used.
    """
    kind = read_data_file(data).kind
    kinds = {path: read_data_file(path).kind for path in train}
    for path, other in kinds.items():
        if other not in _HELPS[kind]:
            raise UserError(
                f"--fit {path} holds {other}, which tells nothing about {kind}; "
                f"it takes {', '.join(_HELPS[kind])}"
            )
    by_kind = {k: [p for p in train if kinds[p] == k] for k in {*_ALLREDUCE, *kinds.values()}}
    reduces = [path for path in train if kinds[path] in _ALLREDUCE]
    if kind in _ALLREDUCE:
        outcome = predict_allreduce(machine, [data], reduces)
    elif kind == "step_jsonl":
        outcome = predict_steps(machine, [data], by_kind.get(kind, []), reduces)
    elif kind == "moe_csv":
        outcome = predict_moe(machine, [data], by_kind.get(kind, []))
    else:
        outcome = predict_acceptance([data], by_kind.get(kind, []))
    return Validation(kind, data, tuple(train), machine.name, outcome)
