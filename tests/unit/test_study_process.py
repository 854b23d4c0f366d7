"""Real processes: kill -9, Ctrl-C, `study stop`, several workers on one database."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from study_files import sim_study, write_study

from autotune.history import History
from autotune.store.store import Store

#: seconds in which a loaded machine must have got somewhere
PATIENCE_S = 90.0


class Folder:
    """A folder with one study file and one database, and the processes started there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}/a.db"
        self.processes: list[subprocess.Popen[str]] = []

    def write(self, **changes) -> None:
        # repeats last about 0.3 s, so that signals land inside them
        args = {
            "clock": 1.0,
            "start_s": 0.1,
            "slow_host_share": 0.0,
            "noise_cv": 0.01,
            **changes.pop("args", {}),
        }
        write_study(self.path, sim_study(backend={"kind": "sim", "args": args}, **changes))

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune.cli.main", "study", *words, "-d", self.url],
            cwd=self.path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def history(self) -> History:
        store = Store.existing(self.url)
        try:
            return History.read(store, store.study("sim").id)
        finally:
            store.close()

    def wait_for(self, reached: Callable[[History], bool]) -> History:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (self.path / "a.db").exists():
                with contextlib.suppress(Exception):
                    history = self.history()
                    if reached(history):
                        return history
            time.sleep(0.1)
        pytest.fail("the study did not get that far")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def in_search(history: History) -> bool:
    return sum(t.role == "search" for t in history.trials) >= 1 and bool(
        history.repeats_of.get(history.trials[-1].id)
    )


def check_whole(history: History) -> None:
    """Nothing is missing, double or left running."""
    assert all(trial.state == "complete" for trial in history.trials)
    assert [row.order for row in history.repeats] == list(range(len(history.repeats)))
    claims = [(t.role, t.knobs.id, t.origin) for t in history.trials if t.role == "search"]
    assert len(set(claims)) == len(claims)
    numbers = [trial.number for trial in history.trials]
    assert len(set(numbers)) == len(numbers)


def test_kill_9_loses_at_most_the_repeat_in_flight_and_resume_goes_on(folder: Folder) -> None:
    folder.write()
    first = folder.spawn("start", "study.yaml")
    folder.wait_for(in_search)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    before = folder.history()
    code, out, _ = folder.finish(folder.spawn("status", "sim", "--json"))
    assert code == 0
    assert json.loads(out)["state"].startswith("interrupted")

    code, out, err = folder.finish(folder.spawn("resume", "sim", "--json"))
    assert code == 0, err
    after = folder.history()
    kept = len(before.repeats)
    assert [row.order for row in after.repeats[:kept]] == [row.order for row in before.repeats]
    assert after.repeats[:kept] == before.repeats
    check_whole(after)
    assert after.num_search_trials == 3
    assert json.loads(out)["num_search_trials"] == 3
    _check_optuna(folder, after)


def test_kill_9_during_the_baseline_is_survived_too(folder: Folder) -> None:
    folder.write(budget={"measured_trials": 1})
    first = folder.spawn("start", "study.yaml")
    folder.wait_for(lambda history: len(history.repeats) >= 2)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    # the same command goes on, as a user would try first
    code, _, err = folder.finish(folder.spawn("start", "study.yaml"))
    assert code == 0, err
    check_whole(folder.history())


def test_ctrl_c_finishes_the_repeat_in_flight_and_says_how_to_resume(folder: Folder) -> None:
    folder.write()
    process = folder.spawn("start", "study.yaml")
    seen = len(folder.wait_for(in_search).repeats)
    process.send_signal(signal.SIGINT)
    code, out, err = folder.finish(process)
    assert code == 130
    assert out == ""
    assert "finishing the repeat in flight" in err
    assert "go on with: autotune study resume sim --database" in err
    assert "Traceback" not in err
    assert len(folder.history().repeats) >= seen + 1

    code, _, err = folder.finish(folder.spawn("resume", "sim"))
    assert code == 0, err
    check_whole(folder.history())


def test_stop_from_another_process_ends_the_study_between_repeats(folder: Folder) -> None:
    folder.write(budget={"measured_trials": 30})
    process = folder.spawn("start", "study.yaml")
    folder.wait_for(lambda history: len(history.repeats) >= 2)
    code, out, _ = folder.finish(folder.spawn("stop", "sim"))
    assert code == 0
    assert f"process {process.pid}" in out
    code, _, err = folder.finish(process)
    assert code == 0
    assert "stopped: autotune study stop" in err
    store = Store.existing(folder.url)
    assert store.study("sim").state == "stopped"


def test_two_workers_share_one_study_without_doing_anything_twice(folder: Folder) -> None:
    folder.write(budget={"measured_trials": 6})
    first = folder.spawn("start", "study.yaml")
    folder.wait_for(lambda history: len(history.trials) >= 1)
    second = folder.spawn("resume", "sim")
    for process in (first, second):
        code, out, err = folder.finish(process)
        assert code == 0, err
        assert "Traceback" not in err
        # whoever ends first waits for the other's comparison
        assert "not compared with it in turns" not in out + err
    history = folder.history()
    check_whole(history)
    # each of the two may have taken its last trial when one was left
    assert 6 <= history.num_search_trials <= 7
    workers = {trial.worker_id for trial in history.trials if trial.role == "search"}
    assert len(workers) == 2
    _check_optuna(folder, history)


def _check_optuna(folder: Folder, history: History) -> None:
    import optuna

    stored = optuna.load_study(study_name="sim", storage=folder.url)
    assert {trial.number for trial in stored.trials} == {t.number for t in history.trials}
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in stored.trials)
