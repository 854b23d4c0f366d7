"""The set of operations the engine computes with, chosen whole by configuration: no mixing.

``opset("reference")`` is plain torch (any device); ``opset("triton")`` is the kernels. Both have
the same signatures; each op's contract stands at its ``<op>_ref`` function.

The basic ops come first, one per mathematical step. The fused ops are what a forward of few tokens
(decode, verify, draft) should use on a GPU: six kernels a layer,

    qkv = norm_linear(x, attn_norm, eps, qkv_weight)
    o = qkv_attention(qkv, q_norm, k_norm, eps, position, cos, sin, k_cache, v_cache, ...)
    x = linear_add(o, o_weight, x)
    weight, expert = norm_route(x, mlp_norm, eps, router_weight, top_k)
    x = norm_moe_add(x, mlp_norm, eps, gate_up, down, weight, expert, x)       (two kernels)

and ``norm_lm_head`` or ``norm_linear_argmax`` at the end; ``finish`` or ``settle`` ends a cycle
whose state lives on the device (``kernels.cycle``). x is the residual stream throughout. With
tensor parallelism one rank passes the residual to ``linear_add`` and ``norm_moe_add`` and the
others None; the all-reduced sum is then the new residual stream, and ``pair_best``, a gather and
``best_of_ranks`` or ``finish_ranks`` find the best token. All ops can be captured in a CUDA
graph once each has run before the capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernels.attention import tree_attention, tree_attention_ref
from kernels.cycle import (
    finish,
    finish_ref,
    force,
    force_ref,
    settle,
    settle_ref,
)
from kernels.draft_ops import (
    draft_input,
    draft_input_ref,
    follow,
    follow_ref,
    pick,
    pick_ref,
    silu_product,
    silu_product_ref,
)
from kernels.draw import draw, draw_ref
from kernels.head import (
    norm_linear_argmax,
    norm_linear_argmax_ref,
    norm_lm_head,
)
from kernels.kv_cache import kv_compact, kv_compact_ref, store_kv, store_kv_ref
from kernels.linear import (
    add_norm_linear,
    add_norm_linear_ref,
    linear_add,
    linear_add_ref,
    norm_linear,
    norm_linear_ref,
)
from kernels.linear_route import linear_route, linear_route_ref
from kernels.moe import (
    moe_mlp,
    moe_mlp_ref,
    norm_moe_add,
    norm_moe_add_ref,
)
from kernels.norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from kernels.qkv_attention import qkv_attention, qkv_attention_ref
from kernels.ranks import (
    best_of_ranks,
    best_of_ranks_ref,
    finish_ranks,
    finish_ranks_ref,
    pair_best,
    pair_best_ref,
)
from kernels.rope import qk_norm_rope, qk_norm_rope_ref
from kernels.router import norm_route, norm_route_ref, route, route_ref
from kernels.sampling import sample_ref
from kernels.tree import tree_mask, tree_mask_ref
from kernels.verify import verify_greedy_ref, verify_sampling_ref
from kernels.verify_kernels import sample, verify_greedy, verify_sampling

NAMES = ("reference", "triton")

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSet:
    """One implementation of every op; see the module docstring."""

    name: str
    rms_norm: Op
    add_rms_norm: Op
    qk_norm_rope: Op
    route: Op
    moe_mlp: Op
    store_kv: Op
    tree_attention: Op
    kv_compact: Op
    tree_mask: Op
    verify_greedy: Op
    verify_sampling: Op
    sample: Op
    draw: Op
    norm_linear: Op
    add_norm_linear: Op
    linear_add: Op
    qkv_attention: Op
    norm_route: Op
    linear_route: Op
    norm_moe_add: Op
    norm_lm_head: Op
    norm_linear_argmax: Op
    draft_input: Op
    silu_product: Op
    follow: Op
    pick: Op
    force: Op
    finish: Op
    pair_best: Op
    best_of_ranks: Op
    finish_ranks: Op
    settle: Op


@cache
def opset(name: str) -> OpSet:
    """The op set called ``name``; raises ``ValueError`` for an unknown one."""
    if name == "reference":
        return OpSet(
            name=name,
            rms_norm=rms_norm_ref,
            add_rms_norm=add_rms_norm_ref,
            qk_norm_rope=qk_norm_rope_ref,
            route=route_ref,
            moe_mlp=moe_mlp_ref,
            store_kv=store_kv_ref,
            tree_attention=tree_attention_ref,
            kv_compact=kv_compact_ref,
            tree_mask=tree_mask_ref,
            verify_greedy=verify_greedy_ref,
            verify_sampling=verify_sampling_ref,
            sample=sample_ref,
            draw=draw_ref,
            norm_linear=norm_linear_ref,
            add_norm_linear=add_norm_linear_ref,
            linear_add=linear_add_ref,
            qkv_attention=qkv_attention_ref,
            norm_route=norm_route_ref,
            linear_route=linear_route_ref,
            norm_moe_add=norm_moe_add_ref,
            norm_lm_head=norm_linear_ref,
            norm_linear_argmax=norm_linear_argmax_ref,
            draft_input=draft_input_ref,
            silu_product=silu_product_ref,
            follow=follow_ref,
            pick=pick_ref,
            force=force_ref,
            finish=finish_ref,
            pair_best=pair_best_ref,
            best_of_ranks=best_of_ranks_ref,
            finish_ranks=finish_ranks_ref,
            settle=settle_ref,
        )
    if name == "triton":
        return OpSet(
            name=name,
            rms_norm=rms_norm,
            add_rms_norm=add_rms_norm,
            qk_norm_rope=qk_norm_rope,
            route=route,
            moe_mlp=moe_mlp,
            store_kv=store_kv,
            tree_attention=tree_attention,
            kv_compact=kv_compact,
            tree_mask=tree_mask,
            verify_greedy=verify_greedy,
            verify_sampling=verify_sampling,
            sample=sample,
            draw=draw,
            norm_linear=norm_linear,
            add_norm_linear=add_norm_linear,
            linear_add=linear_add,
            qkv_attention=qkv_attention,
            norm_route=norm_route,
            linear_route=linear_route,
            norm_moe_add=norm_moe_add,
            norm_lm_head=norm_lm_head,
            norm_linear_argmax=norm_linear_argmax,
            draft_input=draft_input,
            silu_product=silu_product,
            follow=follow,
            pick=pick,
            force=force,
            finish=finish,
            pair_best=pair_best,
            best_of_ranks=best_of_ranks,
            finish_ranks=finish_ranks,
            settle=settle,
        )
    raise ValueError(f"unknown op set {name!r}; known: {', '.join(NAMES)}")
