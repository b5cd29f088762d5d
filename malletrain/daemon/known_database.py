"""Remembers which database a state directory had, so that a lost one is not taken for a new one: a
daemon that knows no jobs would end their leases.

Decides what is reported of a database that is empty and was not.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url

from malletrain.config.model import Config
from malletrain.identity.state_directory import write_atomically

NAME = "database"
"""The file in the state directory that has its URL, without password."""


def remember_database(config: Config) -> None:
    """The database of this configuration is in use. Raises OSError."""
    path, shown = _file(config), _shown(config)
    if _read(path) != shown:
        write_atomically(path, shown + "\n")


def lost_database(config: Config) -> str:
    """Why the database of this configuration, which is empty or not there, may not be begun anew,
    as a sentence; empty: it may.
    """
    path, shown = _file(config), _shown(config)
    if _read(path) != shown:
        return ""
    return (
        f"{shown} is empty or not there, and the daemon of {config.state_dir} had its jobs and "
        "leases in it. Put the newest copy in its place with `malletrain db restore --config FILE "
        "COPY` (PostgreSQL: pg_restore), or make it reachable again: jobs that it knows go on. To "
        f"begin with no jobs instead, and have all leases ended, delete {path}."
    )


def _file(config: Config) -> Path:
    return config.state_dir / NAME


def _shown(config: Config) -> str:
    return make_url(config.database_url).render_as_string(hide_password=True)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
