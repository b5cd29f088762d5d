"""The conditions under which the daemon starts. If one is not met, the daemon refuses to start, and
``malletrain check`` reports it. The daemon refuses for no other reason.

Each test does what the daemon would do, starts nothing and leaves nothing behind. Problems that can
only occur later are not tested here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from malletrain.config.model import Config
from malletrain.daemon.site.advertise import AddressError
from malletrain.daemon.site.backends import backend
from malletrain.daemon.site.database_origin import foreign_database, lost_database
from malletrain.identity.keys import CLIENT, SERVER, read_key
from malletrain.identity.state_directory import (
    FULL,
    StateDirError,
    make_private_dir,
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
from scavenger.interface import SchedulerError

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
