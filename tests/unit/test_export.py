"""The best-config export: schedule, environment, command lines, tuner CSV, evidence."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from autotune.export import (
    Evidence,
    LaunchOptions,
    LevelBest,
    SizeRule,
    Throughput,
    choose_levels,
    tuner_csv,
    write_best,
)
from autotune.export_servers import ServerTarget, sglang_command, vllm_command
from autotune.launch import launch_mapping, nccl_environment
from autotune.schemas import Study
from model.spec import Knobs, Scalar

OFF = {"speculation.method": "off", "parallel.tp": 2, "collectives.backend": "nccl"}
CHAIN = {**OFF, "speculation.method": "eagle3", "speculation.steps": 2, "speculation.topk": 1}
TREE = {**CHAIN, "speculation.steps": 3, "speculation.topk": 4, "speculation.draft_tokens": 8}
STORY = {
    "nccl.proto": "LL",
    "nccl.algo": "ring",
    "nccl.p2p_level": "SYS",
    "nccl.max_channels": 16,
    "nccl.buffsize": 16777216,
    "nccl.nthreads": 512,
}
WHERE = ServerTarget(
    target="/m/t", draft="/m/d", dtype="bfloat16", max_context=4096, max_concurrency=8
)
OPTIONS = LaunchOptions(device="cuda", dtype="bfloat16", max_context=4096, timeout_s=60.0)
EVIDENCE = Evidence(
    study_id="s-1", machine_fingerprint="abc", noise_floor=0.02, database="sqlite:///x.db"
)


def study(**changes: object) -> Study:
    values: dict[str, object] = {
        "name": "s",
        "target": {"path": "/m/t"},
        "draft": {"path": "/m/d"},
        "workload": {
            "prompts": "builtin:code",
            "input_len": 16,
            "output_len": 8,
            "concurrency": [1, 8],
        },
        "backend": {"kind": "engine"},
        "space": {"speculation.method": ["off"]},
        "budget": {"measured_trials": 1},
    }
    return Study.model_validate(values | changes)


def level(
    values: dict[str, Scalar], speed: float, *, concurrency: int = 1, baseline: float = 100.0
) -> LevelBest:
    def throughput(value: float) -> Throughput:
        return Throughput(tokens_per_s=value, low=value * 0.99, high=value * 1.01, num_repeats=5)

    return LevelBest(
        concurrency=concurrency,
        knobs=Knobs.of(values),
        trial=7,
        measured=throughput(speed),
        baseline=throughput(baseline),
        baseline_trial=0,
        output_check="exact",
    )


def flag(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
@pytest.mark.parametrize("values", [CHAIN, TREE], ids=["chain", "tree"])
def test_sglang_gets_all_three_speculative_flags(version: str, values: dict[str, Scalar]) -> None:
    knobs = Knobs.of(values)
    arguments = sglang_command(knobs, WHERE, version).arguments
    assert flag(arguments, "--speculative-num-steps") == str(knobs.steps)
    assert flag(arguments, "--speculative-eagle-topk") == str(knobs.topk)
    assert flag(arguments, "--speculative-num-draft-tokens") == str(knobs.draft_tokens)
    assert flag(arguments, "--speculative-draft-model-path") == "/m/d"


def test_sglang_without_speculation_gets_no_speculative_flag() -> None:
    arguments = sglang_command(Knobs.of(OFF), WHERE, "0.5.23").arguments
    assert not [argument for argument in arguments if argument.startswith("--speculative")]


@pytest.mark.parametrize(
    ("version", "graphed", "present", "absent"),
    [
        pytest.param("0.5.9", True, "--cuda-graph-max-bs", "--disable-cuda-graph", id="059-on"),
        pytest.param("0.5.9", False, "--disable-cuda-graph", "--cuda-graph-max-bs", id="059-off"),
        pytest.param(
            "0.5.23", True, "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs", id="0523-on"
        ),
        pytest.param(
            "0.5.23", False, "--cuda-graph-backend-decode", "--disable-cuda-graph", id="0523-off"
        ),
    ],
)
def test_sglang_graph_flags_are_those_of_the_version(
    version: str, graphed: bool, present: str, absent: str
) -> None:
    knobs = Knobs.of({**CHAIN, "cuda_graph.verify": graphed, "cuda_graph.draft": graphed})
    arguments = sglang_command(knobs, WHERE, version).arguments
    assert present in arguments
    assert absent not in arguments


def test_a_draft_graph_that_differs_from_the_verify_graph_is_noted() -> None:
    knobs = Knobs.of({**CHAIN, "cuda_graph.verify": True})
    assert any("draft" in note for note in sglang_command(knobs, WHERE, "0.5.9").notes)


def test_a_capture_size_of_vllm_counts_tokens_not_requests() -> None:
    knobs = Knobs.of({**CHAIN, "cuda_graph.verify": True, "cuda_graph.draft": True})
    arguments = vllm_command(knobs, WHERE, "0.33.0").arguments
    config = json.loads(flag(arguments, "--compilation-config"))
    assert config["cudagraph_capture_sizes"] == [3, 6, 9, 12, 15, 18, 21, 24]
    speculation = json.loads(flag(arguments, "--speculative-config"))
    assert speculation == {"method": "eagle3", "model": "/m/d", "num_speculative_tokens": 2}


@pytest.mark.parametrize("version", ["0.16.0", "0.33.0"])
def test_vllm_says_that_it_has_no_such_tree(version: str) -> None:
    command = vllm_command(Knobs.of(TREE), WHERE, version)
    config = json.loads(flag(command.arguments, "--speculative-config"))
    assert config["num_speculative_tokens"] == 3
    assert any("chain of 3" in note and "8 tokens" in note for note in command.notes)


def test_an_unknown_server_version_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"SGLang 0\.4: flags are known for 0\.5\.9, 0\.5\.23"):
        sglang_command(Knobs.of(OFF), WHERE, "0.4")


def test_nccl_variables_are_spelled_as_nccl_reads_them() -> None:
    assert nccl_environment(Knobs.of({**OFF, **STORY})) == {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "LL",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
        "NCCL_P2P_LEVEL": "SYS",
    }
    assert nccl_environment(Knobs.of(OFF)) == {}
    assert nccl_environment(Knobs.of({**OFF, **STORY, "collectives.backend": "gloo"})) == {}


def test_one_start_must_serve_every_level() -> None:
    tuned = Knobs.of({**OFF, "nccl.proto": "LL"})
    with pytest.raises(ValueError, match=r"nccl\.proto LL and auto"):
        launch_mapping(
            study(),
            [(1, tuned), (8, Knobs.of(OFF))],
            device="cuda",
            dtype="bfloat16",
            max_context=64,
            timeout_s=1.0,
        )


def test_levels_come_from_the_group_with_the_best_product_of_speedups() -> None:
    tuned = {"nccl.proto": "LL"}
    candidates = [
        level(TREE, 200, concurrency=1),
        level(OFF, 100, concurrency=8),
        level({**TREE, **tuned}, 180, concurrency=1),
        level({**CHAIN, **tuned}, 130, concurrency=8),
        # best of all, but this group was never measured at 8
        level({**TREE, "nccl.proto": "Simple"}, 900, concurrency=1),
    ]
    chosen = choose_levels(candidates)
    assert [(c.concurrency, c.measured.tokens_per_s) for c in chosen] == [(1, 180), (8, 130)]


def test_levels_are_served_with_the_graphs_they_were_measured_with() -> None:
    graphed = {"cuda_graph.verify": True, "cuda_graph.draft": True}
    candidates = [
        level({**TREE, **graphed}, 200, concurrency=1),
        level(TREE, 190, concurrency=1),
        level({**CHAIN, **graphed}, 110, concurrency=8),
        # fastest at 8, but without the graphs that win at 1
        level(CHAIN, 115, concurrency=8),
    ]
    chosen = choose_levels(candidates)
    assert [c.measured.tokens_per_s for c in chosen] == [200, 110]
    mapping = launch_mapping(
        study(),
        [(c.concurrency, c.knobs) for c in chosen],
        device="cuda",
        dtype="bfloat16",
        max_context=64,
        timeout_s=1.0,
    )
    assert mapping["cuda_graph"] == {
        "decode": False,
        "draft": True,
        "verify": True,
        "extend": False,
        "prefill": False,
    }


def test_a_plain_level_decides_the_decode_graph() -> None:
    speculative = Knobs.of({**CHAIN, "cuda_graph.decode": True, "cuda_graph.verify": True})
    mapping = launch_mapping(
        study(),
        [(1, speculative), (8, Knobs.of(OFF))],
        device="cuda",
        dtype="bfloat16",
        max_context=64,
        timeout_s=1.0,
    )
    assert mapping["cuda_graph"]["decode"] is False
    assert mapping["cuda_graph"]["verify"] is True


def test_the_yaml_holds_schedule_environment_commands_and_evidence(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    levels = [level({**TREE, **STORY}, 150), level({**OFF, **STORY}, 101, concurrency=8)]
    written = write_best(path, study(), levels, OPTIONS, EVIDENCE)
    assert written == (path,)
    best = yaml.safe_load(path.read_text())
    assert best["machine_fingerprint"] == "abc"
    assert best["engine"]["schedule"] == [
        {
            "max_concurrency": 1,
            "speculation": {"method": "eagle3", "steps": 3, "topk": 4, "draft_tokens": 8},
        },
        {"max_concurrency": 8, "speculation": {"method": "off"}},
    ]
    assert best["engine"]["tp"] == 2
    assert best["engine"]["nccl"]["buffsize"] == 16777216
    assert best["nccl_environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert best["nccl_tuner"] is None
    first, second = best["evidence"]["levels"]
    assert (first["tokens_per_s"]["low"], first["speedup"]) == (148.5, 1.5)
    assert (first["above_noise_floor"], second["above_noise_floor"]) == (True, False)
    sglang = best["equivalent"]["sglang"]["levels"]
    assert [entry["max_concurrency"] for entry in sglang] == [1, 8]
    command = shlex.split(sglang[0]["commands"][0]["command"])
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    assert sglang[0]["commands"][0]["environment"]["NCCL_PROTO"] == "LL"


def test_a_best_that_never_speculates_loads_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write_best(path, study(), [level(OFF, 100)], OPTIONS, EVIDENCE)
    assert yaml.safe_load(path.read_text())["engine"]["draft"] is None
    write_best(path, study(), [level(CHAIN, 100)], OPTIONS, EVIDENCE)
    assert yaml.safe_load(path.read_text())["engine"]["draft"] == {"path": "/m/d"}


def test_levels_with_the_same_knobs_are_one_command(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    levels = [level(CHAIN, 150), level(CHAIN, 130, concurrency=8)]
    write_best(path, study(), levels, OPTIONS, EVIDENCE)
    entries = yaml.safe_load(path.read_text())["equivalent"]["vllm"]["levels"]
    assert [entry["max_concurrency"] for entry in entries] == [8]


def test_random_weights_have_no_equivalent_command(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    shape = study(target={"shape": "kimi-k2.5", "weights": "random", "layers": 2})
    write_best(path, shape, [level(OFF, 100)], OPTIONS, EVIDENCE)
    best = yaml.safe_load(path.read_text())
    assert "random weights" in best["equivalent"]["sglang"]["unavailable"]
    assert best["engine"]["target"] == {"shape": "kimi-k2.5", "weights": "random", "layers": 2}


def test_size_rules_become_a_tuner_file_beside_the_yaml(tmp_path: Path) -> None:
    rules = [
        SizeRule(min_bytes=65537, max_bytes=4194304, algo="ring", proto="Simple", channels=4),
        SizeRule(min_bytes=0, max_bytes=65536, algo="tree", proto="LL"),
    ]
    path = tmp_path / "best.yaml"
    _, csv = write_best(path, study(), [level(OFF, 100)], OPTIONS, EVIDENCE, rules)
    assert csv.read_text().splitlines()[1:] == [
        "allreduce,0,65536,tree,ll,-1,1,2,-1,-1",
        "allreduce,65537,4194304,ring,simple,4,1,2,-1,-1",
    ]
    tuner = yaml.safe_load(path.read_text())["nccl_tuner"]
    assert tuner["environment"] == {"NCCL_TUNER_CONFIG_FILE": csv.name}


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        pytest.param([(0, 10, "nvls", "LL")], "nvls/LL", id="unknown-algorithm"),
        pytest.param([(0, 10, "ring", "LL"), (10, 20, "ring", "LL")], "overlaps", id="overlap"),
        pytest.param([(10, 0, "ring", "LL")], "10..0 bytes is empty", id="empty"),
    ],
)
def test_an_impossible_rule_is_refused(rules: list[tuple[int, int, str, str]], match: str) -> None:
    built = [SizeRule(min_bytes=a, max_bytes=b, algo=c, proto=d) for a, b, c, d in rules]
    with pytest.raises(ValueError, match=match):
        tuner_csv(built, num_ranks=2)
