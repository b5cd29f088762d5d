"""The history of the database schema, one file a step, run by Alembic.

Decides how a database of an earlier version becomes one of this version. A step that has been
released is never edited: it spells its tables out and imports nothing of :mod:`malletrain`, which
will have moved on. :func:`upgrade` is the only way in.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema behind ``connection`` to ``revision`` within the connection's
    transaction.
    """
    from alembic import command  # costs 12 MB, and most starts of the daemon need no migration

    command.upgrade(_config(connection), revision)


def versions() -> list[str]:
    """Every schema version, oldest first."""
    from alembic.script import ScriptDirectory

    steps = ScriptDirectory(str(Path(__file__).parent)).walk_revisions()
    return [step.revision for step in steps][::-1]


# the type would import Alembic
def _config(connection: Connection):  # type: ignore[no-untyped-def]
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
