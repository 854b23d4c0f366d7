"""MoE layer rows: one kernel's constants fitted on other rows (or priors), these predicted."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autotune.errors import UserError
from autotune.model_validation.scores import Outcome, of_this_gpu
from model.machine import Machine
from model.moe import MoeKernel, MoeRow, MoeWork, read_moe_rows


def predict_moe(machine: Machine, data: Sequence[Path], train: Sequence[Path]) -> Outcome:
    """Predict MoE layer rows as stand-alone benchmarks (a repeated layer may sit in the L2).

    A kernel without rows in ``train`` is predicted from priors. Raises ``UserError``.
    """
    gpu = machine.gpu
    if gpu is None:
        raise UserError(f"{machine.name} has no GPU: MoE layer rows are of GPUs")
    notes: list[str] = []
    skipped: Counter[str] = Counter()
    rows = _rows(machine, data, notes, skipped)
    left_out: Counter[str] = Counter()
    seen = _rows(machine, train, notes, left_out) if train else []
    notes += [f"--fit: left out {count} rows: {reason}" for reason, count in left_out.items()]
    by_kernel: dict[tuple[str, str], list[MoeRow]] = defaultdict(list)
    for row in seen:
        by_kernel[row.kernel, row.weight_format].append(row)
    l2_bytes = gpu.l2_mib * 2**20
    quantiles = np.zeros((3, len(rows)))
    groups = np.array([f"{row.kernel}, {row.weight_format}" for row in rows])
    keys = [(row.kernel, row.weight_format) for row in rows]
    for key in dict.fromkeys(keys):
        index = [n for n, other in enumerate(keys) if other == key]
        if not by_kernel[key]:
            notes.append(f"constants of kernel {key[0]} ({key[1]}) are priors: no --fit rows of it")
        kernel = MoeKernel.fitted(
            by_kernel[key],
            l2_bytes=l2_bytes,
            dram_gb_per_s=gpu.dram_gb_per_s,
            bf16_tflops=gpu.bf16_tflops,
        )
        quantiles[:, index] = kernel.predict_us([rows[n] for n in index], in_step=False)
    cold = MoeWork.of(rows, l2_bytes).cold
    return Outcome(
        unit="us",
        measured=np.array([row.time_us for row in rows]),
        quantiles=quantiles,
        labels=tuple(
            f"{row.kernel}, {row.weight_format}, tp {row.tp}, {row.routing}, {row.tokens} tokens"
            for row in rows
        ),
        groups=tuple(
            f"{name}, {'reads DRAM' if dram else 'fits the L2'}"
            for name, dram in zip(groups, cold, strict=True)
        ),
        headline=np.ones(len(rows), dtype=bool),
        skipped=dict(skipped),
        notes=tuple(notes),
    )


def _rows(
    machine: Machine, paths: Sequence[Path], notes: list[str], skipped: Counter[str]
) -> list[MoeRow]:
    try:
        found = [row for path in paths for row in read_moe_rows(path)]
    except ValueError as error:
        raise UserError(str(error)) from None
    assert machine.gpu is not None
    own = of_this_gpu([row.gpu for row in found], machine.gpu.name)
    if not own.any():
        others = ", ".join(sorted({row.gpu for row in found}))
        notes.append(f"rows of {others}, predicted as if on a {machine.gpu.name}")
        return found
    for row, mine in zip(found, own, strict=True):
        if not mine:
            skipped[f"of GPU {row.gpu}, not the machine's {machine.gpu.name}"] += 1
    return [row for row, mine in zip(found, own, strict=True) if mine]
