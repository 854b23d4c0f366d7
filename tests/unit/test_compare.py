"""A comparison measures in turns, stores everything, and says what it found; one run at a time."""

import io
import json
import multiprocessing
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from study_files import ROOT, sim_study, write_study

from autotune import host_lock
from autotune.backends.base import Group
from autotune.backends.sim_backend import SimBackend
from autotune.cli.main import main
from autotune.compare_report import show_compared
from autotune.compare_session import CompareAsked, run_compare
from autotune.errors import UserError
from autotune.history import History
from autotune.host_lock import hold_machine
from autotune.measuring import StopRequestedError
from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.records import Failure
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study


@pytest.fixture
def finished(tmp_path, monkeypatch) -> Store:
    monkeypatch.chdir(tmp_path)
    loaded = load_study(write_study(tmp_path, sim_study()))
    plan = make_plan(loaded)
    store = Store.create("sqlite:///autotune.db")
    view = create_study(loaded, plan, store)
    progress = Progress(Console(file=io.StringIO()), 3, (1,))
    StudyRun(plan, view, store, progress, StopFlag()).run()
    return store


def asked(first: str, second: str, **changes) -> CompareAsked:
    values = {
        "whats": (first, second), "study": None, "concurrency": None, "max_pairs": 12,
        "default_pairs": (30, 12), "wall_time_s": None, "margin": None,
    }  # fmt: skip
    return CompareAsked(**{**values, **changes})  # type: ignore[arg-type]


def test_speculation_against_the_baseline_is_decided_and_stored(finished: Store) -> None:
    lines: list[str] = []
    before = History.read(finished, finished.study("sim").id)
    found = run_compare(finished, asked("best", "baseline"), StopFlag(), lines.append)
    (level,) = found.levels
    assert level.decision.verdict == "faster"
    assert level.decision.ratio.low > 1.0
    history = History.read(finished, finished.study("sim").id)
    new = [t for t in history.trials if t.role == "compare"]
    assert [t.state for t in new] == ["complete", "complete"]
    assert {t.number for t in new} == {n for numbers in found.trials.values() for n in numbers}
    taken = [len(history.repeats_of[t.id]) for t in new]
    assert taken == [level.decision.num_pairs] * 2
    # what the study itself found is not changed by it
    assert history.baseline is not None
    assert before.baseline is not None
    assert history.baseline.values(1) == before.baseline.values(1)
    (detail,) = finished.event_details(finished.study("sim").id, "compare")
    assert detail["levels"][0]["verdict"] == "faster"


def test_arms_are_measured_in_turns_with_the_order_drawn(finished: Store) -> None:
    run_compare(finished, asked("0", "baseline"), StopFlag(), lambda text: None)
    history = History.read(finished, finished.study("sim").id)
    arms = {t.id: i for i, t in enumerate(t for t in history.trials if t.role == "compare")}
    order = [arms[r.trial_id] for r in history.repeats if r.trial_id in arms]
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert set(pairs) <= {(0, 1), (1, 0)}
    assert len(set(pairs)) == 2


def test_the_same_knobs_are_an_a_a_test(finished: Store) -> None:
    lines: list[str] = []
    found = run_compare(finished, asked("0", "baseline"), StopFlag(), lines.append)
    assert any("A/A test" in line for line in lines)
    assert found.levels[0].same_knobs
    assert found.levels[0].decision.verdict in ("same", "undecided")


def test_a_best_config_file_can_be_compared(finished: Store) -> None:
    view = finished.study("sim")
    from autotune.best import write_study_best
    from autotune.outcome import conclude
    from autotune.plan import stored_plan

    plan = stored_plan(view)
    outcome = conclude(finished, view.id, plan.study, "")
    write_study_best(Path("b.yaml"), plan, view, finished, outcome)
    found = run_compare(finished, asked("b.yaml", "baseline"), StopFlag(), lambda text: None)
    assert found.levels[0].decision.verdict == "faster"


def test_stopping_keeps_what_was_measured(finished: Store) -> None:
    flag = StopFlag()

    def note(text: str) -> None:
        if "pair 7/" in text:
            flag.reason = "Ctrl-C"

    found = run_compare(finished, asked("0", "1", margin=0.0001), flag, note)
    assert found.ended == "stopped: Ctrl-C"
    # seven pairs were judged at a last look although looks come every two
    assert found.levels[0].decision.num_pairs == 7
    states = {t.state for t in finished.trials(finished.study("sim").id) if t.role == "compare"}
    assert states == {"complete"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("99", "baseline"), "'99' is no trial, knobs id, file", id="no-trial"),
        pytest.param(("no.yaml", "baseline"), "no file no.yaml", id="no-file"),
    ],
)
def test_unknown_arms_are_refused(finished: Store, words, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_compare(finished, asked(*words), StopFlag(), lambda text: None)


def test_the_command_prints_json_alone_and_refuses_bad_budgets(finished: Store, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "best", "baseline", "--max-pairs", "10", "--json"])
    assert ended.value.code == 0
    values = json.loads(capsys.readouterr().out)
    assert values["levels"][0]["verdict"] == "faster"
    assert set(values["levels"][0]["pairs_needed"]) == {"1 %", "2 %"}
    for words, message in (
        (["--max-pairs", "3"], "--max-pairs 3"),
        (["--margin", "80"], "--margin 80"),
        (["--wall-time", "7"], "--wall-time"),
        (["-c", "5"], "no concurrency 5; it has 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", "best", "baseline", *words])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# one measurement at a time


def _hold(folder: str) -> None:
    """Hold the machine until the file ``told`` is there."""
    host_lock.tempfile.tempdir = folder
    with hold_machine("engine", "study one", lambda text: None, lambda: None):
        (Path(folder) / "held").touch()
        while not (Path(folder) / "told").exists():
            time.sleep(0.05)


def test_a_second_process_waits_with_one_line_naming_the_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_lock.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_lock, "_POLL_S", 0.05)
    other = multiprocessing.get_context("spawn").Process(target=_hold, args=(str(tmp_path),))
    other.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.05)
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        (tmp_path / "told").touch()

    try:
        with hold_machine("engine", "study two", tell, lambda: None):
            assert lines, "two hold one machine"
    finally:
        (tmp_path / "told").touch()
        other.join()
    assert len(lines) == 1
    assert f"process {other.pid} (study one" in lines[0]


def test_waiting_can_be_given_up_and_simulations_never_wait(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_lock.tempfile, "tempdir", str(tmp_path))
    entered, leave = threading.Event(), threading.Event()

    def holder() -> None:
        with hold_machine("engine", "first", lambda text: None, lambda: None):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=holder)
    thread.start()
    entered.wait(10)
    flag = StopFlag()
    flag.reason = "Ctrl-C"
    try:
        with (
            pytest.raises(StopRequestedError),
            hold_machine("engine", "second", lambda text: None, flag.check),
        ):
            raise AssertionError("two hold one machine")
        with hold_machine("sim", "third", lambda text: None, flag.check):
            pass
    finally:
        leave.set()
        thread.join()


def launch_file(tmp_path: Path, target: dict[str, object]) -> str:
    """A launch config for a target."""
    block = {
        "target": target, "draft": {"weights": "random"}, "tp": 8,
        "collectives": {"backend": "nccl"},
        "schedule": [{"max_concurrency": 1, "speculation": {"method": "off"}}],
    }  # fmt: skip
    path = tmp_path / "launch.yaml"
    path.write_text(json.dumps(block))
    return str(path)


def test_a_file_of_another_model_is_refused(finished: Store, tmp_path: Path) -> None:
    own = dict(sim_study()["target"])
    other = launch_file(tmp_path, {"path": str(ROOT / "studies" / "models" / "tiny-moe")})
    with pytest.raises(UserError, match=r"launch.yaml is for another model"):
        run_compare(finished, asked("baseline", other, study="sim"), StopFlag(), lambda text: None)
    same = launch_file(tmp_path, own)
    found = run_compare(
        finished, asked("baseline", same, study="sim", max_pairs=6), StopFlag(), lambda text: None
    )
    assert found.levels[0].decision.num_pairs == 6


def test_knobs_that_the_backend_refuses_are_a_failure_of_their_arm(
    finished: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: SimBackend, group: Group) -> Failure | None:
        del self, group
        raise ValueError("collectives.backend 'x' does not run here\nand more")

    monkeypatch.setattr(SimBackend, "open", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "baseline", "best", "--study", "sim", "--json"])
    shown = capsys.readouterr()
    # one object on stdout, although it failed
    found = json.loads(shown.out)
    assert ended.value.code == 1
    assert found["failure"]["kind"] == "invalid"
    assert found["failure"]["message"] == "collectives.backend 'x' does not run here"
    assert "gave no number" in shown.err


def test_the_price_of_precision_is_told_in_pairs_and_time(finished: Store) -> None:
    found = run_compare(finished, asked("0", "baseline"), StopFlag(), lambda text: None)
    screen = io.StringIO()
    show_compared(found, Console(file=screen, width=200))
    assert re.search(r"±1 % needs \d+ pairs \(\d+ (s|min|h|days)\)", screen.getvalue())
