"""Determines which daemon a database belongs to: the one that used it last, and where that ran.

Decides whether leases in the database can find this daemon, and what is reported if a database was
moved. The tag by which the main scheduler's jobs are recognised as leases is stored in the
database.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from sqlalchemy import Connection, text

from malletrain.config.model import Config
from malletrain.daemon.batch import lease_tag, write_lease_tag
from malletrain.identity.keys import SERVER, KeyFileError, read_key
from malletrain.store.store import Store

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


def place_of(connection: Connection) -> str:
    """Return the location of this database. A copy of it has another location."""
    if connection.dialect.name == "postgresql":
        return str(connection.execute(_POSTGRES).scalar())
    file = connection.engine.url.database
    return f"{socket.gethostname()}:{Path(file or '').absolute()}"


def read_origin(value: str | None) -> Origin | None:
    """Return the origin that :func:`settle_origin` has stored; None if there is none."""
    return None if value is None else msgspec.json.decode(value, type=Origin)


def moved(config: Config, connection: Connection) -> str:
    """Return why this daemon may not use the database as its own, as a sentence; empty if it may.

    A copy of a database has the leases of a daemon that may still run. The lock of the database
    does not separate the two.
    """
    value = connection.execute(text("SELECT value FROM meta WHERE key = 'origin'")).scalar()
    origin = read_origin(value)
    if origin is None or origin.server_key == _server_key(config):
        return ""
    if origin.place == place_of(connection):
        return ""
    leases = connection.execute(text("SELECT count(*) FROM leases WHERE ended IS NULL")).scalar()
    if not leases:
        return ""
    return (
        f"The database was at {origin.place} and belongs to the daemon of {origin.state_dir}, "
        f"which had leases in it ({leases}). If that one still runs, give this daemon another "
        f"database. If not, either copy its folder {origin.state_dir}/keys to "
        f"{config.state_dir}/keys, and jobs continue where they are if this host has its address; "
        "or run `malletrain db adopt --config FILE`, and its leases are ended and jobs resume from "
        "their snapshots."
    )


def settle_origin(config: Config, store: Store) -> None:
    """Make this daemon the owner of the database. Its leases keep their tag."""
    origin, place = read_origin(store.origin()), store.place(place_of)
    key = _server_key(config)
    if origin is None or (origin.server_key != key and origin.place != place):
        # If it is a copy, it has no leases. The daemon of the original may continue to use its tag.
        write_lease_tag(config, "")
        origin = Origin(lease_tag(config), key, "", place, "")
    write_lease_tag(config, origin.tag)
    _put(store, origin.tag, origin.server_key, origin.endpoint, place, config)


def adopt(config: Config, store: Store) -> None:
    """Accept the current location of the database: its former daemon no longer runs."""
    if (origin := read_origin(store.origin())) is not None:
        place = store.place(place_of)
        store.put_origin(msgspec.json.encode(asdict(origin) | {"place": place}).decode())


def reached_at(config: Config, store: Store, server_key: str, endpoint: str) -> str:
    """Store the address of this daemon.

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
