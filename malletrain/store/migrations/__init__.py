"""Migrates the database schema: one file per step, run by Alembic.

Decides how a database of an earlier version becomes one of this version. A step that has been
released is never edited. It defines its tables itself and imports nothing of :mod:`malletrain`,
which changes later. :func:`upgrade` is the only entry point.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Migrate the schema to ``revision`` within the transaction of ``connection``."""
    from alembic import command  # takes 12 MB, and most starts of the daemon need no migration

    command.upgrade(_config(connection), revision)


def versions() -> list[str]:
    """Return all schema versions, oldest first."""
    from alembic.script import ScriptDirectory

    steps = ScriptDirectory(str(Path(__file__).parent)).walk_revisions()
    return [step.revision for step in steps][::-1]


# the type would import Alembic
def _config(connection: Connection):  # type: ignore[no-untyped-def]
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
