"""Sizes of the target and the draft model, read from Hugging Face ``config.json`` files.

Only sizes that move bytes or flops are kept. Parameter counts leave out norms and biases (below
0.1 %), as in studies/shapes/README.md. A size that a family needs and the file lacks is an error:
a wrong default is worse than a stop.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.formats import bytes_per_weight

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek): low-rank sizes; ``q_lora`` 0: a full q matrix."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one target model."""

    name: str
    hidden: int
    layers: int
    moe_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mla: MlaShape | None
    dense_intermediate: int
    experts: int
    experts_per_token: int
    moe_intermediate: int
    #: width of all shared experts of a layer together
    shared_intermediate: int
    vocab: int
    tied_embeddings: bool
    max_context: int
    #: layers with linear (recurrent) attention: no KV rows per token
    linear_attention_layers: int
    #: layers that see only the last ``sliding_window`` tokens
    sliding_layers: int
    sliding_window: int
    expert_format: str
    other_format: str
    kv_bytes: float

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "max_context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} {getattr(self, field)} must be at least 1")
        if self.moe_layers > self.layers:
            raise ValueError(
                f"{self.name}: moe_layers {self.moe_layers} above layers {self.layers}"
            )
        if self.moe_layers and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.name}: experts_per_token {self.experts_per_token} must be in "
                f"1..{self.experts} (experts)"
            )
        bytes_per_weight(self.expert_format)
        bytes_per_weight(self.other_format)

    @property
    def dense_layers(self) -> int:
        """Layers with a plain MLP."""
        return self.layers - self.moe_layers

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def attention_params(self) -> int:
        """Projection weights of one attention layer."""
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        m = self.mla
        query = m.nope + m.rope
        q = self.hidden * m.q_lora + m.q_lora * self.heads * query if m.q_lora else 0
        q = q or self.hidden * self.heads * query
        kv = self.hidden * (m.kv_lora + m.rope) + m.kv_lora * self.heads * (m.nope + m.v)
        return q + kv + self.heads * m.v * self.hidden

    @property
    def routed_params(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def other_params(self) -> int:
        """All weights but the routed experts: attention, dense and shared MLPs, routers, vocab."""
        dense = self.dense_layers * 3 * self.hidden * self.dense_intermediate
        shared = self.moe_layers * 3 * self.hidden * self.shared_intermediate
        router = self.moe_layers * self.hidden * self.experts
        vocab = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.attention_params + dense + shared + router + vocab

    @property
    def total_params(self) -> int:
        """All weights."""
        return self.routed_params + self.other_params

    @property
    def active_params(self) -> int:
        """Weights one token multiplies with (the embedding is a look-up, not counted)."""
        embedding = 0 if self.tied_embeddings else self.vocab * self.hidden
        routed = self.moe_layers * self.experts_per_token * self.expert_params
        return routed + self.other_params - embedding

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in its format."""
        return self.expert_params * bytes_per_weight(self.expert_format)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in their formats."""
        return self.routed_params * bytes_per_weight(self.expert_format) + (
            self.other_params * bytes_per_weight(self.other_format)
        )

    @property
    def kv_elements_per_token_layer(self) -> int:
        """Cache elements one token adds in one full-attention layer (all heads)."""
        if self.mla is not None:
            return self.mla.kv_lora + self.mla.rope
        return 2 * self.kv_heads * self.head_dim

    @property
    def allreduces_per_forward(self) -> int:
        """Attention output and MLP output of each layer."""
        return 2 * self.layers

    @property
    def allreduce_bytes_per_token(self) -> int:
        """16-bit activations (fp32 ones when the weights are fp32)."""
        return self.hidden * (4 if self.other_format == "fp32" else 2)

    def head_problem(self, tp: int) -> str | None:
        """Why these heads cannot be split over ``tp`` ranks, or None."""
        if self.heads % tp:
            return f"parallel.tp {tp} does not divide the {self.heads} heads of {self.name}"
        return None

    @classmethod
    def from_hf_config(cls, config: Config, *, name: str = "") -> "ModelShape":
        """Read a target's config.json, see ``model/hf_config.py`` for the families."""
        from model.hf_config import model_fields

        return cls(**model_fields(config, name))  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path | str) -> "ModelShape":
        """Read a config.json, or the one inside a folder; raises ``ValueError`` naming the path."""
        file, config = _read_config(Path(path))
        return cls.from_hf_config(config, name=file.parent.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of an EAGLE-3 head: ``layers`` decoder layers over fused target states."""

    name: str
    hidden: int
    target_hidden: int
    #: target layers whose states are fused (EAGLE-3: 3)
    fused_states: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    weight_format: str
    #: the head has its own embedding matrix (otherwise it shares the target's)
    own_embedding: bool

    @property
    def layer_params(self) -> int:
        """One decoder layer; the first takes embedding and state side by side (2 x hidden)."""
        qkv = 2 * self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out = self.heads * self.head_dim * self.hidden
        return qkv + out + 3 * self.hidden * self.intermediate

    @property
    def fuse_params(self) -> int:
        """The matrix that fuses the target's states."""
        return self.fused_states * self.target_hidden * self.hidden

    @property
    def head_params(self) -> int:
        """The draft's own vocabulary matrix."""
        return self.hidden * self.draft_vocab

    @property
    def total_params(self) -> int:
        """All weights of the head."""
        embedding = self.vocab * self.hidden if self.own_embedding else 0
        return self.layers * self.layer_params + self.fuse_params + self.head_params + embedding

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.total_params * bytes_per_weight(self.weight_format)

    @property
    def kv_elements_per_token(self) -> int:
        """Cache elements one token adds over the head's layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    @classmethod
    def from_hf_config(cls, config: Config, *, target: ModelShape, name: str = "") -> "DraftShape":
        """Read an EAGLE-3 draft's config.json (``LlamaForCausalLMEagle3`` and its kin).

        Raises ``ValueError`` naming a missing key, or a target size that is not this target's.
        """
        from model.hf_config import draft_fields

        return cls(**draft_fields(config, target, name))  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path | str, *, target: ModelShape) -> "DraftShape":
        """Read a config.json, or the one inside a folder."""
        file, config = _read_config(Path(path))
        return cls.from_hf_config(config, target=target, name=file.parent.name)

    @classmethod
    def standard(cls, target: ModelShape, *, draft_vocab: int = 32000) -> "DraftShape":
        """The usual public head for this target: one dense layer of the target's width.

        An assumption for a draft that is not at hand: 128-wide heads in groups of 8, an MLP of
        2.5 x hidden, its own vocabulary of 32,000.
        """
        head_dim = min(128, target.hidden)
        heads = max(1, target.hidden // head_dim)
        return cls(
            name=f"eagle3-for-{target.name}",
            hidden=target.hidden,
            target_hidden=target.hidden,
            fused_states=3,
            layers=1,
            heads=heads,
            kv_heads=max(1, heads // 8) if heads >= 8 else heads,
            head_dim=head_dim,
            intermediate=5 * target.hidden // 2,
            vocab=target.vocab,
            draft_vocab=min(draft_vocab, target.vocab),
            weight_format="bf16" if target.other_format != "fp32" else "fp32",
            own_embedding=False,
        )


def _read_config(path: Path) -> tuple[Path, Config]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: no config.json there; give a Hugging Face checkpoint folder")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds {type(config).__name__}, not an object of settings")
    return file, config
