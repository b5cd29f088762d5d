"""What must be right for the daemon to start. The daemon refuses what ``malletrain check`` finds
wrong here, and nothing else: both ask this one list.

Each test tries things as the daemon uses them, starts nothing and leaves nothing behind. What may
go wrong later, or only deserves a look, is not here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from malletrain.config.model import Config
from malletrain.daemon.advertise import AddressError
from malletrain.daemon.backends import backend
from malletrain.daemon.known_database import lost_database
from malletrain.daemon.origin import moved
from malletrain.identity.keys import CLIENT, SERVER, read_key
from malletrain.identity.state_directory import FULL, StateDirError, make_private_dir
from malletrain.store.database import StoreError, advice, open_engine, schema_version
from malletrain.store.migrations import versions
from malletrain.store.schema import HEAD
from scavenger.interface import SchedulerError

Findings = Iterator[tuple[bool | None, str]]
"""(whether it works, None: it does and deserves a look, a sentence)"""

ROOM = 1 << 18
"""Bytes that must fit into the state directory: a new database and what is logged at a start."""
ADDRESS = "address"
"""The test that a daemon which already runs here makes fail."""


def refusals(config: Config) -> list[str]:
    """Why the daemon cannot start with ``config``: sentences, none when it can."""
    return [sentence for _, works, sentence in startup_findings(config) if works is False]


def startup_findings(
    config: Config, leave_out: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool | None, str]]:
    """(what was tested, and a finding) of all but the tests named."""
    for name, test in STARTUP:
        if name in leave_out:
            continue
        try:
            for works, sentence in test(config):
                yield name, works, sentence
        except (StateDirError, StoreError, SchedulerError, OSError) as error:
            yield name, False, " ".join(str(error).split())


def state_directory(config: Config) -> Findings:
    """The directory is the daemon's user's and has room, or can be made."""
    path = config.state_dir
    if path.exists() and not path.is_dir():
        yield False, f"{path} is not a directory; set state_dir in [daemon] to one."
        return
    if path.is_dir() and path.stat().st_mode & stat.S_IWOTH:
        yield (
            False,
            f"Everybody may write to {path}, and put keys and an address of their own in the place "
            f"of the daemon's; if nobody has, run: chmod 700 {path}, else name another.",
        )
        return
    with _tried(path) as new:
        try:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".check-") as file:
                file.write(bytes(ROOM))
        except OSError as error:
            mend = "make room there" if error.errno in FULL else "make it yours"
            problem = f"{path} cannot be written ({error.strerror})"
            yield False, f"{problem}; {mend}, or set state_dir in [daemon] to another."
            return
    yield True, f"{path} will be created." if new else f"{path} can be written."


def keys(config: Config) -> Findings:
    """The keys are there and nobody else can read them, or will be made."""
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
    """The addresses to listen on are free. Where nobody named one for the metrics, they may be
    missing: several daemons of one host cannot share the default.
    """
    for what, text, mend in (
        ("listen", config.daemon.listen.removeprefix("tcp://"), "set another address"),
        (
            "metrics_listen",
            config.daemon.metrics_listen,
            'set another address, or "" for no metrics,',
        ),
    ):
        if not text:
            continue
        host, _, port = text.rpartition(":")
        host = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host.strip("[]"), host.strip("[]"))
        try:
            family, kind, proto, _, where = socket.getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            why = f"{what} = {text} cannot be listened on ({error.strerror or error})"
            if what == "metrics_listen" and not config.daemon.metrics_required:
                yield None, f"{why}, so that there are no metrics; {mend} in [daemon]."
            else:
                yield False, f"{why}; {mend} in [daemon]."
        else:
            yield (
                True,
                f"{what}: any free port of {host} will be taken."
                if port == "0"
                else f"{what}: {text} is free.",
            )


def database(config: Config) -> Findings:
    """The database can be opened, and its tables are of this version or can be brought to it.
    Nothing is created or migrated.
    """
    try:
        url = make_url(config.database_url)
    except ArgumentError as error:
        yield False, f"The URL of the database cannot be read: {error}. Correct [daemon] database."
        return
    shown = url.render_as_string(hide_password=True)
    file = url.database if url.get_backend_name() == "sqlite" else None
    lost = lost_database(config)
    if file and not Path(file).exists():
        if lost:
            yield False, lost
            return
        with _tried(Path(file).parent):
            yield True, f"{shown} will be created."
        return
    engine = open_engine(config.database_url)
    try:
        with engine.connect() as connection:
            current = schema_version(connection)
            elsewhere = moved(config, connection) if current in versions() else ""
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0].rstrip(".")
        what = advice(reason) or " Correct [daemon] database, or make it reachable."
        yield False, f"{shown} cannot be opened: {reason}.{what}"
        return
    finally:
        engine.dispose()
    if elsewhere:
        yield False, elsewhere
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
    """The file that tells other users how to reach the daemon can be written."""
    path = config.daemon.announce
    folder = path.parent if path is not None else None
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield (
            False,
            f"{path} cannot be written: make {folder} a directory of the daemon's user "
            "that everybody may read.",
        )


def scheduler(config: Config) -> Findings:
    """What the daemon needs of the main scheduler to begin: not that it answers just now."""
    yield from backend(config).can_prepare(config)


@contextlib.contextmanager
def _tried(path: Path) -> Iterator[bool]:
    """The directory ``path``, made for the body where it was not there, and whether it was made.
    Raises StateDirError when it cannot be made or used.
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
    """What agents on the nodes are told leads to this machine."""
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
