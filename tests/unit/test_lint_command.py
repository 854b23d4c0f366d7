"""``autotune lint`` and ``autotune env check`` as commands: JSON, exit codes, errors, speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.main import main

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "data" / "nccl_logs"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_json_is_one_object_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "lint", "--engine", "sglang", "--version", "0.5.9", "--json",
        "--args", "--model m --tp 8 --speculative-algorithm EAGLE3", "--env", "NCCL_PROTO=LL128",
    )  # fmt: skip
    values = json.loads(out)
    assert code == 1
    assert {f["id"] for f in values["findings"]} >= {"spec-draft-missing", "nccl-ll128-forced"}
    for finding in values["findings"]:
        assert set(finding) == {"id", "severity", "subject", "reason", "fix", "source"}
    severities = [f["severity"] for f in values["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert sum(values["counts"].values()) == len(values["findings"])


def test_a_clean_command_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "lint", "--engine", "sglang", "--version", "0.5.23", "--args", "--model m"
    )
    assert (code, out.strip()) == (0, "nothing found")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--engine", "tgi"), "unknown engine 'tgi'; known: sglang", id="engine"),
        pytest.param(
            ("--engine", "vllm", "--machine", "nowhere"), "no machine file nowhere", id="machine"
        ),
        pytest.param(("--engine", "vllm", "--target", "gpt-9"), "no target gpt-9", id="target"),
        pytest.param(("--engine", "vllm", "--args", "a 'b"), "--args: No closing", id="quote"),
        pytest.param(("--engine", "vllm", "--log", "gone.log"), "cannot read the log", id="log"),
        pytest.param(("--engine", "sglang", "--version", "new"), "version 'new'", id="version"),
        pytest.param(
            ("--engine", "engine", "--args", "speculation.stepz=3"), "speculation.stepz", id="knob"
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "lint", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_env_check_on_a_folder_gives_verdict_reason_and_evidence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for rank in (0, 1):
        name = f"shm_seed.rank{rank}.log"
        (tmp_path / name).write_bytes((LOGS / name).read_bytes())
    code, out, _ = run(
        capsys, "env", "check", str(tmp_path), "--expect", "NCCL_MAX_NCHANNELS=16",
        "--expect", "NCCL_MIN_NCHANNELS=16", "--target", "kimi-k2.5", "--json",
    )  # fmt: skip
    values = json.loads(out)
    knobs = {knob["name"]: knob for knob in values["knobs"]}
    assert code == 1
    assert knobs["NCCL_MIN_NCHANNELS"]["verdict"] == "not effective"
    assert knobs["NCCL_MAX_NCHANNELS"]["verdict"] == "inert"
    assert knobs["NCCL_MAX_NCHANNELS"]["evidence"][0].endswith("shm_seed.rank0.log:49")
    by_tokens = {row["tokens"]: row for row in values["forward"]}
    assert by_tokens[4]["outcome"] == "inert"
    # measured: 5.2 ms a step of 61 layers at 64 tokens; the machine's priors are wide
    assert 2.0 < by_tokens[64]["change_ms"] < 15.0


def test_env_check_follows_a_command_behind_two_dashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")
    code, out, _ = run(
        capsys, "env", "check", "--json", "--", "sudo", "python", "-m", "sglang.launch_server",
        "--tp", "8",
    )  # fmt: skip
    knobs = {knob["name"]: knob for knob in json.loads(out)["knobs"]}
    assert code == 1
    assert knobs["NCCL_PROTO"]["lost_at"] == "sudo (no -E)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param((), "nothing to check", id="nothing"),
        pytest.param(("gone.log",), "no NCCL log at gone.log", id="missing"),
        pytest.param((str(LOGS), "--expect", "LL"), "write NAME=VALUE", id="expectation"),
        pytest.param((str(LOGS), "--run", "5"), "--run needs a command", id="run"),
        pytest.param((str(LOGS), "--", "x"), "not both", id="both"),
    ],
)
def test_a_mistake_in_env_check_is_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "env", "check", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_command_line_alone_is_linted_without_the_heavy_libraries() -> None:
    program = (
        "import sys; from autotune.lint.run import Request, lint; "
        "lint(Request(engine='sglang', args='--tp 8', env='NCCL_PROTO=LL')); "
        "print([n for n in ('torch', 'scipy', 'optuna', 'sqlalchemy') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
