"""Connections to one database: read-only ones, and ones that commit at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, CursorResult, Engine

from autotune.store.database import clear_errors, writing


class Sessions:
    """An engine and the two kinds of transactions on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = writing(engine)
        self.url = engine.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with clear_errors(self.engine.url), self.engine.connect() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is committed at the end."""
        with clear_errors(self.engine.url), self._writer.connect() as session, session.begin():
            yield session


def new_id(inserted: CursorResult[Any]) -> int:
    """The id that the database gave to one inserted row."""
    key = inserted.inserted_primary_key
    assert key is not None
    return int(key[0])
