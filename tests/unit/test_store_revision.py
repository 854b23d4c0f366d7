"""The revision that is opened without Alembic is the newest one."""

from alembic.script import ScriptDirectory

from autotune.store.database import HEAD_REVISION, _config


def test_the_head_revision_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == HEAD_REVISION
