# ruff: noqa: N815 - fields are tensors with shape suffixes
"""The output projection and the router in one kernel, for few tokens on one rank.

T tokens, K inputs, O outputs (the residual stream), E experts, K' experts per token. A kernel of
its own for the router reads half a megabyte and still takes as long as a launch, a pass over the
residual stream and a reduction take; here the reduction of the projection does its work. With
tensor parallelism the sum over the ranks comes between the two, so that they stay apart.
"""

from typing import NamedTuple

import torch

from kernels.fit import fitted
from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2, require, waiting_programs
from kernels.linear import check_rows, linear_add, linear_add_ref
from kernels.linear_route_kernels import (
    linear_route_matrix_kernel,
    linear_route_vector_kernel,
)
from kernels.norm import Normed
from kernels.router import check_route, norm_route, norm_route_ref
from kernels.tuning import Config, config_for

OP = "linear_route"
#: more tokens or experts leave the last program too much to add; two kernels serve those
MAX_TOKENS, MAX_EXPERTS = 16, 256


class Routed(NamedTuple):
    """The residual stream after the projection, the router's choice, and the norm it took."""

    total_TO: torch.Tensor
    weight_TK: torch.Tensor
    expert_TK: torch.Tensor
    #: for ``norm_moe_add``; None where the two kernels ran
    normed: Normed | None


def linear_route_ref(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    residual_TO: torch.Tensor | None,
    norm_weight_O: torch.Tensor,
    eps: float,
    router_EO: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routed:
    """``linear_add``, then ``norm_route`` of its result."""
    total_TO = linear_add_ref(x_TK, weight_OK, residual_TO)
    weight_TK, expert_TK = norm_route_ref(
        total_TO, norm_weight_O, eps, router_EO, top_k, score=score, bias_E=bias_E,
        renormalize=renormalize, scale=scale,
    )  # fmt: skip
    return Routed(total_TO, weight_TK, expert_TK, None)


def default_config(
    num_tokens: int, num_outputs: int, num_inputs: int, num_experts: int, bytes_each: int
) -> Config:
    """A good choice without tuning, within the smallest GPU's shared memory."""
    if num_tokens == 1:
        block_k = min(pow2(num_inputs), 2048 // bytes_each)
        block_o = max(4, pow2(cdiv(num_outputs, 128)) if num_outputs >= 512 else 4)
        return {"vector": 1, "block_o": min(block_o, 32), "block_k": block_k, "num_warps": 8}
    block_k = min(pow2(num_inputs, 16), 256 // bytes_each)
    block_t = 8 if num_tokens <= 8 else 16
    if num_experts <= 128 and cdiv(num_outputs, 16) <= 128 and num_inputs >= 8 * block_k:
        # as many blocks as the last program adds up shares of
        config = {"vector": 0, "block_t": block_t, "ways": 4, "block_o": 16, "block_k": block_k,
                  "split_k": 1, "stages": 4, "swap": 0, "num_warps": 4}  # fmt: skip
        return fitted(OP, config, bytes_each, num_experts=num_experts)
    block_o = 64 if num_experts <= 128 or num_outputs > 4096 else 32
    split = 1
    while (
        split < 4
        and cdiv(num_outputs, block_o) * split < 100
        and num_inputs // (2 * split) >= 2 * block_k
    ):
        split *= 2
    config = {"vector": 0, "block_t": block_t, "block_o": block_o, "block_k": block_k,
              "split_k": split, "stages": 4, "swap": int(block_o == 64 or block_t < 16),
              "num_warps": 4}  # fmt: skip
    return fitted(OP, config, bytes_each, num_experts=num_experts)


#: block_o, block_k, split_k, stages, num_warps, swap
_TILES = (
    (64, 128, 4, 4, 4, 1), (64, 64, 4, 6, 4, 1), (64, 128, 8, 4, 4, 1), (128, 128, 8, 3, 4, 1),
    (128, 64, 8, 5, 4, 1), (32, 128, 2, 5, 4, 0), (32, 128, 4, 5, 4, 0), (64, 128, 4, 4, 8, 1),
    (16, 256, 1, 5, 4, 0), (32, 256, 2, 4, 4, 0),
)  # fmt: skip


def candidates(num_tokens: int, num_outputs: int, num_inputs: int) -> list[Config]:
    """What tuning tries."""
    if num_tokens == 1:
        return [
            {"vector": 1, "block_o": block_o, "block_k": block_k, "num_warps": num_warps}
            for block_o, block_k, num_warps in (
                (16, 1024, 8), (16, 2048, 8), (16, 1024, 16), (16, 2048, 16), (8, 2048, 8),
                (8, 2048, 4), (8, 4096, 8), (32, 1024, 16), (16, 512, 8),
            )
            if block_k <= pow2(num_inputs)
        ]  # fmt: skip
    block_t = 8 if num_tokens <= 8 else 16
    found: list[Config] = [
        {"vector": 0, "block_t": block_t, "ways": ways, "block_o": 16, "block_k": block_k,
         "split_k": 1, "stages": stages, "swap": 0, "num_warps": ways}
        for ways, block_k, stages in ((4, 128, 4), (4, 256, 3), (2, 256, 4), (8, 128, 4))
        if ways * block_k <= pow2(num_inputs, 16) and num_outputs <= 4096
    ]  # fmt: skip
    return found + [
        {"vector": 0, "block_o": block_o, "block_k": block_k, "split_k": split, "stages": stages,
         "swap": swap, "num_warps": num_warps}
        for block_o, block_k, split, stages, num_warps, swap in _TILES
        if block_k * split <= pow2(num_inputs, 16) and block_o <= pow2(num_outputs, 16)
    ]  # fmt: skip


def linear_route(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    residual_TO: torch.Tensor | None,
    norm_weight_O: torch.Tensor,
    eps: float,
    router_EO: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routed:
    """As ``linear_route_ref``.

    One kernel up to 16 tokens and 256 experts, else ``linear_add`` and ``norm_route``.
    """
    num_tokens, num_inputs = x_TK.shape
    num_outputs, num_experts = weight_OK.shape[0], router_EO.shape[0]
    check_route(num_experts, top_k, score)
    if num_tokens > MAX_TOKENS or num_experts > MAX_EXPERTS:
        total_TO = linear_add(x_TK, weight_OK, residual_TO)
        weight_TK, expert_TK = norm_route(
            total_TO, norm_weight_O, eps, router_EO, top_k, score=score, bias_E=bias_E,
            renormalize=renormalize, scale=scale,
        )  # fmt: skip
        return Routed(total_TO, weight_TK, expert_TK, None)
    require(
        weight_OK.shape[1] == num_inputs and router_EO.shape[1] == num_outputs,
        f"linear_route: x {list(x_TK.shape)}, weight {list(weight_OK.shape)} and router "
        f"{list(router_EO.shape)} do not fit",
    )
    require(
        x_TK.dtype == weight_OK.dtype == router_EO.dtype,
        f"linear_route: x is {x_TK.dtype}, the weight {weight_OK.dtype}, the router "
        f"{router_EO.dtype}; they must be the same",
    )
    require(
        x_TK.stride(1) == weight_OK.stride(1) == router_EO.stride(1) == 1
        and (residual_TO is None or residual_TO.is_contiguous()),
        "linear_route: rows and the residual must be contiguous",
    )
    device = x_TK.device
    config = config_for(
        OP,
        device,
        {"T": num_tokens, "O": num_outputs, "K": num_inputs, "E": num_experts,
         "dtype": str(x_TK.dtype)[6:]},
        lambda: default_config(
            num_tokens, num_outputs, num_inputs, num_experts, x_TK.element_size()
        ),
    )  # fmt: skip
    block_o, block_e = config["block_o"], pow2(num_experts, 16)
    blocks = cdiv(num_outputs, block_o)
    out_TO, weighted_TO = (x_TK.new_empty(num_tokens, num_outputs) for _ in range(2))
    fp32 = {"dtype": torch.float32, "device": device}
    squares_NT = torch.empty(1, num_tokens, **fp32)
    weight_TK = torch.empty(num_tokens, top_k, **fp32)
    expert_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    split, block_t = config.get("split_k", 1), config.get("block_t", 16)
    partial = torch.empty(blocks * split * block_t * block_o, **fp32) if split > 1 else squares_NT
    pdl = pdl_for(device, OP)
    arguments = (
        x_TK, weight_OK, x_TK if residual_TO is None else residual_TO, out_TO, norm_weight_O,
        router_EO, x_TK if bias_E is None else bias_E, weighted_TO, squares_NT, weight_TK,
        expert_TK, partial, torch.empty(blocks * num_tokens * block_e, **fp32),
        torch.empty(blocks * num_tokens, **fp32), arrival_counters(device, blocks + 2),
        num_outputs, x_TK.stride(0), weight_OK.stride(0), router_EO.stride(0), eps,
        scale,
    )  # fmt: skip
    flags = {
        "T": num_tokens, "K": num_inputs, "E": num_experts, "TOP": top_k,
        "HAS_RESIDUAL": residual_TO is not None, "HAS_BIAS": bias_E is not None,
        "SIGMOID": score == "sigmoid", "RENORMALIZE": renormalize, "NUM_BLOCKS": blocks,
        "LAST": waiting_programs(device, min(num_tokens, blocks)),
        "BLOCK_O": block_o, "BLOCK_K": config["block_k"], "BLOCK_N": pow2(blocks),
        "BLOCK_R": config["num_warps"], "BLOCK_E": block_e, "BLOCK_TOP": pow2(top_k), "PDL": pdl,
        "launch_pdl": pdl, "num_warps": config["num_warps"],
    }  # fmt: skip
    if config["vector"]:
        require(
            num_tokens == 1, f"linear_route: the vector kernel takes one token, got {num_tokens}"
        )
        launch(linear_route_vector_kernel, (blocks,), *arguments, **flags)
    else:
        require(
            num_tokens <= block_t,
            f"linear_route: a block of {block_t} tokens does not hold {num_tokens}",
        )
        check_rows(OP, config)
        launch(
            linear_route_matrix_kernel, (blocks, split), *arguments, **flags, BLOCK_T=block_t,
            SPLIT_K=split, WAYS=config.get("ways", 1), STAGES=config["stages"],
            SWAP=bool(config["swap"]), PRECISION="ieee",
        )  # fmt: skip
    return Routed(out_TO, weight_TK, expert_TK, Normed(weighted_TO, squares_NT))
