# ruff: noqa: N815 - fields are tensors with shape suffixes
"""An EAGLE-3 head's weights in the public format (``LlamaForCausalLMEagle3``), or random.

The decoder layer stands under ``midlayer.`` or ``layers.0.``. Legend: H head's hidden size, T
target's hidden size, V target vocabulary, R draft vocabulary, P query + key + value rows, Q query
rows, I intermediate size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint
from engine.errors import invalid
from engine.shapes import DraftShape
from engine.weights import RandomSource, Source

#: spread of random weights
_WIDE_STD = 0.1
_INT_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """The whole head; it lives on rank 0 only."""

    #: fuses the three captured hidden states: (H, 3T)
    fc_HF: torch.Tensor
    #: the target's table unless the head brings its own
    embed_VH: torch.Tensor
    hidden_norm_H: torch.Tensor
    input_norm_H: torch.Tensor
    post_norm_H: torch.Tensor
    #: input: normalised embedding, then normalised hidden state
    qkv_PX: torch.Tensor
    o_HQ: torch.Tensor
    gate_up_JH: torch.Tensor
    down_HI: torch.Tensor
    norm_H: torch.Tensor
    head_RH: torch.Tensor
    #: target id of each draft id
    target_id_R: torch.Tensor


def draft_tensor_shapes(shape: DraftShape, layer: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the public format; ``layer`` is the decoder layer's prefix."""
    h, d, i = shape.hidden, shape.head_dim, shape.intermediate
    return {
        "fc.weight": (h, 3 * shape.target_hidden),
        "norm.weight": (h,),
        "lm_head.weight": (shape.draft_vocab, h),
        "embed_tokens.weight": (shape.vocab, h),
        "d2t": (shape.draft_vocab,),
        "t2d": (shape.vocab,),
        f"{layer}hidden_norm.weight": (h,),
        f"{layer}input_layernorm.weight": (h,),
        f"{layer}post_attention_layernorm.weight": (h,),
        f"{layer}self_attn.q_proj.weight": (shape.heads * d, 2 * h),
        f"{layer}self_attn.k_proj.weight": (shape.kv_heads * d, 2 * h),
        f"{layer}self_attn.v_proj.weight": (shape.kv_heads * d, 2 * h),
        f"{layer}self_attn.o_proj.weight": (h, shape.heads * d),
        f"{layer}mlp.gate_proj.weight": (i, h),
        f"{layer}mlp.up_proj.weight": (i, h),
        f"{layer}mlp.down_proj.weight": (h, i),
    }


def load_draft(
    folder: Path,
    shape: DraftShape,
    target_embed_VH: torch.Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftWeights:
    """Read and check a head's folder; raises ``EngineError`` (invalid)."""
    checkpoint = Checkpoint(folder)
    layer = "layers.0." if "layers.0.self_attn.q_proj.weight" in checkpoint else "midlayer."
    _check_belongs(checkpoint, shape, folder)
    same_vocab = shape.draft_vocab == shape.vocab
    optional = ["embed_tokens.weight", "t2d", *(["d2t"] if same_vocab else [])]
    checkpoint.check(draft_tensor_shapes(shape, layer), optional=optional, dtypes=_INT_DTYPES)
    if "d2t" in checkpoint:
        offset_R = checkpoint.read("d2t").to(torch.int64)
    else:
        offset_R = torch.zeros(shape.draft_vocab, dtype=torch.int64)
    target_id_R = torch.arange(shape.draft_vocab) + offset_R
    if int(target_id_R.min()) < 0 or int(target_id_R.max()) >= shape.vocab:
        raise invalid(f"{folder}: d2t maps outside the target's {shape.vocab} tokens")
    reached_V = torch.bincount(target_id_R, minlength=shape.vocab)
    if int(reached_V.max()) > 1:
        raise invalid(f"{folder}: d2t maps two draft tokens to token {int(reached_V.argmax())}")
    if "t2d" in checkpoint and not torch.equal(checkpoint.read("t2d").bool(), reached_V.bool()):
        raise invalid(f"{folder}: t2d and d2t name different draft tokens")
    embed_VH = None
    if "embed_tokens.weight" in checkpoint:
        embed_VH = checkpoint.read("embed_tokens.weight")
        if not bool(embed_VH.isfinite().all()):
            raise invalid(f"{folder}: embed_tokens.weight holds NaN or infinite values")
    elif shape.hidden != target_embed_VH.shape[1]:
        raise invalid(
            f"{folder}: has no embed_tokens, and its hidden size {shape.hidden} is not the "
            f"target's {target_embed_VH.shape[1]}"
        )
    return _assemble(
        checkpoint, layer, embed_VH, target_embed_VH, target_id_R, dtype=dtype, device=device
    )


def random_draft(
    shape: DraftShape,
    target_embed_VH: torch.Tensor,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftWeights:
    """A head with random weights over the first ``draft_vocab`` tokens.

    Drawn so wide that a layer's output drowns the residual: with narrow weights the hidden state
    hardly moves from step to step, every draft is the same token, and the target's experts in a
    verify are then fewer than real text touches.
    """
    shapes = draft_tensor_shapes(shape, "midlayer.")
    source = RandomSource(shapes, seed, device, dtype=dtype, std=_WIDE_STD)
    target_id_R = torch.arange(shape.draft_vocab)
    return _assemble(
        source, "midlayer.", None, target_embed_VH, target_id_R, dtype=dtype, device=device
    )


def _check_belongs(checkpoint: Checkpoint, shape: DraftShape, folder: Path) -> None:
    """A head of another target is told as such, not as a wrong shape."""
    if "fc.weight" not in checkpoint:
        return
    sizes = checkpoint.read("fc.weight").shape
    width = sizes[-1] if sizes else 1
    if width != 3 * shape.target_hidden:
        raise invalid(
            f"{folder}: this head belongs to another target: fc takes {width} values, three hidden "
            f"states of this target are {3 * shape.target_hidden}"
        )


def _assemble(
    source: Source,
    layer: str,
    embed_VH: torch.Tensor | None,
    target_embed_VH: torch.Tensor,
    target_id_R: torch.Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftWeights:
    def get(*names: str) -> torch.Tensor:
        parts = [source.read(f"{name}.weight") for name in names]
        joined = torch.cat(parts).to(device=device, dtype=dtype).contiguous()
        # the target would refuse every draft and its text stay right: nothing else would tell
        if not bool(joined.isfinite().all()):
            raise invalid(
                f"{', '.join(names)} of the EAGLE-3 head: NaN or infinite as {dtype}; the file "
                "is damaged, or its values overflow this dtype"
            )
        return joined

    attn, mlp = f"{layer}self_attn", f"{layer}mlp"
    return DraftWeights(
        fc_HF=get("fc"),
        embed_VH=target_embed_VH if embed_VH is None else embed_VH.to(device=device, dtype=dtype),
        hidden_norm_H=get(f"{layer}hidden_norm"),
        input_norm_H=get(f"{layer}input_layernorm"),
        post_norm_H=get(f"{layer}post_attention_layernorm"),
        qkv_PX=get(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        o_HQ=get(f"{attn}.o_proj"),
        gate_up_JH=get(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down_HI=get(f"{mlp}.down_proj"),
        norm_H=get("norm"),
        head_RH=get("lm_head"),
        target_id_R=target_id_R.to(device),
    )
