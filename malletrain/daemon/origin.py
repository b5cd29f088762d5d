"""Which daemon a database belongs to: the one that used it last, and where it ran.

Decides whether leases in the database can find this daemon, and what is reported of a database that
was moved. The name under which the main scheduler knows the leases is a part of the database.
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

    ``tag``: by what the main scheduler's jobs are known as its leases. ``server_key``: its public
    key. ``endpoint``: where its agents look for it; empty: it was never reached. ``place``: where
    the database was. ``state_dir``: the daemon's.
    """

    tag: str
    server_key: str
    endpoint: str
    place: str
    state_dir: str


def place_of(connection: Connection) -> str:
    """Where this database is: a copy of it is at another place."""
    if connection.dialect.name == "postgresql":
        return str(connection.execute(_POSTGRES).scalar())
    file = connection.engine.url.database
    return f"{socket.gethostname()}:{Path(file or '').absolute()}"


def read_origin(value: str | None) -> Origin | None:
    """What :func:`settle_origin` wrote; None: nothing was."""
    return None if value is None else msgspec.json.decode(value, type=Origin)


def moved(config: Config, connection: Connection) -> str:
    """Why this daemon may not use the database as its own, as a sentence; empty: it may.

    A copy of a database knows leases of a daemon that may run still. The lock of the database does
    not keep the two apart.
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
        f"{config.state_dir}/keys, and jobs go on where they are if this host has its address; or "
        "run `malletrain db adopt --config FILE`, and its leases are ended and jobs go on from "
        "their snapshots."
    )


def settle_origin(config: Config, store: Store) -> None:
    """The database is this daemon's from now on. Its leases keep the name that they have."""
    origin, place = read_origin(store.origin()), store.place(place_of)
    key = _server_key(config)
    if origin is None or (origin.server_key != key and origin.place != place):
        # Where it is a copy no lease is in it: its daemon may go on with its own name.
        write_lease_tag(config, "")
        origin = Origin(lease_tag(config), key, "", place, "")
    write_lease_tag(config, origin.tag)
    _put(store, origin.tag, origin.server_key, origin.endpoint, place, config)


def adopt(config: Config, store: Store) -> None:
    """The database stays where it is now: its daemon runs no more."""
    if (origin := read_origin(store.origin())) is not None:
        place = store.place(place_of)
        store.put_origin(msgspec.json.encode(asdict(origin) | {"place": place}).decode())


def reached_at(config: Config, store: Store, server_key: str, endpoint: str) -> str:
    """This daemon is reached at ``endpoint`` from now on. Returns why agents of leases taken before
    do not find it, as a sentence; empty: they do.
    """
    origin = read_origin(store.origin())
    before = (origin.server_key, origin.endpoint) if origin is not None else ("", "")
    if origin is not None:
        _put(store, origin.tag, server_key, endpoint, origin.place, config)
    if before[1] == "" or before == (server_key, endpoint):
        return ""
    what = f"at {before[1]}" if before[1] != endpoint else "by another key"
    return f"Its agent looks for the daemon {what}"


def _put(
    store: Store, tag: str, server_key: str, endpoint: str, place: str, config: Config
) -> None:
    made = Origin(tag, server_key, endpoint, place, str(config.state_dir.absolute()))
    store.put_origin(msgspec.json.encode(made).decode())


def _server_key(config: Config) -> str:
    try:
        return read_key(config.state_dir / "keys" / SERVER).public
    except KeyFileError:
        return ""
