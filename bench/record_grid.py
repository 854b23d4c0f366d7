"""Record every configuration of a study's space as a file that ``replay`` serves.

    python -m bench.record_grid --out DIR [--study studies/h200-grid.yaml] [--budget 180]
        [--passes 3] [--engines 12] [--without KNOB=VALUE] [--p2p-disable] [--warm-only]

Engines for every group (graphs, NCCL) are started and stay, so that a repeat of any configuration
costs no start. A pass takes every configuration at every level once, over all groups in one random
order; every second pass is the one before it backwards, so that a linear drift falls on all alike.
Repeats go through the engine backend, as a study's do (warm-up, output check, health, memory), and
each is written when it is taken; the budget ends the run cleanly wherever it is.

One engine works at a time wherever ranks talk to each other: GPUs switch between processes without
regard to each other, so beside k engines a collective waits about k time slices for its peer, some
thousand times what it takes alone. Engines of one rank prepare (kernels, graphs, the check of the
output) beside each other and measure one at a time.

``--warm-only`` only compiles, into the kernels' cache, beside whatever else warms up; a recording
does without it. ``--p2p-disable`` sends NCCL through host memory, the stand-in for a PCIe host.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.backends.base import BackendContext, BackendFailure, Group
from autotune.backends.engine_args import visible_gpus
from autotune.backends.engine_backend import EngineBackend
from autotune.backends.recording import Recorded, portable, recorded_line
from autotune.schemas import Study
from autotune.space import baseline_knobs, build_space
from autotune.study_file import load_study
from autotune.workloads import study_workloads
from model.spec import Knobs, Workload

ROOT = Path(__file__).resolve().parent.parent
#: seconds that are too few for another repeat, failures after which a configuration is left out,
#: and a whole engine that has given no number yet
_LEAST_S, _MOST_FAILURES = 3.0, 2
Cell = tuple[Knobs, int]


@dataclass(frozen=True, slots=True)
class _Host:
    num_gpus: int


def all_knobs(study: Study, without: Sequence[str] = ()) -> tuple[list[Knobs], Knobs]:
    """Every knobs of the study's space on this host, its baseline first; and the baseline.

    ``without``: "knob=value" of those to leave out.
    """
    space = build_space(study.space, _Host(max(visible_gpus(), 1)))
    baseline = baseline_knobs(space, study.space)
    pool = {baseline.id: baseline}
    for knobs in (space.at(index) for index in range(space.size)):
        if not {f"{name}={value}" for name, value in knobs.values().items()} & set(without):
            pool[knobs.id] = knobs
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


@dataclass(slots=True)
class Spent:
    """Seconds of a pass: before a repeat (warm-up, plain output), in it, after it (check)."""

    before_s: float = 0.0
    measured_s: float = 0.0
    after_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.before_s:.0f} s before repeats, {self.measured_s:.0f} s in them, "
            f"{self.after_s:.0f} s after"
        )


class Recorder:
    """Some engines per group, and the file that repeats go to. A cell keeps its engine.

    ``engines``: how many of one rank prepare the baseline's group beside each other, half as many
    every other group. Groups of several ranks have one each.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        path: Path,
        deadline_s: float,
        engines: int = 1,
        without: Sequence[str] = (),
    ) -> None:
        self.path, self.deadline_s = path, deadline_s
        self.places = {str(ROOT): "", str(folder.resolve()): "logs", str(Path.home()): "~"}
        self.knobs, self.baseline = all_knobs(study, without)
        self.workloads: dict[int, Workload] = study_workloads(study)
        self.taken: Counter[Cell] = Counter()
        self.failed: Counter[str] = Counter()
        self.numbers: Counter[EngineBackend] = Counter()
        self.losses: Counter[EngineBackend] = Counter()
        self.order = 0
        self.spent = Spent()
        self.first = EngineBackend(context_of(study, folder, "first"))
        #: each engine with the group it opens
        self.backends: list[tuple[EngineBackend, Group]] = []
        self.engine_of: dict[Cell, EngineBackend] = {}
        groups = list(dict.fromkeys(self.first.group(knobs) for knobs in self.knobs))
        #: whether ranks talk to each other
        self.talks = any(knobs.tp > 1 for knobs in self.knobs)
        for group in groups:
            mine = [knobs for knobs in self.knobs if self.first.group(knobs) == group]
            # the first group compiles for all
            parts = engines if group is groups[0] else -(-engines // 2)
            parts = 1 if self.talks else min(parts, len(mine))
            for part in range(parts):
                backend = self.first
                if self.backends:
                    name = f"engine{len(self.backends)}"
                    backend = EngineBackend(context_of(study, folder, name))
                    # plain decoding of the same prompts, whatever the group
                    backend.share(self.first)
                self.backends.append((backend, group))
                for knobs in mine[part::parts]:
                    self.engine_of |= {(knobs, level): backend for level in self.workloads}

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    def open(self) -> None:
        """Start all engines beside each other; cells of one that does not start are left out.

        Raises ``BackendFailure`` for the baseline's.
        """

        def start(item: tuple[EngineBackend, Group]) -> BackendFailure | None:
            try:
                item[0].open(item[1])
            except BackendFailure as error:
                return error
            return None

        with ThreadPoolExecutor(len(self.backends)) as pool:
            failures = list(pool.map(start, self.backends))
        for (backend, group), failure in zip(self.backends, failures, strict=True):
            if failure is not None and backend is self.first:
                raise failure
            if failure is not None:
                print(f"left out: {dict(group.settings)}: {failure}", flush=True)
                gone = [cell for cell, mine in self.engine_of.items() if mine is backend]
                self.engine_of = {c: b for c, b in self.engine_of.items() if c not in gone}

    def prepare(self) -> None:
        """Make the plain output that all compare with; engines of one rank visit all their cells.

        Those of several ranks are left to their first repeat, which warms up as any does.
        """
        for level in self.workloads:
            self.first.measure(self.baseline, self.workloads[level], 0)
        if self.talks:
            return
        # the first group's compiled kernels are loaded by the others
        first_group = self.backends[0][1]
        for firsts in (True, False):
            chosen = [b for b, group in self.backends if (group == first_group) == firsts]
            with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
                list(pool.map(self._prepare, chosen))

    def _prepare(self, backend: EngineBackend) -> None:
        for (knobs, level), mine in self.engine_of.items():
            if mine is backend and self.left_s > _LEAST_S:
                backend.measure(knobs, self.workloads[level], 0)

    def close(self) -> None:
        """Stop all engines."""
        with ThreadPoolExecutor(len(self.backends)) as pool:
            list(pool.map(lambda item: item[0].close(), self.backends))

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, without paths of this machine."""
        with self.path.open("a") as file:
            file.write(json.dumps(portable(line, self.places), sort_keys=True) + "\n")

    def provenance(self) -> None:
        """Where the numbers come from: the baseline's engine stands for all, but for NCCL.

        What NCCL chose elsewhere is under ``nccl.groups``, with the settings of each group.
        """
        found = self.first.provenance()
        if found.nccl:
            groups = [
                {"settings": dict(group.settings), "nccl": chosen}
                for backend, group in self.backends
                if backend is not self.first and (chosen := backend.nccl())
            ]
            found = found.model_copy(update={"nccl": {**found.nccl, "groups": groups}})
        if os.environ.get("AUTOTUNE_COMMIT"):
            found = found.model_copy(update={"commit": os.environ["AUTOTUNE_COMMIT"]})
        self.write({"kind": "provenance", "provenance": found.model_dump(mode="json")})

    def cells(self) -> list[Cell]:
        """What a pass takes."""
        return list(self.engine_of)

    def take(self, knobs: Knobs, level: int) -> None:
        """One repeat; what did not run is in the file as well."""
        backend = self.engine_of[knobs, level]
        lost = self.losses[backend] >= _MOST_FAILURES and not self.numbers[backend]
        if lost or self.failed[knobs.id] >= _MOST_FAILURES:
            return
        workload = self.workloads[level]
        repeat = self.taken[knobs, level]
        began_s = time.time()
        # a run ends in whatever smaller batches exist: so that all repeats find the same ones. What
        # fails here fails in the repeat too
        with contextlib.suppress(BackendFailure):
            for each in self.workloads.values() if repeat == 0 else ():
                backend.warm(knobs, each)
        measured = backend.measure(knobs, workload, repeat)
        measured = measured.model_copy(update={"order": self.order})
        self.order += 1
        self.taken[knobs, level] += 1
        (self.losses if measured.tokens_per_s is None else self.numbers)[backend] += 1
        if measured.failure is not None:
            self.failed[knobs.id] += 1
            print(f"{knobs.id} at {level}: {measured.failure.message[:200]}", flush=True)
        self.write(recorded_line(Recorded(knobs, workload, measured)))
        started_s, ended_s = measured.started.timestamp(), measured.ended.timestamp()
        self.spent.before_s += started_s - began_s
        self.spent.measured_s += ended_s - started_s
        self.spent.after_s += time.time() - ended_s

    def run(self, count: int) -> None:
        """Passes until the budget ends."""
        for number, order in passes(self.cells(), count):
            self.spent = Spent()
            for knobs, level in order:
                if self.left_s < _LEAST_S:
                    break
                self.take(knobs, level)
            print(
                f"pass {number}: {self.order} repeats, {self.spent}; {self.left_s:.0f} s left",
                flush=True,
            )


def warm(study: Study, folder: Path, engines: int) -> int:
    """Compile what the baseline's group needs, on engines beside each other; how many cells."""
    lead = EngineBackend(context_of(study, folder, "warm"))
    knobs, baseline = all_knobs(study)
    group = lead.group(baseline)
    workloads = study_workloads(study)
    mine = [each for each in knobs if lead.group(each) == group]

    def part(number: int) -> None:
        backend = EngineBackend(context_of(study, folder, f"warm{number}"))
        try:
            backend.open(group)
            for each in mine[number::engines]:
                for workload in workloads.values():
                    backend.warm(each, workload)
        finally:
            backend.close()

    with ThreadPoolExecutor(engines) as pool:
        list(pool.map(part, range(min(engines, len(mine)))))
    return len(mine) * len(workloads)


def context_of(study: Study, folder: Path, name: str) -> BackendContext:
    """The engine backend needs no machine and no model."""
    return BackendContext(
        study=study, study_dir=folder, machine=None, predictor=None, log_dir=folder / name
    )


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--study", type=Path, default=ROOT / "studies" / "h200-grid.yaml")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, starts included")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--p2p-disable", action="store_true", help="NCCL through host memory")
    parser.add_argument("--engines", type=int, default=12, help="of the first group; others half")
    parser.add_argument("--without", action="append", default=[], help="KNOB=VALUE to leave out")
    parser.add_argument("--warm-only", action="store_true", help="compile, record nothing")
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    if args.p2p_disable:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    study = load_study(args.study).study
    args.out.mkdir(parents=True, exist_ok=True)
    if args.warm_only:
        num_cells = warm(study, args.out / "logs", args.engines)
        print(f"{num_cells} cells warm after {time.monotonic() - start_s:.0f} s", flush=True)
        return 0
    path = args.out / f"{study.name}.jsonl"
    deadline_s = start_s + args.budget
    recorder = Recorder(study, args.out / "logs", path, deadline_s, args.engines, args.without)
    try:
        recorder.open()
        print(
            f"{len(recorder.backends)} engines after {time.monotonic() - start_s:.0f} s", flush=True
        )
        recorder.prepare()
        print(f"prepared after {time.monotonic() - start_s:.0f} s", flush=True)
        recorder.provenance()
        recorder.run(args.passes)
    except BackendFailure as error:
        print(f"record_grid: the baseline's engine: {error}", file=sys.stderr)
        return 1
    finally:
        recorder.close()
    least = min((recorder.taken[cell] for cell in recorder.cells()), default=0)
    print(f"{path}: {recorder.order} repeats of {len(recorder.knobs)} knobs, at least {least} each")
    print(f"ended after {time.monotonic() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
