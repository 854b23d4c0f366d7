"""Hugging Face config.json of each model family -> the fields of ``ModelShape``/``DraftShape``."""

import math
from collections.abc import Mapping

from model.formats import format_from_hf
from model.shapes import Config, MlaShape, ModelShape

#: model_type -> (key of the expert count, key of one expert's width)
MOE_KEYS: Mapping[str, tuple[str, str]] = {
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_next": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe_text": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe": ("num_experts", "moe_intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "minimax_m2": ("num_local_experts", "intermediate_size"),
    "minimax": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "llama4_text": ("num_local_experts", "intermediate_size"),
    "llama4": ("num_local_experts", "intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    "deepseek_v32": ("n_routed_experts", "moe_intermediate_size"),
    "kimi_k2": ("n_routed_experts", "moe_intermediate_size"),
    "kimi_k25": ("n_routed_experts", "moe_intermediate_size"),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size"),
    "glm4_moe_lite": ("n_routed_experts", "moe_intermediate_size"),
    "glm_moe_dsa": ("n_routed_experts", "moe_intermediate_size"),
}
#: families without experts
DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
#: families whose hybrid layers default to one full attention in this many
_FULL_ATTENTION_INTERVAL = 4


def need(config: Config, *keys: str) -> int:
    """The first of ``keys`` that the file holds, as an int; raises ``ValueError`` naming them."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, bool) or value is None:
            continue
        if not isinstance(value, int | float) or value != int(value) or value < 0:
            raise ValueError(f"config.json: {key} {value!r} must be a whole number >= 0")
        return int(value)
    raise ValueError(f"config.json: {' or '.join(keys)} is missing")


def model_fields(config: Config, name: str) -> dict[str, object]:
    """Fields of ``ModelShape`` from a target's config.json."""
    outer = config
    if isinstance(config.get("text_config"), Mapping):
        inner: Config = config["text_config"]  # type: ignore[assignment]
        config = {**inner}
        config.setdefault("model_type", outer.get("model_type"))
    kind = str(config.get("model_type", ""))
    if kind not in MOE_KEYS and kind not in DENSE_TYPES:
        known = ", ".join((*MOE_KEYS, *DENSE_TYPES))
        raise ValueError(f"config.json: model_type {kind!r} is unknown; known: {known}")
    layers = need(config, "num_hidden_layers")
    moe = _moe_fields(config, kind, layers)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or outer.get("torch_dtype") or "")
    other = format_from_hf(None, dtype or "auto")
    quantization = config.get("quantization_config") or outer.get("quantization_config")
    expert_format = format_from_hf(quantization, dtype or "auto")  # type: ignore[arg-type]
    if not moe["moe_layers"]:
        other = expert_format
    linear, sliding = _layer_kinds(config, kind, layers)
    heads = need(config, "num_attention_heads")
    mla = _mla(config)
    return {
        "name": name or str(config.get("_name_or_path") or kind),
        "hidden": need(config, "hidden_size"),
        "layers": layers,
        **moe,
        "heads": heads,
        "kv_heads": need(config, "num_key_value_heads", "num_attention_heads"),
        "head_dim": mla.nope + mla.rope if mla else _head_dim(config, heads),
        "mla": mla,
        "vocab": need(config, "vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_context": need(config, "max_position_embeddings"),
        "linear_attention_layers": linear,
        "sliding_layers": sliding,
        "sliding_window": need(config, "sliding_window") if sliding else 0,
        "expert_format": expert_format,
        "other_format": other,
        "kv_bytes": 4.0 if other == "fp32" else 2.0,
    }


def _head_dim(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return need(config, "head_dim")
    return need(config, "hidden_size") // heads


def _mla(config: Config) -> MlaShape | None:
    if config.get("kv_lora_rank") is None:
        return None
    return MlaShape(
        q_lora=need(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        kv_lora=need(config, "kv_lora_rank"),
        nope=need(config, "qk_nope_head_dim"),
        rope=need(config, "qk_rope_head_dim"),
        v=need(config, "v_head_dim"),
    )


def _moe_fields(config: Config, kind: str, layers: int) -> dict[str, int]:
    if kind in DENSE_TYPES:
        return {
            "moe_layers": 0,
            "experts": 0,
            "experts_per_token": 0,
            "moe_intermediate": 0,
            "shared_intermediate": 0,
            "dense_intermediate": need(config, "intermediate_size"),
        }
    count_key, width_key = MOE_KEYS[kind]
    width = need(config, width_key)
    shared = 0
    if config.get("shared_expert_intermediate_size") is not None:
        shared = need(config, "shared_expert_intermediate_size")
    elif config.get("n_shared_experts") is not None:
        shared = width * need(config, "n_shared_experts")
    elif kind.startswith("llama4"):
        # one shared expert of an expert's width, always
        shared = width
    return {
        "moe_layers": _moe_layers(config, layers),
        "experts": need(config, count_key),
        "experts_per_token": need(config, "num_experts_per_tok", "experts_per_token"),
        "moe_intermediate": width,
        "shared_intermediate": shared,
        "dense_intermediate": need(config, "intermediate_size_mlp", "intermediate_size", width_key),
    }


def _moe_layers(config: Config, layers: int) -> int:
    """Layers with experts: first_k_dense_replace, moe_layer_freq, decoder_sparse_step, ..."""
    if isinstance(config.get("moe_layers"), list):
        return len(config["moe_layers"])  # type: ignore[arg-type]
    if config.get("first_k_dense_replace") is not None:
        after = layers - need(config, "first_k_dense_replace")
        freq = config.get("moe_layer_freq") or 1
        return math.ceil(after / need({"moe_layer_freq": freq}, "moe_layer_freq"))
    for key in ("interleave_moe_layer_step", "decoder_sparse_step"):
        if config.get(key) is not None:
            every = max(1, need(config, key))
            plain = config.get("mlp_only_layers")
            dense = set(plain) if isinstance(plain, list) else set()
            return sum((i + 1) % every == 0 and i not in dense for i in range(layers))
    return layers


def _layer_kinds(config: Config, kind: str, layers: int) -> tuple[int, int]:
    """(layers with linear attention, layers with a sliding window)."""
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        sliding = types.count("sliding_attention") if config.get("sliding_window") else 0
        return types.count("linear_attention"), sliding
    if kind in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"):
        every = need({"full_attention_interval": _FULL_ATTENTION_INTERVAL, **config},
                     "full_attention_interval")  # fmt: skip
        return layers - layers // every, 0
    if kind == "gpt_oss":
        return 0, layers // 2
    return 0, 0


def draft_fields(config: Config, target: ModelShape, name: str) -> dict[str, object]:
    """Fields of ``DraftShape`` from an EAGLE-3 draft's config.json."""
    inner = config.get("eagle_config") or config.get("transformer_layer_config") or {}
    merged: dict[str, object] = {**config, **(inner if isinstance(inner, Mapping) else {})}
    hidden = need(merged, "hidden_size")
    target_hidden = need({"target_hidden_size": target.hidden, **merged}, "target_hidden_size")
    if target_hidden != target.hidden:
        raise ValueError(
            f"draft {name or 'config.json'} fuses states of {target_hidden} values, but target "
            f"{target.name} has hidden size {target.hidden}: it belongs to another target"
        )
    vocab = need({"vocab_size": target.vocab, **merged}, "vocab_size")
    heads = need(merged, "num_attention_heads")
    dtype = str(merged.get("dtype") or merged.get("torch_dtype") or "auto")
    states = merged.get("eagle_aux_hidden_state_layer_ids")
    return {
        "name": name or "draft",
        "hidden": hidden,
        "target_hidden": target_hidden,
        "fused_states": len(states) if isinstance(states, list) and states else 3,
        "layers": max(1, need({"num_hidden_layers": 1, **merged}, "num_hidden_layers")),
        "heads": heads,
        "kv_heads": need(merged, "num_key_value_heads", "num_attention_heads"),
        "head_dim": _head_dim(merged, heads),
        "intermediate": need(merged, "intermediate_size"),
        "vocab": vocab,
        "draft_vocab": need({"draft_vocab_size": vocab, **merged}, "draft_vocab_size"),
        "weight_format": format_from_hf(None, dtype),
        "own_embedding": bool(merged.get("own_embedding", False)),
    }
