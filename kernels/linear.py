"""Small-batch linear layers at memory speed: RMSNorm in front, or an addition behind.

T tokens, K inputs, O outputs. The norm costs no pass of its own: with y = norm(x) W^T the row's
scale is a factor of the whole row, so sum(x^2) is gathered while x * g meets W and applied at the
end. One token takes a vector kernel (a program holds whole rows of W in registers), a few tokens
either that of ``linear_tokens`` or, as more do, a matrix kernel, split over K where O gives too few
programs.
"""

import torch

from kernels.fit import fitted
from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2, require
from kernels.linear_kernels import linear_matrix_kernel, linear_vector_kernel
from kernels.linear_tokens import linear_tokens_kernel
from kernels.norm import MAX_HIDDEN, add_rms_norm, rms_norm, rms_norm_ref
from kernels.tuning import Config, config_for

#: most tokens that pass by weights held in registers
MAX_VECTOR_TOKENS = 8


def norm_linear_ref(
    x_TK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    weight_OK: torch.Tensor,
) -> torch.Tensor:
    """``y_TO = rms_norm(x) W^T``."""
    return torch.nn.functional.linear(rms_norm_ref(x_TK, norm_weight_K, eps), weight_OK)


def add_norm_linear_ref(
    x_TK: torch.Tensor,
    residual_TK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    weight_OK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual) W^T, x + residual)``."""
    total_TK = x_TK + residual_TK
    return norm_linear_ref(total_TK, norm_weight_K, eps, weight_OK), total_TK


def linear_add_ref(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """``x W^T + residual`` (None: no addition)."""
    y_TO = torch.nn.functional.linear(x_TK, weight_OK)
    return y_TO if residual_TO is None else y_TO + residual_TO


def default_config(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    element_bytes: int,
    *,
    has_norm: bool = False,
) -> Config:
    """A good choice without tuning: enough bytes in flight on every multiprocessor.

    As measured on an H200 for whole models, shards of two and draft heads
    (``bench/dense_variants.py``).
    """
    if num_tokens == 1:
        block_k = min(pow2(num_inputs), 8192 // element_bytes)
        block_o = max(1, min(8, 32768 // (block_k * element_bytes)))
        return {"vector": 1, "block_o": block_o, "block_k": block_k, "num_warps": 4}
    block_k = min(pow2(num_inputs, 16), 256 // element_bytes)
    side_by_side = not has_norm and num_tokens <= 8 and num_inputs >= 8 * block_k
    if side_by_side and 100 <= cdiv(num_outputs, 16) <= 256:
        config = {"vector": 0, "block_t": 8, "ways": 4, "block_o": 16, "block_k": block_k,
                  "split_k": 1, "stages": 4, "swap": 0, "norm_first": 0,
                  "num_warps": 4}  # fmt: skip
        return fitted("linear_add", config, element_bytes)
    block_o = 64 if num_tokens <= 32 else 32
    few = num_tokens <= 16
    # the norm within the loop, except where so many programs would do it again and again
    within = has_norm and few and num_outputs <= 16384
    block_k = min(pow2(num_inputs, 16), (128 if within else 256) // element_bytes)
    programs = cdiv(num_outputs, block_o)
    split = 1
    while split < 8 and programs * split < 100 and num_inputs // (2 * split) >= 2 * block_k:
        split *= 2
    config = {
        "vector": 0,
        "block_t": min(64, pow2(num_tokens, 16)),
        "block_o": block_o,
        "block_k": block_k,
        "split_k": split,
        "stages": (6 if within else 5) if few else 3,
        "swap": int(block_o == 64),
        "norm_first": int(has_norm and not within and num_inputs <= MAX_HIDDEN),
        "num_warps": 4,
    }
    return fitted("linear_add", config, element_bytes)


#: block_o, block_k, split_k, stages, num_warps, swap
_TILES = (
    (32, 128, 1, 5, 4, 0), (64, 128, 1, 5, 4, 1), (64, 128, 4, 4, 4, 1), (32, 256, 1, 4, 2, 1),
    (32, 256, 1, 4, 4, 0), (64, 128, 2, 5, 4, 1), (128, 128, 4, 3, 4, 1), (128, 128, 1, 4, 4, 1),
    (32, 128, 2, 5, 4, 0), (32, 128, 4, 5, 4, 0), (32, 128, 1, 7, 4, 0), (64, 64, 4, 6, 4, 1),
    (64, 64, 8, 6, 4, 1), (128, 64, 8, 5, 4, 1), (64, 128, 8, 4, 4, 1), (128, 128, 8, 3, 4, 1),
    (16, 128, 1, 7, 1, 1), (32, 128, 2, 5, 2, 1), (64, 64, 1, 8, 4, 1), (32, 256, 2, 4, 4, 0),
    (16, 256, 2, 5, 1, 1), (128, 64, 1, 6, 4, 1), (128, 128, 1, 4, 8, 1),
)  # fmt: skip


#: block_o, block_k, ahead, num_warps of the kernel for few tokens
_TOKEN_TILES = ((8, 512, 1, 2), (8, 1024, 1, 4), (4, 1024, 2, 4))
#: ways, block_o, block_k, stages
_WAYS = ((4, 16, 128, 4), (4, 16, 256, 3), (2, 16, 256, 4), (4, 32, 128, 3))


def candidates(num_tokens: int, num_outputs: int, num_inputs: int) -> list[Config]:
    """What tuning tries for this shape."""
    found: list[Config] = []
    whole = pow2(num_inputs)
    if num_tokens == 1:
        tiles = [
            (8, 2048, 4), (4, 2048, 4), (4, 2048, 2), (2, 2048, 2), (2, 4096, 4), (4, 4096, 4),
            (4, 4096, 8), (8, 1024, 4), (8, 1024, 2), (16, 512, 4), (2, 2048, 1), (1, 4096, 4),
        ]  # fmt: skip
        for block_o, block_k, num_warps in tiles:
            if block_k <= whole and 8 <= block_o * block_k // (32 * num_warps) <= 256:
                found.append({"vector": 1, "block_o": block_o, "block_k": block_k,
                              "num_warps": num_warps})  # fmt: skip
    if num_tokens <= MAX_VECTOR_TOKENS:
        for block_o, block_k, ahead, num_warps in _TOKEN_TILES:
            if block_k <= whole:
                found.append({"vector": 1, "block_o": block_o, "block_k": block_k, "ahead": ahead,
                              "num_warps": num_warps})  # fmt: skip
    if num_tokens == 1:
        return found
    block_t = min(64, pow2(num_tokens, 16))
    if num_tokens <= 16 and num_outputs <= 8192:
        found += [
            {"vector": 0, "block_t": 8 if num_tokens <= 8 else 16, "ways": ways,
             "block_o": block_o, "block_k": block_k, "split_k": 1, "stages": stages, "swap": 0,
             "norm_first": 0, "num_warps": ways}
            for ways, block_o, block_k, stages in _WAYS
            if ways * block_k <= whole
        ]  # fmt: skip
    for block_o, block_k, split, stages, num_warps, swap in _TILES:
        programs = cdiv(num_outputs, block_o) * split
        if block_k * split > pow2(num_inputs, 16) or not 100 <= programs <= 10000:
            continue
        if split > 1 and programs > 1000:
            continue
        size = (block_t + block_o) * block_k * 2 * (stages - 1)
        if size > 200 * 1024:
            continue
        found.append({"vector": 0, "block_t": block_t, "block_o": block_o, "block_k": block_k,
                      "split_k": split, "stages": stages, "swap": swap, "norm_first": 1,
                      "num_warps": num_warps})  # fmt: skip
        if num_outputs > num_inputs and block_o <= 64 and num_tokens <= 16:
            # worth it where a kernel of its own for the norm is a large part
            found.append(dict(found[-1], norm_first=0))
    return found


def num_output_blocks(config: Config, num_outputs: int) -> int:
    """Programs along the outputs."""
    return cdiv(num_outputs, config["block_o"])


def check_rows(op: str, config: Config) -> None:
    """Raise ``ValueError`` where the rows of the product are fewer than a tensor core's."""
    rows = config["block_o"] if config.get("swap") or config.get("ways", 1) > 1 else (
        config.get("block_t", 16)
    )  # fmt: skip
    require(
        rows >= 16,
        f"{op}: a product of {rows} rows; a tensor core takes 16 at least: more tokens a block, or "
        "outputs as rows (swap)",
    )


def in_pairs(*tensors: torch.Tensor) -> bool:
    """Whether rows can be read as words of two bf16 each."""
    return all(
        t.dtype == torch.bfloat16
        and t.shape[-1] % 2 == 0
        and t.storage_offset() % 2 == 0
        and (t.dim() == 1 or t.stride(0) % 2 == 0)
        for t in tensors
    )


def run_linear(
    op: str,
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    *,
    added_TK: torch.Tensor | None = None,
    gain_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TO: torch.Tensor | None = None,
    out_TO: torch.Tensor | None = None,
    store: bool = True,
    argmax: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch for the whole family: ``(out, total, best_value_of_block, best_index_of_block)``."""
    num_tokens, num_inputs = x_TK.shape
    num_outputs = weight_OK.shape[0]
    require(
        weight_OK.shape[1] == num_inputs,
        f"{op}: the weight has {weight_OK.shape[1]} columns, x has {num_inputs}",
    )
    require(
        x_TK.dtype == weight_OK.dtype,
        f"{op}: x is {x_TK.dtype}, the weight is {weight_OK.dtype}; they must be the same",
    )
    require(x_TK.stride(1) == 1 and weight_OK.stride(1) == 1, f"{op}: rows must be contiguous")
    device = x_TK.device
    shape = {"T": num_tokens, "O": num_outputs, "K": num_inputs, "dtype": str(x_TK.dtype)[6:]}
    config = config_for(
        op,
        device,
        shape,
        lambda: default_config(
            num_tokens, num_outputs, num_inputs, x_TK.element_size(), has_norm=gain_K is not None
        ),
    )
    few = config["vector"] and (num_tokens > 1 or config.get("ahead"))
    if gain_K is not None and (config.get("norm_first") or (few and added_TK is not None)):
        # a kernel of its own for the norm leaves the product's loop with loads and dots alone
        if added_TK is None:
            x_TK, normed_total = rms_norm(x_TK, gain_K, eps), None
        else:
            x_TK, normed_total = add_rms_norm(x_TK, added_TK, gain_K, eps)
        out, _, value, index = _launch_linear(
            op,
            x_TK,
            weight_OK,
            config,
            None,
            None,
            0.0,
            residual_TO,
            out_TO,
            store,
            argmax,
        )
        return out, normed_total, value, index
    return _launch_linear(
        op,
        x_TK,
        weight_OK,
        config,
        added_TK,
        gain_K,
        eps,
        residual_TO,
        out_TO,
        store,
        argmax,
    )


def _launch_linear(
    op: str,
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    config: Config,
    added_TK: torch.Tensor | None,
    gain_K: torch.Tensor | None,
    eps: float,
    residual_TO: torch.Tensor | None,
    out_TO: torch.Tensor | None,
    store: bool,
    argmax: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    num_tokens, num_inputs = x_TK.shape
    num_outputs = weight_OK.shape[0]
    device = x_TK.device
    out = None
    if store:
        out = x_TK.new_empty(num_tokens, num_outputs) if out_TO is None else out_TO
    total = None if added_TK is None else torch.empty_like(x_TK)
    blocks = num_output_blocks(config, num_outputs)
    value = index = None
    if argmax:
        value = torch.empty(blocks, num_tokens, dtype=torch.float32, device=device)
        index = torch.empty(blocks, num_tokens, dtype=torch.int32, device=device)
    flags = {
        "K": num_inputs,
        "HAS_ADDED": added_TK is not None,
        "HAS_NORM": gain_K is not None,
        "HAS_RESIDUAL": residual_TO is not None,
        "STORE": store,
        "ARGMAX": argmax,
    }
    pdl = pdl_for(device, op)
    # arguments that a flag switches off still need a pointer of a fixed type
    added = x_TK if added_TK is None else added_TK
    gain = x_TK if gain_K is None else gain_K
    residual = x_TK if residual_TO is None else residual_TO
    pointers = (
        x_TK, added, gain, weight_OK, residual,
        x_TK if out is None else out, x_TK if total is None else total,
        x_TK if value is None else value, x_TK if index is None else index,
    )  # fmt: skip
    if config["vector"]:
        require(
            num_tokens <= MAX_VECTOR_TOKENS,
            f"{op}: the vector kernels take {MAX_VECTOR_TOKENS} tokens at most, got {num_tokens}",
        )
        if num_tokens > 1 or config.get("ahead"):
            del flags["HAS_ADDED"]
            launch(
                linear_tokens_kernel, (blocks,), x_TK, gain, weight_OK, *pointers[4:6],
                *pointers[7:], num_outputs, x_TK.stride(0), weight_OK.stride(0), eps,
                T=num_tokens, **flags, BLOCK_O=config["block_o"], BLOCK_K=config["block_k"],
                AHEAD=config.get("ahead", 1), PAIRS=in_pairs(x_TK, weight_OK, gain), PDL=pdl,
                launch_pdl=pdl, num_warps=config["num_warps"],
            )  # fmt: skip
            return out, total, value, index
        launch(
            linear_vector_kernel, (blocks,), *pointers, num_outputs,
            weight_OK.stride(0), eps, **flags, BLOCK_O=config["block_o"], BLOCK_K=config["block_k"],
            PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"],
        )  # fmt: skip
        return out, total, value, index
    check_rows(op, config)
    block_t, block_o, split = config["block_t"], config["block_o"], config["split_k"]
    token_blocks = cdiv(num_tokens, block_t)
    partial = partial_squares = counters = x_TK
    if split > 1:
        partial = torch.empty(
            token_blocks * blocks * split * block_t * block_o, dtype=torch.float32, device=device
        )
        partial_squares = torch.empty(
            token_blocks * blocks * split * block_t, dtype=torch.float32, device=device
        )
        counters = arrival_counters(device, token_blocks * blocks)
    launch(
        linear_matrix_kernel, (blocks, split, token_blocks), *pointers,
        partial, partial_squares, counters,
        num_tokens, num_outputs, x_TK.stride(0), weight_OK.stride(0), num_outputs, eps,
        **flags, BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_K=config["block_k"], SPLIT_K=split,
        WAYS=config.get("ways", 1), STAGES=config["stages"], SWAP=bool(config.get("swap")),
        PRECISION="ieee", PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"],
    )  # fmt: skip
    return out, total, value, index


def norm_linear(
    x_TK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``norm_linear_ref``; ``out_TO`` may be given."""
    out, _, _, _ = run_linear(
        "norm_linear", x_TK, weight_OK, gain_K=norm_weight_K, eps=eps, out_TO=out_TO
    )
    assert out is not None
    return out


def add_norm_linear(
    x_TK: torch.Tensor,
    residual_TK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    weight_OK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``add_norm_linear_ref``."""
    require(x_TK.is_contiguous() and residual_TK.is_contiguous(), "x, residual: not contiguous")
    out, total, _, _ = run_linear(
        "norm_linear", x_TK, weight_OK, added_TK=residual_TK, gain_K=norm_weight_K, eps=eps
    )
    assert out is not None
    assert total is not None
    return out, total


def linear_add(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    residual_TO: torch.Tensor | None,
    out_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``linear_add_ref``; ``out_TO`` may be given, and may be ``residual_TO`` itself."""
    out, _, _, _ = run_linear("linear_add", x_TK, weight_OK, residual_TO=residual_TO, out_TO=out_TO)
    assert out is not None
    return out
