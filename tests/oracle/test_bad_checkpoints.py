"""Every broken checkpoint is refused with one line that names the file or tensor."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import known_acceptance
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError
from engine.results import Request

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A fresh copy to break."""
    known_acceptance.make(tmp_path, known_acceptance.SMALL)
    return tmp_path


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def _configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def _refused(local: Callable[..., Any], pair: Path) -> str:
    with pytest.raises(EngineError) as caught:
        local(pair / "target", pair / "eagle3", max_context=32)
    assert caught.value.kind == "invalid"
    assert "\n" not in caught.value.message
    return caught.value.message


_O = "model.layers.1.self_attn.o_proj.weight"
_DRAFT_UP = "midlayer.mlp.up_proj.weight"
_GATE = "model.layers.2.mlp.experts.3.gate_proj.weight"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        pytest.param("target", lambda t: t.pop(_O), f"missing tensor {_O}", id="missing"),
        pytest.param(
            "target",
            lambda t: t.update({"model.layers.9.extra": torch.zeros(2)}),
            "unknown tensor model.layers.9.extra",
            id="unknown",
        ),
        pytest.param(
            "target",
            lambda t: t.update({_GATE: t[_GATE][:8].clone()}),
            rf"{_GATE} has shape \[8, 64\], config.json needs \[16, 64\]",
            id="shape",
        ),
        pytest.param(
            "target",
            lambda t: t.update({_O: t[_O].to(torch.int8)}),
            f"{_O} has type I8; known here: BF16, F16, F32",
            id="dtype",
        ),
        pytest.param("eagle3", lambda t: t.pop("fc.weight"), "missing tensor fc.weight", id="fc"),
        pytest.param("eagle3", lambda t: t.pop("d2t"), "missing tensor d2t", id="d2t"),
        pytest.param(
            "eagle3",
            lambda t: t.update({"d2t": t["d2t"] + 400}),
            "d2t maps outside the target's 300 tokens",
            id="d2t-outside",
        ),
        pytest.param(
            "eagle3",
            lambda t: t.update({"t2d": ~t["t2d"]}),
            "t2d and d2t name different draft tokens",
            id="t2d",
        ),
        pytest.param(
            "eagle3",
            lambda t: t["t2d"].fill_(True),
            "t2d and d2t name different draft tokens",
            id="t2d-names-more",
        ),
        pytest.param(
            "eagle3",
            lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1),
            "d2t maps two draft tokens to token",
            id="d2t-twice",
        ),
        pytest.param(
            "eagle3",
            lambda t: t[_DRAFT_UP].__setitem__((3, 5), float("nan")),
            "mlp.up_proj of the EAGLE-3 head: NaN or infinite as torch.float32",
            id="nan-in-the-head",
        ),
        pytest.param(
            "eagle3",
            lambda t: t.update({"fc.weight": torch.tensor(1.0)}),
            "belongs to another target: fc takes 1 values",
            id="fc-a-number",
        ),
        pytest.param(
            "eagle3",
            lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}),
            "unknown tensor layers.1.mlp.up_proj.weight",
            id="second-layer",
        ),
        pytest.param(
            "eagle3",
            lambda t: t.update({"fc.weight": torch.zeros(64, 96)}),
            "belongs to another target: fc takes 96 values, .* are 192",
            id="fc-of-another-target",
        ),
    ],
)
def test_wrong_tensors_are_named(
    local: Callable[..., Any],
    pair: Path,
    part: str,
    change: Callable[[Tensors], object],
    message: str,
) -> None:
    _edit(pair / part, change)
    assert re.search(message, _refused(local, pair))


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        pytest.param(
            "target", {"num_experts": None}, "required key 'num_experts' is missing", id="missing"
        ),
        pytest.param(
            "target", {"hidden_size": "64"}, "hidden_size must be int, got '64'", id="type"
        ),
        pytest.param("target", {"model_type": "llama"}, "model_type 'llama'", id="architecture"),
        pytest.param("target", {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'", id="rope"),
        pytest.param("target", {"mlp_only_layers": [0]}, "mlp_only_layers", id="dense-layers"),
        pytest.param(
            "eagle3",
            {"vocab_size": 5000},
            "belongs to another target: vocab_size 5000, hidden size 64; .* 300 and 64",
            id="vocab-of-another-target",
        ),
        pytest.param(
            "eagle3",
            {"target_hidden_size": 128},
            "belongs to another target: .* hidden size 128",
            id="width-of-another-target",
        ),
        pytest.param("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers 2", id="two-layers"),
        pytest.param("eagle3", {"num_key_value_heads": 3}, "does not divide", id="draft-heads"),
        pytest.param(
            "eagle3", {"draft_vocab_size": 301}, "is above vocab_size 300", id="draft-vocab"
        ),
        pytest.param(
            "eagle3",
            {"rope_scaling": {"rope_type": "llama3"}},
            "rope_type 'llama3'",
            id="draft-rope",
        ),
        pytest.param(
            "eagle3",
            {"eagle_config": {"use_last_layernorm": False}},
            "eagle_config.use_last_layernorm False is not supported",
            id="head-without-its-last-norm",
        ),
        pytest.param("eagle3", {"norm_output": True}, "norm_output True", id="normed-output"),
        pytest.param(
            "eagle3",
            {"norm_before_residual": "false"},
            "norm_before_residual must be bool",
            id="flag-as-text",
        ),
        pytest.param(
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            r"three layers of a 3-layer target, got \[0, 1, 3\]",
            id="layer-ids-as-outputs",
        ),
        pytest.param("eagle3", {"architectures": ["X"]}, "is no EAGLE-3 head", id="no-eagle3"),
        pytest.param(
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]},
            "three layers of a 3-layer target",
            id="layer-ids",
        ),
    ],
)
def test_wrong_configs_are_named(
    local: Callable[..., Any], pair: Path, part: str, values: dict[str, object], message: str
) -> None:
    _configure(pair / part, **values)
    text = _refused(local, pair)
    assert re.search(message, text)
    assert "config.json" in text


def test_a_truncated_file_is_named(local: Callable[..., Any], pair: Path) -> None:
    path = pair / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"{path}: truncated" in _refused(local, pair)


def test_a_missing_folder_is_named(local: Callable[..., Any], pair: Path) -> None:
    with pytest.raises(EngineError, match=r"target.path '.*nowhere': no such folder"):
        local(pair / "nowhere")


def _shard(folder: Path) -> None:
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({n: tensors[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_checkpoints_load_alike(
    local: Callable[..., Any], pair: Path, small_pair: Path
) -> None:
    _shard(pair / "target")
    request = [Request(prompt_ids=(4, 5), max_new_tokens=9, ignore_eos=True)]
    from engine.config import SpeculationConfig

    tokens = [
        local(folder / "target", max_context=32)
        .runner.run(request, SpeculationConfig(), concurrency=1)
        .requests[0]
        .token_ids
        for folder in (pair, small_pair)
    ]
    assert tokens[0] == tokens[1]


def test_a_missing_shard_is_named(local: Callable[..., Any], pair: Path) -> None:
    _shard(pair / "target")
    (pair / "target" / "model-1.safetensors").unlink()
    assert "names model-1.safetensors, which is not there" in _refused(local, pair)


def test_a_head_under_layers_0_with_its_own_embedding_loads(
    local: Callable[..., Any], pair: Path
) -> None:
    """The other spelling of the public format; a scaled embedding must show in the draft."""

    def respell(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        target = load_file(pair / "target" / "model.safetensors")
        tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"] * 3.0

    _edit(pair / "eagle3", respell)
    engine = local(pair / "target", pair / "eagle3", max_context=32)
    target_embed = engine.executor.model.weights.embed_VH
    assert torch.equal(engine.draft.weights.embed_VH, target_embed * 3.0)


def test_nan_logits_fail_naming_cycle_rank_and_request(
    local: Callable[..., Any], pair: Path
) -> None:
    """One poisoned embedding: the text runs into it after some steps."""
    successor = known_acceptance.successors(known_acceptance.SMALL)
    bad = 7
    for _ in range(4):
        bad = int(successor[bad])
    _edit(pair / "target", lambda t: t["model.embed_tokens.weight"][bad].fill_(float("nan")))
    from engine.config import SpeculationConfig

    engine = local(pair / "target", max_context=32)
    request = [Request(prompt_ids=(7,), max_new_tokens=20, ignore_eos=True)]
    with pytest.raises(EngineError, match=r"NaN logits at cycle 3 \(decode, requests 0\).*rank 0"):
        engine.runner.run(request, SpeculationConfig(), concurrency=1)
