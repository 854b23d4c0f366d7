"""``bench/record_grid.py``: a space recorded on the engine, and the search replayed on the file."""

import gzip
import io
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import yaml
from contract_harness import ROOT
from rich.console import Console

from autotune.backends.base import failed_measurement
from autotune.backends.recording import portable, read_recording
from autotune.errors import UserError
from autotune.outcome import Outcome
from autotune.plan import create_study, make_plan, stored_plan
from autotune.progress import Progress
from autotune.records import Failure, Measurement
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study
from model.spec import Knobs, Workload

sys.path.insert(0, str(ROOT))
from bench.record_grid import Recorder, all_knobs, passes

SPACE = {
    "speculation.method": ["off", "eagle3"],
    "speculation.steps": [1, 2],
    "speculation.topk": [1],
    "parallel.tp": 1,
    "collectives.backend": "gloo",
    "host.numa_bind": [False, True],
}


def test_a_pass_takes_every_cell_once_and_every_second_one_backwards() -> None:
    cells = [(f"knobs{number}", level) for number in range(5) for level in (1, 16)]
    (_, first), (_, second), (_, third) = passes(cells, 3)  # type: ignore[arg-type]
    assert sorted(first) == sorted(third) == sorted(cells)  # type: ignore[type-var]
    assert second == first[::-1]
    assert first != third


def study_file(folder: Path, checkpoint: Path, **changes: object) -> Path:
    values = {
        "name": "grid",
        "machine": str(ROOT / "studies" / "machines" / "cpu-2core.yaml"),
        "target": {"path": str(checkpoint)},
        "draft": {"shape": "eagle3", "weights": "random"},
        "workload": {
            "prompts": "builtin:code",
            "input_len": 24,
            "output_len": 12,
            "concurrency": [1, 2],
        },
        "backend": {"kind": "engine", "args": {"device": "cpu", "timeout_s": 200}},
        "space": SPACE,
        "budget": {"measured_trials": 4},
        "measure": {"warmup": 1, "min_repeats": 2, "max_repeats": 2},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def replayed(study: Path, folder: Path) -> Outcome:
    loaded = load_study(study)
    store = Store.create(f"sqlite:///{folder}/a.db")
    view = create_study(loaded, make_plan(loaded), store)
    plan = stored_plan(store.study(view.name))
    progress = Progress(
        Console(file=io.StringIO(), width=200), plan.study.budget.measured_trials, (1,)
    )
    return StudyRun(plan, view, store, progress, StopFlag()).run()


# one rank: two engines of the baseline's group and one of the other; two ranks: one of each
@pytest.mark.parametrize(
    ("tp", "num_engines"),
    [
        pytest.param(1, 3, id="one rank"),
        pytest.param(2, 2, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_recorded_space_is_searched_again_without_the_machine(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, num_engines: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "grid.jsonl"
    space = SPACE | {"parallel.tp": tp}
    study = load_study(study_file(tmp_path, checkpoint, space=space)).study
    recorder = Recorder(study, tmp_path / "logs", path, time.monotonic() + 250, engines=2)
    assert len(recorder.backends) == num_engines
    try:
        recorder.open()
        recorder.prepare()
        recorder.provenance()
        recorder.run(2)
    finally:
        recorder.close()
    text = path.read_text()
    assert not [folder for folder in (ROOT, tmp_path / "logs", Path.home()) if str(folder) in text]
    recording = read_recording(path)
    assert recording.provenance is not None
    cells = Counter((r.knobs.id, r.workload.concurrency) for r in recording.repeats)
    # off and two chains, each with and without a NUMA binding, at two levels
    assert len(cells) == 12
    assert set(cells.values()) == {2}
    assert [r.measurement.order for r in recording.repeats] == list(range(24))
    assert all(r.measurement.failure is None for r in recording.repeats)
    assert {r.measurement.output_check for r in recording.repeats} == {"exact"}
    packed = tmp_path / "grid.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_recording(packed) == recording
    backend = {"kind": "replay", "args": {"path": packed.name}}
    again = study_file(tmp_path, checkpoint, backend=backend, space=space)
    outcome = replayed(again, tmp_path)
    assert outcome.num_search_trials == 4
    assert outcome.num_failed == 0


def test_the_budget_ends_a_pass_and_what_was_taken_stays(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.jsonl"
    space = SPACE | {"host.numa_bind": False, "speculation.method": "off"}
    study = load_study(study_file(tmp_path, checkpoint, space=space)).study
    recorder = Recorder(study, tmp_path / "logs", path, time.monotonic() + 250)
    take, taken = recorder.take, 3

    def ending(knobs: Knobs, level: int) -> None:
        take(knobs, level)
        if recorder.order == taken:
            recorder.deadline_s = time.monotonic()

    monkey = pytest.MonkeyPatch()
    monkey.setattr(recorder, "take", ending)
    try:
        recorder.open()
        recorder.prepare()
        recorder.run(5)
    finally:
        recorder.close()
        monkey.undo()
    assert len(read_recording(path).repeats) == taken
    assert "pass 4: 3 repeats" in capsys.readouterr().out


def test_knobs_of_a_value_are_left_out_but_never_the_baseline(
    checkpoint: Path, tmp_path: Path
) -> None:
    study = load_study(study_file(tmp_path, checkpoint)).study
    pool, baseline = all_knobs(study)
    fewer, same = all_knobs(study, ["speculation.steps=2", "host.numa_bind=True"])
    assert same == baseline == fewer[0]
    kept = {each.id for each in pool if each.steps != 2 and not each.numa_bind}
    assert {each.id for each in fewer} == kept
    assert 0 < len(kept) < len(pool)


def test_an_engine_that_gives_no_number_is_asked_no_more_and_the_others_are(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.jsonl"
    study = load_study(study_file(tmp_path, checkpoint)).study
    recorder = Recorder(study, tmp_path / "logs", path, time.monotonic() + 250)
    broken = next(b for b, _ in recorder.backends if b is not recorder.first)
    asked: list[str] = []

    def measure(backend: object, knobs: Knobs, workload: Workload, repeat: int) -> Measurement:
        asked.append("broken" if backend is broken else "whole")
        now = datetime.now(UTC)
        failure = Failure(kind="hang", stage="measure", message="rank 1 is silent")
        lost = failed_measurement(knobs, workload, repeat, failure, started=now, ended=now)
        whole = lost.model_copy(update={"failure": None, "tokens_per_s": 1.0})
        return lost if backend is broken else whole

    for backend, _ in recorder.backends:
        backend.measure = partial(measure, backend)  # type: ignore[method-assign]
        backend.warm = lambda knobs, workload: None  # type: ignore[method-assign]
    recorder.run(2)
    assert asked.count("broken") == 2
    whole = sum(mine is recorder.first for mine in recorder.engine_of.values())
    assert asked.count("whole") == 2 * whole
    assert len(read_recording(path).repeats) == 2 * whole + 2
    assert "rank 1 is silent" in capsys.readouterr().out


PLACES = {"/work/here": "", "/work/here/out/logs": "logs", "/root": "~"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/work/here/studies/models/tiny", "studies/models/tiny"),
        ("/work/here", "."),
        ("/work/here:/work/here/.site:/usr/lib", ".:.site:/usr/lib"),
        ("/work/here/out/logs/first/nccl.1.log", "logs/first/nccl.1.log"),
        ("no file /root/.cache/x", "no file ~/.cache/x"),
        ("/work/hereafter/a", "/work/hereafter/a"),
        ("/mnt/root/a and /rooted", "/mnt/root/a and /rooted"),
        ({"a": ["/root", 3, None, {"/root": True}]}, {"a": ["~", 3, None, {"/root": True}]}),
    ],
    ids=["below", "itself", "a list of paths", "the deeper one", "in a sentence", "a longer name",
         "the middle of a path", "nested"],
)  # fmt: skip
def test_a_recorded_line_names_no_folder_of_its_machine(value: object, expected: object) -> None:
    assert portable(value, PLACES) == expected


def test_no_shipped_result_names_a_folder_of_the_machine_it_was_taken_on() -> None:
    found = []
    for file in sorted((ROOT / "studies" / "results").rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            data = gzip.decompress(data) if file.suffix == ".gz" else data
            found += [
                (file.name, name) for name in (b"/root/", b"/work/", b"/home/") if name in data
            ]
    assert not found


def test_a_packed_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" * 400)[:-12])
    with pytest.raises(UserError, match=r"grid\.jsonl\.gz: .*; backend\.args\.path needs"):
        read_recording(path)
    path.write_text('{"kind": "measurement"}\n')
    with pytest.raises(UserError, match=r"grid\.jsonl\.gz: .*Not a gzip"):
        read_recording(path)
