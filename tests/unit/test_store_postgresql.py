"""The same store on PostgreSQL; opt in: AUTOTUNE_TEST_POSTGRESQL=postgresql://USER@HOST:PORT/NAME.

The role must be allowed to create databases; each test uses one of its own. `make test-postgresql`.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.engine import make_url
from store_cases import KNOBS, claim, new_study
from study_files import sim_study, write_study

from autotune.errors import AutotuneError, UserError
from autotune.records import Failure, Measurement, Provenance
from autotune.store.database import HEAD_REVISION, VERSION_TABLE, open_engine, parse_url
from autotune.store.store import Store
from autotune.store.tables import METADATA

SERVER = os.environ.get("AUTOTUNE_TEST_POSTGRESQL")
pytestmark = pytest.mark.skipif(SERVER is None, reason="AUTOTUNE_TEST_POSTGRESQL is not set")


@pytest.fixture
def url() -> Iterator[str]:
    """A database of its own, dropped afterwards."""
    assert SERVER is not None
    name = f"autotune_test_{uuid.uuid4().hex[:12]}"
    admin = open_engine(parse_url(SERVER)).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(SERVER).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def measurement(repeat: int) -> Measurement:
    now = datetime.now(UTC)
    return Measurement(
        trial=0,
        knobs_id=KNOBS.id,
        concurrency=1,
        repeat=repeat,
        order=-1,
        started=now,
        ended=now,
        tokens_per_s=100.0 + repeat,
        output_check="exact",
    )


def _create(url: str) -> str:
    Store.create(url).close()
    return "created"


def test_migrations_give_the_tables_that_the_code_declares(url: str) -> None:
    Store.create(url).close()
    Store.existing(url).close()
    engine = open_engine(parse_url(url))
    found = inspect(engine)
    with engine.connect() as connection:
        stored = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    assert stored == HEAD_REVISION
    for table in METADATA.sorted_tables:
        columns = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
        assert columns == {column.name: column.nullable for column in table.columns}
        unique = {item["name"] for item in found.get_unique_constraints(table.name)}
        declared = {c.name for c in table.constraints if str(c.name or "").startswith("uq_")}
        assert declared <= unique
    engine.dispose()


def test_processes_that_create_it_at_once_all_find_it_ready(url: str) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_create, [url] * 4) == ["created"] * 4


def test_an_empty_database_is_refused_for_reading(url: str) -> None:
    with pytest.raises(UserError, match="holds no studies"):
        Store.existing(url)


def test_a_server_that_is_not_there_is_one_line_that_names_it() -> None:
    with pytest.raises(AutotuneError) as caught:
        Store.create("postgresql://nobody:secret@127.0.0.1:9/none")
    message = str(caught.value)
    assert "127.0.0.1:9" in message
    assert "secret" not in message
    assert "\n" not in message


def test_what_is_stored_comes_back(url: str) -> None:
    store = Store.create(url)
    study = new_study(store)
    worker = store.add_worker(study.id)
    trial = claim(store, study, worker)
    assert trial is not None
    store.set_number(trial, 0)
    placed = store.add_measurement(study.id, trial, measurement(0))
    failure = Failure(kind="oom", stage="measure", message="CUDA out of memory")
    store.finish_trial(trial, failure)
    assert store.measurements([trial]) == [placed]
    assert store.repeats(study.id)[0].started == placed.started
    assert [stored.failure for stored in store.failures(study.id)] == [failure]
    assert store.workers(study.id)[0].started.tzinfo is not None
    assert store.trials(study.id)[0].knobs == KNOBS
    store.close()


def test_equal_provenance_is_stored_once(url: str) -> None:
    provenance = Provenance(config={"a": 1}, config_hash="h", python="3.11")
    store = Store.create(url)
    study = new_study(store)
    worker = store.add_worker(study.id)
    trials = [claim(store, study, worker, f"search:{n}") for n in range(2)]
    for trial in trials:
        assert trial is not None
        store.set_provenance(trial, provenance)
        assert store.provenance(trial) == provenance
    with store.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM autotune_provenance")).scalar() == 1
    store.close()


def test_a_piece_of_work_is_taken_once_and_a_name_given_once(url: str) -> None:
    store = Store.create(url)
    study = new_study(store)
    worker = store.add_worker(study.id)

    def take(_: int) -> int | None:
        return claim(store, study, worker)

    def start(_: int) -> str:
        try:
            return new_study(store, "taken").name
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        taken = [trial for trial in pool.map(take, range(16)) if trial is not None]
        names = list(pool.map(start, range(8)))
    assert len(taken) == 1
    assert names.count("taken") == 1
    assert all("exists already" in name for name in names if name != "taken")
    store.close()


def test_repeats_of_many_writers_get_one_order_without_gaps(url: str) -> None:
    store = Store.create(url)
    study = new_study(store)
    trial = claim(store, study, store.add_worker(study.id))
    assert trial is not None

    def add(repeat: int) -> int:
        return store.add_measurement(study.id, trial, measurement(repeat)).order

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(add, range(40))) == list(range(40))
    store.close()


def test_a_writer_that_waits_too_long_says_locked(url: str) -> None:
    store = Store.create(url, busy_timeout_s=0.2)
    with store.write() as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(AutotuneError, match="is locked by another process"):
            new_study(store)
    store.close()


def test_a_study_runs_and_every_command_reads_it(url: str, tmp_path: Path) -> None:
    write_study(tmp_path, sim_study())

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "autotune.cli.main", *words, "--database", url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run("study", "start", "study.yaml", "--json"))["num_search_trials"] == 3
    report = json.loads(run("study", "report", "sim", "--format", "json"))
    assert report
    assert "tok/s" in run("study", "report", "sim")
    assert run("explain", "0")
    assert run("diff", "0", "1")
    with create_engine(open_engine(parse_url(url)).url).connect() as connection:
        # Optuna's own tables are beside ours
        assert connection.execute(text("SELECT count(*) FROM trials")).scalar()
