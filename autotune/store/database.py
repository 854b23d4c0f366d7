"""Opening a database: engine, SQLite settings, migrations, and clear errors.

Several processes may work on one database at once: SQLite runs in WAL mode with a busy timeout,
and writes begin with BEGIN IMMEDIATE, so that a writer waits instead of failing half-way. On
PostgreSQL a lock of our own gives writers the same turns.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from autotune.errors import AutotuneError, UserError
from autotune.store.location import DEFAULT_URL

if TYPE_CHECKING:
    from alembic.config import Config

VERSION_TABLE = "autotune_alembic_version"
#: the newest revision in migrations/versions: a database that has it is opened without Alembic,
#: which takes longer to import than most commands take to answer
HEAD_REVISION = "0001"
#: how a transaction begins that writes; SQLite's word
_WRITES = "IMMEDIATE"
#: how long a statement waits for another writer
BUSY_TIMEOUT_S = 30.0
#: advisory lock of PostgreSQL that each transaction which writes takes (any fixed number)
_WRITE_LOCK = 4_127_001


def parse_url(text_url: str) -> URL:
    """The URL of a database; a bare path means SQLite. Raises ``UserError``."""
    if "://" not in text_url:
        text_url = f"sqlite:///{text_url}"
    try:
        url = make_url(text_url)
    except ArgumentError:
        raise UserError(
            f"database {text_url!r} is no SQLAlchemy URL; write for example {DEFAULT_URL}"
        ) from None
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise UserError(
            f"database {shown(url)}: {url.get_backend_name()} is not supported; "
            f"use sqlite:///FILE or postgresql://HOST/NAME"
        )
    return url


def shown(url: URL) -> str:
    """The URL without its password."""
    return url.render_as_string(hide_password=True)


def sqlite_file(url: URL) -> Path | None:
    """File of an SQLite database; None for other kinds and for memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


@contextmanager
def clear_errors(url: URL) -> Iterator[None]:
    """Turn what a database driver raises into one line."""
    try:
        yield
    except DBAPIError as error:
        raise explain(error.orig or error, url) from error


def explain(error: BaseException, url: URL) -> AutotuneError:
    """One line for a driver's error: what is wrong with which database, and the way out."""
    message = " ".join(str(error).split())
    where = f"database {shown(url)}"
    if re.search(r"locked|busy|lock timeout", message):
        return AutotuneError(
            f"{where} is locked by another process ({message}); wait for it or stop it, "
            f"then run the command again: nothing stored is lost"
        )
    if "readonly" in message or "read-only" in message:
        return UserError(f"{where} can't be written; check the permissions or use --database")
    if "unable to open" in message:
        file = (sqlite_file(url) or Path()).resolve()
        if file.is_dir():
            why = f"{file} is a folder, not a file"
        elif not file.parent.is_dir():
            why = f"{file.parent} is no folder"
        else:
            why = f"{file if file.exists() else file.parent} can't be read and written"
        return UserError(f"{where} can't be opened: {why}; use --database sqlite:///FILE")
    if "not a database" in message or "malformed" in message:
        return UserError(f"{where} is no (intact) SQLite file: {message}; use another --database")
    if "disk is full" in message or "disk I/O" in message:
        return AutotuneError(f"{where}: {message}; free some space, then resume the study")
    return AutotuneError(f"{where}: {message}")


def open_engine(url: URL, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Engine:
    """An engine with our SQLite settings. Raises ``UserError`` when the driver is not installed."""
    try:
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url, connect_args={"timeout": busy_timeout_s})
        else:
            engine = create_engine(_with_driver(url), pool_pre_ping=True)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"database {shown(url)}: {error}; install its driver: pip install 'psycopg[binary]'"
        ) from None
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _sqlite_connected)
        event.listen(engine, "begin", _sqlite_begin)
    else:

        @event.listens_for(engine, "begin")
        def _take_turn(connection: Connection) -> None:
            if connection.get_execution_options().get("begin") == _WRITES:
                wait_ms = round(busy_timeout_s * 1e3)
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {wait_ms}")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK})")

    return engine


def _with_driver(url: URL) -> URL:
    """A plain postgresql:// goes to psycopg 3 where psycopg2, SQLAlchemy's choice, is missing."""
    plain = url.drivername == "postgresql" and find_spec("psycopg2") is None
    return url.set(drivername="postgresql+psycopg") if plain and find_spec("psycopg") else url


def writing(engine: Engine) -> Engine:
    """The same engine for transactions that write."""
    return engine.execution_options(begin=_WRITES)


def _sqlite_connected(connection: sqlite3.Connection, _record: object) -> None:
    # the driver's own transaction handling begins too late; _sqlite_begin does it instead
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    # a commit must survive kill -9 of this process; NORMAL gives that in WAL mode
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('begin', '')}")


def migrate(engine: Engine) -> None:
    """Create our tables or bring them to the newest revision.

    Raises ``UserError`` for a database that a newer autotune wrote, and what ``explain`` says.
    """
    from alembic import command

    config = _config()
    with clear_errors(engine.url):
        if engine.url.get_backend_name() == "sqlite":
            with engine.connect() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                # outside any transaction, and kept in the file for all later connections
                driver.execute("PRAGMA journal_mode=WAL")
        with writing(engine).begin() as connection:
            _refuse_newer(connection, config)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def check_revision(engine: Engine) -> bool:
    """Whether our tables are there and current; refuses a newer database, changes nothing."""
    with clear_errors(engine.url), engine.connect() as connection:
        if _stored_revisions(connection) == [HEAD_REVISION]:
            return True
        _refuse_newer(connection, _config())
    return False


def _stored_revisions(connection: Connection) -> list[str]:
    """What Alembic's table holds; empty where the table is missing."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return []
    rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return [str(row[0]) for row in rows]


def is_empty(engine: Engine) -> bool:
    """Whether autotune has no tables there: a file of somebody else, which reading leaves alone."""
    from alembic.runtime.migration import MigrationContext

    with clear_errors(engine.url), engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        return context.get_current_revision() is None


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def _refuse_newer(connection: Connection, config: "Config") -> None:
    """Raises ``UserError`` when this version does not know the database's revision."""
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    current = context.get_current_revision()
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    if current is not None and current not in known:
        raise UserError(
            f"database {shown(connection.engine.url)} was written by a newer autotune (schema "
            f"{current}; this version knows up to {script.get_current_head()}); upgrade autotune "
            f"or use another --database"
        )
