"""Sessions on one database: read-only ones, and ones that commit at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from autotune.store.database import clear_errors, writing


class Sessions:
    """An engine and the two kinds of sessions on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = writing(engine)
        self.url = engine.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that only reads."""
        with clear_errors(self.engine.url), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose work is committed at the end."""
        with clear_errors(self.engine.url), Session(self._writer) as session, session.begin():
            yield session
