"""Predictions beside measurements, and their errors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """N predictions: quantiles [3, N] (5, 50, 95 %) in the unit of ``measured`` [N]."""

    unit: str
    measured: Array
    quantiles: Array
    #: what each row is, and the group that it is reported under
    labels: tuple[str, ...]
    groups: tuple[str, ...]
    #: rows that count in the headline: one per row of the file
    headline: NDArray[np.bool_]
    #: rows that were not predicted, by reason
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> Array:
        """Relative error of the medians, [N]."""
        result: Array = self.quantiles[1] / self.measured - 1.0
        return result

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Whether each measurement lies in its 90 % interval."""
        low, _, high = self.quantiles
        result: NDArray[np.bool_] = (low <= self.measured) & (self.measured <= high)
        return result

    def summary(self, mask: NDArray[np.bool_]) -> dict[str, Any]:
        """Figures of the rows where ``mask`` holds."""
        error = np.abs(self.error[mask])
        low, median, high = self.quantiles[:, mask]
        return {
            "rows": int(mask.sum()),
            "mape": float(error.mean()),
            "median_ape": float(np.median(error)),
            "max_ape": float(error.max()),
            "coverage90": float(self.inside[mask].mean()),
            "median_width90": float(np.median((high - low) / median)),
        }

    def to_dict(self) -> dict[str, Any]:
        """The headline, its worst rows, and each group."""
        names = list(dict.fromkeys(self.groups))
        groups = np.array(self.groups)
        order = np.argsort(-np.where(self.headline, np.abs(self.error), -1.0))
        worst = [int(i) for i in order[:_WORST] if self.headline[i]]
        return {
            **self.summary(self.headline),
            "worst": [self._row(i) for i in worst],
            "unit": self.unit,
            "groups": [{"name": name, **self.summary(groups == name)} for name in names],
            "skipped": self.skipped,
            "notes": list(self.notes),
        }

    def _row(self, i: int) -> dict[str, Any]:
        low, median, high = (float(v) for v in self.quantiles[:, i])
        return {
            "row": self.labels[i],
            "measured": float(self.measured[i]),
            "predicted": median,
            "low": low,
            "high": high,
            "error": float(self.error[i]),
            "inside90": bool(self.inside[i]),
        }


def gpu_words(name: str) -> frozenset[str]:
    """What tells a GPU's name apart: not the maker, the board or the memory size."""
    words = name.lower().replace("(", " ").replace(")", " ").replace("-", " ").split()
    return frozenset(w for w in words if w not in _COMMON and not w.endswith("gb"))


_COMMON = frozenset(
    (
        "nvidia", "geforce", "server", "workstation", "edition", "blackwell", "hopper", "ada",
        "lovelace", "generation", "tensor", "core", "gpu", "sxm", "sxm4", "sxm5", "pcie", "nvl",
        "nvlink",
    )
)  # fmt: skip


def of_this_gpu(names: Sequence[str | None], machine_gpu: str | None) -> NDArray[np.bool_]:
    """Which rows are of the machine's GPU; rows that name none count as its own."""
    own = gpu_words(machine_gpu or "")
    return np.array([name is None or gpu_words(name) == own for name in names], dtype=bool)
