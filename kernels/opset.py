"""The set of operations the engine computes with, chosen whole by configuration: no mixing.

``opset("reference")`` is plain torch (any device); ``opset("triton")`` is the kernels. Both have
the same signatures; each op's contract stands at its ``<op>_ref`` function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.attention import tree_attention_ref
from kernels.kv_cache import kv_compact_ref, store_kv_ref
from kernels.moe import moe_mlp_ref
from kernels.norm import add_rms_norm_ref, rms_norm_ref
from kernels.rope import qk_norm_rope_ref
from kernels.router import route_ref
from kernels.sampling import sample_ref
from kernels.tree import tree_mask_ref
from kernels.verify import verify_greedy_ref, verify_sampling_ref

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


REFERENCE = OpSet(
    name="reference",
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
)


def opset(name: str) -> OpSet:
    """The op set called ``name``; raises ``ValueError`` for an unknown one."""
    if name == "reference":
        return REFERENCE
    raise ValueError(f"unknown op set {name!r}; known: {', '.join(NAMES)}")
