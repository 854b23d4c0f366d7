"""The launch config: what it accepts, and the line it gives for what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import LaunchConfig, SpeculationConfig
from engine.config_file import load_config, parse_config
from engine.errors import EngineError
from engine.host import machine_fingerprint
from engine.shapes import default_capture_points, named_target_shape

_TARGET = {"shape": "qwen3-30b-a3b", "weights": "random", "layers": 2}
_TREE = {"method": "eagle3", "steps": 3, "topk": 2, "draft_tokens": 6}


def _config(**changes: Any) -> dict[str, Any]:
    return {"target": _TARGET, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"tpp": 2}, r"^tpp: unknown key; did you mean tp\?$", id="unknown-key"),
        pytest.param(
            {"host": {"sockets": 2}},
            "host.sockets: unknown key; known: numa_bind, threads",
            id="unknown-key-below",
        ),
        pytest.param({"timeout_s": float("inf")}, "timeout_s: .*finite number", id="no-watchdog"),
        pytest.param({"host": {"threads": 100_000}}, "threads: .*equal to 1024", id="threads"),
        pytest.param({"environment": {"A=B": "1"}}, "environment.A=B.*match pattern", id="name"),
        pytest.param({"environment": {"": "1"}}, "environment.*match pattern", id="no-name"),
        pytest.param({"environment": {"A": "\0"}}, "environment.A: .*match pattern", id="nul"),
        pytest.param({"target": "tiny"}, r"^target: must be a mapping \(got 'tiny'\)$", id="text"),
        pytest.param(
            {"a1": 1, "b2": 2, "c3": 3, "d4": 4, "e5": 5}, "; and 2 more$", id="many-mistakes"
        ),
        pytest.param({"tp": "2"}, r"tp: Input should be a valid integer.*\(got '2'\)", id="type"),
        pytest.param({"tp": 0}, "tp: .*greater than or equal to 1", id="zero-ranks"),
        pytest.param({"target": {}}, "target: give either path", id="no-target"),
        pytest.param({"target": {"shape": "x"}}, "add weights: random", id="shape-no-weights"),
        pytest.param({"target": {"path": "a", "layers": 2}}, "go with shape", id="path-layers"),
        pytest.param(
            {"nccl": {"min_channels": 8, "max_channels": 4}},
            "nccl: min_channels 8 is above max_channels 4",
            id="channels",
        ),
        pytest.param(
            {"collectives": {"backend": "nccl"}},
            "collectives.backend 'nccl' does not run on device 'cpu'; there: gloo, one_shot",
            id="nccl-on-cpu",
        ),
        pytest.param(
            {"collectives": {"backend": "two_shot"}, "device": "cuda"},
            "'two_shot' does not run on device 'cuda'; there: nccl, one_shot, gloo",
            id="two-shot-on-gpu",
        ),
        pytest.param(
            {
                "collectives": {"backend": "gloo"},
                "device": "cuda",
                "cuda_graph": {"prefill": True},
            },
            "goes through the host, which no CUDA graph can: set all of cuda_graph false",
            id="gloo-under-graphs",
        ),
        pytest.param(
            {"devices": [0]}, r"devices \[0\]: there are none on device", id="cpu-devices"
        ),
        pytest.param(
            {"devices": [0], "tp": 2, "device": "cuda"},
            r"devices \[0\]: 1 GPUs for tp 2; one a rank",
            id="too-few-devices",
        ),
        pytest.param(
            {"devices": [1, 1], "tp": 2, "device": "cuda"},
            r"devices \[1, 1\]: NCCL takes one rank a GPU",
            id="nccl-on-one-gpu",
        ),
        pytest.param(
            {
                "devices": [1, 1],
                "tp": 2,
                "device": "cuda",
                "collectives": {"backend": "one_shot"},
                "cuda_graph": {"decode": True},
            },
            r"devices \[1, 1\]: ranks that share a GPU .* set cuda_graph.prefill false",
            id="prefill-graph-on-one-gpu",
        ),
        pytest.param(
            {"devices": [-1], "device": "cuda"},
            r"devices.0: .*greater than or equal to 0",
            id="negative-device",
        ),
        pytest.param({"cuda_graph": {"verify": True}}, "no CUDA graphs on device", id="graphs"),
        pytest.param(
            {"schedule": [{"max_concurrency": 1, "speculation": _TREE}]},
            "schedule speculates, but no draft is given",
            id="no-draft",
        ),
        pytest.param(
            {"schedule": [{"max_concurrency": 1, "speculation": _TREE | {"draft_tokens": 12}}]},
            r"schedule.0.speculation: draft_tokens 12 \(root included\) must be between 2 and 11",
            id="impossible-tree",
        ),
        pytest.param(
            {"schedule": [{"max_concurrency": 1, "speculation": _TREE | {"topk": 1}}]},
            r"draft_tokens 6: a chain of 3 steps has 4",
            id="impossible-chain",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        parse_config(_config(**changes))
    assert caught.value.kind == "invalid"
    assert "\n" not in caught.value.message


def test_ranks_may_share_a_gpu_through_the_host() -> None:
    config = parse_config(
        _config(tp=2, device="cuda", devices=[3, 3], collectives={"backend": "gloo"})
    )
    assert [config.device_of(rank) for rank in range(2)] == [3, 3]
    assert parse_config(_config(tp=2, device="cuda")).device_of(1) == 1


@pytest.mark.parametrize(
    ("graphs", "captured"),
    [({}, False), ({"decode": True}, True), ({"decode": True, "prefill": False}, False),
     ({"prefill": True}, True)],
)  # fmt: skip
def test_prefill_is_captured_with_decode_unless_switched_alone(
    graphs: dict[str, bool], captured: bool
) -> None:
    config = parse_config(_config(device="cuda", cuda_graph=graphs))
    assert config.cuda_graph.captures_prefill is captured


def test_a_whole_best_config_is_read_by_its_engine_block_only() -> None:
    block = _config(tp=2, draft={"weights": "random"}, schedule=[])
    document = {
        "engine": block,
        "evidence": {"tokens_per_s": 12.0, "machine_fingerprint": machine_fingerprint()},
        "sglang": {"command": "python -m sglang.launch_server"},
    }
    assert parse_config(document) == parse_config(block)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda c, f: {"engine": c, "machine_fingerprint": f}, id="top-level"),
        pytest.param(
            lambda c, f: {"engine": c, "evidence": {"machine_fingerprint": f}}, id="evidence"
        ),
        pytest.param(lambda c, f: {"engine": {**c, "machine_fingerprint": f}}, id="engine-block"),
    ],
)
def test_a_file_of_another_machine_is_refused_unless_allowed(
    wrap: Callable[[dict[str, Any], str], dict[str, Any]],
) -> None:
    foreign = wrap(_config(), "0123456789ab")
    with pytest.raises(EngineError, match=r"'0123456789ab' is another machine.*--allow-other"):
        parse_config(foreign)
    assert parse_config(foreign, allow_other_machine=True).tp == 1
    assert parse_config(wrap(_config(), machine_fingerprint())).tp == 1


def test_the_schedule_picks_by_load_and_unquoted_off_is_off() -> None:
    text = """
    target: {shape: qwen3-30b-a3b, weights: random}
    draft: {weights: random}
    schedule:
      - {max_concurrency: 8, speculation: {method: eagle3, steps: 2, topk: 1}}
      - {max_concurrency: 2, speculation: {method: eagle3, steps: 3, topk: 2, draft_tokens: 6}}
      - {max_concurrency: 16, speculation: {method: off}}
    """
    config = parse_config(yaml.safe_load(text))
    picked = {n: config.speculation_at(n) for n in (1, 2, 3, 8, 9, 99)}
    assert [picked[n].num_tokens for n in (1, 2, 3, 8, 9, 99)] == [6, 6, 3, 3, 1, 1]
    assert picked[9].method == "off"


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "best.yaml"
    file.write_text("engine:\n  target: {path: model}\n")
    assert load_config(file).target.path == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [", "not YAML", id="broken"),
        pytest.param("- 1", "must be a mapping", id="list"),
        pytest.param("engine: 3", "engine: must be a mapping, got 3", id="scalar-block"),
        pytest.param("", "must be a mapping with the engine's settings", id="empty"),
        pytest.param(
            "sglang: {}\nvllm: {}",
            "neither an engine: block nor .* found: sglang, vllm",
            id="foreign",
        ),
        pytest.param(
            "target: {path: a}\ntp: 2\ntp: 4",
            r"best\.yaml: line 3: tp is given twice \(also in line 2\)",
            id="twice",
        ),
        pytest.param(
            "target: {path: a}\ntp: two", r"best\.yaml: tp: .* valid integer", id="names-the-file"
        ),
        pytest.param("? [a, b]\n: 1", "not YAML", id="key-is-a-list"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "best.yaml"
    file.write_text(text)
    with pytest.raises(EngineError, match=message) as caught:
        load_config(file)
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


def test_a_config_survives_the_way_to_the_worker() -> None:
    config = parse_config(
        _config(
            draft={"weights": "random"},
            schedule=[{"max_concurrency": 4, "speculation": _TREE}],
            nccl={"algo": "auto", "proto": "LL"},
        )
    )
    assert LaunchConfig.model_validate_json(config.model_dump_json()) == config


def test_shapes_are_found_by_name_and_cut_to_layers() -> None:
    whole = named_target_shape("qwen3-30b-a3b", None)
    assert (whole.layers, whole.experts, whole.kv_heads) == (48, 128, 4)
    assert named_target_shape("qwen3-30b-a3b", 8).layers == 8
    with pytest.raises(EngineError, match="layers 49 is above the 48 layers"):
        named_target_shape("qwen3-30b-a3b", 49)
    with pytest.raises(
        EngineError, match=r"'qwen9' is neither a path nor known; known: .*qwen3-30"
    ):
        named_target_shape("qwen9", None)


def test_default_capture_points_are_those_of_published_heads() -> None:
    """Qwen3-235B-A22B heads list outputs of layers 1, 46, 90 of 94: inputs of 2, 47, 91."""
    assert default_capture_points(94) == (2, 47, 91)
    assert default_capture_points(36) == (2, 18, 33)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x7fELF\x02\xd0\xff", id="binary"),
        pytest.param(b"a: " + b"[" * 2000 + b"]" * 2000, id="nested-too-deeply"),
    ],
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "best.yaml"
    file.write_bytes(content)
    with pytest.raises(EngineError, match=r"best\.yaml: not YAML"):
        load_config(file)


def test_simulated_measurements_are_refused_as_such() -> None:
    document = {"engine": {"target": {"path": "x"}}, "machine_fingerprint": "sim:0123456789ab"}
    with pytest.raises(EngineError, match=r"sim:0123456789ab.*simulated measurements"):
        parse_config(document)
    assert parse_config(document, allow_other_machine=True).target.path == "x"


@pytest.mark.parametrize(
    ("rates", "steps"),
    [
        pytest.param([0.8, 0.9, 0.1], 3, id="rising"),
        pytest.param([0.8, 0.6], 3, id="too-few"),
        pytest.param([1.2, 0.6, 0.1], 3, id="above-one"),
    ],
)
def test_impossible_synthetic_acceptance_is_named(rates: list[float], steps: int) -> None:
    with pytest.raises(ValueError, match=r"synthetic_acceptance \[.*\] must be 3 rates"):
        SpeculationConfig(method="eagle3", steps=steps, topk=1, synthetic_acceptance=tuple(rates))


def test_synthetic_acceptance_travels_as_json() -> None:
    spec = SpeculationConfig(method="eagle3", steps=2, topk=1, synthetic_acceptance=(0.5, 0.25))
    assert SpeculationConfig.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="goes with speculation"):
        SpeculationConfig(synthetic_acceptance=(0.5,))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        pytest.param({"path": "x", "shape": "y"}, "shape and vocab go with", id="path-and-shape"),
        pytest.param(
            {"weights": "random", "shape": "y", "vocab": 9}, "give either shape", id="both-sizes"
        ),
    ],
)
def test_a_draft_names_its_sizes_once(draft: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_config({"target": {"path": "t"}, "draft": draft})


def test_a_random_head_takes_a_named_shape(tmp_path: Path) -> None:
    from engine.build import resolve

    target = {"shape": "qwen3-30b-a3b", "weights": "random", "layers": 4}
    config = parse_config({"target": target, "draft": {"weights": "random"}})
    shape = resolve(config).draft
    assert shape is not None
    assert (shape.hidden, shape.intermediate, shape.draft_vocab) == (2048, 6144, 32_000)
    missing = {"weights": "random", "shape": str(tmp_path / "none")}
    with pytest.raises(EngineError, match=r"draft.shape .* neither a config.json"):
        resolve(parse_config({"target": target, "draft": missing}))


def test_a_slice_with_random_weights_is_called_one() -> None:
    from engine.api import Engine
    from engine.build import resolve

    config = parse_config(
        {
            "target": {"shape": "mixtral-8x7b", "weights": "random", "layers": 2},
            "draft": {"weights": "random"},
        }
    )
    engine = Engine.__new__(Engine)
    engine.config, engine.shapes = config, resolve(config)
    assert engine.notes[0] == "a slice: 2 of 32 layers"
    assert len(engine.notes) == 3
