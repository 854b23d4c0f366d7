"""Work and time of the kernels of one forward pass, per rank.

Work is bytes and flops; time is bytes over bandwidth or flops over rate, whichever is longer, plus
a floor per kernel (to ramp up and drain: small reads never see the whole bandwidth). In a step of
many layers every weight is read cold from DRAM: nothing of one layer is left in the L2 when the
next step comes to it. Array suffixes: D constant vectors, U forward passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.formats import bytes_per_weight, relative_rate
from model.machine import Machine
from model.routing import expected_experts
from model.servers import GENERIC, KernelCounts, Server
from model.shapes import DraftShape, ModelShape

Array = NDArray[Any]
Constants = Mapping[str, Array]

#: rows of a tensor-core tile
TILE_ROWS = 16.0
#: power of the rows by which the experts' kernels slow beyond their bytes: rows of an expert share
#: tiles, so twice the rows are less than twice the work (16 to 256 rows of a tiny model)
ROWS_POWER = 0.6
#: bf16 flops of one CPU core, GFLOP/s peak: fp32 AVX2 fused multiply-add at 2.5 GHz
CPU_CORE_GFLOPS = 80.0
#: DRAM of a CPU socket when nothing was probed, GB/s
CPU_SOCKET_GB_PER_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank computes on: peak rates, kernels, whether these are launched ahead of time."""

    is_gpu: bool
    dram_bytes_per_us: float
    flops_per_us: float
    memory_bytes: float
    l2_bytes: float
    kernels: KernelCounts

    @classmethod
    def of(cls, machine: Machine, num_ranks: int, server: Server = GENERIC) -> "Device":
        """A rank's share of the machine: one GPU, or 1/num_ranks of the cores and DRAM."""
        gpu = machine.gpu
        if gpu is not None:
            return cls(
                is_gpu=True,
                dram_bytes_per_us=gpu.dram_gb_per_s * 1e3,
                flops_per_us=gpu.bf16_tflops * 1e6,
                memory_bytes=gpu.memory_gib * 2**30,
                l2_bytes=gpu.l2_mib * 2**20,
                kernels=server.kernels,
            )
        cores = machine.cpu.sockets * machine.cpu.cores_per_socket
        dram = machine.measured.dram_gb_per_s or machine.cpu.sockets * CPU_SOCKET_GB_PER_S
        return cls(
            is_gpu=False,
            dram_bytes_per_us=dram * 1e3 / num_ranks,
            flops_per_us=CPU_CORE_GFLOPS * 1e3 * max(cores / num_ranks, 1.0),
            memory_bytes=float("inf"),
            l2_bytes=0.0,
            kernels=server.kernels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """Forward passes to be timed, [U] each: B requests of n tokens over a context, on tp ranks."""

    tokens_per_request: Array
    requests: Array
    context: Array
    tp: Array

    @property
    def tokens(self) -> Array:
        """Rows of the pass."""
        return self.tokens_per_request * self.requests


def gemm_us(
    weight_bytes: Array, flops: Array, rate: float, device: Device, c: Constants, rows: Array
) -> Array:
    """A matrix product that reads its weights once: memory- or tensor-bound.

    Until a 16-row tile is full, every row beyond the first costs a share of the weight stream
    (libraries change from matrix-vector kernels to tiles; measured 1 % a row on H200).
    """
    memory = weight_bytes / (device.dram_bytes_per_us * c["dram_fraction"])
    memory = memory * (1.0 + c["gemm_row_share"] * np.clip(rows - 1.0, 0.0, TILE_ROWS - 1.0))
    result: Array = np.maximum(memory, flops / (device.flops_per_us * rate * c["flops_fraction"]))
    return result


def attention_us(shape: ModelShape, f: Forwards, device: Device, c: Constants) -> Array:
    """Projections and attention of all layers, without the all-reduce: [D, U].

    GQA splits KV heads over ranks and repeats them when there are more ranks than KV heads; MLA
    keeps the whole latent cache on every rank.
    """
    weights = shape.attention_params * bytes_per_weight(shape.other_format) / f.tp
    flops = 2.0 * shape.attention_params / f.tp * f.tokens
    kernels = kernels_attention(shape, device.kernels)
    full = shape.layers - shape.linear_attention_layers - shape.sliding_layers
    seen_rows = (
        f.context * full + np.minimum(f.context, shape.sliding_window) * shape.sliding_layers
    )
    if shape.mla is None:
        kv_share = np.maximum(shape.kv_heads / f.tp, 1.0) / shape.kv_heads
        attend = 4.0 * shape.heads * shape.head_dim / f.tp
    else:
        kv_share = np.ones_like(f.tp)
        attend = 2.0 * shape.heads * (2 * shape.mla.kv_lora + shape.mla.rope) / f.tp
    kv_bytes = (
        shape.kv_elements_per_token_layer * shape.kv_bytes * kv_share * f.requests * seen_rows
    )
    kv = np.maximum(
        kv_bytes / (device.dram_bytes_per_us * c["kv_fraction"]),
        attend * f.tokens * seen_rows / (device.flops_per_us * c["flops_fraction"]),
    )
    dense = gemm_us(weights, flops, relative_rate(shape.other_format), device, c, f.tokens)
    # beyond one row kernels that multiply by a vector give way to tiles
    batched = np.where(f.tokens > 1.5, c["attention_batched_us"], 0.0)
    per_layer = dense + kernels * c["kernel_gap_us"] + c["attention_us"] + batched
    result: Array = shape.layers * per_layer + kv
    return result


def moe_us(shape: ModelShape, f: Forwards, device: Device, c: Constants) -> Array:
    """Routers, routed and shared experts and dense MLPs of all layers: [D, U].

    A tensor-parallel rank holds a slice of every expert, so all ranks read the same experts.
    """
    other = bytes_per_weight(shape.other_format)
    total = np.zeros(np.broadcast_shapes(f.tokens.shape, c["dram_fraction"].shape))
    if shape.dense_layers:
        params = 3 * shape.hidden * shape.dense_intermediate / f.tp
        rate = relative_rate(shape.other_format)
        gemm = gemm_us(params * other, 2 * params * f.tokens, rate, device, c, f.tokens)
        total = total + shape.dense_layers * (gemm + device.kernels.dense * c["kernel_gap_us"])
    if not shape.moe_layers:
        return total
    distinct = expected_experts(
        f.tokens_per_request,
        f.requests,
        shape.experts,
        shape.experts_per_token,
        c["routing_exponent"],
        c["routing_zipf"],
    )
    expert = distinct * shape.expert_bytes / f.tp
    flops = 2.0 * shape.expert_params / f.tp * shape.experts_per_token * f.tokens
    # benchmark rows show work and bytes add up: the weight stream hides little of the products
    routed = expert / (device.dram_bytes_per_us * c["moe_dram_fraction"]) + flops / (
        device.flops_per_us * relative_rate(shape.expert_format) * c["flops_fraction"]
    )
    plain = shape.hidden * (shape.experts + 3 * shape.shared_intermediate / f.tp)
    rest = gemm_us(plain * other, 2 * plain * f.tokens, 1.0, device, c, f.tokens)
    batched = np.where(f.tokens > 1.5, c["moe_batched_us"], 0.0)
    fixed = c["moe_fixed_us"] + c["moe_expert_us"] * distinct + batched
    fixed = fixed + c["moe_rows_us"] * _beyond_a_tile(f.tokens)
    shared = device.kernels.shared if shape.shared_intermediate else 0
    gaps = (device.kernels.router + shared) * c["kernel_gap_us"]
    result: Array = total + shape.moe_layers * (routed + rest + fixed + gaps)
    return result


def _beyond_a_tile(rows: Array) -> Array:
    """(rows - 16)^0.6: rows that fill one tile cost what one row does."""
    result: Array = np.maximum(rows - TILE_ROWS, 0.0) ** ROWS_POWER
    return result


def head_us(shape: ModelShape, f: Forwards, device: Device, c: Constants) -> Array:
    """Final norm, vocabulary product (split over ranks) and arg-max: [D, U]."""
    params = shape.hidden * shape.vocab / f.tp
    other = shape.other_format
    gemm = gemm_us(
        params * bytes_per_weight(other),
        2 * params * f.tokens,
        relative_rate(other),
        device,
        c,
        f.tokens,
    )
    logits = 3 * f.tokens * shape.vocab / f.tp * 4 / (device.dram_bytes_per_us * c["dram_fraction"])
    result: Array = gemm + logits + device.kernels.head * c["kernel_gap_us"]
    return result


def other_us(shape: ModelShape, f: Forwards, device: Device, c: Constants) -> Array:
    """Norms with residual adds and the embedding: [D, U]."""
    rows = 6 * f.tokens * shape.hidden * 2 / (device.dram_bytes_per_us * c["dram_fraction"])
    kernels = shape.layers * device.kernels.other + device.kernels.once
    result: Array = kernels * c["kernel_gap_us"] + shape.layers * rows
    return result


def draft_forward_us(draft: DraftShape, f: Forwards, device: Device, c: Constants) -> Array:
    """One forward of the draft head without its all-reduces: [D, U]."""
    weight = bytes_per_weight(draft.weight_format)
    layer = draft.layers * draft.layer_params
    params = (layer + draft.fuse_params + draft.head_params) / f.tp
    rate = relative_rate(draft.weight_format)
    gemm = gemm_us(params * weight, 2 * params * f.tokens, rate, device, c, f.tokens)
    kv = draft.kv_elements_per_token * 2.0 / f.tp * f.requests * f.context
    per_layer = device.kernels.draft * c["kernel_gap_us"] + c["attention_us"]
    kv_us = kv / (device.dram_bytes_per_us * c["kv_fraction"])
    result: Array = (gemm + kv_us + draft.layers * per_layer) * c["draft_factor"]
    return result


def kernels_attention(shape: ModelShape, kernels: KernelCounts) -> int:
    """Kernels of one attention layer."""
    return kernels.attention_gqa if shape.mla is None else kernels.attention_mla


def kernel_counts(shape: ModelShape, kernels: KernelCounts = GENERIC.kernels) -> Mapping[str, int]:
    """Kernels of one forward pass, by term (collectives not counted)."""
    moe = kernels.moe + (kernels.shared if shape.shared_intermediate else 0)
    return {
        "attention": shape.layers * kernels_attention(shape, kernels),
        "moe": shape.moe_layers * moe + shape.dense_layers * kernels.dense,
        "head": kernels.head,
        "other": shape.layers * kernels.other + kernels.once,
    }
