"""The conditions under which the daemon starts, and which database is its own.

If a condition is not met, the daemon refuses to start, and ``malletrain check`` reports it. The
daemon refuses for no other reason. Each test does what the daemon would do, starts nothing and
leaves nothing behind. Problems that can only occur later are not tested here.

The state directory has the URL of the database in use, so that a lost database is not taken for a
new one: a daemon that knows no jobs would end their leases. The database has its *origin*: which
daemon used it last, where the database was then, and at which address the agents of its leases look
for the daemon. It also has the tag by which the main scheduler's jobs are recognised as leases.
Decides whether a daemon may use a database as its own, and the sentences for a database that is
empty, missing, or belongs to another daemon. :mod:`malletrain.store.ownership` has the lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from malletrain.config.model import Config
from malletrain.daemon.site.advertise import AddressError
from malletrain.daemon.site.backends import backend, lease_tag, write_lease_tag
from malletrain.identity.keys import CLIENT, SERVER, KeyFileError, read_key
from malletrain.identity.state_directory import (
    FULL,
    StateDirError,
    make_private_dir,
    write_atomically,
)
from malletrain.store.database import (
    StoreError,
    advice,
    open_engine,
    parse_url,
    schema_version,
    shown_url,
)
from malletrain.store.migrations import versions
from malletrain.store.schema import HEAD
from malletrain.store.store import Store
from scavenger.interface import SchedulerError

RECORD_NAME = "database"
"""File in the state directory with the URL of the database, without password."""


def remember_database(config: Config) -> None:
    """Record that the database of this configuration is in use. Raises OSError."""
    path, url = _record_path(config), _shown_url(config)
    if _read_record(path) != url:
        write_atomically(path, url + "\n")


def lost_database(config: Config) -> str:
    """Return why the daemon may not create the empty or missing database of this configuration
    anew, as a sentence; empty if it may.
    """
    path, url = _record_path(config), _shown_url(config)
    if _read_record(path) != url:
        return ""
    return (
        f"{url} is empty or not there, but the daemon of {config.state_dir} kept its jobs and "
        "leases in it. Restore the newest copy with `malletrain db restore --config FILE "
        "COPY` (PostgreSQL: pg_restore), or make the database reachable again: the jobs in it then "
        f"continue. To start without jobs instead, and to end all leases, delete {path}."
    )


def _record_path(config: Config) -> Path:
    return config.state_dir / RECORD_NAME


def _shown_url(config: Config) -> str:
    return shown_url(parse_url(config.database_url))


def _read_record(path: Path) -> str:
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


Findings = Iterator[tuple[bool | None, str]]
"""(whether the condition is met, a sentence); None instead of True: met, with a warning."""

MIN_FREE_BYTES = 1 << 18
"""Free space that the state directory needs, bytes: for a new database and the log of a start."""
ADDRESS = "address"
"""Name of the test that fails if a daemon already listens there."""


def refusals(config: Config) -> list[str]:
    """Return why the daemon cannot start with ``config``, as sentences; empty if it can."""
    return [sentence for _, works, sentence in startup_findings(config) if works is False]


def startup_findings(
    config: Config, leave_out: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool | None, str]]:
    """Yield (name of the test, its result, a sentence) of all tests except those in
    ``leave_out``.
    """
    for name, test in STARTUP:
        if name in leave_out:
            continue
        try:
            for works, sentence in test(config):
                yield name, works, sentence
        except (StateDirError, StoreError, SchedulerError, OSError) as error:
            yield name, False, " ".join(str(error).split())


def state_directory(config: Config) -> Findings:
    """Test whether the directory belongs to the daemon's user and has space, or can be created."""
    path = config.state_dir
    if path.exists() and not path.is_dir():
        yield False, f"{path} is not a directory; set state_dir in [daemon] to one."
        return
    if path.is_dir() and path.stat().st_mode & stat.S_IWOTH:
        yield (
            False,
            f"Every user can write to {path}, and replace the keys and the address of the daemon; "
            f"if nobody has done so, run: chmod 700 {path}, else name another directory.",
        )
        return
    with _temporary_directory(path) as new:
        try:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".check-") as file:
                file.write(bytes(MIN_FREE_BYTES))
        except OSError as error:
            remedy = "make room there" if error.errno in FULL else "make it yours"
            problem = f"{path} cannot be written ({error.strerror})"
            yield False, f"{problem}; {remedy}, or set state_dir in [daemon] to another."
            return
    yield True, f"{path} will be created." if new else f"{path} can be written."


def keys(config: Config) -> Findings:
    """Test whether the keys exist and no other user can read them, or can be created."""
    folder = config.state_dir / "keys"
    if not folder.exists():
        yield True, f"Keys will be made in {folder}."
        return
    if folder.stat().st_mode & 0o077:
        yield (
            False,
            f"Others may enter {folder}; if nobody has read the keys run: chmod 700 {folder}, "
            "else delete them.",
        )
    for name in (SERVER, CLIENT):
        try:
            if (folder / name).exists():
                read_key(folder / name)
                yield True, f"{folder / name} can be used."
            else:
                yield True, f"{folder / name} will be made."
        except StateDirError as error:
            yield False, str(error)


def address(config: Config) -> Findings:
    """Test whether the addresses to listen on are free. The default address of the metrics need not
    be free, because several daemons of one host cannot share it.
    """
    for key, endpoint, remedy in (
        ("listen", config.daemon.listen.removeprefix("tcp://"), "set another address"),
        (
            "metrics_listen",
            config.daemon.metrics_listen,
            'set another address, or "" for no metrics,',
        ),
    ):
        if not endpoint:
            continue
        host, _, port = endpoint.rpartition(":")
        host = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host.strip("[]"), host.strip("[]"))
        try:
            family, kind, proto, _, where = socket.getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            why = f"{key} = {endpoint} cannot be listened on ({error.strerror or error})"
            if key == "metrics_listen" and not config.daemon.metrics_required:
                yield None, f"{why}, so that there are no metrics; {remedy} in [daemon]."
            else:
                yield False, f"{why}; {remedy} in [daemon]."
        else:
            yield (
                True,
                f"{key}: any free port of {host} will be taken."
                if port == "0"
                else f"{key}: {endpoint} is free.",
            )


def database(config: Config) -> Findings:
    """Test whether the database can be opened, and has the tables of this version or can be
    migrated. Nothing is created or migrated.
    """
    try:
        url = parse_url(config.database_url)
    except StoreError as error:
        yield False, str(error)
        return
    shown = shown_url(url)
    file = url.database if url.get_backend_name() == "sqlite" else None
    lost = lost_database(config)
    if file and not Path(file).exists():
        if lost:
            yield False, lost
            return
        with _temporary_directory(Path(file).parent):
            yield True, f"{shown} will be created."
        return
    engine = open_engine(config.database_url)
    try:
        with engine.connect() as connection:
            current = schema_version(connection)
            foreign = foreign_database(config, connection) if current in versions() else ""
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0].rstrip(".")
        hint = advice(reason) or " Correct [daemon] database, or make it reachable."
        yield False, f"{shown} cannot be opened: {reason}.{hint}"
        return
    finally:
        engine.dispose()
    if foreign:
        yield False, foreign
    elif current is None:
        yield not lost, lost or f"{shown} can be opened; its tables will be created."
    elif current == HEAD:
        yield True, f"{shown} can be used."
    elif current in versions():
        yield (
            True,
            f"{shown} is of version {current} and will be migrated to {HEAD}; make a copy of it "
            "first.",
        )
    else:
        yield (
            False,
            f"{shown} was written by a later malletrain (schema {current}); run that version, "
            "or name another database.",
        )


def announcement(config: Config) -> Findings:
    """Test whether the file with the daemon's address for other users can be written."""
    path = config.daemon.announce
    folder = path.parent if path is not None else None
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield (
            False,
            f"{path} cannot be written: make {folder} a directory of the daemon's user "
            "that everybody may read.",
        )


def scheduler(config: Config) -> Findings:
    """Test what the daemon needs of the main scheduler to start. The scheduler need not answer
    now.
    """
    yield from backend(config).can_prepare(config)


@contextlib.contextmanager
def _temporary_directory(path: Path) -> Iterator[bool]:
    """Create the directory ``path`` for the body if it does not exist. Yields whether it was
    created. Raises StateDirError if it cannot be created or used.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_private_dir(path)
        yield bool(new)
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def announced_address(config: Config) -> Findings:
    """Test whether the address for agents leads to this machine."""
    try:
        host = backend(config).host(config)
    except AddressError as error:
        yield False, str(error)
    else:
        yield True, f"Agents and clients are told to reach the daemon at {host}."


STARTUP: tuple[tuple[str, Callable[[Config], Findings]], ...] = (
    ("state directory", state_directory),
    ("keys", keys),
    (ADDRESS, address),
    ("announced address", announced_address),
    ("database", database),
    ("users", announcement),
    ("main scheduler", scheduler),
)
