"""Run by Alembic. The connection comes from ``autotune.store.database``, never from a file."""

from alembic import context

from autotune.store.database import VERSION_TABLE
from autotune.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    # Optuna's tables live here too and are none of our business
    include_name=lambda name, kind, parents: (
        kind != "table" or (name or "").startswith("autotune_")
    ),
    render_as_batch=True,
)
context.run_migrations()
