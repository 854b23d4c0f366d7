"""Where a variable gets lost between the shell and the workers, without running the command."""

import shlex
from pathlib import Path

import pytest

from autotune.effect.config_files import file_settings
from autotune.effect.judge_launch import judge_launch
from autotune.effect.launch import read_launch
from autotune.effect.verdicts import KnobVerdict
from model.machine import load_machine

SGLANG = "python -m sglang.launch_server --model-path m --tp 8"
MACHINES = Path(__file__).parents[2] / "studies" / "machines"


def knob(line: str, name: str, tmp_path: Path, **shell: str) -> KnobVerdict:
    launch = read_launch(
        shlex.split(line), {"HOME": str(tmp_path), "PATH": "/bin", **shell}, tmp_path / "none.conf"
    )
    expected = {name: shell[name]} if name in shell else {}
    found = {item.name: item for item in judge_launch(launch, expected).knobs}
    return found[name]


@pytest.mark.parametrize(
    ("line", "lost_at"),
    [
        pytest.param(f"sudo {SGLANG}", "sudo (no -E)", id="sudo"),
        pytest.param(f"sudo -u serve numactl -N 0 {SGLANG}", "sudo (no -E)", id="sudo-user"),
        pytest.param(f"env -i PATH=/bin {SGLANG}", "env -i", id="empty-environment"),
        pytest.param(f"env -u NCCL_PROTO {SGLANG}", "env -u", id="unset"),
        pytest.param(
            f"docker run --gpus all -e NCCL_ALGO=Ring image {SGLANG}",
            "docker run (no -e NAME)",
            id="container",
        ),
        pytest.param(f"ssh host {SGLANG}", "ssh", id="another-host"),
        pytest.param(f"docker exec box {SGLANG}", "docker exec (no -e NAME)", id="docker-exec"),
        pytest.param(f"timeout 10m env -i {SGLANG}", "env -i", id="behind-timeout"),
        pytest.param(f"nsys profile -o x -t cuda env -i {SGLANG}", "env -i", id="behind-nsys"),
        pytest.param(f"uv run --with x env -i {SGLANG}", "env -i", id="behind-uv"),
        pytest.param(f"taskset -c 0-7,9 env -i {SGLANG}", "env -i", id="behind-taskset"),
        pytest.param(f"env -S 'A=1 env -i {SGLANG}'", "env -i", id="split-string"),
        pytest.param(f"srun --export=NONE {SGLANG}", "srun --export=NONE", id="slurm-none"),
        pytest.param(f"srun --export=PATH -n 8 {SGLANG}", "srun --export=PATH", id="slurm-list"),
        pytest.param(f"apptainer exec -e x.sif {SGLANG}", "apptainer -e", id="apptainer"),
        pytest.param(f"su - u -c '{SGLANG}'", "su - (a login shell)", id="login-shell"),
        pytest.param(
            f"systemd-run {SGLANG}",
            "systemd-run (a service starts from systemd's environment)",
            id="systemd-service",
        ),
        pytest.param(
            f"bash -c 'export NCCL_PROTO=Simple; cd / && {SGLANG}'", "set again by bash -c",
            id="shell-text",
        ),
        pytest.param(
            f"bash -lc 'unset NCCL_PROTO; exec {SGLANG}'", "unset by bash -lc", id="shell-unsets"
        ),
    ],
)  # fmt: skip
def test_a_wrapper_that_drops_the_variable_is_named(
    line: str, lost_at: str, tmp_path: Path
) -> None:
    found = knob(line, "NCCL_PROTO", tmp_path, NCCL_PROTO="LL")
    assert found.verdict == "not effective"
    assert found.lost_at == lost_at


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(SGLANG, id="plain"),
        pytest.param(f"numactl --cpunodebind=0 --membind=0 {SGLANG}", id="numactl"),
        pytest.param(f"nohup taskset -c 0-31 {SGLANG}", id="nohup-taskset"),
        pytest.param(f"sudo -E {SGLANG}", id="sudo-keeps"),
        pytest.param(f"sudo --preserve-env=NCCL_PROTO {SGLANG}", id="sudo-keeps-one"),
        pytest.param(f"sudo NCCL_PROTO=LL {SGLANG}", id="sudo-sets"),
        pytest.param(f"env -i NCCL_PROTO=LL {SGLANG}", id="env-sets"),
        pytest.param(f"docker run -e NCCL_PROTO image {SGLANG}", id="container-hands-on"),
        pytest.param(f"docker run -e NCCL_PROTO=LL --rm image {SGLANG}", id="container-sets"),
        pytest.param(f"srun --export=ALL -n 8 {SGLANG}", id="slurm-all"),
        pytest.param(f"systemd-run --scope {SGLANG}", id="systemd-scope"),
        pytest.param(f"singularity run --nv x.sif {SGLANG}", id="singularity"),
        pytest.param(f"su u -c '{SGLANG}'", id="su-keeps"),
        pytest.param(f"bash -c 'A=1; echo NCCL_PROTO=x && {SGLANG}'", id="shell-text-beside"),
        pytest.param(f"conda run -n e --cwd / {SGLANG}", id="conda"),
    ],
)
def test_a_variable_that_arrives_is_not_called_effective_without_proof(
    line: str, tmp_path: Path
) -> None:
    found = knob(line, "NCCL_PROTO", tmp_path, NCCL_PROTO="LL")
    assert found.verdict == "unknown"
    assert "arrives" in found.reason
    assert "spawn" in found.reason


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        pytest.param(SGLANG, "CUDA_DEVICE_MAX_CONNECTIONS", "32", id="sglang-connections"),
        pytest.param(
            f"{SGLANG} --enable-deterministic-inference", "NCCL_ALGO", "Ring", id="deterministic"
        ),
        pytest.param(f"{SGLANG} --enable-symm-mem", "NCCL_CUMEM_ENABLE", "0", id="symm-mem"),
    ],
)
def test_what_the_server_overwrites_is_not_effective(
    line: str, name: str, value: str, tmp_path: Path
) -> None:
    found = knob(line, name, tmp_path, **{name: value})
    assert found.verdict == "not effective"
    assert found.lost_at == "overwritten by the server"


def test_what_the_server_only_defaults_is_left_alone(tmp_path: Path) -> None:
    assert knob(SGLANG, "NCCL_CUMEM_ENABLE", tmp_path, NCCL_CUMEM_ENABLE="1").verdict == "unknown"
    line = "vllm serve m -tp 8"
    found = knob(line, "CUDA_DEVICE_MAX_CONNECTIONS", tmp_path, CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert found.verdict == "unknown"


SCRIPT = """#!/usr/bin/env bash
set -e
# export NCCL_PROTO=LL128
export NCCL_ALGO=${NCCL_ALGO:-Tree}
NCCL_NTHREADS=64
if [ -n "$FAST" ]; then
  export NCCL_PROTO=Simple \\
    NCCL_BUFFSIZE=1048576
fi
export NCCL_MAX_NCHANNELS=$(nproc)
exec numactl -N 0 python -m sglang.launch_server --model-path m --tp 8
"""


def test_a_launch_script_is_read_and_its_line_named(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(SCRIPT)
    shell = {"HOME": str(tmp_path), "PATH": "/bin", "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
    for words in ([str(script)], ["bash", str(script)], ["nohup", "bash", "-x", str(script)]):
        launch = read_launch(words, shell, tmp_path / "none.conf")
        found = {k.name: k for k in judge_launch(launch, {}).knobs}
        assert launch.engine == "sglang"
        assert found["NCCL_PROTO"].lost_at == "set again by serve.sh, line 7"
        assert found["NCCL_ALGO"].verdict == "unknown"
        assert launch.env["NCCL_BUFFSIZE"] == "1048576"
        # neither exported before nor by the assignment
        assert "NCCL_NTHREADS" not in launch.env
        assert any("NCCL_MAX_NCHANNELS=" in note for note in launch.notes)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param("docker compose up -d", "compose file", id="compose"),
        pytest.param(f"tmux new -d {SGLANG}", "tmux's server", id="tmux"),
        pytest.param(f"ray job submit -- {SGLANG}", "Ray's workers", id="ray-job"),
    ],
)
def test_what_a_daemon_starts_is_not_told_by_this_shell(
    line: str, why: str, tmp_path: Path
) -> None:
    found = knob(line, "NCCL_PROTO", tmp_path, NCCL_PROTO="LL")
    assert (found.verdict, why in found.reason) == ("unknown", True)
    assert "perhaps" in (found.lost_at or "")


def test_a_program_that_is_not_here_is_noted(tmp_path: Path) -> None:
    shell = {"HOME": str(tmp_path)}
    launch = read_launch(["no-such-program", "--tp", "8"], shell, tmp_path / "none.conf")
    assert "no-such-program is not found on this host" in launch.notes
    inside = read_launch(["docker", "run", "x", "no-such-program"], shell, tmp_path / "none.conf")
    assert not any("not found" in note for note in inside.notes)


def test_rays_workers_are_children_of_its_daemon(tmp_path: Path) -> None:
    line = "vllm serve m -tp 8 --distributed-executor-backend ray"
    found = knob(line, "NCCL_PROTO", tmp_path, NCCL_PROTO="LL")
    assert found.verdict == "unknown"
    assert "Ray" in (found.lost_at or "")


def test_a_variable_that_is_nowhere_was_lost_in_the_parent(tmp_path: Path) -> None:
    launch = read_launch(shlex.split(SGLANG), {"HOME": str(tmp_path)}, tmp_path / "none.conf")
    (found,) = judge_launch(launch, {"NCCL_PROTO": "LL"}).knobs
    assert (found.verdict, found.lost_at) == ("not effective", "parent")


def test_a_configuration_file_is_a_way_that_no_environment_shows(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# ours\nNCCL_PROTO=LL\n")
    launch = read_launch(shlex.split(SGLANG), {"HOME": str(tmp_path)}, tmp_path / "none.conf")
    (found,) = judge_launch(launch, {"NCCL_PROTO": "LL"}).knobs
    assert found.verdict == "unknown"
    assert found.evidence == (f"{tmp_path}/.nccl.conf:2",)
    (other,) = judge_launch(launch, {"NCCL_PROTO": "Simple"}).knobs
    assert (other.verdict, other.lost_at) == ("not effective", "config file")


def test_the_named_file_replaces_the_own_one_and_the_system_file_is_weakest(
    tmp_path: Path,
) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Tree\n")
    (tmp_path / "named").write_text("NCCL_PROTO=LL\n")
    (tmp_path / "etc").write_text("NCCL_PROTO=Simple\nNCCL_NTHREADS=256\n")
    env = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "named")}
    found, notes = file_settings(env, tmp_path / "etc")
    assert {name: s.value for name, s in found.items()} == {
        "NCCL_PROTO": "LL",
        "NCCL_NTHREADS": "256",
    }
    assert not notes
    _, missing = file_settings({"NCCL_CONF_FILE": str(tmp_path / "gone")}, tmp_path / "etc")
    assert "does not exist" in missing[0]


@pytest.mark.parametrize(
    ("line", "value", "note"),
    [
        pytest.param("NCCL_PROTO=LL", "LL", None, id="plain"),
        pytest.param(" NCCL_PROTO=LL", None, "nobody reads", id="indented"),
        pytest.param("NCCL_PROTO = LL", None, "without spaces", id="spaces-around"),
        pytest.param("export NCCL_PROTO=LL", None, "write NCCL_PROTO=LL", id="export"),
        pytest.param('NCCL_PROTO="LL"', '"LL"', "quotes included", id="quoted"),
        pytest.param("NCCL_PROTO=LL\r", "LL\r", "spaces and quotes", id="windows-line-end"),
        pytest.param("#NCCL_PROTO=LL", None, None, id="comment"),
    ],
)
def test_a_configuration_file_is_read_as_literally_as_nccl_does(
    line: str, value: str | None, note: str | None, tmp_path: Path
) -> None:
    (tmp_path / ".nccl.conf").write_bytes(f"{line}\n".encode())
    found, notes = file_settings({"HOME": str(tmp_path)}, tmp_path / "none.conf")
    assert (found["NCCL_PROTO"].value if "NCCL_PROTO" in found else None) == value
    own = [text for text in notes if str(tmp_path) in text]
    assert (note in own[0] if own else None) == (True if note else None)


def test_with_a_machine_what_arrives_is_predicted_inert_or_effective(tmp_path: Path) -> None:
    machine = load_machine(MACHINES / "8x-rtx-pro-6000-switches.yaml")
    shell = {"HOME": str(tmp_path), "NCCL_NTHREADS": "512", "NCCL_PROTO": "Simple"}
    launch = read_launch(shlex.split(SGLANG), shell, tmp_path / "none.conf")
    found = {k.name: k for k in judge_launch(launch, {}, machine=machine).knobs}
    assert found["NCCL_PROTO"].verdict == "effective"
    assert "harms at 8 KiB" in found["NCCL_PROTO"].reason
