"""Second half of the experts' MLP: down projection, weighted sum over a token's experts, residual.

T tokens, H hidden, E experts, K experts per token, P = T * K pairs, I intermediate. For few tokens
a program owns output columns and goes through every touched expert (no partial results, one
order of summation); for many, an expert's program writes weighted pairs and a second kernel adds.
"""

import torch

from kernels.launch import (
    arrival_counters,
    cdiv,
    launch,
    pdl_for,
    pow2,
    require,
)
from kernels.moe_down_kernels import (
    combine_kernel,
    down_across_kernel,
    down_grouped_kernel,
    down_shared_kernel,
    down_stationary_kernel,
    down_vector_kernel,
)
from kernels.moe_rows import MAX_PAIRS_UNSORTED, Slots
from kernels.moe_tiles import depth, mostly_apart, row_warps, rows_of_expert
from kernels.tuning import Config

#: configuration values of "scheme"
VECTOR, STATIONARY, GROUPED, SHARED, ACROSS = 0, 1, 2, 3, 4
#: pairs up to which the vector kernels may be the faster ones
MAX_PAIRS_SHARED = 128
#: most tokens of the stationary scheme: its rows are the tokens
MAX_STATIONARY_TOKENS = 16


def default_config(
    num_tokens: int,
    num_pairs: int,
    inter: int,
    element_bytes: int,
    *,
    hidden: int = 2048,
    num_experts: int = 128,
) -> Config:
    """A good choice without tuning."""
    top_k = num_pairs // num_tokens
    if num_tokens == 1 or mostly_apart(num_tokens, num_pairs, num_experts):
        return _vector(inter, top_k, element_bytes)
    if num_tokens <= MAX_STATIONARY_TOKENS:
        blocks = cdiv(hidden, 64)
        # two programs a multiprocessor, each with experts enough to keep its loads going
        split = 8
        while split > 1 and (split * blocks > 320 or 2 * split > num_experts):
            split //= 2
        return {"scheme": STATIONARY, "block_o": 64,
                "block_i": depth(inter, 256 // element_bytes), "split": split, "stages": 4,
                "num_warps": 4}  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        return {"scheme": GROUPED, "block_t": 64, "block_o": 64, "block_i": 128 // element_bytes,
                "stages": 3, "num_warps": 4}  # fmt: skip
    block_i = depth(inter, 128 // element_bytes)
    return {"scheme": GROUPED, "block_t": rows_of_expert(num_tokens, num_pairs, num_experts),
            "block_o": 64, "block_i": block_i, "stages": 5 if block_i > 64 // element_bytes else 8,
            "swap": 1, "num_warps": 4}  # fmt: skip


def _vector(inter: int, top_k: int, element_bytes: int) -> Config:
    block_i = min(pow2(inter, 16), 2048 // element_bytes)
    unroll = min(4, pow2(top_k))
    return {"scheme": VECTOR, "block_o": min(8, 16 // unroll), "block_i": block_i,
            "unroll": unroll, "num_warps": row_warps(block_i, element_bytes)}  # fmt: skip


def candidates(num_tokens: int, num_pairs: int, inter: int) -> list[Config]:
    """What tuning tries for this number of tokens (16-bit weights)."""
    found: list[Config] = []
    whole = pow2(inter, 16)
    num_warps = row_warps(whole, 2)
    experts = pow2(num_pairs // num_tokens)
    if num_pairs <= MAX_PAIRS_SHARED:
        block_i = min(whole, 1024)
        for block_o, unroll in ((4, 4), (4, 2), (2, 4), (8, 2), (2, 8)):
            if unroll <= experts:
                found.append({"scheme": VECTOR, "block_o": block_o, "block_i": block_i,
                              "unroll": unroll, "num_warps": min(4, num_warps)})  # fmt: skip
        for block_o in (4, 8, 2):
            if inter >= 256 and experts >= 4:
                found.append({"scheme": ACROSS, "block_o": block_o, "block_i": 256, "unroll": 4,
                              "num_warps": 4})  # fmt: skip
    if num_tokens == 1:
        return found
    if num_pairs <= MAX_PAIRS_SHARED and whole <= 2048:
        for block_o, warps in ((4, 1), (8, 2)):
            found.append({"scheme": SHARED, "block_o": block_o, "block_i": whole,
                          "num_warps": warps})  # fmt: skip
    if num_tokens <= MAX_STATIONARY_TOKENS:
        for block_o, block_i, split, stages, warps in (
            (16, 256, 4, 4, 2), (32, 256, 4, 3, 4), (64, 128, 8, 4, 4), (64, 64, 8, 6, 4),
        ):  # fmt: skip
            found.append({"scheme": STATIONARY, "block_o": block_o,
                          "block_i": min(whole, block_i), "split": split, "stages": stages,
                          "num_warps": warps})  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        tiles = ((64, 64, 64, 3, 4, 0), (64, 128, 64, 3, 8, 0), (32, 64, 64, 4, 4, 0),
                 (64, 64, 64, 4, 8, 0), (64, 64, 64, 4, 4, 1), (64, 128, 64, 3, 4, 1))  # fmt: skip
    else:
        tiles = (
            (16, 64, 64, 5, 4, 1), (16, 64, 64, 6, 4, 1), (16, 64, 128, 4, 4, 1),
            (16, 128, 64, 5, 4, 1), (16, 128, 128, 4, 4, 1), (16, 64, 32, 8, 4, 1),
            (16, 64, 256, 3, 4, 0), (16, 32, 128, 5, 4, 0),
        )  # fmt: skip
    for block_t, block_o, block_i, stages, warps, swap in tiles:
        if block_i <= whole:
            found.append({"scheme": GROUPED, "block_t": block_t, "block_o": block_o,
                          "block_i": block_i, "stages": stages, "swap": swap,
                          "num_warps": warps})  # fmt: skip
    return found


def run_down(
    hidden_PI: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    out_TH: torch.Tensor,
    config: Config,
    slots: Slots,
    active: torch.Tensor | None,
) -> None:
    """Write ``out_TH``; ``active`` is what ``run_gate_up`` filled (stationary scheme only)."""
    num_experts, hidden, inter = down_EHI.shape
    num_tokens, top_k = expert_TK.shape
    device = out_TH.device
    pdl = pdl_for(device, "moe_down")
    residual = out_TH if residual_TH is None else residual_TH
    common = {"PDL": pdl, "launch_pdl": pdl, "num_warps": config["num_warps"]}
    strides = down_EHI.stride()[:2]
    has_residual = residual_TH is not None
    blocks = cdiv(hidden, config["block_o"])
    if config["scheme"] in (VECTOR, ACROSS):
        vector = down_vector_kernel if config["scheme"] == VECTOR else down_across_kernel
        launch(
            vector, (num_tokens, blocks), hidden_PI, down_EHI, weight_TK,
            expert_TK, residual, out_TH, hidden, *strides, INTER=inter,
            K=top_k, HAS_RESIDUAL=has_residual,
            BLOCK_O=config["block_o"], BLOCK_I=config["block_i"], UNROLL=config["unroll"],
            **common,
        )  # fmt: skip
        return
    block = min(1024, pow2(hidden))
    if config["scheme"] == STATIONARY:
        assert active is not None
        split, block_o = config["split"], config["block_o"]
        partial, counters = out_TH, out_TH
        if split > 1:
            size = blocks * split * MAX_STATIONARY_TOKENS * block_o
            partial = torch.empty(size, dtype=torch.float32, device=device)
            counters = arrival_counters(device, blocks)
        launch(
            down_stationary_kernel, (blocks, split), hidden_PI, down_EHI, weight_TK, expert_TK,
            active, active[num_experts:], residual, out_TH, partial, counters,
            num_tokens, hidden, *strides, INTER=inter, K=top_k,
            HAS_RESIDUAL=has_residual, SPLIT=split,
            BLOCK_T=MAX_STATIONARY_TOKENS,
            BLOCK_K=pow2(top_k), BLOCK_O=block_o, BLOCK_I=config["block_i"],
            STAGES=config["stages"], PRECISION="ieee", **common,
        )  # fmt: skip
        return
    pairs_PH = torch.empty(num_tokens * top_k, hidden, dtype=torch.float32, device=device)
    if config["scheme"] == SHARED:
        require(
            config["block_i"] >= inter,
            f"moe_down: sharing takes whole rows, {config['block_i']} of {inter} given",
        )
        launch(
            down_shared_kernel, (num_tokens * top_k, blocks), hidden_PI, down_EHI, weight_TK,
            expert_TK, pairs_PH, num_tokens * top_k, hidden, *strides, INTER=inter,
            BLOCK_P=pow2(num_tokens * top_k), BLOCK_O=config["block_o"],
            BLOCK_I=config["block_i"], **common,
        )  # fmt: skip
    else:
        launch(
            down_grouped_kernel, (blocks, slots.count), hidden_PI, down_EHI, weight_TK, expert_TK,
            slots.order, slots.tile_expert, slots.tile_first, slots.tile_count, pairs_PH,
            num_tokens * top_k, hidden, *strides, INTER=inter, SLOT=slots.kind,
            BLOCK_P=slots.block_p, BLOCK_T=config["block_t"], BLOCK_O=config["block_o"],
            BLOCK_I=config["block_i"], STAGES=config["stages"], SWAP=bool(config.get("swap")),
            PRECISION="ieee", **common,
        )  # fmt: skip
    launch(
        combine_kernel, (cdiv(hidden, block), num_tokens), pairs_PH, residual, out_TH,
        hidden, K=top_k, HAS_RESIDUAL=has_residual, BLOCK=block,
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
