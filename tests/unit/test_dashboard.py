"""Notes, plots and the server of ``autotune dashboard``, on a study of the simulated host."""

import dataclasses
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import optuna
import plotly.graph_objects as go
import pytest
from optuna_dashboard import get_note, save_note
from rich.console import Console
from study_files import sim_study, write_study

from autotune.cli.main import main
from autotune.dashboard.evidence import StudyEvidence, TrialEvidence, read_evidence
from autotune.dashboard.figures import cut_long_bars, figures
from autotune.dashboard.notes import END_MARK, merged, study_note, trial_note
from autotune.dashboard.publish import Publisher
from autotune.dashboard.storage import open_storage
from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.records import Failure
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study
from model.spec import CYCLE_TERMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the database of a finished study called "sim"; tests only add notes to it."""
    path = tmp_path_factory.mktemp("dashboard")
    before = Path.cwd()
    os.chdir(path)
    try:
        loaded = load_study(write_study(path, sim_study(budget={"measured_trials": 5})))
        plan = make_plan(loaded)
        store = Store.create("sqlite:///autotune.db")
        view = create_study(loaded, plan, store)
        progress = Progress(Console(file=io.StringIO()), 5, (1,))
        StudyRun(plan, view, store, progress, StopFlag()).run()
        store.close()
        yield path
    finally:
        os.chdir(before)


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    opened = Store.existing(f"sqlite:///{folder}/autotune.db")
    yield opened
    opened.close()


@pytest.fixture
def study(store: Store) -> StudyEvidence:
    return read_evidence(store, store.study("sim"))


def speculative(study: StudyEvidence) -> TrialEvidence:
    return next(t for t in study.trials if t.trial.knobs.method == "eagle3" and t.levels)


def cells(note: str, first: str) -> list[str]:
    """Cells of the table row that begins with ``first``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in note.splitlines()]
    (row,) = [row for row in rows if row[0] == first]
    return row


def test_a_note_holds_every_term_predicted_beside_measured(study: StudyEvidence) -> None:
    trial = speculative(study)
    (level,) = trial.levels
    note = trial_note(trial, study)
    assert level.predicted is not None
    for term in CYCLE_TERMS:
        row = cells(note, term)
        assert row[2].startswith(f"{level.predicted.terms_ms[term].median:.3g} (")
        assert row[3] == f"{level.term_ms(term):.3g}"


def test_a_note_holds_speed_accept_length_output_and_knobs(study: StudyEvidence) -> None:
    trial = speculative(study)
    (level,) = trial.levels
    summary = level.tokens_per_s
    assert summary is not None
    row = cells(trial_note(trial, study), "1")
    assert row[2].startswith(f"{summary.median:.4g} (")
    assert f"n {summary.n}" in row[2]
    assert row[6] == f"{level.accept_length:.2f}"
    assert row[7] == level.output_check
    baseline = study.baseline(1)
    assert baseline is not None
    assert row[4] == f"{summary.median / baseline.median:.2f}×"
    assert cells(trial_note(trial, study), "`speculation.steps`")[1] == str(trial.trial.knobs.steps)


def test_a_trial_of_autotune_compare_says_so(study: StudyEvidence) -> None:
    trial = speculative(study)
    compared = dataclasses.replace(trial, trial=dataclasses.replace(trial.trial, role="compare"))
    assert "compared in turns (autotune compare) · complete" in trial_note(compared, study)


def test_a_failed_trial_shows_why_and_the_end_of_its_log(study: StudyEvidence) -> None:
    failure = Failure(
        kind="oom",
        stage="start",
        message="rank 3: 2 * 40 GiB asked | 12 free",
        log_tail="\n".join(f"line {i}" for i in range(100)) + "\n```\n<b>CUDA</b>",
    )
    failed = dataclasses.replace(speculative(study), failure=failure)
    note = trial_note(failed, study)
    assert "**Failed: oom at start:** rank 3: 2 \\* 40 GiB asked \\| 12 free" in note
    assert "line 99" in note
    assert "line 10\n" not in note
    # the log's own fence does not end ours
    assert note.count("~~~~~") == 2


def test_what_nobody_measured_or_predicted_is_a_dash(study: StudyEvidence) -> None:
    trial = speculative(study)
    (level,) = trial.levels
    bare = dataclasses.replace(level, predicted=None, repeats=())
    note = trial_note(dataclasses.replace(trial, levels=(bare,)), study)
    assert set(cells(note, "1")[1:]) == {"–"}


@pytest.mark.parametrize(
    ("stored", "result"),
    [
        pytest.param("", f"new\n{END_MARK}", id="nothing-there"),
        pytest.param(f"new\n{END_MARK}", None, id="up-to-date"),
        pytest.param(f"old\n{END_MARK}", f"new\n{END_MARK}", id="outdated"),
        pytest.param(f"old\n{END_MARK}\nmine", f"new\n{END_MARK}\nmine", id="own-words-below-stay"),
        pytest.param("all mine", None, id="a-note-of-the-reader-stays"),
    ],
)
def test_a_readers_own_words_are_never_lost(stored: str, result: str | None) -> None:
    assert merged(f"new\n{END_MARK}", stored) == result


def test_the_study_note_without_an_outcome_still_names_the_study(study: StudyEvidence) -> None:
    assert study_note(study, None).startswith("### Study sim")


def test_the_diagonal_plot_holds_every_trial_that_has_both_values(study: StudyEvidence) -> None:
    figure = figures(study)["1.predicted-against-measured"]
    both = [t for t in study.trials if t.levels and t.levels[0].predicted and t.levels[0].repeats]
    points, diagonal = figure.data
    assert len(points.x) == len(both) >= 5
    first = both[0].levels[0]
    assert first.predicted is not None
    assert first.tokens_per_s is not None
    assert points.x[0] == first.predicted.tokens_per_s.median
    assert points.y[0] == first.tokens_per_s.median
    assert list(diagonal.x) == list(diagonal.y)


def test_bars_of_time_add_up_to_the_cycle_per_token(study: StudyEvidence) -> None:
    figure = figures(study)["3.time-per-cycle"]
    trial = speculative(study)
    (level,) = trial.levels
    (index,) = [i for i, x in enumerate(figure.data[0].x) if x.startswith(f"{trial.trial.number}:")]
    total = sum(bar.y[index] for bar in figure.data)
    assert level.cycle_ms is not None
    assert level.accept_length is not None
    assert total == pytest.approx(level.cycle_ms / level.accept_length, rel=0.05)


def test_a_trial_of_ten_times_the_time_is_cut_and_does_not_hide_the_others() -> None:
    figure = go.Figure()
    figure.add_bar(x=list("abcd"), y=[1.0, 1.2, 12.0, 1.1])
    cut_long_bars(figure, list("abcd"), [1.0, 1.2, 12.0, 1.1])
    assert 1.2 < figure.layout.yaxis.range[1] < 6.0
    (told,) = figure.layout.annotations
    assert (told.x, told.text) == ("c", "12 ms ↑")
    cut_long_bars(even := go.Figure(), list("ab"), [1.0, 1.5])
    assert not even.layout.annotations


def test_the_history_never_falls_and_shows_the_baseline(study: StudyEvidence) -> None:
    figure = figures(study)["2.optimization-history"]
    best = next(trace for trace in figure.data if trace.name.startswith("best so far"))
    assert list(best.y) == sorted(best.y)
    base = next(trace for trace in figure.data if trace.name.startswith("baseline"))
    baseline = study.baseline(1)
    assert baseline is not None
    assert set(base.y) == {baseline.median}


def test_a_study_without_trials_has_no_plots_and_no_crash(study: StudyEvidence) -> None:
    empty = dataclasses.replace(
        study, trials=(), history=dataclasses.replace(study.history, trials=(), repeats=())
    )
    assert figures(empty) == {}
    assert study_note(empty, None)


def test_publishing_twice_writes_nothing_new_and_keeps_own_words(store: Store) -> None:
    storage = open_storage(store)
    publisher = Publisher(store, storage)
    view = store.study("sim")
    publisher.publish(view)
    assert publisher.publish(view) == 0
    stored = optuna.load_study(study_name="sim", storage=storage)
    target = SimpleNamespace(
        storage=storage, study=stored, _trial_id=stored.get_trials()[0]._trial_id
    )
    save_note(target, get_note(target).replace("### Trial 0", "### Trial zero") + "\nmy words")
    assert publisher.publish(view) == 1
    assert get_note(target).startswith("### Trial 0")
    assert get_note(target).endswith("\nmy words")


def test_importances_name_knobs_that_vary(store: Store) -> None:
    publisher = Publisher(store, open_storage(store))
    view = store.study("sim")
    stored = optuna.load_study(study_name="sim", storage=publisher.storage)
    named = dict(publisher._figures(stored, read_evidence(store, view)))
    (bars,) = named["5.knob-importances"].data
    assert "speculation.steps" in bars.y
    assert all(0 <= value <= 1 and math.isfinite(value) for value in bars.x)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a user's mistake is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_port_in_use_is_named_with_a_way_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(capsys, "sim", "-d", str(folder / "autotune.db"), "--port", str(port))
    assert f"--port {port}" in line
    assert "--port 0" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["nowhere.db"], "nowhere.db", id="no-database"),
        pytest.param(["other", "-d", "autotune.db"], "no study 'other'", id="no-study"),
        pytest.param(["missing.yaml"], "missing.yaml", id="no-study-file"),
        pytest.param(["autotune.db", "-d", "b.db"], "two databases", id="two-databases"),
        pytest.param(["sim", "--port", "70000"], "--port 70000", id="impossible-port"),
        pytest.param(["mysql://a/b"], "mysql", id="unknown-database-kind"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    arguments: list[str],
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert words in refused(capsys, *arguments)


def test_a_text_file_is_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.db"
    path.write_text("no database at all, but long enough to look like one to a reader" * 20)
    assert "SQLite" in refused(capsys, str(path))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_cleanly_and_frees_the_port(name: str, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli.main", "dashboard", "sim", "--port", "0", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            text += line
        url = json.loads(text)["url"]
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(getattr(signal, name))
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    # nothing of its session is left
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) != 0


def test_without_serving_it_only_writes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", "study.yaml", "--no-serve", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"url": None, "studies": ["sim"]}
