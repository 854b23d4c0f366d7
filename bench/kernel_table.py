"""Each kernel's time against its own floor, and what it loses a layer: the worst one first.

Built from the rows of ``bench/kernels.py`` and ``bench/dense_variants.py`` (the configurations that
run by default there), all with cold L2. Of a kernel measured by several runs the last given counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.text_table import aligned

Row = Mapping[str, Any]

#: run once a forward, not once a layer
_ONCE = ("norm_lm_head", "norm_linear_argmax")
_NOT_TOGETHER = (
    "one rank and few rows run linear_route in place of linear_add and norm_route; greedy decoding "
    "runs norm_linear_argmax in place of norm_lm_head"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """One kernel at one size (sequences x tokens of each); microseconds a call."""

    size: str
    kernel: str
    us: float
    low_us: float
    high_us: float
    floor_us: float

    @property
    def share(self) -> float:
        """Floor over time: 1 is all that the memory gives."""
        return self.floor_us / self.us

    @property
    def lost_us(self) -> float:
        """Above the floor, a call."""
        return self.us - self.floor_us


def kernel_lines(rows: Iterable[Row]) -> list[KernelLine]:
    """The newest line of each kernel and size of the whole model on one GPU, most lost first."""
    found: dict[tuple[str, str], KernelLine] = {}
    for row in rows:
        line = _of_kernels(row) if "kernel" in row else _of_variants(row)
        if line is not None:
            found[line.size, line.kernel] = line
    return sorted(found.values(), key=lambda line: (_rows(line.size), -line.lost_us))


def _rows(size: str) -> tuple[int, str]:
    sequences, tokens = size.split("x")
    return int(sequences) * int(tokens), size


def _of_kernels(row: Row) -> KernelLine | None:
    """A row of ``bench/kernels.py``; None for whole forwards and failures."""
    if "floor_us" not in row or "range" not in row:
        return None
    low_us, high_us = row["range"]
    return KernelLine(
        size=row["size"], kernel=row["kernel"], us=row["us"],
        low_us=low_us, high_us=high_us, floor_us=row["floor_us"],
    )  # fmt: skip


def _of_variants(row: Row) -> KernelLine | None:
    """A row of ``bench/dense_variants.py``: what the tuned table gives, of the whole model."""
    words = str(row.get("case", "")).split()
    if len(words) != 3 or words[0] != "whole" or row.get("name") != "table" or "us" not in row:
        return None
    return KernelLine(
        size=words[1], kernel=words[2], us=row["us"],
        low_us=row["low_us"], high_us=row["high_us"], floor_us=row["floor_us"],
    )  # fmt: skip


def kernel_table(lines: Iterable[KernelLine]) -> str:
    """The lines as text, and which kernels stand in for which."""
    head = ("size", "kernel", "us a call (range)", "floor", "share", "lost, us")
    texts = [head]
    for line in lines:
        often = " a forward" if line.kernel in _ONCE else " a layer"
        texts.append(
            (
                line.size,
                line.kernel,
                f"{line.us:.1f} ({line.low_us:.1f}-{line.high_us:.1f})",
                f"{line.floor_us:.1f}",
                f"{line.share:.2f}",
                f"{line.lost_us:.1f}{often}",
            )
        )
    return f"{aligned(texts)}\n{_NOT_TOGETHER}"
