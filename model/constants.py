"""The physical constants of the step model: name, unit, prior and where the prior is from.

A constant lives on a log scale when it must be positive, on a logit scale when it is a share, and
on a plain scale otherwise; the prior and posterior are normal on that scale. Priors are wide where
nothing was measured on this kind of host, so an uncalibrated prediction says how little it knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.machine import Machine
from model.servers import GENERIC, Server

Array = NDArray[Any]
Scale = Literal["log", "logit", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant: ``value`` in ``unit``; prior and standard deviations on ``scale``."""

    name: str
    value: float
    unit: str
    prior: float
    prior_sd: float
    scale: Scale
    source: str
    #: physical limits, in ``unit``: no fit and no draw goes beyond
    least: float = -np.inf
    most: float = np.inf

    def __post_init__(self) -> None:
        if not self.least <= self.prior <= self.most:
            raise ValueError(
                f"constant {self.name}: prior {self.prior} {self.unit} is not between "
                f"{self.least} and {self.most}"
            )
        if self.prior_sd <= 0:
            raise ValueError(f"constant {self.name}: prior_sd {self.prior_sd} must be positive")
        for label, value in (("value", self.value), ("prior", self.prior)):
            if not np.isfinite(to_scale(value, self.scale)):
                raise ValueError(
                    f"constant {self.name}: {label} {value!r} is not on scale {self.scale}"
                )


def to_scale(value: float, scale: Scale) -> float:
    """The value on the scale where it is normal; not finite if it does not belong there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if scale == "log":
            return float(np.log(value)) if value > 0 else float("nan")
        if scale == "logit":
            return float(np.log(value / (1.0 - value))) if 0 < value < 1 else float("nan")
    return float(value)


def from_scale(x: Array | float, scale: Scale) -> Array:
    """Inverse of ``to_scale``, element-wise."""
    x = np.asarray(x, dtype=float)
    if scale == "log":
        return np.exp(x)
    if scale == "logit":
        return 1.0 / (1.0 + np.exp(-x))
    return x


def _row(
    name: str, value: float, unit: str, sd: float, source: str, scale: Scale = "log"
) -> Constant:
    least, most = _LIMITS.get(name, (-np.inf, np.inf))
    # what a probe measured on this machine counts, whatever is usual
    return Constant(
        name=name, value=value, unit=unit, prior=value, prior_sd=sd, scale=scale, source=source,
        least=min(least, value), most=max(most, value),
    )  # fmt: skip


#: name -> (least, most) in the constant's unit. Shares of a peak end at 1, a slow mode is not
#: faster. A launch takes a time that any host has: what a fit would make of it beyond is something
#: that the model lacks, and the residual says so
_LIMITS: Mapping[str, tuple[float, float]] = {
    "dram_fraction": (0.02, 1.0),
    "flops_fraction": (0.005, 1.0),
    "kv_fraction": (0.01, 1.0),
    "moe_dram_fraction": (0.02, 1.0),
    "kernel_gap_us": (0.05, 50.0),
    "launch_us": (0.5, 400.0),
    "collective_launch_us": (1.0, 2000.0),
    "graph_launch_us": (0.5, 250.0),
    "gemm_row_share": (1e-4, 0.5),
    "attention_us": (0.1, 2000.0),
    "attention_batched_us": (0.01, 2000.0),
    "moe_fixed_us": (0.5, 5000.0),
    "moe_rows_us": (0.001, 1000.0),
    "draft_step_us": (0.2, 5000.0),
    "extend_us": (0.2, 5000.0),
    "tree_step_us": (0.2, 5000.0),
    "sample_us": (0.1, 50_000.0),
    "host_gap_us": (0.1, 100_000.0),
    "eager_gap_us": (0.1, 100_000.0),
    "host_slow_ratio": (1.0, 4.0),
    "numa_bind_factor": (0.5, 1.2),
    "routing_exponent": (0.01, 1.0),
    "discrepancy": (0.005, 0.5),
}
_JUDGED = "judged; wide"
_GATHER = "an all-gather is half an all-reduce; engines that gather only the best move less"
_REPLICA = "servers split the draft over ranks; engines that keep it whole on each have none"
_LAYERS = "moe-layer-published.csv"
_SERVER = "6 us per torch call, more where kernels are launched from Python"
_STEP = "step-h200x2.jsonl (2 x H200, torch 2.11), widened for other hosts"


#: what a kernel that does something takes beyond an empty one, us: it ramps up and drains. 175
#: kernels of vLLM are 2.4 us each beyond their bytes, the engine's of three sizes 2.2 to 2.9 (H200)
KERNEL_RAMP_US = 1.3
#: a probe's median read, as a share of the peak, is what large products reach within this
_PROBED_SD = 0.07
#: torch calls that one op of ``compute.kernel_counts`` makes on a CPU rank, where ops are not
#: fused: 1,667 calls in a decode forward of studies/models/tiny-moe, which counts 246 ops (torch
#: 2.13). A probe times a call, the model counts ops.
CPU_CALLS_PER_OP = 6.8


def _routing() -> list[Constant]:
    return [
        _row("routing_exponent", 0.8, "1", 0.12,
             "distinct experts 8/22/36/56 at 1/4/8/16 tokens, Qwen3.6-35B-A3B (third party)"),
        _row("routing_zipf", 0.7, "1", 0.35,
             "power-law benchmarks: 148-166, 279-285 of 384 at 32, 128 tokens"),
    ]  # fmt: skip


def _launch(machine: Machine, server: Server) -> Constant:
    eager = machine.measured.launch_eager
    calls = server.launch_calls
    if eager is None:
        if calls is None:
            return _row("launch_us", 9.0, "us per kernel", 0.4, _STEP)
        return _row("launch_us", 6.0 * calls, "us per kernel", 0.6, _SERVER)
    if calls is None:
        # torch launches the probe's kernels from C++, an engine may launch its own from Python
        return _row("launch_us", eager.median_us, "us per kernel", 0.4, "probed on this machine")
    source = f"probed on this machine, x {calls:g}: launched from Python"
    return _row("launch_us", calls * eager.median_us, "us per kernel", 0.45, source)


def _gpu_constants(machine: Machine, server: Server) -> list[Constant]:
    graph = machine.measured.launch_graph
    gap = (
        _row("kernel_gap_us", graph.median_us + KERNEL_RAMP_US, "us per kernel", 0.3,
             "probed on this machine with empty kernels, plus the ramp of real ones")
        if graph
        else _row("kernel_gap_us", 2.0, "us per kernel", 0.35, _STEP)
    )  # fmt: skip
    assert machine.gpu is not None
    read = machine.measured.dram_gb_per_s
    reached = None if read is None else min(read / machine.gpu.dram_gb_per_s, 0.97)
    probed = "probed on this machine: a read of 1 GiB"

    def dram(name: str, usual: str) -> Constant:
        if reached is None:
            return _row(name, 0.80, "of peak", 0.12, usual)
        return _row(name, reached, "of peak", _PROBED_SD, probed)

    return [
        dram("dram_fraction", "aiconfigurator's memory factor 0.8"),
        _row("flops_fraction", 0.70, "of peak", 0.25, "torch matmul 0.85-0.89, less when small"),
        gap,
        _row("attention_us", 8.0, "us per layer", 0.5, "MLA decode kernel 16.6 us (triton)"),
        _row("attention_batched_us", 1.0, "us per layer if batched", 1.2, _JUDGED),
        _row("gemm_row_share", 0.012, "of the weight stream per row", 0.6, _STEP),
        _row("kv_fraction", 0.55, "of peak", 0.35, _JUDGED),
        dram("moe_dram_fraction", _LAYERS),
        _row("moe_fixed_us", 24.0, "us per layer", 0.6, _LAYERS),
        _row("moe_expert_us", 0.05, "us per distinct expert", 1.0, _JUDGED),
        _row("moe_batched_us", 3.0, "us per layer if batched", 1.2, "path switch; 4 x A100: 108"),
        _row("moe_rows_us", 0.3, "us per layer, x (rows - 16)^0.6", 1.0, _JUDGED),
        _launch(machine, server),
        _row("collective_launch_us", 45.0, "us per collective", 0.5, _STEP),
        _row("graph_launch_us", 25.0, "us per graph", 0.7, _JUDGED),
        _row("host_slow_ratio", 1.6, "1", 0.12, _STEP),
        _row("host_slow_share", 0.45, "of runs", 0.7, _STEP, "logit"),
        _row("host_jitter", 0.06, "relative sd", 0.4, _STEP),
        _row("numa_bind_factor", 0.93, "of launch_us", 0.07, _JUDGED),
        _row("draft_step_us", 60.0, "us per draft step", 0.7, _JUDGED),
        _row("tree_us", 60.0, "us per cycle with topk > 1", 0.8, _JUDGED),
        _row("tree_step_us", 12.0, "us per draft step with topk > 1", 1.2, _JUDGED),
        _row("extend_us", 10.0, "us per extend, beyond a draft forward", 1.0, _JUDGED),
        _row("sample_us", 100.0, "us per cycle", 0.7, _JUDGED),
        _row("host_gap_us", 300.0, "us per forward", 0.7, _JUDGED),
        _row("host_gap_spec_us", 1200.0, "us per cycle", 0.8,
             "4-6 ms for all but verify in a 3-step cycle (Kimi-K2.6, third party)"),
        _row("host_gap_request_us", 8.0, "us per request", 1.0, _JUDGED),
        _row("eager_gap_us", 40.0, "us per cycle that is not captured whole", 1.2, _JUDGED),
        _row("allreduce_factor", 1.0, "of the stand-alone time", 0.08, _STEP),
        _row("skew_us", 0.5, "us per collective and doubling of ranks", 1.0, _JUDGED),
        _row("draft_factor", 1.0, "of the modelled draft forward", 0.25, _JUDGED),
        _row("gather_factor", 1.0, "of half an all-reduce of the logits", 0.4, _GATHER),
        _row("draft_reduce_factor", 1.0, "of a tensor-parallel draft's collectives", 0.4, _REPLICA),
    ]  # fmt: skip


def _cpu_constants(machine: Machine) -> list[Constant]:
    eager = machine.measured.launch_eager
    launch = eager.median_us * CPU_CALLS_PER_OP if eager else 19.0
    return [
        _row("dram_fraction", 0.7, "of peak", 0.5, _JUDGED),
        _row("flops_fraction", 0.3, "of peak", 0.8, _JUDGED),
        _row("kernel_gap_us", 0.5, "us per op", 0.5, _JUDGED),
        _row("attention_us", 20.0, "us per layer", 0.8, _JUDGED),
        _row("attention_batched_us", 2.0, "us per layer if batched", 1.2, _JUDGED),
        _row("gemm_row_share", 0.02, "of the weight stream per row", 1.0, _JUDGED),
        _row("kv_fraction", 0.3, "of peak", 0.8, _JUDGED),
        _row("moe_dram_fraction", 0.5, "of peak", 0.6, _JUDGED),
        _row("moe_fixed_us", 60.0, "us per layer", 0.8, _JUDGED),
        _row("moe_expert_us", 30.0, "us per distinct expert", 0.8, _JUDGED),
        _row("moe_batched_us", 5.0, "us per layer if batched", 1.2, _JUDGED),
        _row("moe_rows_us", 2.0, "us per layer, x (rows - 16)^0.6", 1.0, _JUDGED),
        _row("launch_us", launch, "us per op", 0.6, "probed on this machine" if eager else _JUDGED),
        _row("collective_launch_us", 20.0, "us per collective", 0.8, _JUDGED),
        _row("graph_launch_us", 25.0, "us per graph", 0.7, _JUDGED),
        _row("host_slow_ratio", 1.2, "1", 0.12, _JUDGED),
        _row("host_slow_share", 0.2, "of runs", 0.8, _JUDGED, "logit"),
        _row("host_jitter", 0.08, "relative sd", 0.5, _JUDGED),
        _row("numa_bind_factor", 0.97, "of launch_us", 0.07, _JUDGED),
        _row("draft_step_us", 150.0, "us per draft step", 0.8, _JUDGED),
        _row("tree_us", 300.0, "us per cycle with topk > 1", 1.0, _JUDGED),
        _row("tree_step_us", 60.0, "us per draft step with topk > 1", 1.2, _JUDGED),
        _row("extend_us", 60.0, "us per extend, beyond a draft forward", 1.0, _JUDGED),
        _row("sample_us", 150.0, "us per cycle", 0.8, _JUDGED),
        _row("host_gap_us", 200.0, "us per forward", 0.8, _JUDGED),
        _row("host_gap_spec_us", 300.0, "us per cycle", 1.0, _JUDGED),
        _row("host_gap_request_us", 30.0, "us per request", 1.0, _JUDGED),
        _row("eager_gap_us", 1.0, "us; no CPU cycle is captured", 1.0, _JUDGED),
        _row("allreduce_factor", 1.0, "of the stand-alone time", 0.3, _JUDGED),
        _row("skew_us", 50.0, "us per collective and doubling of ranks", 1.8,
             "ranks that share cores wait for each other's time slices: 10 us to ms; judged"),
        _row("draft_factor", 1.0, "of the modelled draft forward", 0.35, _JUDGED),
        _row("gather_factor", 0.5, "of half an all-reduce of the logits", 1.5, _GATHER),
        _row("draft_reduce_factor", 0.3, "of a tensor-parallel draft's collectives", 1.5, _REPLICA),
    ]  # fmt: skip


def default_constants(machine: Machine, server: Server = GENERIC) -> tuple[Constant, ...]:
    """Priors for this machine and server, its own probe rows used where it has them."""
    gpu = machine.gpu is not None
    rows = _gpu_constants(machine, server) if gpu else _cpu_constants(machine)
    rows += _routing()
    rows.append(
        _row("discrepancy", 0.05 if gpu else 0.1, "relative sd of a cycle", 0.5,
             "what the formulas leave out; published step models err by 6-9 %")
    )  # fmt: skip
    unknown = server.priors.keys() - {row.name for row in rows}
    assert not unknown, f"server {server.name} has priors for no constant: {sorted(unknown)}"
    return tuple(_known(row, server) for row in rows)


def _known(row: Constant, server: Server) -> Constant:
    """The prior as this server has it."""
    better = server.priors.get(row.name)
    if better is None:
        return row
    return _row(row.name, better.value, row.unit, better.sd, better.source, row.scale)


def as_mapping(constants: tuple[Constant, ...], x_DK: Array) -> Mapping[str, Array]:
    """Constant vectors on their scales, [D, K], as name -> values [D, 1] in their units."""
    return {
        constant.name: np.clip(
            from_scale(x_DK[:, k, None], constant.scale), constant.least, constant.most
        )
        for k, constant in enumerate(constants)
    }
