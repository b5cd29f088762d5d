"""Which database a daemon owns: a record of it in the state directory, and a record of the daemon
in the database.

The state directory has the URL of the database in use, so that a lost database is not taken for a
new one: a daemon that knows no jobs would end their leases. The database has its *origin*: which
daemon used it last, where the database was then, and at which address the agents of its leases look
for the daemon. It also has the tag by which the main scheduler's jobs are recognised as leases.

Decides whether a daemon may use a database as its own, and the sentences for a database that is
empty, missing, or belongs to another daemon. :mod:`malletrain.store.ownership` has the lock.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from sqlalchemy import Connection, text

from malletrain.config.model import Config
from malletrain.daemon.site.backends import lease_tag, write_lease_tag
from malletrain.identity.keys import SERVER, KeyFileError, read_key
from malletrain.identity.state_directory import write_atomically
from malletrain.store.database import parse_url, shown_url
from malletrain.store.store import Store

NAME = "database"
"""File in the state directory with the URL of the database, without password."""


def remember_database(config: Config) -> None:
    """Record that the database of this configuration is in use. Raises OSError."""
    path, url = _record_path(config), _shown_url(config)
    if _read(path) != url:
        write_atomically(path, url + "\n")


def lost_database(config: Config) -> str:
    """Return why the daemon may not create the empty or missing database of this configuration
    anew, as a sentence; empty if it may.
    """
    path, url = _record_path(config), _shown_url(config)
    if _read(path) != url:
        return ""
    return (
        f"{url} is empty or not there, but the daemon of {config.state_dir} kept its jobs and "
        "leases in it. Restore the newest copy with `malletrain db restore --config FILE "
        "COPY` (PostgreSQL: pg_restore), or make the database reachable again: the jobs in it then "
        f"continue. To start without jobs instead, and to end all leases, delete {path}."
    )


def _record_path(config: Config) -> Path:
    return config.state_dir / NAME


def _shown_url(config: Config) -> str:
    return shown_url(parse_url(config.database_url))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


_POSTGRES = text(
    "SELECT concat_ws('/', (SELECT system_identifier FROM pg_control_system()), "
    "(SELECT oid FROM pg_database WHERE datname = current_database()), current_schema())"
)


@dataclass(frozen=True)
class Origin:
    """The daemon that used a database last.

    ``tag``: tag by which the main scheduler's jobs are recognised as its leases. ``server_key``:
    its public key. ``endpoint``: address at which its agents look for it; empty if it has had none.
    ``place``: location of the database. ``state_dir``: the daemon's state directory.
    """

    tag: str
    server_key: str
    endpoint: str
    place: str
    state_dir: str


def database_location(connection: Connection) -> str:
    """Return the location of this database. A copy of it has another location."""
    if connection.dialect.name == "postgresql":
        return str(connection.execute(_POSTGRES).scalar())
    file = connection.engine.url.database
    return f"{socket.gethostname()}:{Path(file or '').absolute()}"


def read_origin(value: str | None) -> Origin | None:
    """Return the origin that :func:`claim_database` has stored; None if there is none."""
    return None if value is None else msgspec.json.decode(value, type=Origin)


def foreign_database(config: Config, connection: Connection) -> str:
    """Return why this daemon may not use the database as its own, as a sentence; empty if it may.

    A copy of a database has the leases of another daemon, which may still run. The lock does not
    keep the two apart, because the original and the copy have a lock each.
    """
    value = connection.execute(text("SELECT value FROM meta WHERE key = 'origin'")).scalar()
    origin = read_origin(value)
    if origin is None or origin.server_key == _server_key(config):
        return ""
    if origin.place == database_location(connection):
        return ""
    leases = connection.execute(text("SELECT count(*) FROM leases WHERE ended IS NULL")).scalar()
    if not leases:
        return ""
    return (
        f"The database was at {origin.place} and belongs to the daemon of {origin.state_dir}, "
        f"which had leases in it ({leases}). If that daemon still runs, give this one another "
        f"database. If not, either copy its folder {origin.state_dir}/keys to "
        f"{config.state_dir}/keys: jobs then continue where they are if this host has its address. "
        "Or run `malletrain db adopt --config FILE`: its leases are then ended, and jobs resume "
        "from their snapshots."
    )


def claim_database(config: Config, store: Store) -> None:
    """Make this daemon the owner of the database. Its leases keep their tag."""
    origin, place = read_origin(store.origin()), store.place(database_location)
    key = _server_key(config)
    if origin is None or (origin.server_key != key and origin.place != place):
        # A copy that gets here has no leases. The original's daemon may still use its tag.
        write_lease_tag(config, "")
        origin = Origin(lease_tag(config), key, "", place, "")
    write_lease_tag(config, origin.tag)
    _put(store, origin.tag, origin.server_key, origin.endpoint, place, config)


def accept_location(store: Store) -> None:
    """Accept the present location of a moved database whose former daemon no longer runs."""
    if (origin := read_origin(store.origin())) is not None:
        place = store.place(database_location)
        store.put_origin(msgspec.json.encode(asdict(origin) | {"place": place}).decode())


def record_address(config: Config, store: Store, server_key: str, endpoint: str) -> str:
    """Store the address at which agents reach this daemon.

    Args:
        config: the site's configuration.
        store: the database.
        server_key: the daemon's public key.
        endpoint: address at which agents reach it.

    Returns:
        Why agents of earlier leases cannot find it, as a sentence; empty if they can.

    """
    origin = read_origin(store.origin())
    before = (origin.server_key, origin.endpoint) if origin is not None else ("", "")
    if origin is not None:
        _put(store, origin.tag, server_key, endpoint, origin.place, config)
    if before[1] == "" or before == (server_key, endpoint):
        return ""
    difference = f"at {before[1]}" if before[1] != endpoint else "by another key"
    return f"Its agent looks for the daemon {difference}"


def _put(
    store: Store, tag: str, server_key: str, endpoint: str, place: str, config: Config
) -> None:
    origin = Origin(tag, server_key, endpoint, place, str(config.state_dir.absolute()))
    store.put_origin(msgspec.json.encode(origin).decode())


def _server_key(config: Config) -> str:
    try:
        return read_key(config.state_dir / "keys" / SERVER).public
    except KeyFileError:
        return ""
