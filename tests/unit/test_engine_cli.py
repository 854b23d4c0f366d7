"""The engine's command line: a mistake costs one line and no start."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import engine.__main__ as cli
from engine.errors import EngineError

_TINY = Path(__file__).resolve().parents[2] / "studies" / "models"
_CONFIG = f"""
target: {{path: {_TINY / "tiny-moe"}}}
draft: {{path: {_TINY / "tiny-moe-eagle3"}}}
max_context: 128
max_concurrency: 2
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "best.yaml"
    path.write_text(_CONFIG)
    return str(path)


def _started(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an engine was started")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["generate", "--prompt-ids", "1,2", "--max-new-tokens", "127"],
            "request 0: 2 prompt tokens + 127 new tokens are above max_context 128 (the model",
            id="too-long",
        ),
        pytest.param(
            ["generate", "--prompt-ids", "1,2048"],
            "request 0: token 2048 is outside the vocabulary of 2048",
            id="token",
        ),
        pytest.param(["generate", "--prompt", ""], "request 0: 0 prompt tokens", id="no-text"),
        pytest.param(["generate"], "give either --prompt or --prompt-ids", id="no-prompt"),
        pytest.param(
            ["generate", "--prompt-ids", "1", "--prompt", "x"], "give either", id="two-prompts"
        ),
        pytest.param(
            ["generate", "--prompt-ids", "1,x"],
            "--prompt-ids '1,x' must be integers",
            id="text-ids",
        ),
        pytest.param(
            ["bench", "--input-len", "120"],
            "120 prompt tokens + 64 new tokens",
            id="bench-too-long",
        ),
        pytest.param(
            ["bench", "--concurrency", "1,3"],
            "--concurrency 3 must be between 1 and max_concurrency 2",
            id="concurrency",
        ),
        pytest.param(
            ["bench", "--num-prompts", "1000000"], "64,000,000 prompt tokens a repeat", id="memory"
        ),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, config: str, arguments: list[str], line: str
) -> None:
    monkeypatch.setattr(cli, "Engine", _started)
    result = CliRunner().invoke(cli.app, [*arguments, "--config", config])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("engine: ")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_failure_is_exit_code_1_with_the_workers_log(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    def start(*_: Any) -> None:
        raise EngineError("oom", "start", "rank 0 ran out of memory", "allocating\nfailed\n")

    monkeypatch.setattr(cli, "Engine", start)
    result = CliRunner().invoke(cli.app, ["generate", "--prompt-ids", "1", "--config", config])
    assert result.exit_code == 1
    assert result.stderr == (
        "engine: rank 0 ran out of memory\n--- worker log (tail) ---\nallocating\nfailed\n"
    )


@pytest.mark.parametrize("text", ["{}", "not JSON", ""], ids=["empty-object", "no-json", "empty"])
def test_a_broken_tokenizer_is_one_line_naming_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(cli, "Engine", _started)
    (tmp_path / "config.json").write_text((_TINY / "tiny-moe" / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "launch.yaml").write_text(f"target: {{path: {tmp_path}}}\nmax_context: 64\n")
    words = ["generate", "--config", str(tmp_path / "launch.yaml"), "--prompt", "x"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"engine: {tmp_path / 'tokenizer.json'}: no tokenizer: ")
    assert result.stderr.count("\n") == 1
