"""The file of the users' keys: makes, lists, revokes and checks keys.

A key is ``llm-ID-SECRET``. The file has the SHA-256 of each secret, not the secret: 256 random bits
need no slower hash. Only its owner may read the file. Whenever a key is checked, the file is read
again if it has changed, so that a revoked key is refused at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from llmserve.gateway.errors import GatewayError

PREFIX = "llm"


class UserKeyError(GatewayError):
    """The file of keys cannot be used; the message is a sentence for the operator."""


class UserKey(msgspec.Struct, frozen=True):
    """One key, without its secret."""

    id: str
    """Public part; names the key in lists and logs."""
    user: str
    hash: str
    """SHA-256 of the secret, hexadecimal."""
    created: float
    """Seconds since the epoch."""
    application: str = ""
    """Application of all requests with this key; empty: the client may name one."""
    revoked: float | None = None
    """Time of the revocation, seconds since the epoch; None: the key is valid."""


class KeyFile:
    """The keys in one file.

    Args:
        path: path of the file, which the first :meth:`add` creates with mode 0600.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._keys: dict[str, UserKey] = {}

    def add(self, user: str, application: str = "") -> tuple[UserKey, str]:
        """Make a key.

        Args:
            user: user of the key.
            application: application of all requests with the key; empty: the client may name one.

        Returns:
            The key without its secret, and the whole key as text for the user, which is not stored.

        Raises:
            UserKeyError: the file cannot be read or written.
        """
        secret = secrets.token_urlsafe(32)
        with self._locked():
            keys = self._read()
            name = secrets.token_hex(4)
            while name in keys:
                name = secrets.token_hex(4)
            key = UserKey(name, user, _hash(secret), time.time(), application)
            self._write({**keys, name: key})
        return key, f"{PREFIX}-{name}-{secret}"

    def list(self) -> list[UserKey]:
        """Return all keys, the oldest first.

        Raises:
            UserKeyError: the file cannot be read.
        """
        return sorted(self._read().values(), key=lambda key: key.created)

    def revoke(self, name: str) -> Sequence[UserKey]:
        """Make keys invalid.

        Args:
            name: the id of a key, the whole key, or a user, for all keys of that user. If it is
                both an id and a user, it means the key.

        Returns:
            The key, even if it was revoked before; for a user, the keys that were valid, the oldest
            first.

        Raises:
            UserKeyError: there is no such key or user, or the file cannot be read or written.
        """
        parts = name.split("-", 2)
        with self._locked():
            keys = self._read()
            if len(parts) == 3 and parts[0] == PREFIX and parts[1] in keys:
                name = parts[1]
            of_user = [key for key in keys.values() if key.user == name]
            if name not in keys and not of_user:
                raise UserKeyError(
                    f"There is no key {name} in {self._path}, and no user {name} with keys; "
                    "`llmserve key list` names them."
                )
            now = time.time()
            valid = [key for key in ([keys[name]] if name in keys else of_user) if not key.revoked]
            revoked = [msgspec.structs.replace(key, revoked=now) for key in valid]
            if revoked:
                self._write({**keys, **{key.id: key for key in revoked}})
        if name in keys and not revoked:
            return [keys[name]]
        return sorted(revoked, key=lambda key: key.created)

    def check(self, text: str) -> UserKey | None:
        """Return the valid key that a client has sent; None if the text is not a valid key.

        Raises:
            UserKeyError: the file cannot be read.
        """
        parts = text.split("-", 2)
        if len(parts) != 3 or parts[0] != PREFIX:
            return None
        key = self._current().get(parts[1])
        if key is None or not hmac.compare_digest(key.hash, _hash(parts[2])):
            return None
        return None if key.revoked is not None else key

    def is_valid(self, name: str) -> bool:
        """Return whether the key with this id exists and is not revoked.

        Raises:
            UserKeyError: the file cannot be read.
        """
        key = self._current().get(name)
        return key is not None and key.revoked is None

    def has_revoked_all(self, user: str) -> bool:
        """Return whether a user had keys and all of them are revoked.

        Raises:
            UserKeyError: the file cannot be read.
        """
        keys = [key for key in self._current().values() if key.user == user]
        return bool(keys) and all(key.revoked is not None for key in keys)

    def _current(self) -> dict[str, UserKey]:
        """Return the keys. Reads the file again if it has changed."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._version, self._keys = None, {}
            return self._keys
        except OSError as error:
            raise UserKeyError(f"The keys in {self._path} cannot be read: {error}.") from None
        version = (status.st_mtime_ns, status.st_ino, status.st_size)
        if version != self._version:
            self._keys = self._read()
            self._version = version
        return self._keys

    def _read(self) -> dict[str, UserKey]:
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise UserKeyError(
                        f"{self._path} can be read or written by other users (mode "
                        f"{stat.S_IMODE(status.st_mode):04o}); run chmod 600 on it."
                    )
                keys = msgspec.json.decode(file.read(), type=list[UserKey])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserKeyError(f"The keys in {self._path} cannot be read: {error}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserKeyError(
                f"{self._path} is not a file of keys: {error}. Restore it, or delete it and make "
                "new keys."
            ) from None
        return {key.id: key for key in keys}

    def _write(self, keys: dict[str, UserKey]) -> None:
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(number, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(list(keys.values()))))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
        except OSError as error:
            raise UserKeyError(f"The keys in {self._path} cannot be written: {error}.") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file for the body: only one process changes it at a time."""
        try:
            number = os.open(
                self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600
            )
        except OSError as error:
            raise UserKeyError(f"The keys in {self._path} cannot be written: {error}.") from None
        with open(number, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
