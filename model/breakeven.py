"""Bounds and break-even: speed of light per term, and what speculation needs to pay."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from model.collectives import CollectiveKey
from model.compute import Device
from model.formats import bytes_per_weight
from model.routing import uniform_experts
from model.spec import Inert, Knobs, Workload
from model.step import StepModel


def speed_of_light_ms(
    step: StepModel, knobs: Knobs, workload: Workload, prefix: str
) -> Mapping[str, float]:
    """The physical bound of each term, ms per cycle: bytes over peak rate, or flops over peak.

    Experts: at least those of one token are read. All-reduce: 2 (n - 1) / n of the bytes through
    one rank's link. Launches, floors, waits and gaps are not part of a bound.
    """
    shape, tp = step.target, knobs.tp
    device = step.device(tp)
    spec = knobs.method != "off"
    tokens = workload.concurrency * (knobs.draft_tokens if spec else 1)
    other = bytes_per_weight(shape.other_format)
    dense = (
        3
        * shape.hidden
        * (
            shape.dense_layers * shape.dense_intermediate
            + shape.moe_layers * shape.shared_intermediate
        )
    )
    experts = 0.0
    if shape.moe_layers:
        experts = float(uniform_experts(1, shape.experts, shape.experts_per_token))
    kv_share = 1.0 if shape.mla else max(shape.kv_heads / tp, 1.0) / shape.kv_heads
    kv_layers = shape.layers - shape.linear_attention_layers - shape.sliding_layers
    kv = shape.kv_elements_per_token_layer * shape.kv_bytes * kv_share
    kv *= workload.concurrency * workload.context * kv_layers
    attention = shape.layers * shape.attention_params
    expert_flops = shape.moe_layers * shape.experts_per_token * shape.expert_params
    size = np.array(float(tokens * shape.allreduce_bytes_per_token))
    floor = float(step.collectives.floor_us(np.array(float(tp)), size))
    terms = {
        f"{prefix}.attention": _bound(attention * other / tp + kv, attention / tp * tokens, device),
        f"{prefix}.moe": _bound(
            (dense * other + shape.moe_layers * experts * shape.expert_bytes) / tp,
            (dense + expert_flops) / tp * tokens,
            device,
        ),
        f"{prefix}.allreduce": shape.allreduces_per_forward * floor / 1e3 if tp > 1 else 0.0,
        f"{prefix}.head": _bound(
            shape.hidden * shape.vocab * other / tp,
            shape.hidden * shape.vocab / tp * tokens,
            device,
        ),
        f"{prefix}.other": 0.0,
        "sample": 0.0,
        "host_gap": 0.0,
    }
    if spec and step.draft is not None:
        draft = step.draft
        params = draft.layers * draft.layer_params + draft.fuse_params + draft.head_params
        one = _bound(params * bytes_per_weight(draft.weight_format) / tp, params / tp, device)
        terms |= {"draft": (knobs.steps - 1) * one, "extend": one}
    return terms


#: NCCL knob -> field of ``CollectiveKey`` and its unset value
_NCCL_FIELDS: Mapping[str, tuple[str, str | None]] = {
    "nccl.algo": ("algo", "auto"),
    "nccl.proto": ("proto", "auto"),
    "nccl.min_channels": ("min_channels", None),
    "nccl.max_channels": ("max_channels", None),
    "nccl.buffsize": ("buffsize_bytes", None),
    "nccl.nthreads": ("nthreads", None),
    "nccl.p2p_level": ("p2p_level", "auto"),
}


def inert_nccl(step: StepModel, knobs: Knobs, workload: Workload) -> list[Inert]:
    """NCCL knobs without which NCCL runs the very same all-reduces in this step."""
    key = CollectiveKey.of(knobs)
    if key.tp == 1 or key.backend != "nccl" or step.collectives.problem(key) is not None:
        return []
    tree = (knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens)
    sizes = step.message_sizes([tree], workload.concurrency)
    found = []
    for name, (attribute, unset) in _NCCL_FIELDS.items():
        if getattr(key, attribute) == unset:
            continue
        change: dict[str, Any] = {attribute: unset}
        without = replace(key, **change)
        same = step.collectives.classes([key, without], sizes)
        if same[0] == same[1]:
            found.append(
                Inert(name, "NCCL runs the same all-reduce without it at every size of this step")
            )
    return found


def inert_knobs(step: StepModel, knobs: Knobs, workload: Workload) -> tuple[Inert, ...]:
    """Knobs that cannot change the outcome here, each with its reason."""
    found = inert_nccl(step, knobs, workload)
    if step.machine.gpu is None:
        for name in ("decode", "draft", "verify", "extend"):
            if getattr(knobs, f"graph_{name}"):
                found.append(Inert(f"cuda_graph.{name}", "there is no GPU: nothing is captured"))
    if knobs.tp == 1:
        for name, value in knobs.values().items():
            if name.startswith("nccl.") and value not in (None, "auto"):
                found.append(Inert(name, "one rank has nobody to reduce with"))
    if knobs.numa_bind and step.machine.cpu.sockets == 1:
        found.append(Inert("host.numa_bind", "the host has one socket"))
    return tuple(found)


def _bound(num_bytes: float, multiplications: float, device: Device) -> float:
    """ms of reading the bytes or doing 2 flops per multiplication, whichever is longer."""
    memory = num_bytes / device.dram_bytes_per_us
    return max(memory, 2.0 * multiplications / device.flops_per_us) / 1e3
