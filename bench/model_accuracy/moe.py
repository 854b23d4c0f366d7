"""Accuracy of the MoE layer model on published rows: leave one token count out.

    python -m bench.model_accuracy.moe [CSV]

Constants are fitted per (GPU, kernel), shared by all routings and sizes of that kernel.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.machine import load_machine
from model.moe import MoeKernel, MoeRow, MoeWork, read_moe_rows

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "studies/results/published/moe-layer-published.csv"
MACHINES = {
    "RTX PRO 6000 Blackwell Server": ROOT / "studies/machines/8x-rtx-pro-6000-switches.yaml",
    "L40S": ROOT / "studies/machines/8x-l40s.yaml",
}


@dataclass(frozen=True)
class Scores:
    """Errors of one kernel; ``cold`` are the rows that read DRAM."""

    gpu: str
    kernel: str
    num_cold: int
    cold_mape: float
    cold_max: float
    cold_coverage: float
    num_hot: int
    hot_mape: float
    hot_coverage: float
    constants: dict[str, float]
    worst: str


def gpu_facts(gpu: str) -> dict[str, float]:
    """L2 bytes and peak rates of a GPU of the tables, from its machine file."""
    if gpu not in MACHINES:
        raise ValueError(f"no machine file for GPU {gpu!r}; known: {', '.join(MACHINES)}")
    card = load_machine(MACHINES[gpu]).gpu
    assert card is not None
    return {
        "l2_bytes": card.l2_mib * 2**20,
        "dram_gb_per_s": card.dram_gb_per_s,
        "bf16_tflops": card.bf16_tflops,
    }


def leave_one_token_count_out(rows: Sequence[MoeRow]) -> Scores:
    """Predict the rows of each token count from a fit of all others of this kernel."""
    facts = gpu_facts(rows[0].gpu)
    measured = np.array([row.time_us for row in rows])
    tokens = np.array([row.tokens for row in rows])
    quantiles = np.zeros((3, len(rows)))
    for count in np.unique(tokens):
        kernel = MoeKernel.fitted([r for r in rows if r.tokens != count], **facts)
        index = np.flatnonzero(tokens == count)
        quantiles[:, index] = kernel.predict_us([rows[i] for i in index], in_step=False)
    error = quantiles[1] / measured - 1.0
    inside = (quantiles[0] <= measured) & (measured <= quantiles[2])
    cold = MoeWork.of(rows, facts["l2_bytes"]).cold
    worst = int(np.flatnonzero(cold)[np.abs(error[cold]).argmax()])
    whole = MoeKernel.fitted(rows, **facts)
    return Scores(
        gpu=rows[0].gpu,
        kernel=rows[0].kernel,
        num_cold=int(cold.sum()),
        cold_mape=float(np.abs(error[cold]).mean()),
        cold_max=float(np.abs(error[cold]).max()),
        cold_coverage=float(inside[cold].mean()),
        num_hot=int((~cold).sum()),
        hot_mape=float(np.abs(error[~cold]).mean()),
        hot_coverage=float(inside[~cold].mean()),
        constants=whole.constants_by_name(),
        worst=f"{rows[worst].routing}, {rows[worst].tokens} tokens: {error[worst]:+.1%}",
    )


def evaluate(path: Path = PUBLISHED) -> list[Scores]:
    """Scores of every (GPU, kernel) of a file."""
    groups: dict[tuple[str, str], list[MoeRow]] = defaultdict(list)
    for row in read_moe_rows(path):
        groups[(row.gpu, row.kernel)].append(row)
    return [leave_one_token_count_out(rows) for rows in groups.values()]


def pooled_cold_mape(scores: Sequence[Scores]) -> float:
    """Mean absolute relative error over all cold rows."""
    return sum(s.cold_mape * s.num_cold for s in scores) / sum(s.num_cold for s in scores)


def main(path: Path = PUBLISHED) -> None:
    """Print one line per kernel and the pooled bar."""
    scores = evaluate(path)
    for s in scores:
        print(
            f"{s.gpu[:12]:12s} {s.kernel[:44]:44s} cold n={s.num_cold:3d} MAPE {s.cold_mape:5.1%} "
            f"max {s.cold_max:5.1%} cover {s.cold_coverage:4.0%} | hot n={s.num_hot:2d} "
            f"MAPE {s.hot_mape:5.1%} cover {s.hot_coverage:4.0%} | worst {s.worst}"
        )
        print("   ", ", ".join(f"{k}={v:.4g}" for k, v in s.constants.items()))
    hot = sum(s.hot_coverage * s.num_hot for s in scores) / sum(s.num_hot for s in scores)
    print(
        f"pooled cold MAPE {pooled_cold_mape(scores):.2%} (bar 8 %); cache-hot coverage {hot:.0%}"
    )


if __name__ == "__main__":
    main(*(Path(a) for a in sys.argv[1:]))
