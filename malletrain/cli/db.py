"""``malletrain db``: copies of the daemon's database, while it runs; what it holds, and whether it
is whole.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from malletrain.cli.common import Refused, Sentences, config_option
from malletrain.cli.daemon import load, missing

if TYPE_CHECKING:
    from malletrain.config.model import Config

config_file = config_option("Configuration of the site (TOML), which names the database.")


@click.group(cls=Sentences)
def db() -> None:
    """Back up, restore, check and export the daemon's database.

    SQLite is copied while the daemon runs, by its own means. PostgreSQL has tools for all of this:
    pg_dump and pg_restore.

    \b
    Examples:
      malletrain db backup /backup/malletrain.db
      malletrain db check
    """


def _copies() -> Any:
    try:
        from malletrain.store import copies
    except ModuleNotFoundError as error:
        raise missing(error) from None
    return copies


@contextlib.contextmanager
def _alone(config: Config) -> Iterator[None]:
    """No daemon has the state directory, and none the database from another one. Raises Refused."""
    from malletrain.identity.state_directory import StateDirError, lock_state_dir
    from malletrain.store.database import StoreError
    from malletrain.store.ownership import own

    def in_use(owner: str) -> None:
        raise Refused(f"The database is in use: {owner} has it. Stop that one first.")

    try:
        with (
            lock_state_dir(config.state_dir),
            own(config.database_url, f"malletrain db, pid {os.getpid()}", in_use),
        ):
            yield
    except (StateDirError, StoreError) as error:
        raise Refused(str(error)) from None


@db.command()
@config_file
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_file: Path, file: Path) -> None:
    """Copy the database to FILE, which must not be there yet. The daemon may run.

    The copy is of one moment, and is checked before it gets its name.

    \b
    Example:
      malletrain db backup --config site.toml /backup/malletrain-$(date +%F).db
    """
    copies, config = _copies(), load(config_file)
    try:
        size = copies.backup(config.database_url, file)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(f"{file} is a copy of the database of {config.state_dir} ({size:,} bytes).")


@db.command()
@config_file
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def restore(config_file: Path, file: Path) -> None:
    """Put the copy in FILE in the place of the database. The daemon must not run.

    What was there is kept beside it. The copy knows nothing of jobs and leases that came after it:
    give all leases back first ('malletrain pause --release'), then stop the daemon.

    \b
    Example:
      malletrain db restore --config site.toml /backup/malletrain-2026-11-22.db
    """
    copies, config = _copies(), load(config_file)
    try:
        with _alone(config):
            backup = copies.restore(config.database_url, file)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(
        f"The database is that of {file} now." + (f" {backup} is what was." if backup else "")
    )


@db.command()
@config_file
def adopt(config_file: Path) -> None:
    """Take over a database that another daemon had at another place. That daemon must not run any
    more.

    Its leases are ended when the daemon starts, and jobs go on from their snapshots. Not needed
    where the other daemon's folder 'keys' was copied, too.

    \b
    Example:
      malletrain db adopt --config site.toml
    """
    _copies()
    config = load(config_file)
    from malletrain.daemon.origin import adopt as adopt_database
    from malletrain.store.store import Store

    with _alone(config), Store.open(config.database_url) as store:
        adopt_database(config, store)
    click.echo(f"The database is that of the daemon of {config.state_dir} from its next start.")


@db.command()
@config_file
def vacuum(config_file: Path) -> None:
    """Give the room of what was deleted back to the file system. The daemon must not run.

    Only of use after much was deleted ([accounting] keep): the daemon uses that room again. It
    needs as much room once more while it works.

    \b
    Example:
      malletrain db vacuum --config site.toml
    """
    copies, config = _copies(), load(config_file)
    try:
        with _alone(config):
            before, after = copies.vacuum(config.database_url)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
    click.echo(f"The database had {before:,} bytes and has {after:,}.")


@db.command()
@config_file
def check(config_file: Path) -> None:
    """Say whether the database is whole, of which version it is and what is in it. The daemon may
    run.
    """
    copies, config = _copies(), load(config_file)
    try:
        click.echo(copies.check(config.database_url))
    except copies.CopyError as error:
        raise Refused(str(error)) from None


@db.command()
@config_file
def export(config_file: Path) -> None:
    """Print jobs, leases and events as JSON, one a line, for other programs. The daemon may run.

    \b
    Example:
      malletrain db export --config site.toml | gzip > malletrain.jsonl.gz
    """
    copies, config = _copies(), load(config_file)
    try:
        copies.export(config.database_url, sys.stdout)
    except copies.CopyError as error:
        raise Refused(str(error)) from None
