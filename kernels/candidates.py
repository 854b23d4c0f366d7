"""The configurations that tuning may try for an op: each kernel's own, at the sizes of a case."""

from kernels import attention_kernel, linear, linear_route, moe_down, moe_gate_up, router, tuning
from kernels.catalog import Dims


def candidates_for(op: str, dims: Dims, num_sequences: int, num_tokens: int) -> list[tuning.Config]:
    """Every configuration tuning may try for ``op`` of ``layer_cases``."""
    rows = num_sequences * num_tokens
    q_width = dims.heads * dims.head_size
    if op == "norm_linear":
        width = q_width + 2 * dims.kv_heads * dims.head_size
        return linear.candidates(rows, width, dims.hidden)
    if op == "linear_add":
        return linear.candidates(rows, dims.hidden, q_width)
    if op == "linear_route":
        if rows > linear_route.MAX_TOKENS:
            return []
        return linear_route.candidates(rows, dims.hidden, q_width)
    if op == "lm_head":
        return linear.candidates(rows, dims.vocab, dims.hidden)
    if op == "norm_route":
        return router.candidates(rows, dims.experts)
    if op == "moe_gate_up":
        return moe_gate_up.candidates(rows, rows * dims.top_k, dims.hidden)
    if op == "moe_down":
        return moe_down.candidates(rows, rows * dims.top_k, dims.inter)
    if op in ("qkv_attention", "tree_attention"):
        return attention_kernel.candidates(
            num_sequences * dims.kv_heads, num_tokens * (dims.heads // dims.kv_heads)
        )
    raise ValueError(f"no candidates are known for op {op!r}")
