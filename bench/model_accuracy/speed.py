"""Speed of the model: predictions per second, calibration, discrete-event simulation.

    python -m bench.model_accuracy.speed

CPU seconds of one thread (set OMP_NUM_THREADS=1); other processes on the machine do not count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.model_accuracy.story import CHAIN, GRAPHS, predictor, workload
from model.knobs_array import enumerate_space
from model.observations import TermObservation
from model.spec import Knobs, Scalar
from model.step_program import host_model, phases_of, simulated_collectives
from model.step_sim import simulate_cycle

#: the space of the design, without buffer sizes, threads and peer levels
SPACE: dict[str, list[Scalar | None]] = {
    "speculation.method": ["off", "eagle3"],
    "speculation.steps": [1, 2, 3, 4, 5, 6],
    "speculation.topk": [1, 2, 4, 8],
    "speculation.draft_tokens": list(range(2, 65)),
    "parallel.tp": [8],
    "collectives.backend": ["nccl", "one_shot", "two_shot"],
    "nccl.algo": ["auto", "ring", "tree"],
    "nccl.proto": ["auto", "LL", "LL128", "Simple"],
    "nccl.min_channels": ["auto", 2, 4, 8, 16],
    "nccl.max_channels": ["auto", 1, 4, 16],
    "host.numa_bind": [False, True],
    "cuda_graph.verify": [True, False],
    "cuda_graph.draft": [True, False],
}


@dataclass(frozen=True)
class Speeds:
    """CPU seconds, and predictions per CPU second."""

    num_knobs: int
    first_s: float
    again_s: float
    calibrate_s: float
    num_observations: int
    captured_cycle_s: float
    eager_cycle_s: float
    #: one uncached 8-rank collective on 4 channels
    collective_s: float

    @property
    def per_second(self) -> float:
        """From the space to the array, NCCL's plans of this machine known."""
        return self.num_knobs / self.again_s


def cpu_s(run: Callable[[], object], repeats: int = 3) -> float:
    """Least CPU time of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def evaluate() -> Speeds:
    """Measure all."""
    p, load = predictor("8x-rtx-pro-6000-switches"), workload(1)
    first = cpu_s(lambda: p.predict_many(enumerate_space(SPACE), load), repeats=1)
    again = cpu_s(lambda: p.predict_many(enumerate_space(SPACE), load))
    chain = Knobs.of({**CHAIN, "speculation.steps": 3, **GRAPHS})
    trees = [chain, Knobs.of({"parallel.tp": 8, **GRAPHS})]
    trees += [Knobs.of({**chain.values(), "speculation.steps": s}) for s in (1, 2, 4, 5, 6)]
    seen = [
        TermObservation(
            knobs=k, workload=workload(c), term=name, value_ms=v.median * 1.1, rel_sd=0.02
        )
        for k in trees
        for c in (1, 8)
        for name, v in p.predict(k, workload(c)).terms_ms.items()
    ]
    p.updated(seen)
    calibrate = cpu_s(lambda: p.updated(seen))
    eager = Knobs.of({**chain.values(), **dict.fromkeys(GRAPHS, False)})
    host = host_model(p.calibration)
    times = []
    for knobs in (chain, eager):
        phases = phases_of(p.step, p.calibration, knobs, load)
        cache = simulated_collectives(p.step, p.calibration, knobs)
        times.append(cpu_s(lambda ph=phases, ca=cache: simulate_cycle(ph, 8, host, 1, ca)))  # type: ignore[misc]
    channels: dict[str, Scalar | None] = {"nccl.min_channels": 4, "nccl.max_channels": 4}
    narrow = Knobs.of({**chain.values(), **channels})
    four = simulated_collectives(p.step, p.calibration, narrow, cache=False)
    return Speeds(
        num_knobs=len(enumerate_space(SPACE)),
        first_s=first,
        again_s=again,
        calibrate_s=calibrate,
        num_observations=len(seen),
        captured_cycle_s=times[0],
        eager_cycle_s=times[1],
        collective_s=cpu_s(lambda: four.time_us(float(1 << 20))),
    )


def main() -> None:
    """Print the bars."""
    s = evaluate()
    print(f"{s.num_knobs} knobs from the space to the array: {s.again_s:.2f} s, "
          f"{s.per_second:,.0f} a second (bar 500,000); first time on a machine {s.first_s:.2f} s "
          f"({s.num_knobs / s.first_s:,.0f} a second)")  # fmt: skip
    print(
        f"calibration on {s.num_observations} observations: {s.calibrate_s * 1e3:.0f} ms (bar 100)"
    )
    print(f"captured cycle, 8 ranks, 61 layers: {s.captured_cycle_s * 1e3:.1f} ms (bar 50)")
    print(f"eager cycle, every kernel an event: {s.eager_cycle_s * 1e3:.0f} ms (bar 1000)")
    print(f"one uncached 8-rank collective, 4 channels: {s.collective_s * 1e3:.1f} ms (bar 100)")


if __name__ == "__main__":
    main()
