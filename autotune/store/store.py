"""Our side of one database: studies, trials and evidence. Every write is one transaction."""

from autotune.errors import UserError
from autotune.store.database import (
    BUSY_TIMEOUT_S,
    check_revision,
    is_empty,
    migrate,
    open_engine,
    parse_url,
    shown,
    sqlite_file,
)
from autotune.store.evidence import EvidenceQueries
from autotune.store.studies import StudyQueries
from autotune.store.trials import TrialQueries
from autotune.store.workers import WorkerQueries


class Store(StudyQueries, TrialQueries, EvidenceQueries, WorkerQueries):
    """One database. Open with ``Store.create`` or ``Store.existing``."""

    @classmethod
    def create(cls, url: str, busy_timeout_s: float = BUSY_TIMEOUT_S) -> "Store":
        """Open a database, making or upgrading our tables."""
        engine = open_engine(parse_url(url), busy_timeout_s)
        migrate(engine)
        return cls(engine)

    @classmethod
    def is_there(cls, url: str) -> bool:
        """Whether the database may hold something: false for an SQLite file that is missing."""
        path = sqlite_file(parse_url(url))
        return path is None or path.exists()

    @classmethod
    def existing(cls, url: str, busy_timeout_s: float = BUSY_TIMEOUT_S) -> "Store":
        """Open a database that must be there. Raises ``UserError`` when it is not."""
        parsed = parse_url(url)
        path = sqlite_file(parsed)
        if path is not None and not path.exists():
            raise UserError(
                f"database {shown(parsed)}: no such file; start a study first, or name another "
                f"with --database"
            )
        engine = open_engine(parsed, busy_timeout_s)
        if not check_revision(engine):
            if is_empty(engine):
                raise UserError(
                    f"database {shown(parsed)} holds no studies; start one first, or name another "
                    f"with --database"
                )
            migrate(engine)
        return cls(engine)
