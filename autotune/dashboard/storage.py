"""Optuna's storage on the database of our studies."""

from typing import Any

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import AutotuneError
from autotune.store.database import BUSY_TIMEOUT_S, explain
from autotune.store.store import Store


def open_storage(store: Store) -> RDBStorage:
    """Open Optuna's tables. Raises ``AutotuneError`` as the store does."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = make_url(store.url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        options = {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
    try:
        return RDBStorage(store.url, engine_kwargs=options)
    except SQLAlchemyError as error:
        raise explain(getattr(error, "orig", None) or error, url) from error
    except RuntimeError as error:
        # tables of another Optuna release
        raise AutotuneError(f"database {url.render_as_string()}: {error}") from error


def optuna_id(storage: RDBStorage, name: str) -> int:
    """Optuna's number of a study, as it stands in the dashboard's address."""
    return int(storage.get_study_id_from_name(name))
