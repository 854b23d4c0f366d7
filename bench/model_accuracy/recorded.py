"""Accuracy of whole cycles on one H200, against recordings that no constant was fitted to by rows.

    python -m bench.model_accuracy.recorded [--rows] [--search] [--trials 8 16 32] [--seeds 3]

Slices of Qwen3-30B-A3B (8 and 48 layers) and a tiny trained model by this repository's engine, on
one GPU and on two (`studies/results/h200/engine*.jsonl`), and vLLM 0.26 on the same slices. Each is
predicted from priors alone; the slices of 48 layers also after the 8-layer ones were measured. Then
the tiny model's grid (`h200-grid.jsonl.gz`) from priors and, with ``--search``, after a study's
trials, as ``bench/replay_search.py`` runs them (``--study`` takes another replayed study).
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import load_machine
from model.observations import ExpertsObservation, TermObservation
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Interval, Knobs, Workload

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
RESULTS = STUDIES / "results/h200"
MACHINES = STUDIES / "machines"
GRAPHS = ("decode", "draft", "verify", "extend")
_TINY = {"off": (0, 0, 0), "chain 3": (3, 1, 4), "chain 5": (5, 1, 6),
         "tree 3x2/8": (3, 2, 8), "tree 3x4/16": (3, 4, 16)}  # fmt: skip
#: experts that a verify of 4 tokens meets where routing is spread, by requests
_UNIFORM = {1: 29.0, 4: 82.0}
#: vLLM 0.26.0, bf16, CUDA graphs, context 1024: (layers, requests, draft steps, wall ms), medians
#: of 3 repeats (spread 2-17 %); two runs of the 8-layer rows are both here
VLLM = (
    (8, 1, 0, 1.90), (8, 1, 0, 1.86), (8, 4, 0, 1.66), (8, 4, 0, 1.95), (8, 16, 0, 2.33),
    (8, 16, 0, 2.71), (8, 64, 0, 3.98), (8, 64, 0, 4.58), (48, 1, 0, 4.135), (48, 4, 0, 6.50),
    (8, 1, 3, 6.07), (8, 4, 3, 9.10), (8, 16, 3, 7.16), (48, 1, 3, 6.84), (48, 4, 3, 12.63),
    (48, 16, 3, 17.3),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cycle: ms, and its terms where they were told apart."""

    kind: str
    name: str
    layers: int
    knobs: Knobs
    workload: Workload
    cycle_ms: float
    terms_ms: dict[str, float]
    experts: float | None = None
    machine: str = "1x-h200"


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of cycles: relative, absolute; share of 90 % intervals that hold the measured one."""

    what: str
    rows: int
    median: float
    p90: float
    coverage: float

    @classmethod
    def of(cls, what: str, rows: Sequence[Row], predicted: Sequence[Interval]) -> "Score":
        """Of cycles and their predictions."""
        real = np.array([row.cycle_ms for row in rows])
        low, middle, high = (
            np.array([getattr(p, name) for p in predicted]) for name in ("low", "median", "high")
        )
        error = np.abs(middle / real - 1.0)
        inside = (low <= real) & (real <= high)
        return cls(
            what,
            len(rows),
            float(np.median(error)),
            float(np.quantile(error, 0.9)),
            float(inside.mean()),
        )

    def line(self) -> str:
        """One line of the table."""
        return (
            f"{self.what:58} n {self.rows:3}  median {self.median:6.1%}  p90 {self.p90:6.1%}  "
            f"90 % intervals hold {self.coverage:4.0%}"
        )


def workload(concurrency: int, context: int, output_len: int = 257) -> Workload:
    """A load of this mean context."""
    return Workload(
        prompts="recorded", prompts_sha256="", chat_template=None, input_len=context,
        output_len=output_len, context=context, temperature=0.0, ignore_eos=True, seed=0,
        concurrency=concurrency,
    )  # fmt: skip


def knobs(steps: int, topk: int, draft_tokens: int, *, eager_verify: bool = False) -> Knobs:
    """One rank, everything captured but perhaps the verify."""
    graphs = {f"cuda_graph.{name}": True for name in GRAPHS}
    if not steps:
        return Knobs.of({"parallel.tp": 1, "cuda_graph.decode": True})
    return Knobs.of(
        {
            "parallel.tp": 1,
            **graphs,
            "cuda_graph.verify": not eager_verify,
            "speculation.method": "eagle3",
            "speculation.steps": steps,
            "speculation.topk": topk,
            "speculation.draft_tokens": draft_tokens,
        }
    )


def engine_rows() -> list[Row]:
    """Rows of this repository's engine, all runs."""
    found = []
    for file in ("engine.jsonl", "engine-2.jsonl"):
        for line in (RESULTS / file).read_text().splitlines():
            row = json.loads(line)
            kind = row.get("row")
            if kind in ("decode", "eagle3 k=3"):
                steps = 3 if kind != "decode" else 0
                # routing collapsed in the first session (4 tokens of a request met 9 experts);
                # an eager verify takes what its launches take all the same
                collapsed = steps and row["distinct_experts"] < 0.5 * _UNIFORM[row["batch"]]
                if collapsed and "eager" not in row["name"]:
                    continue
                found.append(_engine_row(row, steps, "eager" in row["name"]))
            elif kind == "tiny" and row.get("phases_ms"):
                tree = _TINY[row["name"].removeprefix("tiny, ")]
                found.append(_row("tiny", row, 16, knobs(*tree), workload(row["batch"], 192)))
    return found


def _engine_row(row: dict[str, Any], steps: int, eager: bool) -> Row:
    chosen = knobs(steps, int(steps > 0), steps + 1 if steps else 0, eager_verify=eager)
    kind = "slice, eager verify" if eager else "slice"
    return _row(kind, row, row["layers"], chosen, workload(row["batch"], 1024))


def _row(kind: str, row: dict[str, Any], layers: int, chosen: Knobs, load: Workload) -> Row:
    terms = {name: ms for name, ms in row["phases_ms"].items() if ms > 0}
    experts = row.get("distinct_experts")
    return Row(kind, row["name"], layers, chosen, load, row["cycle_ms"], terms, experts)


def two_gpu_rows() -> list[Row]:
    """Rows of this repository's engine on two GPUs, all runs: slices of 8 layers and tiny."""
    found = []
    for line in (RESULTS / "engine-tp2.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind, name = row.get("row"), row.get("name", "")
        if kind not in ("decode", "eagle3 k=3", "tiny") or not row.get("phases_ms"):
            continue
        tree = (3, 1, 4) if kind == "eagle3 k=3" else (0, 0, 0)
        if kind == "tiny":
            tree = _TINY[name.rpartition("P2P off, ")[2]]
        chosen = knobs(*tree, eager_verify="eager" in name).values() | {"parallel.tp": 2}
        chosen |= {"collectives.backend": "one_shot" if "one-shot" in name else "nccl"}
        if "LL x16" in name:
            chosen |= {"nccl.proto": "LL", "nccl.min_channels": 16, "nccl.max_channels": 16}
        made = _row(
            "tiny" if kind == "tiny" else "slice",
            row,
            16 if kind == "tiny" else 8,
            Knobs.of(chosen),
            workload(row["batch"], 192 if kind == "tiny" else 1024),
        )
        link = "nvlink" if "NVLink" in name else "shm"
        found.append(dataclasses.replace(made, machine=f"2x-h200-{link}"))
    return found


def vllm_rows() -> list[Row]:
    """Walls of vLLM."""
    return [
        Row("vllm", f"vLLM, {layers} layers", layers, knobs(k, int(k > 0), k + 1 if k else 0),
            workload(batch, 1024), wall, {})
        for layers, batch, k, wall in VLLM
    ]  # fmt: skip


@cache
def predictor(kind: str, layers: int, host: str = "1x-h200") -> Predictor:
    """Priors for a kind of rows on a machine."""
    machine = load_machine(MACHINES / f"{host}.yaml")
    server = "vllm" if kind == "vllm" else "engine"
    if kind == "tiny":
        target = ModelShape.load(STUDIES / "models/tiny-moe")
        draft = DraftShape.load(STUDIES / "models/tiny-moe-eagle3", target=target)
    else:
        config = json.loads((STUDIES / "shapes/qwen3-30b-a3b/config.json").read_text())
        config["num_hidden_layers"] = layers
        target = ModelShape.from_hf_config(config, name=f"qwen3-30b-a3b, {layers} layers")
        draft = DraftShape.standard(target)
    calibration = default_calibration(machine, server)
    return Predictor(target, draft, machine, calibration, AcceptanceModel.prior())


def from_priors(rows: Sequence[Row]) -> list[Interval]:
    """Cycles before anything is measured."""
    return [
        predictor(row.kind, row.layers, row.machine).predict(row.knobs, row.workload).cycle_ms
        for row in rows
    ]


def after(rows: Sequence[Row], seen: Sequence[Row]) -> list[Interval]:
    """Cycles of ``rows`` after the terms of ``seen`` (one model's) were measured.

    How many experts a layer met is told of all: random weights route tokens apart, which no row
    without speculation says, and which is no time.
    """
    terms = [
        TermObservation(knobs=row.knobs, workload=row.workload, term=name, value_ms=ms, rel_sd=0.03)
        for row in seen
        for name, ms in row.terms_ms.items()
    ]
    base = predictor(seen[0].kind, seen[0].layers)
    counted = [
        ExpertsObservation(
            tokens_per_request=max(row.knobs.draft_tokens, 1),
            requests=row.workload.concurrency,
            experts=base.target.experts,
            experts_per_token=base.target.experts_per_token,
            distinct=row.experts,
            rel_sd=0.1,
        )
        for row in (*seen, *rows)
        if row.experts is not None
    ]
    told = base.updated([*terms, *counted]).calibration
    return [
        dataclasses.replace(predictor(row.kind, row.layers), calibration=told)
        .predict(row.knobs, row.workload)
        .cycle_ms
        for row in rows
    ]


def scores() -> list[Score]:
    """All but the grid."""
    rows, vllm = engine_rows(), vllm_rows()
    found = []
    for kind in ("slice", "slice, eager verify", "tiny"):
        chosen = [row for row in rows if row.kind == kind]
        found.append(Score.of(f"{kind}, from priors", chosen, from_priors(chosen)))
    eight = [row for row in rows if row.kind == "slice" and row.layers == 8]
    deep = [row for row in rows if row.kind == "slice" and row.layers == 48]
    found.append(Score.of("slice of 48 layers, after those of 8", deep, after(deep, eight)))
    tiny = [row for row in rows if row.kind == "tiny"]
    few = [row for row in tiny if row.workload.concurrency == 1]
    many = [row for row in tiny if row.workload.concurrency > 1]
    found.append(Score.of("tiny at 4 and 16 requests, after those at 1", many, after(many, few)))
    two = two_gpu_rows()
    found.append(Score.of("two GPUs, from priors", two, from_priors(two)))
    found.append(Score.of("vLLM walls, from priors", vllm, from_priors(vllm)))
    return found


def grid_scores(
    study: Path, trials: Sequence[int], seeds: int
) -> list[tuple[str, dict[str, float]]]:
    """The grid: from priors, then after each number of a study's trials (medians over seeds)."""
    from autotune.plan import make_plan
    from autotune.study_file import LoadedStudy, load_study
    from bench.replay_search import Truth, accuracy, read_recording, searched

    loaded = load_study(study)
    truth = Truth.of(read_recording(loaded.base_dir / loaded.study.backend.args["path"]))
    found = [("from priors", accuracy(make_plan(loaded).model, truth))]
    for count in trials:
        budget = loaded.study.budget.model_copy(update={"measured_trials": count})
        limited = LoadedStudy(
            study=loaded.study.model_copy(update={"budget": budget}),
            source=loaded.source,
            base_dir=loaded.base_dir,
        )
        ends = [accuracy(searched(limited, seed, truth)[1], truth) for seed in range(seeds)]
        middle = {key: statistics.median(end[key] for end in ends) for key in ends[0]}
        found.append((f"after {count} trials", middle))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="every row, not only the scores")
    parser.add_argument("--search", action="store_true", help="also after a study's trials")
    parser.add_argument("--study", type=Path, default=STUDIES / "h200-replay.yaml")
    parser.add_argument("--trials", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.rows:
        for row in [*engine_rows(), *two_gpu_rows(), *vllm_rows()]:
            cycle = predictor(row.kind, row.layers, row.machine).predict(row.knobs, row.workload)
            c = cycle.cycle_ms
            terms = " ".join(
                f"{name.rpartition('.')[2]} {1e3 * ms:.0f}/{1e3 * cycle.terms_ms[name].median:.0f}"
                for name, ms in row.terms_ms.items()
            )
            print(
                f"{row.name:32} {row.workload.concurrency:3}  measured {row.cycle_ms:7.3f} ms, "
                f"predicted {c.median:7.3f} ({c.low:.3f}-{c.high:.3f})  {terms}"
            )
    for score in scores():
        print(score.line())
    for what, found in grid_scores(
        options.study, options.trials if options.search else (), options.seeds
    ):
        print(
            f"{options.study.stem}, tokens/s, {what:24} median {found['median_error']:6.1%}  p90 "
            f"{found['p90_error']:6.1%}  90 % intervals hold {found['coverage90']:4.0%}  "
            f"rank correlation {found['rank_correlation']:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
