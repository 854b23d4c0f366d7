"""Record every configuration of a study's space as a file that ``replay`` serves.

    python -m bench.record_grid --out DIR [--study studies/h200-grid.yaml] [--budget 180]
        [--passes 3] [--engines 12] [--p2p-disable]

A few engines per group (graphs, NCCL) are started and stay, so that a repeat of any configuration
costs no start; they compile and capture beside each other, and measure one at a time. A pass takes
every configuration at every level once, over all groups in one random order; every second pass is
the one before it backwards, so that a linear drift falls on all alike.
Repeats go through the engine backend, as a study's do (warm-up, output check, health, memory), and
each is written when it is taken; the budget ends the run cleanly wherever it is.
``--p2p-disable`` sends NCCL through host memory, the stand-in for a PCIe host.
"""

import argparse
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

from autotune.backends.base import BackendContext, Group
from autotune.backends.engine_args import visible_gpus
from autotune.backends.engine_backend import EngineBackend
from autotune.backends.recording import Recorded, recorded_line
from autotune.schemas import Study
from autotune.space import baseline_knobs, build_space
from autotune.study_file import load_study
from autotune.workloads import study_workloads
from model.spec import Knobs, Workload

ROOT = Path(__file__).resolve().parent.parent
#: seconds that are too few for another repeat, failures after which a configuration is left out
_LEAST_S, _MOST_FAILURES = 3.0, 2
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
    """Some engines per group, and the file that repeats go to.

    A cell always runs on the same engine. Only one engine measures at a time; preparing (kernels,
    graphs, the check of the output) is what they do beside each other.
    """

    def __init__(
        self, study: Study, folder: Path, path: Path, deadline_s: float, engines: int = 1
    ) -> None:
        self.path, self.deadline_s = path, deadline_s
        self.knobs, self.baseline = all_knobs(study)
        self.workloads: dict[int, Workload] = study_workloads(study)
        self.taken: Counter[Cell] = Counter()
        self.failed: Counter[str] = Counter()
        self.order = 0
        self.first = EngineBackend(context_of(study, folder, "first"))
        #: each engine with the group it opens
        self.backends: list[tuple[EngineBackend, Group]] = []
        self._engine_of: dict[Cell, EngineBackend] = {}
        groups = list(dict.fromkeys(self.first.group(knobs) for knobs in self.knobs))
        for group in groups:
            cells = [cell for cell in self.cells() if self.first.group(cell[0]) == group]
            # the first group compiles for all
            parts = min(engines if group is groups[0] else -(-engines // 2), len(cells))
            for part in range(parts):
                backend = self.first
                if self.backends:
                    name = f"engine{len(self.backends)}"
                    backend = EngineBackend(context_of(study, folder, name))
                    # plain decoding of the same prompts, whatever the group
                    backend.share_references(self.first)
                self.backends.append((backend, group))
                self._engine_of |= dict.fromkeys(cells[part::parts], backend)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    def open(self) -> None:
        """Start all engines beside each other; a group that does not start ends the recording."""
        with ThreadPoolExecutor(len(self.backends)) as pool:
            list(pool.map(lambda item: item[0].open(item[1]), self.backends))

    def prepare(self) -> None:
        """Measure every cell once for nothing: kernels, graphs and the check of its output.

        The baseline comes first, because outputs are compared with it; then the first group, whose
        compiled kernels the others load.
        """
        for level in self.workloads:
            self.first.measure(self.baseline, self.workloads[level], 0)
        first_group = self.backends[0][1]
        for firsts in (True, False):
            chosen = [b for b, group in self.backends if (group == first_group) == firsts]
            with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
                list(pool.map(self._prepare, chosen))

    def _prepare(self, backend: EngineBackend) -> None:
        for (knobs, level), mine in self._engine_of.items():
            if mine is backend and self.left_s > _LEAST_S:
                backend.measure(knobs, self.workloads[level], 0)

    def close(self) -> None:
        """Stop all engines."""
        for backend, _ in self.backends:
            backend.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def provenance(self) -> None:
        """Where the numbers come from: the baseline's engine stands for all."""
        found = self.first.provenance()
        if os.environ.get("AUTOTUNE_COMMIT"):
            found = found.model_copy(update={"commit": os.environ["AUTOTUNE_COMMIT"]})
        self.write({"kind": "provenance", "provenance": found.model_dump(mode="json")})

    def cells(self) -> list[Cell]:
        """What a pass takes."""
        return [(knobs, level) for knobs in self.knobs for level in self.workloads]

    def take(self, knobs: Knobs, level: int) -> None:
        """One repeat; what did not run is in the file as well."""
        if self.failed[knobs.id] >= _MOST_FAILURES:
            return
        backend = self._engine_of[knobs, level]
        workload = self.workloads[level]
        repeat = self.taken[knobs, level]
        measured = backend.measure(knobs, workload, repeat)
        measured = measured.model_copy(update={"order": self.order})
        self.order += 1
        self.taken[knobs, level] += 1
        if measured.failure is not None:
            self.failed[knobs.id] += 1
            print(f"{knobs.id} at {level}: {measured.failure.message[:200]}", flush=True)
        self.write(recorded_line(Recorded(knobs, workload, measured)))


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
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    if args.p2p_disable:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    study = load_study(args.study).study
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{study.name}.jsonl"
    recorder = Recorder(study, args.out / "logs", path, start_s + args.budget, args.engines)
    try:
        recorder.open()
        print(
            f"{len(recorder.backends)} engines after {time.monotonic() - start_s:.0f} s", flush=True
        )
        recorder.prepare()
        print(f"prepared after {time.monotonic() - start_s:.0f} s", flush=True)
        recorder.provenance()
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
    least = min((recorder.taken[cell] for cell in recorder.cells()), default=0)
    print(f"{path}: {recorder.order} repeats of {len(recorder.knobs)} knobs, at least {least} each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
