"""Record a grid of configurations of the trained tiny model as a file that ``replay`` serves.

    python bench/record_grid.py --out DIR [--budget 120] [--tp 1] [--host-memory]

Speculation (steps, topk, draft_tokens) times graphs (on, verify off, all off) on this GPU; with two
or more ranks times NCCL protocol and channels too, and ``--host-memory`` sets NCCL_P2P_DISABLE=1.
Groups that need new workers are run forth and back (A B C C B A), and the configurations inside a
group in an order of their own each time, so that drift falls on all alike. Every repeat is written
when it is taken; the budget ends the run cleanly wherever it is.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# this folder goes: here "engine" would be bench/engine.py, not the package
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != ROOT / "bench")]

from autotune.backends.engine_measurement import measured  # noqa: E402
from autotune.backends.recording import Recorded, _line  # noqa: E402
from autotune.provenance import collect_provenance  # noqa: E402
from autotune.records import Failure, Measurement  # noqa: E402
from bench.engine_tiny import OFF, tiny_config, tiny_requests  # noqa: E402
from engine.api import Engine  # noqa: E402
from engine.config import SpeculationConfig  # noqa: E402
from engine.errors import EngineError  # noqa: E402
from engine.host import machine_fingerprint  # noqa: E402
from model.spec import Knobs, Workload  # noqa: E402

#: starts of one group, and seconds that are too few for another repeat
_MAX_STARTS, _LEAST_S = 3, 3.0
INPUT_LEN, OUTPUT_LEN, LEVELS = 64, 65, (1, 8)
#: "cpu" tries the script out
DEVICE = os.environ.get("RECORD_DEVICE", "cuda")
#: (steps, topk, draft_tokens)
TREES = tuple(
    [(steps, 1, steps + 1) for steps in range(1, 8)]
    + [(1, 2, 3), (1, 4, 5), (1, 8, 9)]
    + [(2, k, t) for k, t in ((2, 4), (2, 7), (4, 8), (4, 16), (8, 16))]
    + [(3, k, t) for k, t in ((2, 4), (2, 8), (4, 8), (4, 16), (4, 24), (8, 16), (8, 32))]
    + [(4, k, t) for k, t in ((2, 8), (4, 8), (4, 16), (4, 32), (8, 16), (8, 32))]
    + [(5, k, t) for k, t in ((2, 8), (4, 16), (4, 32), (8, 32))]
    + [(6, 4, 16)]
)
GRAPHS = {
    "on": {"decode": True, "draft": True, "verify": True, "extend": True},
    "verify off": {"decode": True, "draft": True, "verify": False, "extend": True},
    "off": {"decode": False, "draft": False, "verify": False, "extend": False},
}


@dataclass(frozen=True, slots=True)
class Group:
    """What needs new workers."""

    name: str
    graphs: dict[str, bool]
    proto: str
    max_channels: int | None


def groups(tp: int) -> list[Group]:
    """Graphs alone on one GPU; NCCL protocol and channels too on several."""
    if tp == 1:
        return [Group(name, flags, "auto", None) for name, flags in GRAPHS.items()]
    nccl = [("auto", None), ("LL", 4), ("LL128", None), ("Simple", 4)]
    found = [Group(f"on, {p}/{c}", GRAPHS["on"], p, c) for p, c in nccl]
    return [*found, Group("verify off, auto", GRAPHS["verify off"], "auto", None)]


def speculations() -> list[SpeculationConfig]:
    """The baseline and every tree."""
    return [
        OFF,
        *(SpeculationConfig(method="eagle3", steps=s, topk=k, draft_tokens=t) for s, k, t in TREES),
    ]


def knobs_of(group: Group, speculation: SpeculationConfig, tp: int) -> Knobs:
    """The configuration as the rest of the tool names it."""
    return Knobs.of(
        {
            "speculation.method": speculation.method,
            "speculation.steps": speculation.steps,
            "speculation.topk": speculation.topk,
            "speculation.draft_tokens": 0
            if speculation.method == "off"
            else speculation.num_tokens,
            "parallel.tp": tp,
            "collectives.backend": "nccl",
            "nccl.proto": group.proto,
            "nccl.max_channels": group.max_channels,
            **{f"cuda_graph.{name}": on for name, on in group.graphs.items()},
        }
    )


def engine_config(group: Group, tp: int, host_memory: bool) -> Any:
    """The launch config of a group."""
    proto = None if group.proto == "auto" else group.proto
    on_cpu = DEVICE == "cpu"
    return tiny_config(
        tp=tp,
        device=DEVICE,
        max_concurrency=max(LEVELS),
        cuda_graph=GRAPHS["off"] if on_cpu else group.graphs,
        nccl={"proto": proto, "max_channels": group.max_channels},
        environment={"NCCL_P2P_DISABLE": "1"} if host_memory else {},
        timeout_s=60.0,
    )


class Recorder:
    """Takes repeats and writes them as they come."""

    def __init__(self, path: Path, tp: int, host_memory: bool, deadline_s: float) -> None:
        self.path, self.tp, self.host_memory, self.deadline_s = path, tp, host_memory, deadline_s
        self.asks = tiny_requests(max(LEVELS), INPUT_LEN, OUTPUT_LEN)
        self.order = 0
        self.repeats: dict[tuple[str, int], int] = {}
        self.plain: dict[int, list[tuple[int, ...]]] = {}

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def workload(self, level: int) -> Workload:
        """What is measured at a level."""
        prompts = hash_of([r.prompt_ids for r in self.asks[:level]])
        return Workload(
            prompts="builtin:code",
            prompts_sha256=prompts,
            chat_template=None,
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN,
            context=INPUT_LEN + OUTPUT_LEN // 2,
            temperature=0.0,
            ignore_eos=True,
            seed=0,
            concurrency=level,
        )

    def run_group(self, group: Group, rng: random.Random) -> None:
        """One start: every speculation at every level, in a random order.

        A speculation that ends the workers is recorded as failed and left out; new workers go on.
        """
        todo = speculations()
        rng.shuffle(todo)
        # plain decoding first: outputs are compared with it
        todo.sort(key=lambda s: s.method != "off")
        starts = 0
        while todo and starts < _MAX_STARTS and self.left_s > _LEAST_S:
            starts += 1
            speculation = OFF
            try:
                with Engine(engine_config(group, self.tp, self.host_memory)) as engine:
                    while todo and self.left_s > _LEAST_S:
                        speculation = todo.pop(0)
                        for level in LEVELS:
                            self.take(engine, group, speculation, level)
            except EngineError as error:
                self.failed(group, speculation, error)
                print(f"{group.name}, {speculation}: {error.kind}: {error.message[:300]}")

    def take(
        self, engine: Engine, group: Group, speculation: SpeculationConfig, level: int
    ) -> None:
        """Warm up and take one repeat."""
        knobs = knobs_of(group, speculation, self.tp)
        some = self.asks[:level]
        engine.generate(some, speculation, concurrency=level)
        started = datetime.now(UTC)
        run = engine.generate(some, speculation, concurrency=level)
        ended = datetime.now(UTC)
        outputs = [r.token_ids for r in run.requests]
        if speculation.method == "off":
            self.plain.setdefault(level, outputs)
        same = sum(a == b for a, b in zip(outputs, self.plain.get(level, []), strict=False))
        key = (knobs.id, level)
        eager = [f"{n}: {how}" for n, how in run.graphs.items() if how != "captured"]
        measurement = Measurement(
            trial=-1,
            knobs_id=knobs.id,
            concurrency=level,
            repeat=self.repeats.get(key, 0),
            order=self.order,
            started=started,
            ended=ended,
            output_check="exact" if same == len(outputs) else "unverified",
            notes=(
                f"{same} of {len(outputs)} outputs equal plain decoding's (bf16: near-ties part)",
                f"group {group.name}; path {run.path}",
                *(eager[:3] if any(group.graphs.values()) else ()),
            ),
            **measured(run, knobs),
        )
        self.repeats[key] = self.repeats.get(key, 0) + 1
        self.order += 1
        self.write(_line(Recorded(knobs, self.workload(level), measurement)))

    def failed(self, group: Group, speculation: SpeculationConfig, error: EngineError) -> None:
        """What did not run is in the file as well."""
        knobs = knobs_of(group, speculation, self.tp)
        now = datetime.now(UTC)
        failure = Failure(
            kind=error.kind,
            stage=error.stage,
            message=error.message,
            log_tail=error.log_tail[-2000:],
        )
        measurement = Measurement(
            trial=-1,
            knobs_id=knobs.id,
            concurrency=LEVELS[0],
            repeat=self.repeats.get((knobs.id, LEVELS[0]), 0),
            order=self.order,
            started=now,
            ended=now,
            failure=failure,
        )
        self.order += 1
        self.write(_line(Recorded(knobs, self.workload(LEVELS[0]), measurement)))


def hash_of(value: object) -> str:
    """sha256 of a value's JSON."""
    import hashlib

    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def warm(parts: int) -> None:
    """Compile the kernels of all shapes in parallel processes, into Triton's cache."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import bench.record_grid as g\n"
        "from engine.api import Engine\n"
        "part = int(sys.argv[1])\n"
        "with Engine(g.engine_config(g.groups(1)[-1], 1, False)) as e:\n"
        "    asks = g.tiny_requests(max(g.LEVELS), g.INPUT_LEN, 3)\n"
        f"    for s in g.speculations()[part::{parts}]:\n"
        "        for level in g.LEVELS: e.generate(asks[:level], s, concurrency=level)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stderr=subprocess.PIPE, text=True)
        for n in range(parts)
    ]
    for number, process in enumerate(processes):
        error = process.communicate()[1]
        if process.returncode:
            print(f"warm {number}: exit code {process.returncode}\n{error[-1500:]}", flush=True)


def forth_and_back(found: list[Group]) -> Iterator[list[Group]]:
    """A B C, then C B A, and so on."""
    for turn in itertools.count():
        yield found if turn % 2 == 0 else found[::-1]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--host-memory", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    if DEVICE == "cuda":
        warm(12)
    print(f"warm after {time.monotonic() - start_s:.0f} s", flush=True)
    path = args.out / f"grid-tp{args.tp}.jsonl"
    recorder = Recorder(path, args.tp, args.host_memory, start_s + args.budget)
    config = engine_config(groups(args.tp)[0], args.tp, args.host_memory).model_dump(mode="json")
    provenance = collect_provenance(
        {"backend": "engine", "engine": config},
        device=DEVICE,
        ranks=(),
        machine_fingerprint=machine_fingerprint(),
        nccl={},
    )
    if os.environ.get("AUTOTUNE_COMMIT"):
        provenance = provenance.model_copy(update={"commit": os.environ["AUTOTUNE_COMMIT"]})
    recorder.write({"kind": "provenance", "provenance": provenance.model_dump(mode="json")})
    rng = random.Random(0)
    for turn in itertools.islice(forth_and_back(groups(args.tp)), args.passes):
        for group in turn:
            if recorder.left_s < 15:
                break
            began_s = time.monotonic()
            recorder.run_group(group, rng)
            print(
                f"{group.name}: {time.monotonic() - began_s:.0f} s, {recorder.order} repeats",
                flush=True,
            )
    num = len(recorder.repeats)
    print(f"{path}: {recorder.order} repeats of {num} (knobs, level) pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
