"""Measured synthetic steps (GEMMs, small kernels and two all-reduces a layer) and their model.

The rows of files like step-h200x2.jsonl hold a step with and without its all-reduces, launched one
by one and as one graph. Device constants come from the graphed step without all-reduces, the
all-reduce from stand-alone rows, and the graphed step with all-reduces is then predicted, not
fitted. Eager rows are bound by the host, which has a fast and a slow mode.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.calibration import Calibration
from model.compute import Device, gemm_us
from model.constants import Constant, as_mapping
from model.intervals import mixture_quantiles
from model.robust import Fit, robust_map
from model.step import expected_maximum

Array = NDArray[Any]

_DEVICE = ("dram_fraction", "flops_fraction", "kernel_gap_us", "gemm_row_share")
_FIELDS = ("tokens", "layers", "hidden", "small_kernels_per_layer", "allreduce_bytes")
_TIMES = ("eager_us", "eager_no_allreduce_us", "graph_us", "graph_no_allreduce_us")
#: spread of a mode that the rows of one session do not show, relative
_MODE_SD = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One measured step; times in us."""

    env: Mapping[str, str]
    link: str
    tokens: int
    layers: int
    hidden: int
    gemms: tuple[tuple[int, int], ...]
    small_kernels_per_layer: int
    allreduce_bytes: int
    eager_us: float
    eager_no_allreduce_us: float
    graph_us: float
    graph_no_allreduce_us: float
    num_ranks: int = 2

    @property
    def kernels(self) -> int:
        """Kernels of the step, collectives not counted."""
        return self.layers * (len(self.gemms) + self.small_kernels_per_layer)

    @property
    def collectives(self) -> int:
        """All-reduces of the step: two a layer."""
        return 2 * self.layers


def read_step_rows(path: Path | str) -> list[StepRow]:
    """Rows of a JSONL file; raises ``ValueError`` naming line and field."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, Mapping):
                raise ValueError(f"an object is expected, got {line[:40]!r}")
            rows.append(_row_of(value))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _row_of(value: Mapping[str, Any]) -> StepRow:
    missing = next((k for k in ("env", "link", "gemms", *_FIELDS, *_TIMES) if k not in value), None)
    if missing is not None:
        raise ValueError(f"column {missing!r} is missing")
    named: dict[str, Any] = {name: _positive(name, value[name]) for name in (*_FIELDS, *_TIMES)}
    named |= {name: int(named[name]) for name in _FIELDS}
    named["num_ranks"] = int(_positive("num_ranks", value.get("num_ranks", 2)))
    if named["num_ranks"] < 2:
        raise ValueError(f"num_ranks {value['num_ranks']!r} must be at least 2")
    try:
        gemms = tuple((int(k), int(n)) for k, n in value["gemms"])
    except (TypeError, ValueError):
        raise ValueError(f"gemms {value['gemms']!r} must be pairs of sizes") from None
    if not gemms or min(min(pair) for pair in gemms) < 1:
        raise ValueError(f"gemms {value['gemms']!r} must be pairs of positive sizes")
    if not isinstance(value["env"], Mapping):
        raise ValueError(f"env {value['env']!r} must be an object of NCCL variables")
    env = {str(k): str(v) for k, v in value["env"].items()}
    return StepRow(env=env, link=str(value["link"]), gemms=gemms, **named)


def _positive(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        unit = " us" if name.endswith("_us") else ""
        raise ValueError(f"{name} {value!r} must be a number > 0{unit}")
    return number


def device_us(rows: Sequence[StepRow], device: Device, c: Mapping[str, Array]) -> Array:
    """Device time of the steps without all-reduces, [D, N]: bf16 weights, each read once."""
    total = np.zeros((1, len(rows)))
    tokens = np.array([float(row.tokens) for row in rows])
    for n, row in enumerate(rows):
        weights = [float(k * m) for k, m in row.gemms]
        column = np.sum(
            [
                gemm_us(
                    np.array(2.0 * w), np.array(2.0 * w * row.tokens), 1.0, device, c, tokens[n]
                )
                for w in weights
            ],
            axis=0,
        )
        column = row.layers * column + row.kernels * c["kernel_gap_us"]
        if total.shape[0] != column.shape[0]:
            total = np.repeat(total, column.shape[0], axis=0)
        total[:, n] = column[:, 0]
    return total


def fit_device(rows: Sequence[StepRow], device: Device, priors: Sequence[Constant]) -> Fit:
    """Constants of ``priors`` (see ``device_priors``) from graphed steps without all-reduces."""
    chosen = tuple(priors)
    return robust_map(
        lambda x: device_us(rows, device, as_mapping(chosen, x)),
        np.array([row.graph_no_allreduce_us for row in rows]),
        np.full(len(rows), 0.02),
        np.array([np.log(p.value) for p in chosen]),
        np.diag([p.prior_sd**-2.0 for p in chosen]),
    )


def device_priors(constants: Sequence[Constant]) -> tuple[Constant, ...]:
    """Those constants of a calibration that a step without all-reduces tells."""
    return tuple(c for c in constants if c.name in _DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Launch costs of a host with a fast and a slow mode, us."""

    launch_us: float
    collective_us: float
    slow_ratio: float
    slow_share: float
    #: relative sd of a step within a mode
    mode_sd: float
    num_rows: int

    def step_us(self, kernels: Array, collectives: Array, num_ranks: int) -> Array:
        """Fast-mode time of launching a step one by one."""
        wait = 1.0 + self.mode_sd * float(expected_maximum(np.array(float(num_ranks))))
        # the fit's rows already contain the wait for the slower of their two hosts
        fitted = 1.0 + self.mode_sd * float(expected_maximum(np.array(2.0)))
        launches = kernels * self.launch_us + collectives * self.collective_us
        result: Array = launches * wait / fitted
        return result

    def quantiles_us(self, rows: Sequence[StepRow], floor_us: Array) -> Array:
        """5 %, 50 % and 95 % of eager steps, [3, N]; never below the device time ``floor_us``."""
        kernels = np.array([row.kernels for row in rows], dtype=float)
        collectives = np.array([row.collectives for row in rows], dtype=float)
        fast = np.maximum(self.step_us(kernels, collectives, 2), floor_us)
        slow = np.maximum(self.step_us(kernels, collectives, 2) * self.slow_ratio, floor_us)
        # few rows tell a mode's place, so its error adds to its width
        sd = self.mode_sd * np.sqrt(1.0 + 2.0 / max(self.num_rows, 1))
        return mixture_quantiles(np.log(fast), sd, np.log(slow), sd, self.slow_share)


def fit_host(rows: Sequence[StepRow]) -> HostFit:
    """Two modes from eager rows: expectation-maximisation in log time, a shared width per column.

    Both columns (with and without all-reduces) are bimodal by the same ratio; a row's two columns
    were measured apart and may be in different modes.
    """
    plain = np.log([row.eager_no_allreduce_us / row.kernels for row in rows])
    whole = np.log([row.eager_us for row in rows])
    low_plain = _two_modes(plain)[0]
    low, ratio, share, sd = _two_modes(whole)
    kernels = float(np.mean([row.kernels for row in rows]))
    collectives = float(np.mean([row.collectives for row in rows]))
    launch = float(np.exp(low_plain))
    collective = (float(np.exp(low)) - kernels * launch) / collectives
    return HostFit(
        launch_us=launch,
        collective_us=max(collective, 0.0),
        slow_ratio=float(np.exp(ratio)),
        slow_share=share,
        mode_sd=float(np.hypot(sd, _MODE_SD)),
        num_rows=len(rows),
    )


def prior_host(calibration: Calibration) -> HostFit:
    """Launch costs before any eager step was seen: the priors, as wide as they are."""
    launch = calibration.constant("launch_us")
    spread = float(np.hypot(launch.prior_sd, calibration.constant("collective_launch_us").prior_sd))
    return HostFit(
        launch_us=calibration["launch_us"],
        collective_us=calibration["collective_launch_us"],
        slow_ratio=calibration["host_slow_ratio"],
        slow_share=calibration["host_slow_share"],
        # launches of both kinds make up a step: neither error counts whole
        mode_sd=float(np.hypot(0.7 * spread, _MODE_SD)),
        num_rows=1000,
    )


def _two_modes(log_time: Array) -> tuple[float, float, float, float]:
    """(fast centre, slow - fast, share of slow, sd) of a two-mode mixture with weak priors.

    Prior: the slow mode is 1.5 x (sd 10 %) the fast one, half the runs each (4 pseudo-runs).
    """
    low, gap, share, sd = float(np.quantile(log_time, 0.2)), float(np.log(1.5)), 0.5, 0.1
    for _ in range(60):
        fast = np.log(1 - share) - 0.5 * ((log_time - low) / sd) ** 2
        slow = np.log(share) - 0.5 * ((log_time - low - gap) / sd) ** 2
        weight = 1.0 / (1.0 + np.exp(np.clip(fast - slow, -50, 50)))
        low = float(np.sum(log_time - weight * gap) / log_time.size)
        precision = weight.sum() / sd**2
        middle = float(np.sum(weight * (log_time - low)) / sd**2)
        gap = (middle + np.log(1.5) / 0.1**2) / (precision + 1 / 0.1**2)
        share = float((weight.sum() + 2.0) / (log_time.size + 4.0))
        square = (1 - weight) * (log_time - low) ** 2 + weight * (log_time - low - gap) ** 2
        sd = float(np.sqrt((square.sum() + 4 * 0.06**2) / (log_time.size + 4)))
    return low, float(gap), share, sd
