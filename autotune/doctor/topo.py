"""Reads the matrices of ``nvidia-smi topo -m`` and ``nvidia-smi topo -p2p r``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"^GPU(\d+)$")
_DEVICE = re.compile(r"^(?:GPU\d+|NIC\d+|mlx\d+_\w+|hfi1_\d+|\w+_\d+)$")
_CPUS = re.compile(r"^\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*$")

#: what the cells of ``topo -p2p r`` mean
P2P_STATES: Mapping[str, str] = {
    "OK": "ok",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU (or its driver) does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "switched off by a driver registry key",
    "U": "unknown to the driver",
}


@dataclass(frozen=True, slots=True)
class TopoMatrix:
    """Cells between devices; affinities of ``topo -m`` by GPU."""

    cells: Mapping[tuple[str, str], str]
    cpu_affinity: Mapping[int, str]
    numa_affinity: Mapping[int, str]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs that have a row."""
        return tuple(sorted({int(m[1]) for a, _ in self.cells if (m := _GPU.match(a))}))

    def gpu_pairs(self) -> Iterator[tuple[int, int, str]]:
        """(a, b, cell) of every pair of GPUs, once, row of the lower number first."""
        for a in self.gpus:
            for b in self.gpus:
                cell = self.cells.get((f"GPU{a}", f"GPU{b}"))
                if a < b and cell is not None:
                    yield a, b, cell

    @property
    def all_nvlink(self) -> bool:
        """Whether every pair of GPUs is joined by NVLink (and there is a pair)."""
        pairs = list(self.gpu_pairs())
        return bool(pairs) and all(cell.startswith("NV") for _, _, cell in pairs)


def parse_topo(text: str) -> TopoMatrix:
    """Read a matrix, tab- or space-separated, colours removed.

    Raises ``ValueError`` when there is no row of GPUs.
    """
    cells: dict[tuple[str, str], str] = {}
    cpus: dict[int, str] = {}
    nodes: dict[int, str] = {}
    columns: list[str] = []
    for raw in text.splitlines():
        words = _ANSI.sub("", raw).split()
        if not words:
            if cells:
                # the legend follows
                break
            continue
        if not columns:
            columns = _columns(words)
            continue
        row, values = words[0], words[1:]
        for column, cell in zip(columns, values, strict=False):
            cells[row, column] = cell
        gpu = _GPU.match(row)
        rest = [word for word in values[len(columns) :] if word != "N/A"]
        if gpu and rest and _CPUS.match(rest[0]):
            cpus[int(gpu[1])] = rest[0]
            if len(rest) > 1 and _CPUS.match(rest[1]):
                nodes[int(gpu[1])] = rest[1]
    if not any(_GPU.match(row) for row, _ in cells):
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ValueError(f"no GPU matrix; it begins with {first[:80]!r}")
    return TopoMatrix(cells, cpus, nodes)


def _columns(words: list[str]) -> list[str]:
    """Device columns of a header line, empty for another line."""
    found = []
    for word in words:
        if not _DEVICE.match(word):
            break
        found.append(word)
    return found if found and _GPU.match(found[0]) else []


def cpu_set(text: str) -> frozenset[int]:
    """``"0-3,8"`` -> {0, 1, 2, 3, 8}. Raises ``ValueError`` for another text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus |= set(range(int(low), int(high or low) + 1))
    return frozenset(cpus)
