"""Accuracy of the step model on measured steps: graphed steps predicted, eager intervals.

    python -m bench.model_accuracy.step [STEP_JSONL ALLREDUCE_JSONL]

Device constants come from the graphed column without all-reduces, all-reduce constants from the
stand-alone rows; ``graph_us`` is never fitted. Eager intervals are fitted on all environments but
the one predicted.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.calibration import default_calibration
from model.collectives import CollectiveTimes, Route, allreduce_constants
from model.compute import Device
from model.constants import as_mapping
from model.intervals import Z90
from model.machine import Machine, load_machine
from model.nccl.settings import NcclSettings
from model.robust import Fit, robust_map
from model.step_rows import (
    StepRow,
    device_priors,
    device_us,
    fit_device,
    fit_host,
    read_step_rows,
)

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "studies/results/published"
MACHINES = {
    "nvlink": ROOT / "studies/machines/2x-h200-nvlink.yaml",
    "shm-pcie5": ROOT / "studies/machines/2x-h200-shm.yaml",
}
RANKS = 2


@dataclass(frozen=True)
class Scores:
    """Errors of graphed steps; coverage and interval scores of both kinds."""

    rows: int
    median_ape: float
    max_ape: float
    graph_coverage: float
    graph_width: float
    eager_coverage: float
    eager_score: float
    baseline_score: float
    worst: str


class Collectives:
    """Stand-alone all-reduces of several links, one set of constants."""

    def __init__(self) -> None:
        self.machines = {link: load_machine(path) for link, path in MACHINES.items()}
        self.times = {link: CollectiveTimes(m) for link, m in self.machines.items()}
        self.constants = allreduce_constants(self.machines["nvlink"])

    def predict(self, rows: Sequence[tuple[str, dict[str, str], int]], x: np.ndarray) -> np.ndarray:
        """Graphed time, us [D, N], of (link, environment, bytes)."""
        c = as_mapping(self.constants, x)
        out = np.zeros((len(x), len(rows)))
        for link, times in self.times.items():
            index = [n for n, row in enumerate(rows) if row[0] == link]
            routes = [Route("nccl", RANKS, NcclSettings.from_env(rows[n][1])) for n in index]
            sizes = [rows[n][2] for n in index]
            out[:, index] = times.observed_us(routes, sizes, [True] * len(index), c)
        return out

    def fit(self, path: Path) -> Fit:
        """Constants from the graphed column of stand-alone rows."""
        data = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        rows = [(d["link"], d["env"], int(d["size_bytes"])) for d in data]
        return robust_map(
            lambda x: self.predict(rows, x),
            np.array([d["graph_us"] for d in data]),
            np.full(len(data), 0.04),
            np.array([np.log(c.value) for c in self.constants]),
            np.diag([c.prior_sd**-2.0 for c in self.constants]),
        )


def graphed_quantiles(
    rows: Sequence[StepRow], reduces: Collectives, reduce_fit: Fit
) -> tuple[np.ndarray, np.ndarray]:
    """(5/50/95 % of the whole graphed step [3, N], device time without all-reduces [N])."""
    machine: Machine = reduces.machines["nvlink"]
    device = Device.of(machine, RANKS)
    calibration = default_calibration(machine)
    priors = device_priors(calibration.constants)
    fit = fit_device(rows, device, priors)
    delta = 1e-4

    def moved(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[None], x + delta * np.eye(x.size)])

    compute = device_us(rows, device, as_mapping(priors, moved(fit.x)))
    wanted = [(row.link, dict(row.env), row.allreduce_bytes) for row in rows]
    one = reduces.predict(wanted, moved(reduce_fit.x))
    count = np.array([row.collectives for row in rows])
    one = one * calibration["allreduce_factor"] + calibration["skew_us"] * np.log2(RANKS)
    total = compute[0] + count * one[0]
    by_compute = (compute[1:] - compute[0]) / delta
    by_reduce = count * (one[1:] - one[0]) / delta
    variance = np.einsum("kn,kj,jn->n", by_compute, fit.covariance, by_compute)
    variance += np.einsum("kn,kj,jn->n", by_reduce, reduce_fit.covariance, by_reduce)
    factor_sd = calibration.constant("allreduce_factor").prior_sd
    variance += (count * one[0] * factor_sd) ** 2 + (0.02 * total) ** 2
    sd = np.sqrt(variance) / total
    return np.exp(np.log(total) + np.array([[-Z90], [0.0], [Z90]]) * sd), compute[0]


def interval_score(low: np.ndarray, high: np.ndarray, value: np.ndarray) -> float:
    """Mean interval score of 90 % intervals (width plus 20 x the miss); lower is better."""
    miss = np.maximum(low - value, 0.0) + np.maximum(value - high, 0.0)
    return float(np.mean(high - low + 2.0 / 0.1 * miss))


def evaluate(
    steps: Path = PUBLISHED / "step-h200x2.jsonl",
    allreduces: Path = PUBLISHED / "allreduce-h200x2.jsonl",
) -> Scores:
    """Scores of a step file."""
    rows = read_step_rows(steps)
    reduces = Collectives()
    quantiles, device = graphed_quantiles(rows, reduces, reduces.fit(allreduces))
    measured = np.array([row.graph_us for row in rows])
    error = quantiles[1] / measured - 1.0
    inside = (quantiles[0] <= measured) & (measured <= quantiles[2])
    worst = int(np.abs(error).argmax())
    eager = np.array([row.eager_us for row in rows])
    names = [json.dumps([row.link, dict(sorted(row.env.items()))]) for row in rows]
    low, high = np.zeros(len(rows)), np.zeros(len(rows))
    base_low, base_high = np.zeros(len(rows)), np.zeros(len(rows))
    for name in dict.fromkeys(names):
        out = np.array([other == name for other in names])
        host = fit_host([row for row, left in zip(rows, out, strict=True) if not left])
        left_rows = [row for row, left in zip(rows, out, strict=True) if left]
        low[out], _, high[out] = host.quantiles_us(left_rows, device[out])
        base_low[out], base_high[out] = np.quantile(eager[~out], [0.05, 0.95])
    return Scores(
        rows=len(rows),
        median_ape=float(np.median(np.abs(error))),
        max_ape=float(np.abs(error).max()),
        graph_coverage=float(inside.mean()),
        graph_width=float(np.median((quantiles[2] - quantiles[0]) / quantiles[1])),
        eager_coverage=float(((low <= eager) & (eager <= high)).mean()),
        eager_score=interval_score(low, high, eager),
        baseline_score=interval_score(base_low, base_high, eager),
        worst=f"{names[worst]}, {rows[worst].tokens} tokens: {error[worst]:+.1%}",
    )


def main(*paths: Path) -> None:
    """Print the bars."""
    s = evaluate(*paths)
    print(
        f"graphed steps, n={s.rows}: median APE {s.median_ape:.2%} (bar 5 %), max {s.max_ape:.2%}"
    )
    print(f"  worst {s.worst}")
    print(f"  90 % interval covers {s.graph_coverage:.0%}, median width {s.graph_width:.1%}")
    print(
        f"eager steps, leave one environment out: covers {s.eager_coverage:.1%} (bar 85-97 %), "
        f"interval score {s.eager_score:.0f} us (range of training rows {s.baseline_score:.0f} us)"
    )


if __name__ == "__main__":
    main(*(Path(a) for a in sys.argv[1:]))
