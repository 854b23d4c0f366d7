"""The table of ``bench/engine.py``: our walls against the bars and against what ran beside them.

Built from the rows of one run: our stages may have run before and after the peers, and all their
repeats count towards the range. A peer that did not run leaves its column empty.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kernel_table import kernel_lines, kernel_table
from bench.text_table import aligned

Row = Mapping[str, Any]

#: links of two GPUs, all with the same bars
TWO_GPUS = ("P2P off", "P2P off, LL x16", "one-shot", "NVLink")
#: (name of the rows, tokens in a forward, "decode" or "eagle3 k=3") -> the issue's bar, ms
BARS = {
    ("8 layers", 1, "decode"): 0.55,
    ("8 layers", 4, "decode"): 1.0,
    ("8 layers", 16, "decode"): 2.0,
    ("8 layers", 64, "decode"): 3.0,
    ("48 layers", 1, "decode"): 2.4,
    ("48 layers", 4, "decode"): 4.8,
    ("48 layers", 1, "eagle3 k=3"): 5.2,
    **{
        (f"8 layers, 2 GPUs, {link}", batch, "decode"): bar
        for link in TWO_GPUS
        for batch, bar in ((1, 0.75), (4, 1.0), (16, 1.7))
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One size: ours, its bar, and the peers; milliseconds a step."""

    name: str
    layers: int
    batch: int
    kind: str
    wall: float
    low: float
    high: float
    runs: int
    busy: float
    floor: float | None
    bar: float
    distinct_experts: float | None
    #: best over implementations and both forms of T tokens
    transformers_captured: float | None
    transformers_eager: float | None
    vllm_wall: float | None
    vllm_busy: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the ratios that are the claim."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {
            "vllm_over_ours": _ratio(self.vllm_wall, self.wall),
            "transformers_over_ours": _ratio(self.transformers_captured, self.wall),
        }


def _ratio(a: float | None, b: float) -> float | None:
    return None if a is None else a / b


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """One line a bar of which a row of ours exists."""
    found = list(rows)
    lines = []
    for (name, batch, kind), bar in BARS.items():
        ours = [
            r for r in found if (r.get("row"), r.get("name"), r.get("batch")) == (kind, name, batch)
        ]
        if not ours:
            continue
        layers = ours[-1]["layers"]
        # the peers ran on one GPU
        peers = [
            r
            for r in found
            if r.get("row") == "peer"
            and name == f"{r.get('layers')} layers"
            and r.get("tokens") == batch
            and kind == "decode"
        ]
        peer_name = f"vLLM, {name}" + ("" if kind == "decode" else ", k=3")
        lines.append(
            Line(
                name=name,
                layers=layers,
                batch=batch,
                kind=kind,
                wall=statistics.median(r["wall_ms"] for r in ours),
                low=min(r["wall_low_ms"] for r in ours),
                high=max(r["wall_high_ms"] for r in ours),
                runs=sum(r["repeats"] for r in ours),
                busy=statistics.median(r["busy_ms"] for r in ours),
                floor=ours[-1].get("floor_ms"),
                bar=bar,
                distinct_experts=ours[-1].get("distinct_experts"),
                transformers_captured=_least(peers, "captured_ms"),
                transformers_eager=_least(peers, "eager_ms"),
                vllm_wall=_of(found, "vllm", peer_name, batch, "wall_ms"),
                vllm_busy=_of(found, "vllm busy", peer_name, batch, "busy_ms"),
            )
        )
    return lines


def _least(rows: Sequence[Row], key: str) -> float | None:
    return min((r[key] for r in rows if r.get(key) is not None), default=None)


def _of(rows: Sequence[Row], row: str, name: str, batch: int, key: str) -> float | None:
    values = [
        r[key]
        for r in rows
        if (r.get("row"), r.get("name"), r.get("batch")) == (row, name, batch) and key in r
    ]
    return statistics.median(values) if values else None


def table(lines: Sequence[Line]) -> str:
    """The lines as text; milliseconds a step."""
    head = (
        "ms a step", "wall (range, n)", "bar", "GPU busy", "floor", "experts",
        "vLLM wall (busy), times ours", "transformers graph (eager), times ours",
    )  # fmt: skip
    texts = [head]
    for line in lines:
        kind = "" if line.kind == "decode" else f", {line.kind}"
        met = "met" if line.wall <= line.bar else "MISSED"
        vllm = "-"
        if line.vllm_wall is not None:
            busy = "-" if line.vllm_busy is None else f"{line.vllm_busy:.2f}"
            vllm = f"{line.vllm_wall:.2f} ({busy}), {line.vllm_wall / line.wall:.2f}x"
        peer = "-"
        if line.transformers_captured is not None:
            eager = line.transformers_eager
            peer = (
                f"{line.transformers_captured:.2f} ({'-' if eager is None else f'{eager:.1f}'}), "
                f"{line.transformers_captured / line.wall:.2f}x"
            )
        texts.append(
            (
                f"{line.name}, {line.batch}{kind}",
                f"{line.wall:.3f} ({line.low:.3f}-{line.high:.3f}, {line.runs})",
                f"{line.bar:.2f} {met}",
                f"{line.busy:.3f}",
                "-" if line.floor is None else f"{line.floor:.3f}",
                "-" if line.distinct_experts is None else f"{line.distinct_experts:.1f}",
                vllm,
                peer,
            )
        )
    return aligned(texts)


def main(paths: Sequence[str]) -> int:
    """Print one table over the rows of several runs: ``python -m bench.engine_table FILE...``.

    Rows of ``bench/kernels.py`` and ``bench/dense_variants.py`` among them make a second table.
    """
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    steps, kernels = lines_of(rows), kernel_lines(rows)
    if steps:
        print(table(steps))
    if kernels:
        print(("\n" if steps else "") + kernel_table(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
