"""The daemon's state directory: its lock, and the file through which clients find the daemon.

Decides the default directory, that one daemon at a time uses it (a lock that ends with its process,
so that ``kill -9`` leaves none behind), and the form of ``daemon.json`` with the address of the
running daemon: the user's own daemon in the state directory, the site's daemon in the site's file.
:mod:`malletrain.identity.keys` manages the keys. Imports the standard library only, because the
command line uses it at every call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malletrain.protocol import env

LOCK = "daemon.lock"
INFO = "daemon.json"
SITE_INFO = Path("/etc/malletrain/daemon.json")
START_HINT = "Start one with: malletrain daemon --config FILE"
SITE_HINT = "Ask the operators of this machine."
KEY_FORM = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A CURVE key as z85 text."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of the operating system if no more data can be written."""


def written_in_vain(error: OSError) -> str:
    """Return why a file cannot be written, and advice if its disk is full: sentences that begin
    with the reason.
    """
    advice = " Make room on its file system." if error.errno in FULL else ""
    return f"{error.strerror}.{advice}"


_ENDPOINT = re.compile(r"tcp://[^\s/;]+:[0-9]{1,5}")


def lock_refusal(what: str, error: OSError) -> str:
    """Return the sentences about a lock that the file system refuses, with what to do.

    Args:
        what: what is locked, the subject of the sentence.
        error: the error of flock(2), or of the write of the owner's name.
    """
    advice = (
        "Make room there."
        if error.errno in FULL
        else "Put it on a file system with locks: a local one, or Lustre mounted with -o flock."
    )
    return f"{what} cannot be locked: {error.strerror}. {advice}"


class StateDirError(RuntimeError):
    """The state directory cannot be used; the message is a sentence that says why and what to
    do.
    """


def default_state_dir() -> Path:
    """Return ``$MALLETRAIN_STATE_DIR`` if set, else ``~/.local/state/malletrain``. Raises
    StateDirError.
    """
    return expanded(os.environ.get(env.STATE_DIR) or "~/.local/state/malletrain", env.STATE_DIR)


def expanded(path: str, variable: str) -> Path:
    """Return ``path`` with ``~`` expanded. Raises StateDirError if there is no home directory,
    with the ``variable`` to set instead.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise StateDirError(
            f"The path {path} needs a home directory, and the system knows none of this user "
            f"(id {os.geteuid()}); set HOME, or {variable} "
            "to a path without ~."
        ) from None


def make_private_dir(path: Path) -> Path:
    """Create ``path`` (mode 0700) if needed and return it. Raises StateDirError if it cannot be
    used or belongs to another user.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise StateDirError(f"The directory {path} cannot be used: {error.strerror}.") from None
    if status.st_uid != os.geteuid():
        raise StateDirError(
            f"The directory {path} belongs to another user; name one of your own as [daemon] "
            "state_dir."
        )
    return path


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, also after a
    crash.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class StateLock:
    """A lock on a state directory. It ends with :meth:`release`, or in any case with the
    process.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle: int | None = handle
        self.path = path

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock_state_dir(path: Path) -> StateLock:
    """Lock the state directory for this process; create it (mode 0700) if needed. Raises
    StateDirError if a daemon uses it.

    The lock file is not removed; only the lock on it matters. Child processes do not inherit it.
    """
    make_private_dir(path)
    lock = path / LOCK
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateDirError(f"The lock file {lock} cannot be opened: {error.strerror}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        pid, _, host = os.pread(handle, 300, 0).decode("utf-8", "replace").strip().partition(" ")
        os.close(handle)
        who = f"pid {pid} on {host}" if pid else "starting at this moment"
        raise StateDirError(
            f"Another daemon ({who}) uses the state directory {path}. Stop it first, or give "
            "this one a directory of its own "
            "as [daemon] state_dir."
        ) from None
    except OSError as error:
        os.close(handle)
        raise StateDirError(lock_refusal(f"The state directory {path}", error)) from None
    return StateLock(handle, lock)


@dataclass(frozen=True)
class DaemonInfo:
    """How to reach the daemon of a state directory. ``endpoint``: ``tcp://HOST:PORT``;
    ``server_key``: its public key, z85 text.
    """

    endpoint: str
    server_key: str
    pid: int
    host: str
    version: str
    started: float

    def is_gone(self) -> bool:
        """Return whether the daemon has certainly ended: it ran on this host and its process does
        not exist.
        """
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def write_daemon_info(path: Path, info: DaemonInfo) -> None:
    """Write the file through which clients find this daemon; replaces that of an earlier daemon."""
    try:
        write_atomically(path, json.dumps(asdict(info), indent=1) + "\n", mode=0o644)
    except OSError as error:
        raise StateDirError(
            f"The file {path} cannot be written: {written_in_vain(error)}"
        ) from None


def remove_daemon_info(path: Path) -> None:
    """Remove the file through which clients find the daemon, at a clean stop."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def start_hint() -> str:
    """Return advice for when this user's own daemon does not run."""
    if not os.path.exists(SITE_INFO):
        return START_HINT
    return f"{START_HINT} - or use the site's daemon: export {env.DAEMON}={SITE_INFO}"


def announced() -> Path | None:
    """Return the file with the address of the site's daemon, if this user has no daemon of their
    own.

    It is ``$MALLETRAIN_DAEMON`` if set; else /etc/malletrain/daemon.json if it exists and no daemon
    of this user seems to run. Raises StateDirError.
    """
    if named := os.environ.get(env.DAEMON):
        return expanded(named, env.DAEMON)
    if os.environ.get(env.STATE_DIR) or not os.path.exists(SITE_INFO):
        return None
    try:
        own = default_state_dir() / INFO
    except StateDirError:  # no home directory, and so no daemon of their own
        return SITE_INFO
    return None if os.path.lexists(own) and not _certainly_gone(own) else SITE_INFO


def _certainly_gone(path: Path) -> bool:
    try:
        return _read_info(path).is_gone()
    except (OSError, ValueError):
        return False


def read_daemon_info(path: Path, start: str = START_HINT, *, site: bool = False) -> DaemonInfo:
    """Return the address of the daemon. Raises StateDirError, with the hint ``start``, if no
    daemon was started or it has ended.

    ``site``: whether the file is the site's and not in a state directory. It may be a copy on
    another host, so it does not show whether the daemon runs.
    """
    state_dir = path.parent
    try:
        info = _read_info(path)
    except (FileNotFoundError, NotADirectoryError):
        what = (
            f"The file {path} of the site's daemon is not there."
            if site
            else f"No daemon is running in {state_dir}."
        )
        raise StateDirError(f"{what} {start}") from None
    except OSError as error:
        raise StateDirError(f"The file {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        what = start if site else "restart the daemon, which writes it anew."
        raise StateDirError(
            f"The file {path} is damaged ({error}); {what[0].lower()}{what[1:]}"
        ) from None
    if not site and info.is_gone():
        raise StateDirError(f"The daemon (pid {info.pid}) that ran in {state_dir} is gone. {start}")
    return info


def _read_info(path: Path) -> DaemonInfo:
    """Raise OSError, and ValueError if the content of the file is not a DaemonInfo."""
    try:
        fields: Any = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELD_CHECKS.keys():
        raise ValueError(f"it must have the fields {', '.join(_FIELD_CHECKS)}")
    for name, is_valid in _FIELD_CHECKS.items():
        if not is_valid(fields[name]):
            raise ValueError(f"its {name} is not valid")
    return DaemonInfo(**fields)


_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    "endpoint": lambda value: isinstance(value, str) and _ENDPOINT.fullmatch(value) is not None,
    "server_key": lambda value: isinstance(value, str) and KEY_FORM.fullmatch(value) is not None,
    "pid": lambda value: type(value) is int and 0 < value < 2**31,
    "host": lambda value: isinstance(value, str),
    "version": lambda value: isinstance(value, str),
    "started": lambda value: type(value) in (int, float),
}
"""Checks of the fields of a DaemonInfo, because a file may be damaged or written by another user.
"""
