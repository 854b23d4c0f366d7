"""The kernels behind ``verify_greedy`` and ``verify_sampling`` (contracts in ``verify``).

B sequences, T nodes each, A = T longest path, V vocabulary. One program a sequence walks the tree:
parents precede children, so one pass over the nodes finds the path.
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.launch import launch, pdl_for, pow2, require

#: largest tree the kernels take
MAX_NODES = 1024


@triton.jit
def verify_greedy_kernel(
    tokens, parents, targets, path, num_accepted, next_token, T,
    BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    wait_for_predecessor(PDL)
    row = b * T
    steps = tl.full([BLOCK_T], -1, dtype=tl.int64)
    steps = tl.where(i == 0, 0, steps)
    current = 0
    accepted = 0
    target = tl.load(targets + row).to(tl.int64)
    for node in range(1, T):
        parent = tl.load(parents + row + node).to(tl.int32)
        token = tl.load(tokens + row + node).to(tl.int64)
        hit = (parent == current) & (token == target)
        current = tl.where(hit, node, current)
        accepted += hit.to(tl.int32)
        target = tl.load(targets + row + current).to(tl.int64)
        steps = tl.where(hit & (i == accepted), node, steps)
    tl.store(path + row + i, steps, mask=i < T)
    tl.store(num_accepted + b, accepted.to(tl.int64))
    tl.store(next_token + b, target)


def _outputs(token_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_sequences, num_nodes = token_BT.shape
    require(num_nodes <= MAX_NODES, f"verify: at most {MAX_NODES} nodes a tree, got {num_nodes}")
    kind = {"dtype": torch.int64, "device": token_BT.device}
    return (
        torch.empty(num_sequences, num_nodes, **kind),
        torch.empty(num_sequences, **kind),
        torch.empty(num_sequences, **kind),
    )


def verify_greedy(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    target_BT: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``verify_greedy_ref``."""
    require(
        token_BT.is_contiguous() and parent_BT.is_contiguous() and target_BT.is_contiguous(),
        "verify_greedy: inputs must be contiguous",
    )
    path_BA, num_accepted_B, next_token_B = _outputs(token_BT) if out is None else out
    require(path_BA.is_contiguous(), "verify_greedy: the path must be contiguous")
    pdl = pdl_for(token_BT.device)
    launch(
        verify_greedy_kernel, (token_BT.shape[0],), token_BT, parent_BT, target_BT, path_BA,
        num_accepted_B, next_token_B, token_BT.shape[1], BLOCK_T=pow2(token_BT.shape[1]),
        PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
    return path_BA, num_accepted_B, next_token_B


@triton.jit
def verify_sampling_kernel(
    tokens, parents, draft, target, uniforms, last_uniforms, work_p, work_q,
    path, num_accepted, next_token, T, V,
    HAS_DRAFT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    v = tl.arange(0, BLOCK_V)
    wait_for_predecessor(PDL)
    row = b * T
    p = work_p + b * V
    q = work_q + b * V
    steps = tl.full([BLOCK_T], -1, dtype=tl.int64)
    steps = tl.where(i == 0, 0, steps)
    current = 0
    accepted = 0
    _copy_row(target + row * V, p, V, BLOCK_V)
    if HAS_DRAFT:
        _copy_row(draft + row * V, q, V, BLOCK_V)
    p_sum = _row_sum(p, V, BLOCK_V)
    q_sum = 1.0
    if HAS_DRAFT:
        q_sum = _row_sum(q, V, BLOCK_V)
    for node in range(1, T):
        parent = tl.load(parents + row + node).to(tl.int32)
        if parent == current:
            token = tl.load(tokens + row + node).to(tl.int64)
            p_x = tl.load(p + token) / tl.maximum(p_sum, 1e-30)
            q_x = 1.0
            if HAS_DRAFT:
                q_x = tl.load(q + token) / tl.maximum(q_sum, 1e-30)
            if tl.load(uniforms + row + node).to(tl.float32) * q_x < p_x:
                current = node
                accepted += 1
                steps = tl.where(i == accepted, node, steps)
                tl.debug_barrier()
                _copy_row(target + (row + node) * V, p, V, BLOCK_V)
                p_sum = _row_sum(p, V, BLOCK_V)
                if HAS_DRAFT:
                    _copy_row(draft + (row + node) * V, q, V, BLOCK_V)
                    q_sum = _row_sum(q, V, BLOCK_V)
            else:
                tl.debug_barrier()
                new_sum = 0.0
                new_q_sum = 0.0
                for v0 in range(0, V, BLOCK_V):
                    inside = v0 + v < V
                    p_v = tl.load(p + v0 + v, mask=inside, other=0.0)
                    if HAS_DRAFT:
                        q_v = tl.load(q + v0 + v, mask=inside, other=0.0)
                        p_v = tl.maximum(
                            p_v / tl.maximum(p_sum, 1e-30) - q_v / tl.maximum(q_sum, 1e-30), 0.0
                        )
                        q_v = tl.where(v0 + v == token, 0.0, q_v)
                        tl.store(q + v0 + v, q_v, mask=inside)
                        new_q_sum += tl.sum(q_v, axis=0)
                    else:
                        p_v = tl.where(v0 + v == token, 0.0, p_v)
                    tl.store(p + v0 + v, p_v, mask=inside)
                    new_sum += tl.sum(p_v, axis=0)
                p_sum = new_sum
                if HAS_DRAFT:
                    q_sum = new_q_sum
            tl.debug_barrier()
    threshold = tl.load(last_uniforms + b).to(tl.float32) * p_sum
    tl.store(next_token + b, draw(p, threshold, V, BLOCK_V))
    tl.store(path + row + i, steps, mask=i < T)
    tl.store(num_accepted + b, tl.full([], 0, tl.int64) + accepted)


@triton.jit
def _copy_row(source, goal, V, BLOCK_V: tl.constexpr):
    v = tl.arange(0, BLOCK_V)
    for v0 in range(0, V, BLOCK_V):
        value = tl.load(source + v0 + v, mask=v0 + v < V, other=0.0).to(tl.float32)
        tl.store(goal + v0 + v, value, mask=v0 + v < V)
    tl.debug_barrier()


@triton.jit
def _row_sum(source, V, BLOCK_V: tl.constexpr):
    v = tl.arange(0, BLOCK_V)
    total = 0.0
    for v0 in range(0, V, BLOCK_V):
        total += tl.sum(tl.load(source + v0 + v, mask=v0 + v < V, other=0.0), axis=0)
    return total


@triton.jit
def draw(weights, threshold, V, BLOCK_V: tl.constexpr):
    """The first index whose running sum exceeds ``threshold``; never one of weight 0."""
    v = tl.arange(0, BLOCK_V)
    below = 0.0
    found = tl.full([], -1, tl.int64)
    last = tl.full([], 0, tl.int64)
    for v0 in range(0, V, BLOCK_V):
        w = tl.load(weights + v0 + v, mask=v0 + v < V, other=0.0).to(tl.float32)
        index = (v0 + v).to(tl.int64)
        running = below + tl.cumsum(w, axis=0)
        over = (running > threshold) & (w > 0)
        here = tl.min(tl.where(over, index, V), axis=0)
        found = tl.where((found < 0) & (here < V), here, found)
        last = tl.maximum(last, tl.max(tl.where(w > 0, index, 0), axis=0))
        below += tl.sum(w, axis=0)
    return tl.where(found < 0, last, found)


def verify_sampling(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    draft_prob_BTV: torch.Tensor | None,
    target_prob_BTV: torch.Tensor,
    uniform_BT: torch.Tensor,
    uniform_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``verify_sampling_ref``, sums in fp32."""
    num_sequences, num_nodes = token_BT.shape
    vocabulary = target_prob_BTV.shape[2]
    require(
        all(
            x is None or x.is_contiguous()
            for x in (
                token_BT, parent_BT, draft_prob_BTV, target_prob_BTV, uniform_BT, uniform_B
            )
        ),
        "verify_sampling: inputs must be contiguous",
    )  # fmt: skip
    path_BA, num_accepted_B, next_token_B = _outputs(token_BT)
    device = token_BT.device
    work_p = torch.empty(num_sequences, vocabulary, dtype=torch.float32, device=device)
    work_q = work_p if draft_prob_BTV is None else torch.empty_like(work_p)
    pdl = pdl_for(device)
    launch(
        verify_sampling_kernel, (num_sequences,), token_BT, parent_BT,
        target_prob_BTV if draft_prob_BTV is None else draft_prob_BTV, target_prob_BTV,
        uniform_BT, uniform_B, work_p, work_q, path_BA, num_accepted_B, next_token_B,
        num_nodes, vocabulary, HAS_DRAFT=draft_prob_BTV is not None, BLOCK_T=pow2(num_nodes),
        BLOCK_V=min(4096, pow2(vocabulary, 16)), PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip
    return path_BA, num_accepted_B, next_token_B


@triton.jit
def sample_kernel(
    logits, temperatures, uniforms, work, token, V, logits_stride, temperature,
    PER_ROW: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    wait_for_predecessor(PDL)
    row = logits + t * logits_stride
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperatures + t).to(tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    where = tl.full([], 0, tl.int64)
    for v0 in range(0, V, BLOCK_V):
        x = tl.load(row + v0 + v, mask=v0 + v < V, other=float("-inf")).to(tl.float32)
        best = tl.max(x, axis=0)
        index = tl.min(tl.where(x == best, (v0 + v).to(tl.int64), V), axis=0)
        where = tl.where((best > top) & (index < V), index, where)
        top = tl.maximum(top, best)
    if heat > 0:
        scratch = work + t * V
        total = 0.0
        for v0 in range(0, V, BLOCK_V):
            x = tl.load(row + v0 + v, mask=v0 + v < V, other=float("-inf")).to(tl.float32)
            w = tl.exp((x - top) / heat)
            tl.store(scratch + v0 + v, w, mask=v0 + v < V)
            total += tl.sum(w, axis=0)
        tl.debug_barrier()
        threshold = tl.load(uniforms + t).to(tl.float32) * total
        where = draw(scratch, threshold, V, BLOCK_V)
    tl.store(token + t, where)


def sample(
    logits_TV: torch.Tensor, temperature: float | torch.Tensor, uniform_T: torch.Tensor
) -> torch.Tensor:
    """As ``sampling.sample_ref``, sums in fp32."""
    num_rows, vocabulary = logits_TV.shape
    require(logits_TV.stride(1) == 1, "sample: rows must be contiguous")
    uniform_T = uniform_T.contiguous()
    per_row = isinstance(temperature, torch.Tensor)
    device = logits_TV.device
    temperature_T = temperature if isinstance(temperature, torch.Tensor) else uniform_T
    if per_row:
        temperature_T = temperature_T.expand(num_rows).contiguous()
    token_T = torch.empty(num_rows, dtype=torch.int64, device=device)
    work_TV = torch.empty(num_rows, vocabulary, dtype=torch.float32, device=device)
    pdl = pdl_for(device)
    launch(
        sample_kernel, (num_rows,), logits_TV, temperature_T, uniform_T, work_TV, token_T,
        vocabulary, logits_TV.stride(0), 0.0 if per_row else float(temperature),
        PER_ROW=per_row, BLOCK_V=min(8192, pow2(vocabulary, 16)), PDL=pdl, launch_pdl=pdl,
        num_warps=8,
    )  # fmt: skip
    return token_T
