"""Real process trees: where a variable was lost, and that nothing is left running."""

import os
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from autotune.effect.judge_run import judge_run
from autotune.effect.launch import read_launch
from autotune.effect.verdicts import Judgement
from autotune.effect.watch import watched_run
from autotune.errors import UserError

#: writes what NCCL of this process would: one line per variable it finds in its environment
WORKER = """
import os, sys, time
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", "h").replace("%p", str(os.getpid()))
rank = int(sys.argv[1])
comm = f"comm 0x{rank}a rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId 10"
comm += " commId 0xab"
with open(path, "w") as log:
    def say(text):
        log.write(f"h:{os.getpid()}:{os.getpid()} [0] NCCL INFO {text}\\n")
    say(f"ncclCommInitRankConfig {comm} - Init START")
    for name in ("NCCL_PROTO", "NCCL_P2P_DISABLE"):
        if name in os.environ:
            say(f"{name} set by environment to {os.environ[name]}")
    say("2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels, 2 per peer")
    say(f"ncclCommInitRankConfig {comm} - Init COMPLETE")
time.sleep(60)
"""
LAUNCHER = """
import os, subprocess, sys, time
children = []
for rank in range(2):
    env = dict(os.environ)
    if {drop}:
        env.pop("NCCL_PROTO", None)
    children.append(subprocess.Popen([sys.executable, {worker!r}, str(rank)], env=env))
time.sleep(60)
"""


def run(tmp_path: Path, drop: str, **shell: str) -> tuple[Judgement, list[int]]:
    worker, launcher = tmp_path / "worker.py", tmp_path / "launcher.py"
    worker.write_text(textwrap.dedent(WORKER))
    launcher.write_text(textwrap.dedent(LAUNCHER).format(drop=drop, worker=str(worker)))
    env = {**os.environ, "HOME": str(tmp_path), **shell}
    words = [sys.executable, str(launcher)]
    launch = read_launch(words, env, tmp_path / "none.conf")
    with watched_run(words, 4.0, env) as watched:
        judgement = judge_run(watched, launch, {"NCCL_PROTO": "LL"})
        return judgement, [process.pid for process in watched.processes]


def test_a_variable_lost_between_launcher_and_one_worker_is_found_and_nothing_stays(
    tmp_path: Path,
) -> None:
    judgement, pids = run(tmp_path, "rank == 1", NCCL_PROTO="LL", NCCL_P2P_DISABLE="1")
    found = {knob.name: knob for knob in judgement.knobs}
    assert found["NCCL_PROTO"].verdict == "not effective"
    assert f"between pid {pids[0]}" in (found["NCCL_PROTO"].lost_at or "")
    assert found["NCCL_P2P_DISABLE"].verdict != "not effective"
    assert len(pids) == 3
    time.sleep(0.2)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_variable_that_reaches_all_workers_is_not_reported_lost(tmp_path: Path) -> None:
    judgement, _ = run(tmp_path, "False", NCCL_PROTO="LL")
    (found,) = (knob for knob in judgement.knobs if knob.name == "NCCL_PROTO")
    assert found.verdict in ("unknown", "effective", "inert")
    assert len(found.evidence) == 2


def test_a_variable_that_was_never_set_is_lost_in_the_parent(tmp_path: Path) -> None:
    judgement, _ = run(tmp_path, "False")
    (found,) = (knob for knob in judgement.knobs if knob.name == "NCCL_PROTO")
    assert (found.verdict, found.lost_at) == ("not effective", "parent")


def test_a_program_that_does_not_exist_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no-such-program"), watched_run(["no-such-program"], 1.0):
        pass


def test_a_command_that_fails_at_once_says_so(tmp_path: Path) -> None:
    words = ["/bin/sh", "-c", "echo broken >&2; exit 3"]
    launch = read_launch(words, {"HOME": str(tmp_path)}, tmp_path / "none.conf")
    with watched_run(words, 5.0) as watched:
        judgement = judge_run(watched, launch, {})
    assert any("code 3: broken" in note for note in judgement.notes)
