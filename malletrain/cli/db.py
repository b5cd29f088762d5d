"""``malletrain db``: backs up, restores, checks and exports the daemon's database."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from malletrain.cli.common import CommandGroup, Refused, config_option
from malletrain.cli.daemon import load, missing

if TYPE_CHECKING:
    from malletrain.config.model import Config

config_file = config_option("Configuration of the site (TOML), which names the database.")


@click.group(cls=CommandGroup)
def db() -> None:
    """Back up, restore, check and export the daemon's database.

    A SQLite database is copied with SQLite's online backup, so the daemon can run. For PostgreSQL
    use pg_dump and pg_restore.

    \b
    Examples:
      malletrain db backup /backup/malletrain.db
      malletrain db check
    """


def _import_copies() -> Any:
    try:
        from malletrain.store import copies
    except ModuleNotFoundError as error:
        raise missing(error) from None
    return copies


@contextlib.contextmanager
def _exclusive_access(config: Config) -> Iterator[None]:
    """Lock the state directory and the database, so that no daemon uses them. Raises Refused if one
    does."""
    from malletrain.identity.state_directory import StateDirError, lock_state_dir
    from malletrain.store.database import StoreError
    from malletrain.store.ownership import own

    def raise_in_use(owner: str) -> None:
        raise Refused(f"The database is in use by {owner}. Stop it first.")

    try:
        with (
            lock_state_dir(config.state_dir),
            own(config.database_url, f"malletrain db, pid {os.getpid()}", raise_in_use),
        ):
            yield
    except (StateDirError, StoreError) as error:
        raise Refused(str(error)) from None


@db.command()
@config_file
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_file: Path, file: Path) -> None:
    """Copy the database to FILE, which must not exist. The daemon can be running.

    The copy is a consistent snapshot. It is checked before it is renamed to FILE.

    \b
    Example:
      malletrain db backup --config site.toml /backup/malletrain-$(date +%F).db
    """
    copies, config = _import_copies(), load(config_file)
    try:
        size = copies.backup(config.database_url, file)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(f"{file} is a copy of the database of {config.state_dir} ({size:,} bytes).")


@db.command()
@config_file
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def restore(config_file: Path, file: Path) -> None:
    """Replace the database with the copy in FILE. The daemon must not be running.

    The old database is kept next to the new one. The copy lacks all later jobs and leases. So first
    release all leases ('malletrain pause --release'), then stop the daemon.

    \b
    Example:
      malletrain db restore --config site.toml /backup/malletrain-2026-11-22.db
    """
    copies, config = _import_copies(), load(config_file)
    try:
        with _exclusive_access(config):
            backup = copies.restore(config.database_url, file)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(
        f"The database is restored from {file}." + (f" The old one is {backup}." if backup else "")
    )


@db.command()
@config_file
def adopt(config_file: Path) -> None:
    """Take over a database that was moved here from another daemon. That daemon must not be
    running.

    When the daemon starts, it ends the old leases, and jobs resume from their snapshots. Not needed
    if you also copied the other daemon's folder 'keys'.

    \b
    Example:
      malletrain db adopt --config site.toml
    """
    _import_copies()
    config = load(config_file)
    from malletrain.daemon.site.startup import accept_location
    from malletrain.store.store import Store

    with _exclusive_access(config), Store.open(config.database_url) as store:
        accept_location(store)
    click.echo(f"The daemon of {config.state_dir} takes over this database at its next start.")


@db.command()
@config_file
def vacuum(config_file: Path) -> None:
    """Return the disk space of deleted rows to the file system. The daemon must not be running.

    Useful only after large deletions ([accounting] keep), because the daemon reuses the space.
    While it runs, it needs free disk space of the size of the database.

    \b
    Example:
      malletrain db vacuum --config site.toml
    """
    copies, config = _import_copies(), load(config_file)
    try:
        with _exclusive_access(config):
            before, after = copies.vacuum(config.database_url)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(f"The database had {before:,} bytes and now has {after:,}.")


@db.command()
@config_file
def check(config_file: Path) -> None:
    """Check the integrity of the database, and print its version and what it contains. The daemon
    can be running.
    """
    copies, config = _import_copies(), load(config_file)
    try:
        click.echo(copies.check(config.database_url))
    except copies.CopyError as error:
        raise Refused(str(error)) from None


@db.command()
@config_file
def export(config_file: Path) -> None:
    """Print jobs, leases and events as JSON, one per line. The daemon can be running.

    \b
    Example:
      malletrain db export --config site.toml | gzip > malletrain.jsonl.gz
    """
    copies, config = _import_copies(), load(config_file)
    try:
        copies.export(config.database_url, sys.stdout)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
