"""CURVE keys, which identify the peers of connections.

Decides where keys are stored, that no other user can read them, and which identity a public key
has: ``lease:<id>`` (the agent of one lease, as long as the lease exists), ``client:<user>``, or
``unauthenticated:<key>`` if a client may still log in (:mod:`malletrain.identity.users`). The
handlers of messages decide what an identity may do.

Files under ``keys/`` in the state directory (mode 0700), each one key pair as JSON (mode 0600):
``server.key``, ``client.key`` (the user who runs the daemon). The secret half of a lease's key is
not stored here: it is passed to the lease, readable by the lease's user, and the store keeps the
public half. Keys are z85 text, 40 characters.
"""

from __future__ import annotations

import hmac
import json
import os
import pwd
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from malletrain.identity.state_directory import (
    KEY_FORM,
    StateDirError,
    expanded,
    make_private_dir,
    write_atomically,
    written_in_vain,
)

SERVER = "server.key"
CLIENT = "client.key"
LOGIN_LASTS_S = 600.0
"""Validity of a login with a client's key, seconds. After it the client has to log in again, which
clients do automatically. So a user who is no longer authenticated loses access within this time.
"""


class KeyFileError(StateDirError):
    """A key file that cannot be used; the message is a sentence that says why and what to do."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair as z85 text. The secret half is not shown when printed."""

    public: str
    secret: str = field(repr=False)


def new_pair() -> KeyPair:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def is_key(text: str) -> bool:
    """Return whether ``text`` has the form of a key."""
    return KEY_FORM.fullmatch(text) is not None


def write_key(path: Path, pair: KeyPair) -> None:
    """Write a key pair readable by its owner only. Raises KeyFileError."""
    try:
        write_atomically(
            path, json.dumps({"public": pair.public, "secret": pair.secret}) + "\n", mode=0o600
        )
    except OSError as error:
        why = written_in_vain(error)
        raise KeyFileError(f"The key file {path} cannot be written: {why}") from None


def read_key(path: Path) -> KeyPair:
    """Read a key pair. Raises KeyFileError if the file does not exist, is damaged, belongs to
    another user or is readable by others.
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise KeyFileError(f"The key file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise KeyFileError(
            f"The key file {path} is damaged; delete it and restart the daemon, which makes a "
            "new one."
        ) from None
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"The key file {path} belongs to another user and is not used; check who wrote it, "
            "then delete it."
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(
            f"The key file {path} can be read by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), so its key is no secret. Delete it "
            "and restart the daemon, which makes a new one with mode 0600."
        )
    try:
        fields = json.loads(text)
        pair = KeyPair(fields["public"], fields["secret"])
        if zmq.curve_public(pair.secret.encode("ascii")).decode("ascii") != pair.public:
            raise ValueError("the halves do not belong together")
    except (ValueError, TypeError, KeyError, AttributeError, zmq.ZMQError):
        raise KeyFileError(
            f"The key file {path} is damaged; delete it and restart the daemon, which makes a "
            "new one."
        ) from None
    return pair


def own_key() -> KeyPair:
    """Return the key pair of this user for the site's daemon, created at the first call:
    ``client.key`` in ``~/.config/malletrain``.

    Raises StateDirError, KeyFileError.
    """
    base = expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "XDG_CONFIG_HOME")
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(
            f"The directory {base}, where your key is kept, cannot be made: {error.strerror}."
        ) from None
    path = make_private_dir(base / "malletrain") / CLIENT
    if not path.exists():
        write_key(path, new_pair())
    return read_key(path)


class KeyRing:
    """The keys of one state directory, and the identity of each public key.

    Passed to pyzmq's authenticator as its credentials provider (:meth:`callback`). ``lookup``:
    returns the user of a key that is not known here; ``unauthenticated``: whether to accept
    connections with unknown keys too, so that their clients learn how to log in; ``now``: a clock,
    seconds. Raises KeyFileError if the directory or a key in it cannot be trusted.
    """

    def __init__(
        self,
        state_dir: Path,
        user: str | None = None,
        *,
        lookup: Callable[[str], str | None] = lambda key: None,
        unauthenticated: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup, self._unauthenticated, self._now = lookup, unauthenticated, now
        self._logins: dict[str, tuple[str, float]] = {}
        self.directory = make_private_dir(state_dir / "keys")
        mode = stat.S_IMODE(self.directory.stat().st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeyFileError(
                f"The key directory {self.directory} is open to others (mode {mode:04o}). If "
                "nobody else may have read it: chmod 700 "
                f"{self.directory}; else delete the keys in it first."
            )
        self.server = self._read_or_create(SERVER)
        self.client = self._read_or_create(CLIENT)
        self._identities = {self.client.public: f"client:{user or user_name()}"}
        self._keys_of_lease: dict[str, set[str]] = {}

    def _read_or_create(self, name: str) -> KeyPair:
        path = self.directory / name
        if not path.exists():
            write_key(path, new_pair())
        return read_key(path)

    def make_lease_key(self, lease: str) -> KeyPair:
        """Create the key pair of a new lease and accept it from now on."""
        pair = new_pair()
        self.accept_lease(lease, pair.public)
        return pair

    def accept_lease(self, lease: str, public: str) -> None:
        """Accept ``public`` as the key of ``lease`` (after a restart: from the store)."""
        self._identities[public] = f"lease:{lease}"
        self._keys_of_lease.setdefault(lease, set()).add(public)

    def accept_client(self, public: str, user: str) -> None:
        """Accept ``public`` as a key of ``user`` for LOGIN_LASTS_S."""
        if public in self._identities:
            return  # an agent does not become a user
        now = self._now()
        self._logins = {key: login for key, login in self._logins.items() if login[1] > now}
        self._logins[public] = f"client:{user}", now + LOGIN_LASTS_S

    def drop_lease(self, lease: str) -> None:
        """Reject the key of a lease that has ended."""
        for public in self._keys_of_lease.pop(lease, ()):
            if self._identities.get(public) == f"lease:{lease}":
                del self._identities[public]

    def job_key(self, job: str) -> str:
        """Return the secret of a service's processes (64 hexadecimal digits). It is derived, so
        that it is the same after a restart of the daemon.
        """
        return hmac.new(
            self.server.secret.encode("ascii"), f"service of job {job}".encode(), "sha256"
        ).hexdigest()

    def identity(self, public: str | bytes) -> str | None:
        """Return the identity of this public key (z85); ``None`` if it may not connect."""
        key = public.decode("ascii", "replace") if isinstance(public, bytes) else public
        if identity := self._identities.get(key):
            return identity
        if user := self._lookup(key):
            return f"client:{user}"
        login, until = self._logins.get(key, ("", 0.0))
        if self._now() < until:
            return login
        return f"unauthenticated:{key}" if self._unauthenticated and is_key(key) else None

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a connection with this public key is accepted; called by pyzmq's
        authenticator."""
        return self.identity(key) is not None


def user_name() -> str:
    """Return the login name of the user this process runs as."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container without an entry for its user
        return str(os.geteuid())
