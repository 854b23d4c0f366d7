"""Every op with inputs of a real model's shapes: what compiling, tuning, benchmarks and tests run.

B sequences of T new tokens each (P = B * T rows), H hidden, N query heads, G key heads, D head
size, E experts, K experts per token, I intermediate size, V vocabulary, C cache rows a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.linear import linear_add_ref, norm_linear_ref
from kernels.norm import rms_norm_ref
from kernels.opset import OpSet

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The sizes of a model that kernels see (one tensor-parallel shard of it)."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    top_k: int
    inter: int
    vocab: int
    qk_norm: bool = True


#: sizes from the models' public config.json
QWEN3_30B_A3B = Dims(
    name="qwen3-30b-a3b", hidden=2048, heads=32, kv_heads=4, head_size=128, experts=128, top_k=8,
    inter=768, vocab=151936,
)  # fmt: skip
MIXTRAL_8X7B_TP8 = Dims(
    name="mixtral-8x7b/8", hidden=4096, heads=4, kv_heads=1, head_size=128, experts=8, top_k=2,
    inter=1792, vocab=4000, qk_norm=False,
)  # fmt: skip
#: what its experts and router see; its attention (latent) is of another kind
KIMI_K2 = Dims(
    name="kimi-k2", hidden=7168, heads=64, kv_heads=64, head_size=128, experts=384, top_k=8,
    inter=2048, vocab=163840, qk_norm=False,
)  # fmt: skip
#: small and odd: nothing is a power of two or a multiple of 16
ODD = Dims(
    name="odd", hidden=200, heads=6, kv_heads=2, head_size=24, experts=12, top_k=3, inter=40,
    vocab=333,
)  # fmt: skip


def shard(dims: Dims, ways: int) -> Dims:
    """One rank's sizes with tensor parallelism; ``ValueError`` where they do not divide.

    Fewer key heads than ranks: each rank has one, as copies.
    """
    parted = (dims.heads, dims.inter, dims.vocab)
    if ways < 1 or any(size % ways for size in parted):
        raise ValueError(
            f"{dims.name} cannot be split {ways} ways: {dims.heads} heads, {dims.inter} "
            f"intermediate columns and {dims.vocab} words must divide"
        )
    if ways == 1:
        return dims
    return replace(
        dims, name=f"{dims.name}/{ways}", heads=dims.heads // ways,
        kv_heads=max(1, dims.kv_heads // ways), inter=dims.inter // ways, vocab=dims.vocab // ways,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one size.

    ``make(device, dtype)`` builds inputs (random, no synchronisation), ``run(ops, inputs)`` calls
    the op, ``weights`` names the inputs to rotate for a cold L2, ``min_bytes(inputs)`` is what
    must move at least (weights touched and cache rows read). ``tuned`` names the ops of the
    configuration cache that take part. ``check(inputs, outputs)`` gives a relative error where
    comparing with the reference's outputs would not do (a near-tie may be decided either way).
    """

    name: str
    tuned: tuple[str, ...]
    make: Callable[[torch.device, torch.dtype], Inputs]
    run: Callable[[OpSet, Inputs], Any]
    weights: tuple[str, ...]
    min_bytes: Callable[[Inputs], int]
    check: Callable[[Inputs, Any], float] | None = None


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _randn(
    device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)


def touched_experts(expert_TK: torch.Tensor) -> int:
    """Distinct experts a routing touches."""
    return int(expert_TK.unique().numel())


def _route_error(inputs: Inputs, outputs: Any) -> float:
    """The chosen experts' weights are theirs, and none left out is clearly better."""
    weight, expert = outputs
    x = rms_norm_ref(inputs["x"], inputs["norm"], 1e-6).float()
    probability = (x @ inputs["w"].float().T).softmax(-1)
    chosen = probability.gather(1, expert)
    wanted = chosen / chosen.sum(-1, keepdim=True)
    last = probability.topk(expert.shape[1], dim=-1).values[:, -1]
    missed = ((last - chosen.amin(1)) / last).max()
    return float(torch.maximum((wanted - weight).abs().max(), missed))


def _linear_route_error(inputs: Inputs, outputs: Any) -> float:
    """The residual stream is right, and the choice is right for the stream that came out."""
    total, weight, expert = outputs
    wanted = linear_add_ref(inputs["x"], inputs["w"], inputs["residual"]).float()
    error = (total.float() - wanted).abs().max() / wanted.abs().max()
    routed = {"x": total, "norm": inputs["norm"], "w": inputs["router"]}
    return max(float(error), _route_error(routed, (weight, expert)))


def _argmax_error(inputs: Inputs, outputs: Any) -> float:
    """The logit is the token's, and no other is clearly larger."""
    token, value = outputs
    logits = norm_linear_ref(inputs["x"], inputs["norm"], 1e-6, inputs["w"]).float()
    at_token = logits.gather(1, token[:, None])[:, 0]
    best = logits.amax(-1)
    error = torch.maximum((at_token - value).abs(), best - at_token)
    return float((error / best.abs()).max())


def layer_cases(dims: Dims, num_sequences: int, num_tokens: int, context: int) -> list[Case]:
    """The fused ops of one forward, in order; the prefix of every sequence is ``context`` rows."""
    rows = num_sequences * num_tokens
    q_width = dims.heads * dims.head_size
    qkv_width = q_width + 2 * dims.kv_heads * dims.head_size
    eps = 1e-6

    def x(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "x": _randn(device, dtype, rows, dims.hidden),
            "norm": _randn(device, dtype, dims.hidden, scale=0.2) + 1,
        }

    def qkv(device: torch.device, dtype: torch.dtype) -> Inputs:
        scale = dims.hidden**-0.5
        return x(device, dtype) | {"w": _randn(device, dtype, qkv_width, dims.hidden, scale=scale)}

    def out(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "x": _randn(device, dtype, rows, q_width),
            "w": _randn(device, dtype, dims.hidden, q_width, scale=q_width**-0.5),
            "residual": _randn(device, dtype, rows, dims.hidden),
        }

    def router(device: torch.device, dtype: torch.dtype) -> Inputs:
        scale = dims.hidden**-0.5
        return x(device, dtype) | {
            "w": _randn(device, dtype, dims.experts, dims.hidden, scale=scale)
        }

    def out_and_router(device: torch.device, dtype: torch.dtype) -> Inputs:
        given = router(device, dtype)
        return out(device, dtype) | {"router": given["w"], "norm": given["norm"]}

    def moe(device: torch.device, dtype: torch.dtype) -> Inputs:
        logits = torch.rand(rows, dims.experts, device=device)
        weight, expert = logits.softmax(-1).topk(dims.top_k, dim=-1)
        return x(device, dtype) | {
            "gate_up": _randn(
                device, dtype, dims.experts, 2 * dims.inter, dims.hidden, scale=dims.hidden**-0.5
            ),
            "down": _randn(
                device, dtype, dims.experts, dims.hidden, dims.inter, scale=dims.inter**-0.5
            ),
            "weight": weight / weight.sum(-1, keepdim=True),
            "expert": expert,
        }

    def moe_bytes(inputs: Inputs) -> int:
        expert_bytes = _bytes(inputs["gate_up"], inputs["down"]) // dims.experts
        return touched_experts(inputs["expert"]) * expert_bytes

    def head(device: torch.device, dtype: torch.dtype) -> Inputs:
        scale = dims.hidden**-0.5
        return x(device, dtype) | {"w": _randn(device, dtype, dims.vocab, dims.hidden, scale=scale)}

    cases = [
        Case(
            name="norm_linear",
            tuned=("norm_linear",),
            make=qkv,
            run=lambda ops, i: ops.norm_linear(i["x"], i["norm"], eps, i["w"]),
            weights=("w",),
            min_bytes=lambda i: _bytes(i["w"]),
        ),
        attention_case(dims, num_sequences, num_tokens, context),
        Case(
            name="linear_add",
            tuned=("linear_add",),
            make=out,
            run=lambda ops, i: ops.linear_add(i["x"], i["w"], i["residual"]),
            weights=("w",),
            min_bytes=lambda i: _bytes(i["w"]),
        ),
        Case(
            name="norm_route",
            tuned=("norm_route",),
            make=router,
            run=lambda ops, i: ops.norm_route(i["x"], i["norm"], eps, i["w"], dims.top_k),
            weights=("w",),
            min_bytes=lambda i: _bytes(i["w"]),
            check=_route_error,
        ),
        Case(
            name="linear_route",
            tuned=("linear_route",),
            make=out_and_router,
            run=lambda ops, i: ops.linear_route(
                i["x"], i["w"], i["residual"], i["norm"], eps, i["router"], dims.top_k
            )[:3],
            weights=("w", "router"),
            min_bytes=lambda i: _bytes(i["w"], i["router"]),
            check=_linear_route_error,
        ),
        Case(
            name="norm_moe_add",
            tuned=("moe_gate_up", "moe_down"),
            make=moe,
            run=lambda ops, i: ops.norm_moe_add(
                i["x"], i["norm"], eps, i["gate_up"], i["down"], i["weight"], i["expert"], i["x"]
            ),
            weights=("gate_up", "down"),
            min_bytes=moe_bytes,
        ),
        Case(
            name="norm_lm_head",
            tuned=("lm_head",),
            make=head,
            run=lambda ops, i: ops.norm_lm_head(i["x"], i["norm"], eps, i["w"]),
            weights=("w",),
            min_bytes=lambda i: _bytes(i["w"]),
        ),
        Case(
            name="norm_linear_argmax",
            tuned=("lm_head",),
            make=head,
            run=lambda ops, i: ops.norm_linear_argmax(i["x"], i["norm"], eps, i["w"]),
            weights=("w",),
            min_bytes=lambda i: _bytes(i["w"]),
            check=_argmax_error,
        ),
    ]
    if rows > 64:
        # prefill: attention takes the separate ops
        cases = [case for case in cases if case.name != "qkv_attention"]
    return cases


def attention_case(dims: Dims, num_sequences: int, num_tokens: int, context: int) -> Case:
    """``qkv_attention`` with a causal mask given as a tree's mask (None for one token)."""
    rows = num_sequences * num_tokens
    width = (dims.heads + 2 * dims.kv_heads) * dims.head_size
    capacity = context + num_tokens
    cache_shape = (num_sequences, capacity, dims.kv_heads, dims.head_size)

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        angle = torch.rand(capacity, dims.head_size // 2, device=device).repeat(1, 2)
        ones = torch.ones(num_sequences, num_tokens, num_tokens, dtype=torch.bool, device=device)
        token = torch.arange(num_tokens, device=device)
        return {
            "qkv": _randn(device, dtype, rows, width),
            "q_norm": _randn(device, dtype, dims.head_size) if dims.qk_norm else None,
            "k_norm": _randn(device, dtype, dims.head_size) if dims.qk_norm else None,
            "position": (context + token).repeat(num_sequences),
            "cos": angle.cos(),
            "sin": angle.sin(),
            "k_cache": _randn(device, dtype, *cache_shape),
            "v_cache": _randn(device, dtype, *cache_shape),
            "slot": torch.arange(num_sequences, device=device),
            "prefix": torch.full((num_sequences,), context, dtype=torch.int64, device=device),
            "mask": ones.tril() if num_tokens > 1 else None,
        }

    return Case(
        name="qkv_attention",
        tuned=("qkv_attention",),
        make=make,
        run=lambda ops, i: ops.qkv_attention(
            i["qkv"], i["q_norm"], i["k_norm"], 1e-6, i["position"], i["cos"], i["sin"],
            i["k_cache"], i["v_cache"], i["slot"], i["prefix"], i["mask"], dims.head_size**-0.5,
        ),
        weights=("k_cache", "v_cache"),
        min_bytes=lambda i: _bytes(i["k_cache"], i["v_cache"]),
    )  # fmt: skip
