"""The database: committed repeats, claims taken once, clear refusals, speed at size."""

import multiprocessing
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from store_cases import KNOBS, WORKLOAD, claim, new_study

from autotune.errors import AutotuneError, UserError
from autotune.history import History
from autotune.records import Failure, Measurement, Provenance
from autotune.store.database import VERSION_TABLE, open_engine, parse_url
from autotune.store.store import Store
from autotune.store.tables import METADATA
from autotune.store.views import NoiseFloor, WorkerView
from autotune.store.workers import is_alive, worked_s
from model.spec import Interval, Prediction


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db"


@pytest.fixture
def store(url: str) -> Store:
    return Store.create(url)


def measurement(repeat: int, value: float | None = 10.0, failure: Failure | None = None):
    now = datetime.now(UTC)
    return Measurement(
        trial=0,
        knobs_id=KNOBS.id,
        concurrency=1,
        repeat=repeat,
        order=-1,
        started=now,
        ended=now + timedelta(seconds=1),
        tokens_per_s=value,
        failure=failure,
    )


def test_repeats_come_back_whole_and_in_the_order_taken(store: Store) -> None:
    study = new_study(store)
    trial = claim(store, study, store.add_worker(study.id))
    assert trial is not None
    store.set_number(trial, 0)
    written = [store.add_measurement(study.id, trial, measurement(r, 10.0 + r)) for r in range(3)]
    assert [m.order for m in written] == [0, 1, 2]
    assert store.measurements([trial]) == written
    history = History.read(store, study.id)
    assert history.trial_values(trial, 1) == [10.0, 11.0, 12.0]


def test_a_failed_trial_keeps_its_repeats_and_its_reason_but_is_not_pooled(store: Store) -> None:
    study = new_study(store)
    trial = claim(store, study, store.add_worker(study.id))
    assert trial is not None
    store.set_number(trial, 0)
    store.add_measurement(study.id, trial, measurement(0))
    failure = Failure(kind="incorrect", stage="check", message="differs")
    store.finish_trial(trial, failure)
    assert store.failures(study.id)[0].failure == failure
    history = History.read(store, study.id)
    assert len(history.repeats) == 1
    assert history.by_knobs[KNOBS.id].failed
    assert history.by_knobs[KNOBS.id].summary(1) is None


def test_work_is_claimed_once_and_inherited_only_from_its_owner(store: Store) -> None:
    study = new_study(store)
    one, two = store.add_worker(study.id), store.add_worker(study.id)
    trial = claim(store, study, one)
    assert trial is not None
    assert claim(store, study, two) is None
    assert not store.adopt_trial(trial, two, two)
    assert store.adopt_trial(trial, one, two)
    assert not store.adopt_trial(trial, one, two)


def _claim_many(url: str, study_id: int, start: float) -> int:
    store = Store.create(url)
    study = store.study("s")
    worker = store.add_worker(study_id)
    time.sleep(max(0.0, start - time.time()))
    return sum(claim(store, study, worker, f"search:{i}") is not None for i in range(25))


def test_processes_that_claim_at_once_share_the_work_without_overlap(url: str) -> None:
    study = new_study(Store.create(url))
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        start = time.time() + 3.0
        taken = pool.starmap(_claim_many, [(url, study.id, start)] * 3)
    assert sum(taken) == 25


def test_predictions_and_provenance_survive_the_round_trip(store: Store) -> None:
    study = new_study(store)
    trial = claim(store, study, store.add_worker(study.id))
    assert trial is not None
    middle = Interval(2.0, 1.0, 3.0)
    prediction = Prediction(
        knobs=KNOBS,
        workload=WORKLOAD,
        calibration_id="c",
        terms_ms={"draft": middle},
        cycle_ms=middle,
        accept_length=middle,
        tokens_per_s=middle,
        speed_of_light_ms={"draft": 0.1},
        memory_gib_per_gpu=1.0,
        feasible=True,
    )
    store.add_prediction(trial, prediction)
    assert store.predictions(study.id) == {trial: {1: prediction}}
    provenance = Provenance(config={"a": 1}, config_hash="h", python="3.11")
    store.set_provenance(trial, provenance)
    assert store.provenance(trial) == provenance


def test_a_name_is_taken_once_and_an_unknown_one_lists_what_is_there(store: Store) -> None:
    new_study(store)
    with pytest.raises(UserError, match="study 's' exists already"):
        new_study(store)
    with pytest.raises(UserError, match=r"no study .x. in .*; studies there: s"):
        store.study("x")


def test_migrations_build_exactly_the_tables_of_the_code(url: str) -> None:
    engine = Store.create(url).engine
    found = inspect(engine)
    names = {name for name in found.get_table_names() if name != VERSION_TABLE}
    assert names == set(METADATA.tables)
    for name, table in METADATA.tables.items():
        assert {c["name"] for c in found.get_columns(name)} == set(table.columns.keys())
        indexed = {index["name"] for index in found.get_indexes(name)}
        assert {index.name for index in table.indexes} <= indexed


def test_a_database_of_a_newer_schema_is_refused(url: str) -> None:
    store = Store.create(url)
    with store.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    for opened in (Store.create, Store.existing):
        with pytest.raises(UserError, match=r"newer autotune .schema 9999; this version knows"):
            opened(url)


def test_a_locked_database_says_so_and_its_contents_stay(url: str, tmp_path: Path) -> None:
    new_study(Store.create(url))
    blocker = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    try:
        store = Store(open_engine(parse_url(url), busy_timeout_s=0.2))
        with pytest.raises(AutotuneError, match="is locked by another process") as caught:
            new_study(store, "other")
        assert caught.value.exit_code == 1
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()
    assert [study.name for study in Store.existing(url).studies()] == ["s"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda d: f"sqlite:///{d}/no/such/x.db", "is no folder", id="no-folder"),
        pytest.param(lambda d: "mysql://host/x", "mysql is not supported", id="dialect"),
        pytest.param(lambda d: "http//x://", "is no SQLAlchemy URL", id="no-url"),
        pytest.param(lambda d: str(d / "text.db"), "is no .intact. SQLite file", id="text-file"),
        pytest.param(lambda d: f"sqlite:///{d}", "can't be opened", id="folder"),
    ],
)
def test_a_database_that_cannot_be_used_gets_one_clear_line(
    tmp_path: Path, make, message: str
) -> None:
    (tmp_path / "text.db").write_text("no database at all, " * 100)
    with pytest.raises(UserError, match=message) as caught:
        Store.create(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_reading_an_absent_database_does_not_create_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; start a study first"):
        Store.existing(str(tmp_path / "b.db"))
    assert not (tmp_path / "b.db").exists()


def test_ten_thousand_repeats_are_summarised_in_a_few_calls_each(
    store: Store, python_calls: Callable[..., int]
) -> None:
    study = new_study(store)
    worker = store.add_worker(study.id)
    trials = []
    for number in range(100):
        trial = claim(store, study, worker, f"search:{number}")
        assert trial is not None
        store.set_number(trial, number)
        store.finish_trial(trial, None)
        trials.append(trial)
    record = measurement(0).model_dump(mode="json")
    rows = [
        {
            "study_id": study.id,
            "trial_id": trials[i % 100],
            "knobs_id": KNOBS.id,
            "concurrency": 1,
            "repeat": i // 100,
            "order": i,
            "started": datetime.now(UTC),
            "ended": datetime.now(UTC),
            "tokens_per_s": 10.0 + i % 7,
            "output_check": "exact",
            "record": record,
        }
        for i in range(10_000)
    ]
    with store.write() as session:
        session.execute(METADATA.tables["autotune_measurement"].insert(), rows)
    calls = python_calls(lambda: History.read(store, study.id))
    assert History.read(store, study.id).by_knobs[KNOBS.id].summary(1).n == 10_000
    assert calls <= 10_000 * 20


def test_noise_floors_are_replaced_and_events_counted(store: Store) -> None:
    study = new_study(store)
    store.set_noise_floor(study.id, NoiseFloor(1, 0.5, 3))
    store.set_noise_floor(study.id, NoiseFloor(1, 0.02, 6))
    assert store.noise_floors(study.id) == {1: NoiseFloor(1, 0.02, 6)}
    store.add_event(study.id, "open", {})
    assert store.count_events(study.id, "open") == 1


def test_time_worked_counts_overlapping_workers_once() -> None:
    def worker(start: int, end: int) -> WorkerView:
        zero = datetime(2030, 1, 1, tzinfo=UTC)
        begun, ended = zero + timedelta(seconds=start), zero + timedelta(seconds=end)
        return WorkerView(
            id=1, host="h", pid=1, process_started=0.0, started=begun, last_seen=ended, ended=ended
        )

    assert worked_s([worker(0, 10), worker(5, 12), worker(20, 25)]) == 17


def test_this_process_is_alive_and_a_reused_pid_is_not(store: Store) -> None:
    study = new_study(store)
    store.add_worker(study.id)
    (worker,) = store.workers(study.id)
    now = datetime.now(UTC)
    assert is_alive(worker, now)
    reused = WorkerView(**{**_fields(worker), "process_started": worker.process_started - 1000})
    assert not is_alive(reused, now)


def _fields(worker: WorkerView) -> dict:
    return {name: getattr(worker, name) for name in WorkerView.__dataclass_fields__}
