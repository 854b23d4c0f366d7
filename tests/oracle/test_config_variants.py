"""Every variant of a config.json either gives transformers' logits or is refused by name.

The silent third case is the one that matters: a key that changes what the model computes and that
the engine does not read.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.build import resolve
from engine.config import DraftSpec, LaunchConfig, TargetSpec
from engine.errors import EngineError
from engine.executor import Order
from engine.timing import NoTimer

_LENGTH = 40
_COMMON = {
    "vocab_size": 151,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 6, "norm_topk_prob": True},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 40, "num_local_experts": 5, "sliding_window": None},
    ),
}


def _write(folder: Path, family: str, values: Mapping[str, Any], **save: Any) -> None:
    """A random checkpoint of the family as transformers saves it."""
    make_config, make_model, sizes = _FAMILIES[family]
    torch.manual_seed(8)
    with torch.inference_mode(mode=False):
        model = make_model(make_config(**(_COMMON | sizes | dict(values)))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.15
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else noise)
    model.to(save.pop("dtype", torch.float32)).save_pretrained(folder, **save)


def _configure(folder: Path, values: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    merged = json.loads(path.read_text()) | dict(values)
    path.write_text(json.dumps({k: v for k, v in merged.items() if v != "absent"}))


def _logits(engine: Any, token_T: torch.Tensor) -> torch.Tensor:
    order = Order(
        token_BT=token_T[None], slot_B=torch.tensor([0]), prefix_B=torch.tensor([0]), want="full"
    )
    logits_TV: torch.Tensor = engine.executor.forward(order, NoTimer())[1].logits_MV
    return logits_TV


def _assert_equal(engine: Any, folder: Path, family: str) -> None:
    token_T = torch.randint(1, 151, (_LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(mode=False):
        model: Any = _FAMILIES[family][1]
        reference = model.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        expected_TV = reference(token_T[None]).logits[0]
    torch.testing.assert_close(_logits(engine, token_T), expected_TV, rtol=1e-4, atol=1e-4)


_WINDOW = {"use_sliding_window": True, "sliding_window": _LENGTH, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("family", "values", "save"),
    [
        pytest.param("qwen3_moe", {"norm_topk_prob": False}, {}, id="qwen3-weights-as-they-are"),
        pytest.param("qwen3_moe", {"tie_word_embeddings": True}, {}, id="qwen3-tied"),
        pytest.param("qwen3_moe", {"sliding_window": 8}, {}, id="qwen3-window-not-in-use"),
        pytest.param("qwen3_moe", _WINDOW, {}, id="qwen3-window-as-long-as-the-context"),
        pytest.param("qwen3_moe", {"num_key_value_heads": 1, "head_dim": 24}, {}, id="qwen3-heads"),
        pytest.param("qwen3_moe", {"num_experts_per_tok": 6}, {}, id="qwen3-all-experts"),
        pytest.param("qwen3_moe", {}, {"dtype": torch.bfloat16}, id="qwen3-bf16"),
        pytest.param("qwen3_moe", {}, {"max_shard_size": "60KB"}, id="qwen3-sharded"),
        pytest.param("mixtral", {"tie_word_embeddings": True}, {}, id="mixtral-tied"),
        pytest.param("mixtral", {"head_dim": 20}, {}, id="mixtral-head-dim"),
        pytest.param("mixtral", {"sliding_window": _LENGTH}, {}, id="mixtral-window"),
        pytest.param("mixtral", {"num_experts_per_tok": 1}, {}, id="mixtral-one-expert"),
        pytest.param("mixtral", {}, {"dtype": torch.float16}, id="mixtral-fp16"),
        pytest.param("mixtral", {}, {"max_shard_size": "60KB"}, id="mixtral-sharded"),
    ],
)
def test_variants_it_computes_equal_transformers(
    local: Callable[..., Any],
    tmp_path: Path,
    family: str,
    values: Mapping[str, Any],
    save: dict[str, Any],
) -> None:
    _write(tmp_path, family, values, **dict(save))
    _assert_equal(local(tmp_path, max_context=_LENGTH), tmp_path, family)


_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module", params=list(_FAMILIES))
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint of each family, to be changed in copies."""
    folder = tmp_path_factory.mktemp(str(request.param))
    _write(folder, request.param, {})
    return folder


def _copy(plain: Path, folder: Path) -> None:
    for path in plain.iterdir():
        (folder / path.name).hardlink_to(path)
    text = (plain / "config.json").read_text()
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"rope_scaling": _LINEAR}, "rope_scaling: rope_type 'linear'", id="linear"),
        pytest.param({"rope_scaling": _YARN}, "rope_scaling: rope_type 'yarn'", id="yarn"),
        pytest.param(
            {"rope_parameters": {**_YARN, "rope_theta": 1e4}}, "rope_type 'yarn'", id="yarn-v5"
        ),
        pytest.param(
            {"rope_scaling": {"rope_theta": 777.0}},
            r"rope_scaling.rope_theta 777: they must be the same",
            id="two-thetas",
        ),
        pytest.param({"rope_parameters": "yarn"}, "rope_parameters must be an object", id="type"),
        pytest.param({"rope_theta": 0}, "rope_theta must be a number above 0", id="theta-0"),
        pytest.param({"rope_theta": True}, "rope_theta must be a number", id="theta-true"),
        pytest.param({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5", id="partial"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config 'fp8': quantized weights are not supported",
            id="fp8",
        ),
        pytest.param(
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types 'linear_attention'",
            id="layer-types",
        ),
        pytest.param(
            {"sliding_window": 39, "use_sliding_window": True},
            "max_context 40 is above the target's sliding_window 39",
            id="window-shorter-than-the-context",
        ),
        pytest.param({"hidden_act": "gelu"}, "hidden_act 'gelu'", id="activation"),
        pytest.param({"rms_norm_eps": float("nan")}, "rms_norm_eps must be 0 or more", id="eps"),
        pytest.param({"head_dim": 15}, "head_dim 15 must be even", id="odd-heads"),
        pytest.param({"head_dim": {"a": 1}}, "head_dim must be int", id="head-dim-type"),
        pytest.param({"num_hidden_layers": 10**12}, "between 1 and 1,024", id="endless-layers"),
        pytest.param(
            {"num_key_value_heads": "absent"}, "'num_key_value_heads' is missing", id="kv"
        ),
        pytest.param({"num_key_value_heads": 4}, "does not divide num_attention_heads 6", id="gqa"),
        pytest.param({"hidden_size": 60}, "has shape .* config.json needs", id="hidden-size"),
    ],
)
def test_variants_it_does_not_compute_are_refused_by_name(
    local: Callable[..., Any],
    plain: Path,
    tmp_path: Path,
    values: Mapping[str, Any],
    message: str,
) -> None:
    _copy(plain, tmp_path)
    _configure(tmp_path, values)
    assert re.search(message, _refused(local, tmp_path))


def _refused(local: Callable[..., Any], folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        local(folder, max_context=_LENGTH)
    assert caught.value.kind == "invalid"
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"attention_bias": True}, "attention_bias True", id="bias"),
        pytest.param({"decoder_sparse_step": 2}, "decoder_sparse_step 2", id="sparse-step"),
        pytest.param({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]", id="dense-layers"),
    ],
)
def test_qwen3_variants_with_other_tensors_are_refused_by_name(
    local: Callable[..., Any], tmp_path: Path, values: Mapping[str, Any], message: str
) -> None:
    _write(tmp_path, "qwen3_moe", values)
    assert re.search(message, _refused(local, tmp_path))


def test_a_head_beside_tied_embeddings_must_be_the_same(
    local: Callable[..., Any], plain: Path, tmp_path: Path
) -> None:
    _copy(plain, tmp_path)
    _configure(tmp_path, {"tie_word_embeddings": True})
    assert "lm_head.weight is not model.embed_tokens.weight" in _refused(local, tmp_path)
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family = json.loads((plain / "config.json").read_text())["model_type"]
    _assert_equal(local(tmp_path, max_context=_LENGTH), tmp_path, family)


def test_a_stale_index_beside_the_whole_file_is_not_read(
    local: Callable[..., Any], plain: Path, tmp_path: Path
) -> None:
    """As transformers has it: model.safetensors holds everything, whatever an index says."""
    _copy(plain, tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    family = json.loads((plain / "config.json").read_text())["model_type"]
    _assert_equal(local(tmp_path, max_context=_LENGTH), tmp_path, family)


def test_a_tensor_in_two_files_is_refused(
    local: Callable[..., Any], plain: Path, tmp_path: Path
) -> None:
    _copy(plain, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(151, 48)}, tmp_path / "b.safetensors")
    assert "lm_head.weight stands in a.safetensors as well" in _refused(local, tmp_path)


@pytest.mark.parametrize("eos", ["</s>", [1, "2"], True, 1.5, -1])
def test_an_end_token_that_is_none_is_refused(
    local: Callable[..., Any], plain: Path, tmp_path: Path, eos: object
) -> None:
    _copy(plain, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    _configure(tmp_path, {"eos_token_id": eos})
    message = "eos_token_id must be a token or a list of them"
    assert message in _refused(local, tmp_path)


def test_a_random_head_of_more_tokens_than_its_target_is_refused(plain: Path) -> None:
    target, draft = TargetSpec(path=str(plain)), DraftSpec(weights="random", vocab=152)
    with pytest.raises(EngineError, match=r"draft.vocab 152 is above the target's vocab_size 151"):
        resolve(LaunchConfig(target=target, draft=draft, max_context=32))
