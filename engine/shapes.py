"""Sizes of a target and of an EAGLE-3 draft, read from Hugging Face config.json files.

Every size is read by name: a missing key stops with that name rather than guess a default.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config_json import Keys, read_json
from engine.errors import invalid

#: far above every published model; a file beyond them is broken
_MOST_LAYERS, _MOST_EXPERTS = 1024, 8192
_SHAPES = Path(__file__).resolve().parent.parent / "studies" / "shapes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """A Mixture-of-Experts transformer of a known family (``model_type``)."""

    family: str
    #: query and key heads are normalised
    qk_norm: bool
    #: width of the family's dense layers, None where the config names none
    dense_intermediate: int | None
    #: layers of the whole model where ``layers`` is a slice of it
    whole_layers: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_intermediate: int
    experts: int
    experts_per_token: int
    renormalize: bool
    rms_eps: float
    rope_theta: float
    max_position: int
    #: tokens that attention looks back over, itself included; None: all
    sliding_window: int | None
    tied_head: bool
    eos_ids: tuple[int, ...]

    def check_tp(self, tp: int) -> None:
        """Raise unless ``tp`` ranks can share the heads and the experts' width."""
        if self.heads % tp:
            raise invalid(f"tp {tp} does not divide num_attention_heads {self.heads}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise invalid(
                f"tp {tp} and num_key_value_heads {self.kv_heads}: one must divide the other"
            )
        if self.moe_intermediate % tp:
            raise invalid(f"tp {tp} does not divide moe_intermediate_size {self.moe_intermediate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A one-layer EAGLE-3 head."""

    vocab: int
    draft_vocab: int
    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    norm_before_residual: bool
    #: target layers run before each captured hidden state: value i is the input of layer i
    capture_points: tuple[int, int, int]


def target_shape(config_json: Path, *, sizes_only: bool = False) -> TargetShape:
    """Parse a Qwen3-MoE or Mixtral config.json; raises ``EngineError`` (invalid) naming the key.

    ``sizes_only``: weights will be random, so a file without ``rope_theta`` will do.
    """
    keys = Keys(read_json(config_json), config_json)
    family = keys.data.get("model_type")
    if family not in ("qwen3_moe", "mixtral"):
        raise invalid(
            f"{config_json}: model_type {family!r} is not supported; known: 'qwen3_moe', 'mixtral'"
        )
    keys.require("hidden_act", "silu", "silu")
    if not sizes_only:
        keys.refuse_quantized()
    shape = _qwen3(keys, sizes_only) if family == "qwen3_moe" else _mixtral(keys, sizes_only)
    if shape.heads % shape.kv_heads:
        raise invalid(
            f"{config_json}: num_key_value_heads {shape.kv_heads} does not divide "
            f"num_attention_heads {shape.heads}"
        )
    if shape.experts_per_token > shape.experts:
        raise invalid(
            f"{config_json}: num_experts_per_tok {shape.experts_per_token} is above "
            f"num_experts {shape.experts}"
        )
    return shape


def _qwen3(keys: Keys, sizes_only: bool) -> TargetShape:
    keys.require("attention_bias", False, False)
    keys.require("decoder_sparse_step", 1, 1)
    if keys.data.get("mlp_only_layers"):
        raise invalid(
            f"{keys.source}: mlp_only_layers {keys.data['mlp_only_layers']} is not supported; "
            "known: []"
        )
    return TargetShape(
        family="qwen3_moe",
        qk_norm=True,
        dense_intermediate=keys.maybe_positive("intermediate_size"),
        # required: where it is absent, transformers takes 128 and others hidden size / heads
        head_dim=keys.head_dim(),
        sliding_window=_window(keys, used=bool(keys.maybe(bool, "use_sliding_window"))),
        moe_intermediate=keys.positive("moe_intermediate_size"),
        # transformers 5 writes the count of experts under its second name
        experts=keys.positive("num_experts", "num_local_experts", most=_MOST_EXPERTS),
        renormalize=keys.get(bool, "norm_topk_prob"),
        **_common_sizes(keys, sizes_only),
    )


def _mixtral(keys: Keys, sizes_only: bool) -> TargetShape:
    width = keys.positive("intermediate_size")
    heads = keys.positive("num_attention_heads")
    return TargetShape(
        family="mixtral",
        qk_norm=False,
        dense_intermediate=width,
        head_dim=keys.head_dim(keys.positive("hidden_size"), heads),
        sliding_window=_window(keys, used=True),
        moe_intermediate=width,
        experts=keys.positive("num_local_experts", "num_experts", most=_MOST_EXPERTS),
        renormalize=True,
        **_common_sizes(keys, sizes_only),
    )


def _window(keys: Keys, *, used: bool) -> int | None:
    window = keys.maybe_positive("sliding_window") if used else None
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    types = keys.maybe(list, "layer_types") or []
    wrong = next((t for t in types if t not in known), None)
    if wrong is not None:
        raise invalid(
            f"{keys.source}: layer_types {wrong!r} is not supported; known: full_attention"
        )
    return window


def _common_sizes(keys: Keys, sizes_only: bool) -> dict[str, Any]:
    layers = keys.positive("num_hidden_layers", most=_MOST_LAYERS)
    return {
        "vocab": keys.positive("vocab_size"),
        "hidden": keys.positive("hidden_size"),
        "layers": layers,
        "whole_layers": layers,
        "heads": keys.positive("num_attention_heads"),
        "kv_heads": keys.positive("num_key_value_heads"),
        "experts_per_token": keys.positive("num_experts_per_tok"),
        "rms_eps": keys.rms_eps(),
        "rope_theta": keys.rope_theta(default=10_000.0 if sizes_only else None),
        "max_position": keys.positive("max_position_embeddings"),
        "tied_head": keys.get(bool, "tie_word_embeddings"),
        "eos_ids": keys.eos_ids(),
    }


def named_target_shape(name: str, layers: int | None) -> TargetShape:
    """A shape by its name in ``studies/shapes`` or by path (a folder or its config.json)."""
    choices = [Path(name), Path(name) / "config.json", _SHAPES / name / "config.json"]
    found = next((p for p in choices if p.is_file()), None)
    if found is None:
        known = sorted(p.parent.name for p in _SHAPES.glob("*/config.json"))
        raise invalid(f"shape {name!r} is neither a path nor known; known: {', '.join(known)}")
    shape = target_shape(found, sizes_only=True)
    if layers is None:
        return shape
    if layers > shape.layers:
        raise invalid(f"target.layers {layers} is above the {shape.layers} layers of {name}")
    return replace(shape, layers=layers)


def draft_shape(config_json: Path, target: TargetShape) -> DraftShape:
    """Parse an EAGLE-3 config.json and check that the head belongs to ``target``."""
    keys = Keys(read_json(config_json), config_json)
    names = keys.maybe(list, "architectures") or []
    if not any("eagle3" in str(name).lower() for name in names):
        raise invalid(
            f"{config_json}: architectures {names} is no EAGLE-3 head (LlamaForCausalLMEagle3)"
        )
    keys.require("hidden_act", "silu", "silu")
    keys.refuse_quantized()
    keys.require("num_hidden_layers", 1, 1)
    keys.require("attention_bias", False, False)
    keys.require("mlp_bias", False, False)
    _require_plain_eagle3(keys)
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    vocab = keys.positive("vocab_size")
    target_hidden = keys.maybe_positive("target_hidden_size") or hidden
    if vocab != target.vocab or target_hidden != target.hidden:
        raise invalid(
            f"{config_json}: this head belongs to another target: vocab_size {vocab}, hidden size "
            f"{target_hidden}; the target has {target.vocab} and {target.hidden}"
        )
    draft_vocab = keys.positive("draft_vocab_size", "vocab_size")
    if draft_vocab > vocab:
        raise invalid(f"{config_json}: draft_vocab_size {draft_vocab} is above vocab_size {vocab}")
    kv_heads = keys.positive("num_key_value_heads")
    if heads % kv_heads:
        raise invalid(
            f"{config_json}: num_key_value_heads {kv_heads} does not divide "
            f"num_attention_heads {heads}"
        )
    return DraftShape(
        vocab=vocab,
        draft_vocab=draft_vocab,
        hidden=hidden,
        target_hidden=target_hidden,
        intermediate=keys.positive("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.head_dim(hidden, heads),
        rms_eps=keys.rms_eps(),
        rope_theta=keys.rope_theta(),
        norm_before_residual=keys.maybe(bool, "norm_before_residual") or False,
        capture_points=_capture_points(keys, target.layers),
    )


def random_draft_shape(target: TargetShape, draft_vocab: int | None) -> DraftShape:
    """A head of the target's width with the customary 32,000-token draft vocabulary or less."""
    if draft_vocab is not None and draft_vocab > target.vocab:
        raise invalid(f"draft.vocab {draft_vocab} is above the target's vocab_size {target.vocab}")
    vocab = min(draft_vocab or 32_000, target.vocab)
    return DraftShape(
        vocab=target.vocab,
        draft_vocab=vocab,
        hidden=target.hidden,
        target_hidden=target.hidden,
        # heads of a family take its dense width
        intermediate=target.dense_intermediate or 4 * target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        rope_theta=target.rope_theta,
        norm_before_residual=True,
        capture_points=default_capture_points(target.layers),
    )


def default_capture_points(layers: int) -> tuple[int, int, int]:
    """Inputs of layers 2, L/2 and L-3, as SGLang and vLLM have it; clamped in shallow targets."""
    low, mid, high = 2, layers // 2, layers - 3
    return (min(low, layers), min(max(mid, 0), layers), min(max(high, 0), layers))


#: keys of an EAGLE-3 config.json or its ``eagle_config`` that change what a head computes, and the
#: value of the plain head
_PLAIN_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "parallel_draft_step": 1,
}


def _require_plain_eagle3(keys: Keys) -> None:
    for place, data in (("", keys.data), ("eagle_config.", keys.mapping("eagle_config"))):
        for name, wanted in _PLAIN_EAGLE3.items():
            value = data.get(name)
            if value is not None and value != wanted:
                raise invalid(
                    f"{keys.source}: {place}{name} {value!r} is not supported; known: {wanted!r}"
                )


def _capture_points(keys: Keys, layers: int) -> tuple[int, int, int]:
    """Two conventions are in use and both are honoured by where the list stands.

    At the top level (vLLM, speculators) value i is the input of layer i; inside ``eagle_config``
    (ModelOpt, SGLang) value i is the output of layer i, which is the input of layer i + 1.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    ids, shift = keys.maybe(list, name), 0
    if not ids:
        ids, shift = keys.mapping("eagle_config").get(name), 1
    if not ids:
        return default_capture_points(layers)
    good = isinstance(ids, list) and len(ids) == 3
    if not good or not all(type(i) is int and 0 <= i <= layers - shift for i in ids):
        raise invalid(
            f"{keys.source}: {name} must be three layers of a {layers}-layer target, got {ids}"
        )
    return (ids[0] + shift, ids[1] + shift, ids[2] + shift)
