"""Record every configuration of a study's space as a file that ``replay`` serves.

    python -m bench.record_grid --out DIR [--study studies/h200-grid.yaml] [--budget 180]
        [--passes 3] [--p2p-disable]

One engine per group (graphs, NCCL) is started and stays, so that a repeat of any configuration
costs no start. A pass takes every configuration at every level once, over all groups in one random
order; every second pass is the one before it backwards, so that a linear drift falls on all alike.
Repeats go through the engine backend, as a study's do (warm-up, output check, health, memory), and
each is written when it is taken; the budget ends the run cleanly wherever it is.
``--p2p-disable`` sends NCCL through host memory, the stand-in for a PCIe host.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.backends.base import BackendContext, BackendFailure, Group
from autotune.backends.engine_args import group_mapping, resolve, study_prompts, visible_gpus
from autotune.backends.engine_backend import EngineBackend
from autotune.backends.recording import Recorded, recorded_line
from autotune.launch import speculation_mapping
from autotune.schemas import Study
from autotune.space import baseline_knobs, build_space
from autotune.study_file import load_study
from autotune.workloads import study_workloads
from engine.api import Engine
from engine.config import LaunchConfig, SpeculationConfig
from engine.results import Request
from model.spec import Knobs, Workload

ROOT = Path(__file__).resolve().parent.parent
#: seconds that are too few for another repeat, failures after which a configuration is left out
_LEAST_S, _MOST_FAILURES = 3.0, 2
#: processes that compile kernels side by side
_WARM_PARTS = 14
Cell = tuple[Knobs, int]


@dataclass(frozen=True, slots=True)
class _Host:
    num_gpus: int


def all_knobs(study: Study) -> tuple[list[Knobs], Knobs]:
    """Every knobs of the study's space on this host, its baseline first; and the baseline."""
    space = build_space(study.space, _Host(max(visible_gpus(), 1)))
    baseline = baseline_knobs(space, study.space)
    pool = {baseline.id: baseline}
    pool |= {knobs.id: knobs for knobs in (space.at(index) for index in range(space.size))}
    return list(pool.values()), baseline


def passes(cells: Sequence[Cell], count: int, seed: int = 0) -> Iterator[tuple[int, list[Cell]]]:
    """(number, order) of each pass: random, then the same backwards, then random again."""
    draws = random.Random(seed)
    order = list(cells)
    for number in range(count):
        if number % 2 == 0:
            draws.shuffle(order)
        else:
            order.reverse()
        yield number, list(order)


class Recorder:
    """One backend per group, and the file that repeats go to."""

    def __init__(self, study: Study, folder: Path, path: Path, deadline_s: float) -> None:
        self.path, self.deadline_s = path, deadline_s
        self.knobs, self.baseline = all_knobs(study)
        self.workloads: dict[int, Workload] = study_workloads(study)
        self.backends: dict[Group, EngineBackend] = {}
        self.taken: Counter[tuple[str, int]] = Counter()
        self.failed: Counter[str] = Counter()
        self.order = 0
        first = EngineBackend(context_of(study, folder, "group0"))
        for knobs in self.knobs:
            group = first.group(knobs)
            if group not in self.backends:
                number = len(self.backends)
                backend = EngineBackend(context_of(study, folder, f"group{number}"))
                if number:
                    # plain decoding of the same prompts, whatever the group
                    backend.share_references(next(iter(self.backends.values())))
                self.backends[group] = backend

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    def open(self) -> None:
        """Start all engines beside each other; a group that does not start is left out, said."""

        def start(item: tuple[Group, EngineBackend]) -> str | None:
            try:
                item[1].open(item[0])
            except BackendFailure as error:
                return str(error)
            return None

        with ThreadPoolExecutor(4) as pool:
            problems = list(pool.map(start, self.backends.items()))
        for group, problem in zip(list(self.backends), problems, strict=True):
            if problem is not None:
                print(f"group {group.label()}: {problem}", flush=True)
                del self.backends[group]

    def close(self) -> None:
        """Stop all engines."""
        for backend in self.backends.values():
            backend.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def provenance(self) -> None:
        """Where the numbers come from: the baseline's engine stands for all."""
        found = next(iter(self.backends.values())).provenance()
        if os.environ.get("AUTOTUNE_COMMIT"):
            found = found.model_copy(update={"commit": os.environ["AUTOTUNE_COMMIT"]})
        self.write({"kind": "provenance", "provenance": found.model_dump(mode="json")})

    def cells(self) -> list[Cell]:
        """What a pass takes."""
        return [(knobs, level) for knobs in self.knobs for level in self.workloads]

    def take(self, knobs: Knobs, level: int) -> None:
        """One repeat; what did not run is in the file as well."""
        backend = next(iter(self.backends.values()))
        backend = self.backends.get(backend.group(knobs))  # type: ignore[assignment]
        if backend is None or self.failed[knobs.id] >= _MOST_FAILURES:
            return
        workload = self.workloads[level]
        repeat = self.taken[knobs.id, level]
        measured = backend.measure(knobs, workload, repeat)
        measured = measured.model_copy(update={"order": self.order})
        self.order += 1
        self.taken[knobs.id, level] += 1
        if measured.failure is not None:
            self.failed[knobs.id] += 1
            print(f"{knobs.id} at {level}: {measured.failure.message[:200]}", flush=True)
        self.write(recorded_line(Recorded(knobs, workload, measured)))


def context_of(study: Study, folder: Path, name: str) -> BackendContext:
    """The engine backend needs no machine and no model."""
    return BackendContext(
        study=study, study_dir=folder, machine=None, predictor=None, log_dir=folder / name
    )


def warm(study_file: Path) -> None:
    """Compile the kernels of all shapes in parallel processes, into Triton's cache."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.record_grid", "--study", str(study_file), "--out", ".",
             "--warm-part", str(part)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for part in range(_WARM_PARTS)
    ]  # fmt: skip
    for number, process in enumerate(processes):
        error = process.communicate()[1]
        if process.returncode:
            print(f"warm {number}: exit code {process.returncode}\n{error[-800:]}", flush=True)


def warm_part(study: Study, part: int) -> None:
    """One process of ``warm``: its share of the trees at every level, a few tokens each."""
    context = context_of(study, ROOT, "warm")
    pool, baseline = all_knobs(study)
    mapping = group_mapping(study, resolve(context), dict(first_group(context, baseline).settings))
    specs = {
        SpeculationConfig.model_validate(speculation_mapping(k)).model_dump_json() for k in pool
    }
    ids = study_prompts(study, max(study.workload.concurrency)).token_ids
    with Engine(LaunchConfig.model_validate(mapping)) as engine:
        for text in sorted(specs)[part::_WARM_PARTS]:
            speculation = SpeculationConfig.model_validate_json(text)
            for level in study.workload.concurrency:
                few = [
                    Request(prompt_ids=i, max_new_tokens=6, ignore_eos=True) for i in ids[:level]
                ]
                engine.generate(few, speculation, concurrency=level)
                if speculation.method == "off":
                    engine.generate(few, speculation, concurrency=level, margins=True)


def first_group(context: BackendContext, baseline: Knobs) -> Group:
    """The group of the baseline."""
    return EngineBackend(context).group(baseline)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--study", type=Path, default=ROOT / "studies" / "h200-grid.yaml")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, starts included")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--p2p-disable", action="store_true", help="NCCL through host memory")
    parser.add_argument("--warm-part", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    if args.p2p_disable:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    study = load_study(args.study).study
    if args.warm_part is not None:
        warm_part(study, args.warm_part)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if study.backend.args.get("device") == "cuda":
        warm(args.study.resolve())
        print(f"warm after {time.monotonic() - start_s:.0f} s", flush=True)
    path = args.out / f"{study.name}.jsonl"
    recorder = Recorder(study, args.out / "logs", path, start_s + args.budget)
    try:
        recorder.open()
        print(f"{len(recorder.backends)} engines after {time.monotonic() - start_s:.0f} s")
        recorder.provenance()
        # the baseline first: what others' outputs are compared with
        for level in recorder.workloads:
            recorder.take(recorder.baseline, level)
        for number, order in passes(recorder.cells(), args.passes):
            for knobs, level in order:
                if recorder.left_s < _LEAST_S:
                    break
                recorder.take(knobs, level)
            print(
                f"pass {number}: {recorder.order} repeats, {recorder.left_s:.0f} s left", flush=True
            )
    finally:
        recorder.close()
    least = min((recorder.taken[k.id, level] for k, level in recorder.cells()), default=0)
    print(f"{path}: {recorder.order} repeats of {len(recorder.knobs)} knobs, at least {least} each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
