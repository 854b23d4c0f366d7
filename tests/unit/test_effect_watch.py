"""Real process trees: where a variable was lost, and that nothing is left running."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from autotune.effect.judge_run import judge_run
from autotune.effect.launch import read_launch
from autotune.effect.verdicts import Judgement
from autotune.effect.watch import Watched, watched_run
from autotune.errors import UserError
from autotune.nccl_log import parse_nccl_logs

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


#: argument: how workers start, what happens to the variable
SPAWNING = """
import multiprocessing as mp, os, sys, time

def work(what):
    if what == "overwritten":
        os.environ["NCCL_PROTO"] = "Simple"
    if what == "removed":
        os.environ.pop("NCCL_PROTO", None)
    time.sleep(30)

if __name__ == "__main__":
    method, what = sys.argv[1:]
    context = mp.get_context(method)
    if what == "set-after-the-server":
        context.Process(target=work, args=("",), daemon=True).start()
        time.sleep(0.5)
        os.environ["NCCL_PROTO"] = "LL"
    if what == "removed-by-the-parent":
        os.environ.pop("NCCL_PROTO")
    for _ in range(2):
        context.Process(target=work, args=(what,), daemon=True).start()
    time.sleep(30)
"""


def watch_python(tmp_path: Path, *arguments: str, **shell: str) -> tuple[Judgement, Watched]:
    script = tmp_path / "spawning.py"
    script.write_text(textwrap.dedent(SPAWNING))
    env = {**os.environ, "HOME": str(tmp_path), **shell}
    words = [sys.executable, str(script), *arguments]
    launch = read_launch(words, env, tmp_path / "none.conf")
    with watched_run(words, 4.0, env) as watched:
        return judge_run(watched, launch, {"NCCL_PROTO": "LL"}), watched


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_environment_is_that_of_getenv_inside_each_worker(tmp_path: Path, method: str) -> None:
    judgement, watched = watch_python(tmp_path, method, "nothing", NCCL_PROTO="LL")
    (found,) = (knob for knob in judgement.knobs if knob.name == "NCCL_PROTO")
    assert found.verdict == "unknown"
    assert "no NCCL log shows" in found.reason
    workers = judgement.to_json()["workers"]
    assert len(workers) == len(watched.processes) >= 3
    assert all(worker["environment"]["NCCL_PROTO"] == "LL" for worker in workers)
    assert not any("set NCCL_DEBUG=INFO" in note for note in judgement.notes)


@pytest.mark.parametrize(
    ("method", "what", "shell", "lost"),
    [
        # what a process was started with still says LL: only its memory shows the change
        pytest.param("spawn", "overwritten", {"NCCL_PROTO": "LL"}, "inside pid", id="overwritten"),
        pytest.param("fork", "removed", {"NCCL_PROTO": "LL"}, "inside pid", id="removed-in-a-fork"),
        pytest.param(
            "spawn", "removed-by-the-parent", {"NCCL_PROTO": "LL"}, "inside pid", id="parent"
        ),
        pytest.param("forkserver", "set-after-the-server", {}, "forkserver", id="forkserver"),
    ],
)
def test_a_change_after_the_start_is_seen_and_placed(
    tmp_path: Path, method: str, what: str, shell: dict[str, str], lost: str
) -> None:
    judgement, watched = watch_python(tmp_path, method, what, **shell)
    (found,) = (knob for knob in judgement.knobs if knob.name == "NCCL_PROTO")
    assert found.verdict == "not effective"
    assert lost in (found.lost_at or "")
    if what == "overwritten":
        assert "now Simple" in found.reason
    if what == "removed-by-the-parent":
        assert f"pid {watched.processes[0].pid} was started with" in found.reason


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "60"])
    os._exit(0)
time.sleep({stay})
"""


@pytest.mark.parametrize("stay", [0.5, 30], ids=["parent-ends", "parent-stays"])
def test_a_daemon_that_left_its_session_is_seen_and_stopped(tmp_path: Path, stay: float) -> None:
    script = tmp_path / "daemon.py"
    script.write_text(DAEMON.format(stay=stay))
    with watched_run([sys.executable, str(script)], 2.0) as watched:
        sleeper = next(p for p in watched.processes if p.name == "sleep 60")
        assert not psutil.pid_exists(sleeper.pid)


def test_a_log_that_went_to_the_output_or_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    own = tmp_path / "own.%p.log"
    line = "h:7:7 [0] NCCL INFO NCCL_PROTO set by environment to "
    script = tmp_path / "logging.sh"
    script.write_text(
        f"echo '{line}LL'\nexport NCCL_DEBUG_FILE={own}\n"
        f'exec {sys.executable} -c "import os,time; '
        "p=os.environ['NCCL_DEBUG_FILE'].replace('%p', str(os.getpid())); "
        f"open(p, 'w').write('{line.replace(':7:7', ':8:8')}Simple'); time.sleep(9)\"\n"
    )
    with watched_run(["/bin/sh", str(script)], 2.0) as watched:
        log = parse_nccl_logs(watched.logs)
        values = {process.pid: process.environment["NCCL_PROTO"] for process in log.processes}
    assert values == {7: "LL", 8: "Simple"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_ended_twice_by_the_user_nothing_is_left_of_a_command_that_ignores_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, subprocess, time\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
        "subprocess.Popen(['setsid', 'sleep', '300'])\ntime.sleep(300)\n"
    )
    words = ["env", "check", "--run", "200", "--", sys.executable, str(script)]
    with subprocess.Popen(
        [sys.executable, "-m", "autotune.cli.main", *words], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as command:  # fmt: skip
        children = wait_for_children(command.pid, 2)
        command.send_signal(number)
        time.sleep(1.0)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=30) in (130, 143)
    assert not [pid for pid in children if psutil.pid_exists(pid)]


def wait_for_children(pid: int, count: int) -> list[int]:
    """Processes below ``pid`` once there are ``count``; the sleeper among them."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = psutil.Process(pid).children(recursive=True)
        if len(found) >= count and any("sleep" in " ".join(p.cmdline()) for p in found):
            return [p.pid for p in found]
        time.sleep(0.1)
    raise AssertionError("the command did not come up")


def test_a_program_that_does_not_exist_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no-such-program"), watched_run(["no-such-program"], 1.0):
        pass


def test_what_it_returns_when_we_stop_it_is_no_end_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "polite.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\ntime.sleep(60)\n"
    )
    words = [sys.executable, str(script)]
    with watched_run(words, 1.5) as watched:
        assert watched.exit_code is None


def test_a_command_that_fails_at_once_says_so(tmp_path: Path) -> None:
    words = ["/bin/sh", "-c", "echo broken >&2; exit 3"]
    launch = read_launch(words, {"HOME": str(tmp_path)}, tmp_path / "none.conf")
    with watched_run(words, 5.0) as watched:
        judgement = judge_run(watched, launch, {})
    assert any("code 3: broken" in note for note in judgement.notes)
