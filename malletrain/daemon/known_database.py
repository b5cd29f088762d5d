"""Records which database a state directory uses, so that a lost database is not mistaken for a new
one. A daemon that knows no jobs would end their leases.

Decides what is reported when a used database is empty or missing.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url

from malletrain.config.model import Config
from malletrain.identity.state_directory import write_atomically

NAME = "database"
"""File in the state directory with the URL of the database, without password."""


def remember_database(config: Config) -> None:
    """Record that the database of this configuration is in use. Raises OSError."""
    path, url = _file(config), _shown_url(config)
    if _read(path) != url:
        write_atomically(path, url + "\n")


def lost_database(config: Config) -> str:
    """Return why the empty or missing database of this configuration may not be initialised again,
    as a sentence; empty if it may.
    """
    path, url = _file(config), _shown_url(config)
    if _read(path) != url:
        return ""
    return (
        f"{url} is empty or not there, and the daemon of {config.state_dir} had its jobs and "
        "leases in it. Restore the newest copy with `malletrain db restore --config FILE "
        "COPY` (PostgreSQL: pg_restore), or make it reachable again: jobs that it knows continue. "
        f"To start without jobs instead, and end all leases, delete {path}."
    )


def _file(config: Config) -> Path:
    return config.state_dir / NAME


def _shown_url(config: Config) -> str:
    return make_url(config.database_url).render_as_string(hide_password=True)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
