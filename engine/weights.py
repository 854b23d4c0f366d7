# ruff: noqa: N815 - fields are tensors with shape suffixes
"""This rank's weights of target and draft, from a checkpoint or random.

Tensor-parallel slicing happens at load: each rank reads only its rows or columns. Legend: H hidden,
D head size, n/g this rank's query and key heads, E experts, I this rank's expert width, J = 2I,
V/R vocabulary / this rank's share of it.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.checkpoint import Checkpoint
from engine.errors import invalid
from engine.shapes import TargetShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayer:
    """One transformer layer, this rank's shard."""

    input_norm_H: torch.Tensor
    #: rows: n query heads, g key heads, g value heads
    qkv_PH: torch.Tensor
    #: None where the architecture normalises no heads (Mixtral)
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    o_HQ: torch.Tensor
    post_norm_H: torch.Tensor
    router_EH: torch.Tensor
    #: gate rows first
    gate_up_EJH: torch.Tensor
    down_EHI: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWeights:
    """The target, this rank's shard; embedding and norms are whole on every rank."""

    embed_VH: torch.Tensor
    layers: tuple[TargetLayer, ...]
    norm_H: torch.Tensor
    #: rows [vocab_start, vocab_start + R) of the head
    head_RH: torch.Tensor
    vocab_start: int


@dataclass(frozen=True, slots=True)
class Rank:
    """Place of a rank in the tensor-parallel group, and what it holds of the heads."""

    rank: int
    tp: int

    def span(self, size: int) -> tuple[int, int]:
        """This rank's [start, stop) of a dimension that tp divides."""
        width = size // self.tp
        return self.rank * width, (self.rank + 1) * width

    def kv_span(self, kv_heads: int) -> tuple[int, int]:
        """This rank's key heads; above one rank a head, neighbours hold the same head."""
        if self.tp <= kv_heads:
            return self.span(kv_heads)
        head = self.rank * kv_heads // self.tp
        return head, head + 1

    def vocab_span(self, vocab: int) -> tuple[int, int]:
        """This rank's rows of the head; shares differ by one row where tp does not divide it."""
        return self.rank * vocab // self.tp, (self.rank + 1) * vocab // self.tp


class Source(Protocol):
    """Where tensors come from, in checkpoint names."""

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop)."""

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop)."""


class RandomSource:
    """Normal weights of a fixed seed, the same whatever the number of ranks; norms are 1.

    A tensor's values depend on its name and the seed only. ``scale`` gives a tensor's spread as a
    multiple of ``std``, by name.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        seed: int,
        device: torch.device,
        *,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        scale: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self.shapes, self.seed, self.device, self.std = shapes, seed, device, std
        self.dtype, self.scale = dtype, scale

    def read(self, name: str) -> torch.Tensor:
        """Generate the whole tensor."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        return self.normal(name, shape)

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal values for ``name``; on a GPU in the dtype they will be used in."""
        generator = torch.Generator(self.device)
        # the CPU generator takes 32 bits of its seed
        generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        dtype = self.dtype if self.device.type == "cuda" else torch.float32
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return out.normal_(0.0, self.std * self.scale(name), generator=generator)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Generate, then cut."""
        return self.read(name)[start:stop]

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Generate, then cut."""
        return self.read(name)[:, start:stop]


def target_scale(layers: int) -> Callable[[str], float]:
    """Spreads with which every token is routed by what it is, as in a trained model.

    With one spread for all, attention (a mean over the context, alike for all of its tokens) soon
    outweighs the embedding in the residual stream: from the third layer on the tokens of a
    sequence take the same experts, and greedy decoding repeats one token. So embeddings have a
    spread of 1, and what attention adds is divided by the number of layers.
    """

    def scale(name: str) -> float:
        if "embed_tokens" in name:
            return 50.0
        return 1.0 / layers if "o_proj" in name else 1.0

    return scale


@dataclass(frozen=True, slots=True)
class _MoeNames:
    """Where a layer keeps its router and its experts' three matrices."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


_MOE_NAMES = {
    "qwen3_moe": _MoeNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": _MoeNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
}


def target_tensor_shapes(shape: TargetShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the family's Hugging Face checkpoint and its shape."""
    names = _MOE_NAMES[shape.family]
    h, d, i = shape.hidden, shape.head_dim, shape.moe_intermediate
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (shape.vocab, h),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": (h,),
            f"{at}.post_attention_layernorm.weight": (h,),
            f"{at}.self_attn.q_proj.weight": (shape.heads * d, h),
            f"{at}.self_attn.k_proj.weight": (shape.kv_heads * d, h),
            f"{at}.self_attn.v_proj.weight": (shape.kv_heads * d, h),
            f"{at}.self_attn.o_proj.weight": (h, shape.heads * d),
            f"{at}.{names.router}.weight": (shape.experts, h),
        }
        if shape.qk_norm:
            tensors[f"{at}.self_attn.q_norm.weight"] = (d,)
            tensors[f"{at}.self_attn.k_norm.weight"] = (d,)
        for expert in range(shape.experts):
            mlp = f"{at}.{names.experts}.{expert}"
            tensors[f"{mlp}.{names.gate}.weight"] = (i, h)
            tensors[f"{mlp}.{names.up}.weight"] = (i, h)
            tensors[f"{mlp}.{names.down}.weight"] = (h, i)
    return tensors


def check_target(checkpoint: Checkpoint, shape: TargetShape, place: Rank) -> None:
    """Refuse a checkpoint whose tensors are not exactly the shape's."""
    optional = ("lm_head.weight",) if shape.tied_head else ()
    checkpoint.check(target_tensor_shapes(shape), optional=optional)
    if shape.tied_head and "lm_head.weight" in checkpoint:
        rows = place.vocab_span(shape.vocab)
        head_RH = checkpoint.read_rows("lm_head.weight", *rows)
        # readers differ: some tie the two, newer transformers takes the head
        if not torch.equal(head_RH, checkpoint.read_rows("model.embed_tokens.weight", *rows)):
            raise invalid(
                f"{checkpoint.folder}: tie_word_embeddings is true, but lm_head.weight is not "
                "model.embed_tokens.weight; set it to false to use lm_head"
            )


def load_target(
    source: Source,
    shape: TargetShape,
    place: Rank,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> TargetWeights:
    """This rank's shard; ``progress`` is called after every layer."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype).contiguous()

    layers = []
    for number in range(shape.layers):
        layers.append(_load_layer(source, shape, place, number, put))
        progress()
    start, stop = place.vocab_span(shape.vocab)
    embed_VH = put(source.read("model.embed_tokens.weight"))
    tied = shape.tied_head
    head_RH = embed_VH[start:stop] if tied else put(source.read_rows("lm_head.weight", start, stop))
    return TargetWeights(
        embed_VH=embed_VH,
        layers=tuple(layers),
        norm_H=put(source.read("model.norm.weight")),
        head_RH=head_RH,
        vocab_start=start,
    )


def _load_layer(
    source: Source,
    shape: TargetShape,
    place: Rank,
    number: int,
    put: Callable[[torch.Tensor], torch.Tensor],
) -> TargetLayer:
    at, d = f"model.layers.{number}", shape.head_dim
    q_start, q_stop = place.span(shape.heads)
    kv_start, kv_stop = place.kv_span(shape.kv_heads)
    names = _MOE_NAMES[shape.family]

    def norm(name: str) -> torch.Tensor | None:
        return put(source.read(f"{at}.self_attn.{name}.weight")) if shape.qk_norm else None

    def heads(name: str, start: int, stop: int) -> torch.Tensor:
        return source.read_rows(f"{at}.self_attn.{name}.weight", start * d, stop * d)

    gate_up_EJH, down_EHI = _load_experts(source, shape, place, f"{at}.{names.experts}", put)
    qkv = torch.cat(
        (
            heads("q_proj", q_start, q_stop),
            heads("k_proj", kv_start, kv_stop),
            heads("v_proj", kv_start, kv_stop),
        )
    )
    return TargetLayer(
        input_norm_H=put(source.read(f"{at}.input_layernorm.weight")),
        qkv_PH=put(qkv),
        q_norm_D=norm("q_norm"),
        k_norm_D=norm("k_norm"),
        o_HQ=put(source.read_columns(f"{at}.self_attn.o_proj.weight", q_start * d, q_stop * d)),
        post_norm_H=put(source.read(f"{at}.post_attention_layernorm.weight")),
        router_EH=put(source.read(f"{at}.{names.router}.weight")),
        gate_up_EJH=gate_up_EJH,
        down_EHI=down_EHI,
    )


def _load_experts(
    source: Source,
    shape: TargetShape,
    place: Rank,
    at: str,
    put: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a layer's experts, stacked: gate rows above up rows, and down."""
    start, stop = place.span(shape.moe_intermediate)
    if isinstance(source, RandomSource) and source.device.type == "cuda":
        # one launch for all experts: a large model has tens of thousands of expert matrices
        num, full, hidden = shape.experts, shape.moe_intermediate, shape.hidden
        gate_up = source.normal(f"{at}.gate_up", (num, 2, full, hidden))[:, :, start:stop]
        down = source.normal(f"{at}.down", (num, hidden, full))[:, :, start:stop]
        return put(gate_up.flatten(1, 2)), put(down)
    names = _MOE_NAMES[shape.family]
    gate_ups, downs = [], []
    for expert in range(shape.experts):
        mlp = f"{at}.{expert}"
        gate = source.read_rows(f"{mlp}.{names.gate}.weight", start, stop)
        up = source.read_rows(f"{mlp}.{names.up}.weight", start, stop)
        gate_ups.append(put(torch.cat((gate, up))))
        downs.append(put(source.read_columns(f"{mlp}.{names.down}.weight", start, stop)))
    return torch.stack(gate_ups), torch.stack(downs)
