"""Command lines, environments, versions and options as the servers' own parsers take them."""

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.lint.command import parse_command, parse_env
from autotune.lint.flags import resolve_option
from autotune.lint.run import Request, lint
from autotune.lint.shell import plain_words
from autotune.lint.speculation import resolve
from autotune.lint.versions import parse_version, pinned_nccl


def command(engine: str, text: str, version: str | None = None):  # type: ignore[no-untyped-def]
    return parse_command(
        engine, plain_words(text, "--args"), None if version is None else parse_version(version)
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("--tp-size 8", id="full"),
        pytest.param("--tp 8", id="unique-prefix"),
        pytest.param("--tensor-parallel-size=8", id="alias-with-equals"),
        pytest.param("python3 -m sglang.launch_server --model m --tp 8", id="whole-line"),
        pytest.param("NCCL_PROTO=LL numactl -N 0 python -m sglang.launch_server --tp 8", id="numa"),
        pytest.param("--tp \\\n  8 \\\n --port 30000", id="continued-lines"),
        pytest.param("--tp 4 --tp 8", id="the-last-counts"),
    ],
)
def test_sglang_spellings_of_one_option_are_one(text: str) -> None:
    parsed, _ = command("sglang", text, "0.5.9")
    assert parsed.number("--tp-size") == 8


def test_variables_in_front_of_the_program_are_its_environment() -> None:
    _, env = command("sglang", "NCCL_PROTO=LL FOO=1 python -m sglang.launch_server --tp 8")
    assert env == {"NCCL_PROTO": "LL", "FOO": "1"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            """vllm serve m --speculative-config '{"method": "eagle3", "model": "d", """
            """"num_speculative_tokens": 3}'""",
            id="json",
        ),
        pytest.param(
            "vllm serve m --speculative-config.method eagle3 --speculative-config.model d "
            "--speculative-config.num_speculative_tokens 3",
            id="dotted",
        ),
        pytest.param(
            """vllm serve m --speculative_config='{"method":"eagle3","model":"d","""
            """"num_speculative_tokens":3}'""",
            id="underscores-and-equals",
        ),
    ],
)
def test_vllm_spellings_of_a_configuration_are_one(text: str) -> None:
    parsed, _ = command("vllm", text)
    spec = resolve(parsed, None)
    assert spec is not None
    assert (spec.algorithm, spec.steps, spec.draft_tokens) == ("EAGLE3", 3, 4)
    assert spec.draft_model == "d"
    assert parsed.positionals == ("m",)


def test_vllm_switches_do_not_swallow_the_model() -> None:
    parsed, _ = command("vllm", "vllm serve --enforce-eager org/model -tp 4")
    assert parsed.positionals == ("org/model",)
    assert parsed.number("--tensor-parallel-size") == 4


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        pytest.param("", (3, 1, 4), id="none-given"),
        pytest.param(
            "--speculative-num-steps 2 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 16",
            (2, 1, 3),
            id="chain-is-resized",
        ),
        pytest.param(
            "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
            (5, 4, 8),
            id="tree-as-given",
        ),
    ],
)
def test_sglang_resolves_the_tree_as_the_server_does(
    arguments: str, sizes: tuple[int, int, int]
) -> None:
    parsed, _ = command("sglang", f"--model m --speculative-algorithm EAGLE3 {arguments}", "0.5.9")
    spec = resolve(parsed, "Kimi-K2.5")
    assert spec is not None
    assert (spec.steps, spec.topk, spec.draft_tokens) == sizes


def test_llama_targets_get_a_tree_by_default() -> None:
    parsed, _ = command("sglang", "--speculative-algorithm EAGLE", "0.5.9")
    spec = resolve(parsed, "meta-llama/Llama-3.1-8B")
    assert spec is not None
    assert (spec.steps, spec.topk, spec.draft_tokens) == (5, 4, 8)


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        pytest.param("--cuda-graph-max-bs", "0.5.9", "known", id="known-then"),
        pytest.param("--cuda-graph-max-bs", "0.5.23", "removed", id="gone-now"),
        pytest.param("--cuda-graph-max-bs-decode", "0.5.9", "not_yet", id="not-yet"),
        pytest.param("--speculative-adaptive", "0.5.19", "known", id="came-in-between"),
        pytest.param("--max-running", "0.5.23", "known", id="unique-prefix"),
        pytest.param("--speculative-num", "0.5.9", "ambiguous", id="ambiguous-prefix"),
        pytest.param("--speculative-number-steps", "0.5.9", "unknown", id="misspelt"),
        pytest.param("--cuda-graph-max-bs", None, "known", id="some-version-knows-it"),
        pytest.param("--tp-size", "0.4.1", "known", id="older-than-any-table"),
    ],
)
def test_options_by_version(name: str, version: str | None, status: str) -> None:
    parsed = None if version is None else parse_version(version)
    assert resolve_option("sglang", name, parsed).status == status


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("A=1 B=2", {"A": "1", "B": "2"}, id="words"),
        pytest.param("export A=1; export B='x y'", {"A": "1", "B": "x y"}, id="exports"),
        pytest.param("A=1\nB=\n", {"A": "1", "B": ""}, id="lines"),
        pytest.param("A=x=y", {"A": "x=y"}, id="equals-in-the-value"),
    ],
)
def test_environments_as_people_paste_them(text: str, found: dict[str, str]) -> None:
    assert parse_env(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("A=1 --flag", "'--flag' is no NAME=VALUE", id="no-assignment"),
        pytest.param("A='1", "No closing quotation", id="open-quote"),
    ],
)
def test_an_environment_that_is_none_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_env(text)


def test_versions_compare_and_pin_nccl_only_where_it_was_read() -> None:
    assert parse_version("v0.5.9") < parse_version("0.5.9.post1") < parse_version("0.5.10")
    assert parse_version("0.33") == parse_version("0.33.0rc1") == (0, 33, 0)
    assert pinned_nccl("sglang", parse_version("0.5.23")) == "2.30.7"
    assert pinned_nccl("sglang", parse_version("0.5.15")) is None
    with pytest.raises(UserError, match="write it like"):
        parse_version("latest")


FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


@pytest.mark.parametrize(
    ("engine", "name", "expected", "never"),
    [
        pytest.param(
            "sglang", "sglang-eagle3-eager.log",
            {"log-verify-eager", "graph-off", "verify-without-split-kv"}, {"spec-options-alone"},
            id="sglang-eager",
        ),
        pytest.param(
            "sglang", "sglang-eagle3-graph.log", {"verify-without-split-kv"},
            {"log-verify-eager", "graph-off"}, id="sglang-graphs",
        ),
        pytest.param(
            "sglang", "sglang-baseline.log", set(), {"spec-options-alone", "log-verify-eager"},
            id="sglang-baseline",
        ),
        pytest.param(
            "vllm", "vllm-0.26-eagle3-k3.log", {"spec-lossy", "log-accept-rate"},
            {"log-wiring-fault", "log-wrong-draft", "flag-unknown"}, id="vllm-eagle3",
        ),
        pytest.param(
            "vllm", "vllm-0.26-eager.log", {"graph-off"}, {"flag-unknown"}, id="vllm-eager"
        ),
        pytest.param(
            "vllm", "vllm-0.26-tp2-graphs.log", {"log-allreduce-nccl"}, {"graph-off"}, id="vllm-tp2"
        ),
    ],
)  # fmt: skip
def test_logs_of_real_servers_give_what_is_true_of_them(
    engine: str, name: str, expected: set[str], never: set[str]
) -> None:
    found = {f.id for f in lint(Request(engine=engine, logs=(FOREIGN / name,)))}
    assert expected <= found
    assert not never & found
    assert not {id for id in found if id.startswith("flag-")}
