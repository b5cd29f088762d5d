"""The users of a daemon besides the one who runs it: a list of their keys, and MUNGE.

Decides to which user a client's key belongs. The handlers of requests decide what a user may do.
"""

from __future__ import annotations

import codecs
import os
import pwd
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from malletrain.identity.keys import is_key
from malletrain.protocol.bounds import USER_NAME

MIN_CHECK_INTERVAL_S = 0.4
"""Minimum time between two checks of the file, seconds. Users with open requests are checked twice
a second, so a removed user loses access within a second."""
MIN_AGE_S = 0.5
"""Age, seconds, up to which a version of the file that lacks keys of the previous one is looked at
once more before it counts: programs that write a file in place empty it first. Less than a second
with the interval between two checks."""
TIMEOUT_S = 10.0
_NO_FILE = (0, 0, 0)
"""The version of a file that is not there."""
_SURROGATE = re.compile("[\udc80-\udcff]")
_REFUSALS = {
    15: "the credential is too old; do the clocks of this machine and the daemon's agree?",
    16: "the credential is of the future; do the clocks of this machine and the daemon's agree?",
    17: "the credential was used before",
}


class UsersError(RuntimeError):
    """The list of users, or a credential, cannot be used; the message is a sentence that says why
    and what to do.
    """


@dataclass(frozen=True)
class UserList:
    """A list of users as far as it can be used."""

    users: Mapping[str, str]
    """Key → user."""
    problems: tuple[str, ...] = ()
    """A sentence for each line that is ignored."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys in ignored lines that no other line gives to a user."""


def parse_users(text: str, where: str = "list of users") -> UserList:
    """Return the users in ``text``: ``NAME KEY`` on each line, ``#`` begins a comment; a user may
    have several keys. A wrong line is ignored and reported; the others are valid.

    A byte that is not UTF-8 text is a surrogate in ``text``, as Python's ``surrogateescape`` makes
    it. Comments may have such bytes.
    """
    users: dict[str, str] = {}
    problems: list[str] = []
    ignored_keys: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place, count = f"{where}, line {number}", len(problems)
        if any(_SURROGATE.search(word) for word in words[:2]):
            problems.append(
                f"{place}, is left out: it is not UTF-8 text; save the file in that encoding."
            )
        elif len(words) < 2 or not is_key(words[1]) or (len(words) > 2 and words[2][0] != "#"):
            problems.append(
                f"{place}, is left out: it must be a user name and a key, as 'malletrain key' "
                "prints them."
            )
        elif not USER_NAME.fullmatch(words[0]):
            problems.append(
                f"{place}, is left out: '{words[0]}' is no user name. It begins with a letter, a "
                "digit or _, and has only such and . @ \\ + - in it."
            )
        elif users.setdefault(words[1], words[0]) != words[0]:
            problems.append(
                f"{place}, is left out: the key of {words[0]} is that of {users[words[1]]} already."
            )
        if len(problems) > count:
            ignored_keys.update(filter(is_key, words))
    return UserList(users, tuple(problems), frozenset(ignored_keys - users.keys()))


def read_users(path: Path) -> UserList:
    """Return the list in the file. Raises UsersError, also if users other than the daemon's user
    and root could have written it, or if it is UTF-16.
    """
    try:
        status = path.stat()
        data = path.read_bytes()
    except OSError as error:
        raise UsersError(f"The list of users {path} cannot be read: {error.strerror}.") from None
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsersError(
            f"The list of users {path} can be written by others, who could make themselves "
            "anybody; chown and chmod 644 it."
        )
    if b"\0" in data or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsersError(
            f"The list of users {path} is not UTF-8 text; save the file in that encoding."
        )
    return parse_users(data.decode("utf-8-sig", "surrogateescape"), str(path))


class Users:
    """The list of users in a file, read again when it changes. A wrong line is ignored; if the file
    cannot be read or has no valid line, the previous list stays valid. A key that the file has lost
    is valid until the file is older than :data:`MIN_AGE_S` or is the same at the next check, and at
    most for that time if the file is written again and again.

    Used by several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why the file cannot be read; empty if it can."""
        self._list = UserList({})
        self._version: tuple[int, int, int] | None = None
        self._unsettled: tuple[int, int, int] | None = None
        """Version that lacked keys at the last check, and was young."""
        self._lost_since: float | None = None
        """Time (monotonic, seconds) since which each check has found keys missing; None if the last
        one found all.
        """
        self._checked_at = -MIN_CHECK_INTERVAL_S
        self._lock = threading.Lock()

    def user_of(self, key: str) -> str | None:
        """Return the user of this key; ``None`` if it is not in the list."""
        if time.monotonic() - self._checked_at >= MIN_CHECK_INTERVAL_S:
            self._check_file()
        return self._list.users.get(key)

    def is_ignored(self, key: str) -> bool:
        """Return whether the list has this key only in lines that are ignored."""
        return key in self._list.ignored_keys

    def problems(self) -> tuple[str, ...]:
        """Return the problems of the list, a sentence each: why the file cannot be read, and which
        lines are ignored.
        """
        return (*([self.problem] if self.problem else []), *self._list.problems)

    def _check_file(self) -> None:
        with self._lock:
            self._checked_at = time.monotonic()
            try:
                status = self.path.stat()
                version = (status.st_mtime_ns, status.st_ino, status.st_size)
                if version == self._version:
                    self.problem = ""  # the file may have been missing meanwhile
                    self._unsettled = self._lost_since = None
                    return
                user_list = read_users(self.path)
                if self._may_be_unfinished(user_list, version, status.st_ctime):
                    users = {**self._list.users, **user_list.users}
                    self._list = replace(self._list, users=users)
                    return
                if user_list.problems and not user_list.users:
                    ignored_keys = user_list.ignored_keys - self._list.users.keys()
                    self._list = replace(self._list, ignored_keys=ignored_keys)
                    self._version = None
                    raise UsersError(
                        f"The list of users {self.path} has no valid line: {user_list.problems[0]}"
                    )
                self._list, self.problem, self._version = user_list, "", version
            except FileNotFoundError:  # a removed file means: no users
                try:
                    removed_at = self.path.parent.stat().st_ctime
                except OSError:
                    removed_at = 0.0
                if self._may_be_unfinished(UserList({}), _NO_FILE, removed_at):
                    return
                self._list, self.problem, self._version = (
                    UserList({}),
                    f"The list of users {self.path} is not there.",
                    None,
                )
            except (OSError, UsersError) as error:
                self.problem = str(error)

    def _may_be_unfinished(
        self, user_list: UserList, version: tuple[int, int, int], changed_at: float
    ) -> bool:
        """Return whether this version of the file has lost keys so recently that a program may be
        writing it, and note it. At the next check the same version is a finished one.

        Args:
            user_list: what was read.
            version: the version of the file.
            changed_at: when the file changed, by the clock of its file system, seconds.
        """
        seen, self._unsettled = self._unsettled == version, version
        is_young = abs(time.time() - changed_at) < MIN_AGE_S
        now = time.monotonic()
        if self._list.users.keys() <= user_list.users.keys():
            self._lost_since = None
            return False
        if self._lost_since is None:
            self._lost_since = now
        if is_young and not seen and now - self._lost_since < MIN_AGE_S:
            return True
        self._lost_since = None
        return False


class Munge:
    """MUNGE, through its commands. ``socket``: socket of the service; empty: the default."""

    def __init__(self, socket: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._socket = [f"--socket={socket}"] if socket else []
        self._environment = environment

    @staticmethod
    def there() -> bool:
        """Return whether this machine has the commands."""
        return shutil.which("munge") is not None and shutil.which("unmunge") is not None

    def credential(self, payload: str) -> str:
        """Return a credential of this process's user for ``payload``. Raises UsersError."""
        return self._run(["munge", *self._socket, f"--string={payload}"], "").strip()

    def user(self, credential: str, payload: str) -> str:
        """Return the name of the user who created ``credential`` for ``payload``. Raises
        UsersError if the credential is not valid.
        """
        if (
            not credential.startswith("MUNGE:")
            or not credential.isascii()
            or len(credential) > 8192
        ):
            raise UsersError("What was given is no credential of MUNGE.")
        output = self._run(["unmunge", *self._socket, "--numeric", "--keys=STATUS,UID"], credential)
        head, _, content = output.partition("\n\n")
        facts = dict(line.split(":", 1) for line in head.splitlines() if ":" in line)
        if facts.get("STATUS", "").strip() != "0" or content != payload:
            raise UsersError("The credential was made for another purpose.")
        try:
            return pwd.getpwuid(int(facts["UID"])).pw_name
        except (KeyError, ValueError):
            raise UsersError(
                f"The daemon's host knows no user of id {facts.get('UID', '?').strip()}."
            ) from None

    def _run(self, argv: list[str], stdin: str) -> str:
        try:
            process = subprocess.run(
                argv,
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT_S,
                env=self._environment,
            )
        except (OSError, ValueError) as error:
            raise UsersError(f"{argv[0]} cannot be run: {error}.") from None
        except subprocess.TimeoutExpired:
            raise UsersError(f"{argv[0]} did not answer within {TIMEOUT_S:g} s.") from None
        if process.returncode != 0:
            words = " ".join(process.stderr.split()) or _REFUSALS.get(
                process.returncode, f"exit code {process.returncode}"
            )
            raise UsersError(f"{argv[0]} refused: {words.rstrip('.')}.")
        return process.stdout


def login_payload(server_key: str, client_key: str) -> str:
    """Return the payload of a credential for a login, which is valid only for this daemon and this
    client's key.
    """
    return f"malletrain login {server_key} {client_key}"
