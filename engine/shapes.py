"""Sizes of a target and of an EAGLE-3 draft, read from Hugging Face config.json files.

Every size is read by name: a missing key stops with that name rather than guess a default.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import invalid

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


class _Keys:
    """Reads keys of one config file by name."""

    def __init__(self, data: Mapping[str, Any], source: Path) -> None:
        self.data, self.source = data, source

    def get(self, kind: type, *names: str) -> Any:
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise invalid(f"{self.source}: {name} must be {kind.__name__}, got {value!r}")
            return value
        raise invalid(f"{self.source}: required key {names[0]!r} is missing")

    def positive(self, *names: str) -> int:
        value: int = self.get(int, *names)
        if value < 1:
            raise invalid(f"{self.source}: {names[0]} must be at least 1, got {value}")
        return value

    def rope_theta(self, *, default: float | None = None) -> float:
        """From ``rope_theta`` or, as newer transformers write it, ``rope_parameters``."""
        rope = self.data.get("rope_parameters") or self.data.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise invalid(f"{self.source}: rope_type {kind!r} is not supported; known: default")
        theta = rope.get("rope_theta", self.data.get("rope_theta", default))
        if not isinstance(theta, (int, float)):
            raise invalid(f"{self.source}: required key 'rope_theta' is missing")
        return float(theta)

    def require(self, name: str, default: object, wanted: object) -> None:
        """Refuse a variant of the architecture that the engine does not compute."""
        value = self.data.get(name, default)
        if value != wanted:
            raise invalid(f"{self.source}: {name} {value!r} is not supported; known: {wanted!r}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; one clear line when it is missing or broken."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise invalid(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise invalid(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid(f"{path}: must hold a JSON object")
    return data


def target_shape(config_json: Path, *, sizes_only: bool = False) -> TargetShape:
    """Parse a Qwen3-MoE or Mixtral config.json; raises ``EngineError`` (invalid) naming the key.

    ``sizes_only``: weights will be random, so a file without ``rope_theta`` will do.
    """
    keys = _Keys(read_json(config_json), config_json)
    family = keys.data.get("model_type")
    if family not in ("qwen3_moe", "mixtral"):
        raise invalid(
            f"{config_json}: model_type {family!r} is not supported; known: 'qwen3_moe', 'mixtral'"
        )
    keys.require("hidden_act", "silu", "silu")
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


def _qwen3(keys: _Keys, sizes_only: bool) -> TargetShape:
    keys.require("attention_bias", False, False)
    keys.require("use_sliding_window", False, False)
    keys.require("decoder_sparse_step", 1, 1)
    if keys.data.get("mlp_only_layers"):
        raise invalid(
            f"{keys.source}: mlp_only_layers {keys.data['mlp_only_layers']} is not supported; "
            "known: []"
        )
    return TargetShape(
        family="qwen3_moe",
        qk_norm=True,
        dense_intermediate=keys.data.get("intermediate_size"),
        head_dim=keys.positive("head_dim"),
        moe_intermediate=keys.positive("moe_intermediate_size"),
        # transformers 5 writes the count of experts under its second name
        experts=keys.positive("num_experts", "num_local_experts"),
        renormalize=keys.get(bool, "norm_topk_prob"),
        **_common_sizes(keys, sizes_only),
    )


def _mixtral(keys: _Keys, sizes_only: bool) -> TargetShape:
    keys.require("sliding_window", None, None)
    width = keys.positive("intermediate_size")
    heads = keys.positive("num_attention_heads")
    return TargetShape(
        family="mixtral",
        qk_norm=False,
        dense_intermediate=width,
        head_dim=keys.data.get("head_dim") or keys.positive("hidden_size") // heads,
        moe_intermediate=width,
        experts=keys.positive("num_local_experts", "num_experts"),
        renormalize=True,
        **_common_sizes(keys, sizes_only),
    )


def _common_sizes(keys: _Keys, sizes_only: bool) -> dict[str, Any]:
    layers = keys.positive("num_hidden_layers")
    return {
        "vocab": keys.positive("vocab_size"),
        "hidden": keys.positive("hidden_size"),
        "layers": layers,
        "whole_layers": layers,
        "heads": keys.positive("num_attention_heads"),
        "kv_heads": keys.positive("num_key_value_heads"),
        "experts_per_token": keys.positive("num_experts_per_tok"),
        "rms_eps": keys.get(float, "rms_norm_eps"),
        "rope_theta": keys.rope_theta(default=10_000.0 if sizes_only else None),
        "max_position": keys.positive("max_position_embeddings"),
        "tied_head": keys.get(bool, "tie_word_embeddings"),
        "eos_ids": _eos_ids(keys.source.parent, keys.data),
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
    keys = _Keys(read_json(config_json), config_json)
    names = keys.data.get("architectures") or []
    if not any("eagle3" in str(name).lower() for name in names):
        raise invalid(
            f"{config_json}: architectures {names} is no EAGLE-3 head (LlamaForCausalLMEagle3)"
        )
    keys.require("hidden_act", "silu", "silu")
    keys.require("num_hidden_layers", 1, 1)
    keys.require("attention_bias", False, False)
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    vocab = keys.positive("vocab_size")
    target_hidden = keys.data.get("target_hidden_size") or hidden
    if vocab != target.vocab or target_hidden != target.hidden:
        raise invalid(
            f"{config_json}: this head belongs to another target: vocab_size {vocab}, hidden size "
            f"{target_hidden}; the target has {target.vocab} and {target.hidden}"
        )
    return DraftShape(
        vocab=vocab,
        draft_vocab=keys.positive("draft_vocab_size", "vocab_size"),
        hidden=hidden,
        target_hidden=target_hidden,
        intermediate=keys.positive("intermediate_size"),
        heads=heads,
        kv_heads=keys.positive("num_key_value_heads"),
        head_dim=keys.data.get("head_dim") or hidden // heads,
        rms_eps=keys.get(float, "rms_norm_eps"),
        rope_theta=keys.rope_theta(),
        norm_before_residual=bool(keys.data.get("norm_before_residual", False)),
        capture_points=_capture_points(keys, target.layers),
    )


def random_draft_shape(target: TargetShape, draft_vocab: int | None) -> DraftShape:
    """A head of the target's width with the customary 32,000-token draft vocabulary or less."""
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


def _capture_points(keys: _Keys, layers: int) -> tuple[int, int, int]:
    """Two conventions are in use and both are honoured by where the list stands.

    At the top level (vLLM, speculators) value i is the input of layer i; inside ``eagle_config``
    (ModelOpt, SGLang) value i is the output of layer i, which is the input of layer i + 1.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    ids = keys.data.get(name)
    if not ids:
        nested = (keys.data.get("eagle_config") or {}).get(name)
        ids = [i + 1 for i in nested] if nested else None
    if not ids:
        return default_capture_points(layers)
    if len(ids) != 3 or not all(isinstance(i, int) and 0 <= i <= layers for i in ids):
        raise invalid(
            f"{keys.source}: {name} must be three layers of a {layers}-layer target, got {ids}"
        )
    return (ids[0], ids[1], ids[2])


def _eos_ids(folder: Path, data: Mapping[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = data.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
