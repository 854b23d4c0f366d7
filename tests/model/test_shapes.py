"""Shapes: sizes and bytes of the 14 models against published figures, and bad configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.formats import bytes_per_weight, format_from_hf
from model.routing import uniform_experts
from model.shapes import DraftShape, ModelShape

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = json.loads((ROOT / "tests/data/model_shapes.json").read_text())["models"]
NAMES = sorted(FIGURES)


def load(name: str) -> ModelShape:
    return ModelShape.load(ROOT / "studies/shapes" / name)


def test_every_shape_folder_has_figures() -> None:
    folders = {p.parent.name for p in (ROOT / "studies/shapes").glob("*/config.json")}
    assert folders == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_equal_published_figures(name: str) -> None:
    shape, want = load(name), FIGURES[name]
    assert shape.moe_layers == want["moe_layers"]
    assert shape.expert_params / 1e6 == pytest.approx(want["per_expert_m"], abs=0.006)
    assert shape.attention_params / 1e6 == pytest.approx(want["attention_per_layer_m"], abs=0.006)
    assert shape.routed_params / 1e9 == pytest.approx(want["routed_b"], abs=0.006)
    assert shape.other_params / 1e9 == pytest.approx(want["other_b"], abs=0.006)
    assert shape.total_params / 1e9 == pytest.approx(want["total_b"], abs=0.06)
    assert shape.active_params / 1e9 == pytest.approx(want["active_b"], abs=0.006)
    assert shape.kv_elements_per_token_layer == want["kv_elements"]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_equal_published_figures(name: str) -> None:
    shape, want = load(name), FIGURES[name]
    assert shape.expert_format == want["native_format"]
    native = want["native_format"]
    assert shape.expert_bytes / 1e6 == pytest.approx(want["expert_mb"][native], abs=0.006)
    assert shape.weight_bytes / 1e9 == pytest.approx(want["weights_gb"][native], abs=0.06)
    for weight_format, megabytes in want["expert_mb"].items():
        bytes_ = shape.expert_params * bytes_per_weight(weight_format)
        assert bytes_ / 1e6 == pytest.approx(megabytes, abs=0.006)


@pytest.mark.parametrize("name", NAMES)
def test_messages_and_distinct_experts_equal_published_figures(name: str) -> None:
    shape, want = load(name), FIGURES[name]
    assert shape.allreduces_per_forward == want["allreduces"]
    for tokens, bytes_ in want["allreduce_bytes"].items():
        assert int(tokens) * shape.allreduce_bytes_per_token == bytes_
    for tokens, distinct in want["distinct_experts"].items():
        got = float(uniform_experts(int(tokens), shape.experts, shape.experts_per_token))
        assert got == pytest.approx(distinct, abs=0.006)


def test_hybrid_and_sliding_layers_are_counted() -> None:
    assert load("qwen3.5-397b-a17b").linear_attention_layers == 45
    gpt_oss = load("gpt-oss-120b")
    assert (gpt_oss.sliding_layers, gpt_oss.sliding_window) == (18, 128)


def base_config() -> dict[str, Any]:
    path = ROOT / "studies/shapes/qwen3-30b-a3b/config.json"
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model_type": "rwkv"}, "model_type 'rwkv' is unknown", id="family"),
        pytest.param({"num_experts": None}, "num_experts is missing", id="missing-size"),
        pytest.param({"hidden_size": 2048.5}, "hidden_size 2048.5", id="fraction"),
        pytest.param({"num_experts_per_tok": 200}, "experts_per_token 200", id="top-k-above-E"),
        pytest.param({"torch_dtype": "int3"}, "torch_dtype 'int3'", id="dtype"),
        pytest.param(
            {"quantization_config": {"quant_method": "mystery"}}, "'mystery' is unknown", id="quant"
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 64}},
            "3 bits in groups of 64",
            id="group",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_hf_config({**base_config(), **change})


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json there"):
        ModelShape.load(tmp_path / "nothing")


def test_a_draft_of_another_target_is_refused() -> None:
    target = load("qwen3-30b-a3b")
    draft = {
        "hidden_size": 2048, "target_hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936,
        "draft_vocab_size": 32000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with pytest.raises(ValueError, match="belongs to another target"):
        DraftShape.from_hf_config(draft, target=target)
    good = DraftShape.from_hf_config({**draft, "target_hidden_size": 2048}, target=target)
    assert good.fuse_params == 3 * 2048 * 2048
    assert good.head_params == 2048 * 32000


@pytest.mark.parametrize(
    ("config", "want"),
    [
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
        pytest.param({"quant_method": "fp8"}, "fp8"),
        pytest.param({"quant_method": "mxfp4"}, "mxfp4"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        pytest.param({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_g128"),
        pytest.param({"quant_method": "awq", "bits": 4, "group_size": 32}, "int4_g32"),
        pytest.param(None, "bf16"),
    ],
)
def test_quantisation_is_read_from_its_spellings(config: dict[str, Any] | None, want: str) -> None:
    assert format_from_hf(config, "bfloat16") == want
