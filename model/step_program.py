"""Knobs and load as the phases that the discrete-event simulation runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from model import compute
from model.allreduce.simulator import AllreduceSimulator
from model.calibration import Calibration
from model.collectives import ASSUMED_NCCL_VERSION, CollectiveKey
from model.constants import as_mapping
from model.nccl.settings import NcclSettings
from model.spec import Interval, Knobs, Workload
from model.step import PhaseParts, StepModel, draft_kernels, launch_us
from model.step_columns import StepRows
from model.step_sim import CollectiveCache, CycleResult, HostModel, Op, Phase, simulate_cycle

#: a draft whose collectives cost less than this share of a split one's is not split
_SPLIT_DRAFT = 0.25


def phases_of(
    step: StepModel, calibration: Calibration, knobs: Knobs, workload: Workload
) -> list[Phase]:
    """The phases of one cycle (or plain step) at the calibration's values, host in its fast mode.

    A term's device time is dealt out evenly over its kernels; layers alternate attention, its
    all-reduce, MLP and its all-reduce.
    """
    rows = StepRows.of([knobs], [workload])
    c = as_mapping(calibration.constants, calibration.x[None])
    launch, collective = (
        float(np.broadcast_to(v, (1, 1))[0, 0]) for v in launch_us(rows, c, False)
    )
    once = calibration["graph_launch_us"]
    spec = knobs.method != "off"
    tokens = np.where(rows.speculative, rows.draft_tokens, 1.0)
    target = step.target_parts(rows, tokens, float(knobs.tp), c, False)
    size = float(tokens[0] * workload.concurrency * step.target.allreduce_bytes_per_token)
    target_ops = tuple(_target_ops(step, _values(target), size, knobs.tp, launch, collective, spec))
    name = "verify" if spec else "decode"
    phases = []
    if spec:
        width = 4 if step.draft is not None and step.draft.weight_format == "fp32" else 2
        draft = step.draft_parts(rows, float(knobs.tp), c, False)
        extend = step.extend_parts(rows, float(knobs.tp), c, False)
        for phase, parts, forwards, graphed, per_request in (
            ("draft", draft, knobs.steps - 1, knobs.graph_draft, knobs.topk),
            ("extend", extend, 1, knobs.graph_extend, knobs.steps + 1),
        ):
            assert step.draft is not None
            draft_bytes = float(per_request * workload.concurrency * step.draft.hidden * width)
            reduce_us = step.reduce_us(knobs, draft_bytes, c) if knobs.tp > 1 else 0.0
            reduce_us *= calibration["draft_reduce_factor"]
            # a draft kept whole on every rank has no collectives at all
            split = calibration["draft_reduce_factor"] >= _SPLIT_DRAFT
            whole = 1 if step.server.whole_draft else 0
            reduces = 2 * step.draft.layers + 2 if split and not whole else whole
            shape = _DraftPhase(
                name=phase,
                forwards=forwards,
                kernels=draft_kernels(step.draft, step.server.kernels),
                reduces=reduces if knobs.tp > 1 else 0,
                selects=step.server.kernels.select * knobs.steps if phase == "draft" else 0,
                size_bytes=draft_bytes,
            )
            ops = shape.ops(_values(parts)[phase], reduce_us, launch, collective)
            phases.append(Phase(phase, tuple(ops), graphed, once))
        phases.insert(1, Phase(name, target_ops, knobs.graph_verify, once))
    else:
        phases.append(Phase(name, target_ops, knobs.graph_decode, once))
    return phases


def simulate_knobs(
    step: StepModel,
    calibration: Calibration,
    knobs: Knobs,
    workload: Workload,
    *,
    seeds: int,
    collectives: CollectiveCache | None = None,
) -> tuple[Interval, list[CycleResult]]:
    """Cycle time of ``seeds`` simulated runs: median with 90 % interval, ms, and the runs.

    All-reduces are simulated, too, chunk by chunk, each size once (``simulated_collectives``),
    unless ``collectives`` gives their times.
    """
    if seeds < 1:
        raise ValueError(f"seeds {seeds} must be at least 1")
    if collectives is None and knobs.tp > 1:
        collectives = simulated_collectives(step, calibration, knobs)
    phases = phases_of(step, calibration, knobs, workload)
    rows = StepRows.of([knobs], [workload])
    sample, between = step.host_us(rows, as_mapping(calibration.constants, calibration.x[None]))
    gap = float(sample[0, 0] + between[0, 0])
    host = host_model(calibration)
    runs = [simulate_cycle(phases, knobs.tp, host, seed, collectives, gap) for seed in range(seeds)]
    low, median, high = np.quantile([run.total_us / 1e3 for run in runs], [0.05, 0.5, 0.95])
    return Interval(float(median), float(low), float(high)), runs


def simulated_collectives(
    step: StepModel, calibration: Calibration, knobs: Knobs, *, cache: bool = True
) -> CollectiveCache:
    """Discrete-event all-reduces of these knobs for a step's simulation, by size.

    Waiting for the last rank is the step's own business, so all ranks start together here.
    """
    key = step.collectives.usable(CollectiveKey.of(knobs))
    machine = step.machine
    simulator = AllreduceSimulator(
        machine,
        key.tp,
        key.backend,
        key.settings if key.backend == "nccl" else NcclSettings(),
        machine.software.nccl_version or ASSUMED_NCCL_VERSION,
        {c.name: c.value for c in calibration.constants},
        cache,
    )
    factor = calibration["allreduce_factor"]
    return CollectiveCache(
        lambda size: factor * simulator.duration_us(max(int(size), 1)), enabled=cache
    )


def host_model(calibration: Calibration) -> HostModel:
    """The calibration's view of how hosts vary."""
    return HostModel(
        slow_share=calibration["host_slow_share"],
        slow_ratio=calibration["host_slow_ratio"],
        rank_sd=calibration["host_jitter"],
        launch_sd=0.3,
        kernel_sd=0.01,
    )


def _values(parts: PhaseParts) -> Mapping[str, float]:
    return {name: float(np.broadcast_to(v, (1, 1))[0, 0]) for name, v in parts.device_us.items()}


def _target_ops(
    step: StepModel,
    device_us: Mapping[str, float],
    size: float,
    tp: int,
    launch: float,
    collective: float,
    speculative: bool,
) -> Iterator[Op]:
    shape = step.target
    prefix = "verify" if speculative else "decode"
    made = step.server.kernels
    counts = compute.kernel_counts(shape, made)
    each = {name: device_us[name] / max(counts[name], 1) for name in counts}
    reduce_us = device_us["allreduce"] / (shape.allreduces_per_forward + 1)

    def kernels(name: str, count: int) -> list[Op]:
        return [Op(f"{prefix}.{name}", each[name], launch)] * count

    def reduce() -> list[Op]:
        return [Op(f"{prefix}.allreduce", reduce_us, collective, size)] if tp > 1 else []

    yield from (*kernels("other", made.once), *reduce())
    moe = made.moe + (made.shared if shape.shared_intermediate else 0)
    for layer in range(shape.layers):
        before = min(made.other, 1)
        attention = compute.kernels_attention(shape, made)
        yield from (*kernels("other", before), *kernels("attention", attention))
        yield from (*reduce(), *kernels("other", made.other - before))
        yield from kernels("moe", made.dense if layer < shape.dense_layers else moe)
        yield from reduce()
    yield from kernels("head", made.head)
    if tp > 1:
        yield Op(f"{prefix}.head", 0.0, collective)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DraftPhase:
    """Counts of a draft or extend phase."""

    name: str
    forwards: int
    kernels: int
    reduces: int
    selects: int
    size_bytes: float

    def ops(
        self, total_us: float, reduce_us: float, launch: float, collective: float
    ) -> Iterator[Op]:
        """Kernels and collectives; kernels share what the collectives leave of ``total_us``."""
        rest = max(total_us - self.forwards * self.reduces * reduce_us, 0.0)
        each = rest / max(self.forwards * self.kernels + self.selects, 1)
        for _ in range(self.forwards):
            for index in range(self.kernels):
                yield Op(self.name, each, launch)
                if index < self.reduces:
                    yield Op(self.name, reduce_us, collective, self.size_bytes)
        yield from [Op(self.name, each, launch)] * self.selects
