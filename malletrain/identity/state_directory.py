"""The daemon's state directory: who may use it, and how a client finds the daemon in it.

Decides where the directory is by default, that one daemon at a time uses it (a lock that dies with
its holder, so that ``kill -9`` leaves none behind), and the form of ``daemon.json``, which says how
to reach the daemon that runs: in the state directory that of the user, in the site's file that of
everybody. Keys are :mod:`malletrain.identity.keys`'s. Imports the standard library only: the
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


def written_in_vain(error: OSError) -> str:
    """Why a file cannot be written, and what to do where its disk is full: sentences that begin
    with the reason.
    """
    mend = " Make room on its file system." if error.errno in FULL else ""
    return f"{error.strerror}.{mend}"


"""What an operating system answers where nothing more can be written."""
_ENDPOINT = re.compile(r"tcp://[^\s/;]+:[0-9]{1,5}")


class StateDirError(RuntimeError):
    """The state directory cannot be used; the message is a sentence that says why and what to
    do.
    """


def default_state_dir() -> Path:
    """``$MALLETRAIN_STATE_DIR`` if set, else ``~/.local/state/malletrain``. Raises
    StateDirError.
    """
    return expanded(os.environ.get(env.STATE_DIR) or "~/.local/state/malletrain", env.STATE_DIR)


def expanded(path: str, variable: str) -> Path:
    """``path`` with ``~`` expanded. Raises StateDirError where there is no home directory, naming
    the ``variable`` to set instead.
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
    """Create ``path`` (mode 0700) if need be and return it. Raises StateDirError when it cannot be
    used or belongs to somebody else.
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
    """A held lock on a state directory. It ends with :meth:`release`, or with the process whatever
    way it ends.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle: int | None = handle
        self.path = path

    def release(self) -> None:
        """Give the lock back. A second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock_state_dir(path: Path) -> StateLock:
    """Take the state directory for this process, creating it (mode 0700) if need be. Raises
    StateDirError when a daemon has it.

    The lock file stays behind; only the lock on it means anything. Processes started later do not
    inherit it.
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
        mend = "Make room there." if error.errno in FULL else "Use a local file system."
        raise StateDirError(
            f"The state directory {path} cannot be locked: {error.strerror}. {mend}"
        ) from None
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
        """Whether the daemon certainly runs no more: it was on this host and its process is not
        there.
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
    """Tell clients in this file how to reach this daemon; replaces what a daemon before said."""
    try:
        write_atomically(path, json.dumps(asdict(info), indent=1) + "\n", mode=0o644)
    except OSError as error:
        raise StateDirError(
            f"The file {path} cannot be written: {written_in_vain(error)}"
        ) from None


def remove_daemon_info(path: Path) -> None:
    """Say that no daemon runs any more (a clean stop)."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def start_hint() -> str:
    """What to do when this user's own daemon does not run."""
    if not os.path.exists(SITE_INFO):
        return START_HINT
    return f"{START_HINT} - or use the site's daemon: export {env.DAEMON}={SITE_INFO}"


def announced() -> Path | None:
    """The file in which the daemon of the whole site says how to reach it, if this user has no
    daemon of their own.

    ``$MALLETRAIN_DAEMON`` if set; else /etc/malletrain/daemon.json where it is there and no daemon
    of this user's runs, as far as can be told. Raises StateDirError.
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
    """How to reach the daemon. Raises StateDirError, saying how to ``start`` one, when none has
    been started or it is gone.

    ``site``: the file is not of a state directory but tells everybody of a daemon, and may be a
    copy: only the daemon itself can tell whether it runs.
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
    """Raises OSError, and ValueError when something else than a DaemonInfo stands in the file."""
    try:
        fields: Any = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict) or fields.keys() != _FORMS.keys():
        raise ValueError(f"it must have the fields {', '.join(_FORMS)}")
    for name, fits in _FORMS.items():
        if not fits(fields[name]):
            raise ValueError(f"its {name} has not the form that it must have")
    return DaemonInfo(**fields)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "endpoint": lambda value: isinstance(value, str) and _ENDPOINT.fullmatch(value) is not None,
    "server_key": lambda value: isinstance(value, str) and KEY_FORM.fullmatch(value) is not None,
    "pid": lambda value: type(value) is int and 0 < value < 2**31,
    "host": lambda value: isinstance(value, str),
    "version": lambda value: isinstance(value, str),
    "started": lambda value: type(value) in (int, float),
}
"""What stands in the fields of a DaemonInfo: a file may be damaged, and may have been written by
anybody.
"""
