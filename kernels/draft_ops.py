"""The parts of an EAGLE-3 head that are no attention and no matrix.

N rows, H hidden size, V vocabulary, I intermediate size; in the extend B sequences, T nodes of a
tree, A = T longest path, L longest accepted path with its root, F three hidden states, S slots.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import embedding
from torch.nn.functional import silu as torch_silu

from kernels.device import wait_for_predecessor
from kernels.launch import cdiv, launch, pdl_for, pow2, require
from kernels.norm import rms_norm_ref

_BLOCK_I = 1024


def draft_input_ref(
    token_N: torch.Tensor,
    embed_VH: torch.Tensor,
    hidden_NH: torch.Tensor,
    embed_norm_H: torch.Tensor,
    hidden_norm_H: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y (N, 2H), normed (N, H))``: the normalised embedding beside the normalised hidden state,
    and the latter alone."""
    normed_NH = rms_norm_ref(hidden_NH, hidden_norm_H, eps)
    embed_NH = rms_norm_ref(embedding(token_N, embed_VH), embed_norm_H, eps)
    return torch.cat((embed_NH, normed_NH), dim=-1), normed_NH


def silu_product_ref(gate_up_NJ: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; J = 2I, gate first."""
    gate, up = gate_up_NJ.chunk(2, dim=-1)
    return torch_silu(gate) * up


def follow_ref(
    token_BT: torch.Tensor,
    path_BA: torch.Tensor,
    count_B: torch.Tensor,
    next_B: torch.Tensor,
    captured_NF: torch.Tensor,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(following (B, L), hidden (B L, F))``: the pairs an extend settles.

    The pair of a node on the accepted path is the token after it and its hidden states. Rows past
    the path repeat the root's; the next extend overwrites what comes of them.
    """
    num_sequences, num_tokens = token_BT.shape
    path_BL = path_BA[:, :longest].clamp(min=0)
    following_BL = torch.cat((token_BT.gather(1, path_BL)[:, 1:], next_B[:, None]), dim=1)
    following_BL = following_BL.scatter(1, count_B[:, None], next_B[:, None])
    captured_BTF = captured_NF.view(num_sequences, num_tokens, -1)
    index_BLF = path_BL[:, :, None].expand(-1, -1, captured_BTF.shape[-1])
    return following_BL, captured_BTF.gather(1, index_BLF).flatten(0, 1)


def pick_ref(
    x_NW: torch.Tensor, y_NH: torch.Tensor, count_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row ``count_b`` of each sequence's rows, of two matrices: (B, W) and (B, H)."""
    num_sequences = count_B.shape[0]
    longest = x_NW.shape[0] // num_sequences
    row_B = torch.arange(num_sequences, device=x_NW.device) * longest + count_B
    return x_NW[row_B], y_NH[row_B]


@triton.jit
def _normed(x, gain, H, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps) * gain


@triton.jit
def draft_input_kernel(
    token, embed, hidden, embed_norm, hidden_norm, y, normed, H, hidden_stride, eps,
    BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    kind = y.dtype.element_ty
    if half == 0:
        gain = tl.load(embed_norm + h, mask=inside, other=0.0).to(tl.float32)
        wait_for_predecessor(PDL)
        x = tl.load(embed + tl.load(token + n) * H + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + n * 2 * H + h, _normed(x, gain, H, eps).to(kind), mask=inside)
    else:
        gain = tl.load(hidden_norm + h, mask=inside, other=0.0).to(tl.float32)
        wait_for_predecessor(PDL)
        x = tl.load(hidden + n * hidden_stride + h, mask=inside, other=0.0).to(tl.float32)
        out = _normed(x, gain, H, eps).to(kind)
        tl.store(y + n * 2 * H + H + h, out, mask=inside)
        tl.store(normed + n * H + h, out, mask=inside)


@triton.jit
def silu_product_kernel(gate_up, out, I, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    wait_for_predecessor(PDL)
    gate = tl.load(gate_up + n * 2 * I + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * I + I + i, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + n * I + i, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def follow_kernel(
    token, path, count, next_token, captured, following, out, T, L, F,
    BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b = (row // L).to(tl.int64)
    a = row % L
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    wait_for_predecessor(PDL)
    node = tl.maximum(tl.load(path + b * T + a), 0)
    after = tl.maximum(tl.load(path + b * T + a + 1, mask=a + 1 < L, other=0), 0)
    chosen = tl.load(token + b * T + after)
    ends = (a == tl.load(count + b)) | (a == L - 1)
    chosen = tl.where(ends, tl.load(next_token + b), chosen)
    if tl.program_id(1) == 0:
        tl.store(following + row, chosen)
    x = tl.load(captured + (b * T + node) * F + f, mask=f < F, other=0.0)
    tl.store(out + row.to(tl.int64) * F + f, x, mask=f < F)


@triton.jit
def pick_kernel(
    x, y, count, x_out, y_out, L, W, H,
    BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    h = tl.arange(0, BLOCK_H)
    wait_for_predecessor(PDL)
    row = b * L + tl.load(count + b)
    if tl.program_id(1) == 0:
        tl.store(x_out + b * W + w, tl.load(x + row * W + w, mask=w < W, other=0.0), mask=w < W)
    else:
        tl.store(y_out + b * H + h, tl.load(y + row * H + h, mask=h < H, other=0.0), mask=h < H)


def draft_input(
    token_N: torch.Tensor,
    embed_VH: torch.Tensor,
    hidden_NH: torch.Tensor,
    embed_norm_H: torch.Tensor,
    hidden_norm_H: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draft_input_ref``, in one launch."""
    num_rows, hidden = hidden_NH.shape
    require(
        embed_VH.is_contiguous() and embed_VH.shape[1] == hidden and hidden_NH.stride(1) == 1,
        f"draft_input: embeddings {list(embed_VH.shape)} and hidden states "
        f"{list(hidden_NH.shape)} must be contiguous rows of one width",
    )
    y = hidden_NH.new_empty(num_rows, 2 * hidden)
    normed = hidden_NH.new_empty(num_rows, hidden)
    pdl = pdl_for(hidden_NH.device)
    launch(
        draft_input_kernel, (num_rows, 2), token_N, embed_VH, hidden_NH, embed_norm_H,
        hidden_norm_H, y, normed, hidden, hidden_NH.stride(0), eps, BLOCK_H=pow2(hidden),
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return y, normed


def silu_product(gate_up_NJ: torch.Tensor) -> torch.Tensor:
    """As ``silu_product_ref``, in one launch."""
    num_rows, double = gate_up_NJ.shape
    require(gate_up_NJ.is_contiguous(), "silu_product: the input must be contiguous")
    out = gate_up_NJ.new_empty(num_rows, double // 2)
    pdl = pdl_for(gate_up_NJ.device)
    launch(
        silu_product_kernel, (num_rows, cdiv(double // 2, _BLOCK_I)), gate_up_NJ, out, double // 2,
        BLOCK=_BLOCK_I, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return out


def follow(
    token_BT: torch.Tensor,
    path_BA: torch.Tensor,
    count_B: torch.Tensor,
    next_B: torch.Tensor,
    captured_NF: torch.Tensor,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``follow_ref``, in one launch."""
    num_sequences, num_tokens = token_BT.shape
    width = captured_NF.shape[1]
    require(
        token_BT.is_contiguous() and path_BA.is_contiguous() and captured_NF.is_contiguous(),
        "follow: inputs must be contiguous",
    )
    require(longest <= num_tokens, f"follow: a path of {longest} in a tree of {num_tokens}")
    following_BL = token_BT.new_empty(num_sequences, longest)
    out = captured_NF.new_empty(num_sequences * longest, width)
    pdl = pdl_for(token_BT.device)
    launch(
        follow_kernel, (num_sequences * longest, cdiv(width, _BLOCK_I)), token_BT, path_BA,
        count_B, next_B, captured_NF, following_BL, out, num_tokens, longest, width,
        BLOCK_F=_BLOCK_I, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return following_BL, out


def pick(
    x_NW: torch.Tensor, y_NH: torch.Tensor, count_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``pick_ref``, in one launch."""
    num_sequences, num_rows = count_B.shape[0], x_NW.shape[0]
    require(
        x_NW.is_contiguous() and y_NH.is_contiguous() and y_NH.shape[0] == num_rows,
        f"pick: {list(x_NW.shape)} and {list(y_NH.shape)} must be contiguous rows, as many of each",
    )
    x_BW = x_NW.new_empty(num_sequences, x_NW.shape[1])
    y_BH = y_NH.new_empty(num_sequences, y_NH.shape[1])
    pdl = pdl_for(x_NW.device)
    launch(
        pick_kernel, (num_sequences, 2), x_NW, y_NH, count_B, x_BW, y_BH,
        num_rows // num_sequences, x_NW.shape[1], y_NH.shape[1], BLOCK_W=pow2(x_NW.shape[1]),
        BLOCK_H=pow2(y_NH.shape[1]), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return x_BW, y_BH
