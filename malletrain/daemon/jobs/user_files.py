"""Asks for files of users. Their file system may not answer, such as NFS whose server is away, and
a thread that asks it cannot be interrupted. The daemon therefore asks in threads of their own and
stops waiting after a while. Decides what it takes for granted then. May be called in any thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_SCRIPT_BYTES = 16 * 1024 * 1024
"""Number of bytes of a script that its profile key covers."""
ANSWER_S = 3.0
"""Maximum wait for an answer, seconds. The daemon does nothing else meanwhile."""
MAX_UNANSWERED = 4
"""Maximum number of folders that are waited for. While so many do not answer, none is asked."""
MAX_SCRIPTS = 10_000
"""Maximum number of scripts whose digests are remembered."""
_lock = threading.Lock()
"""Held to change what follows, never while a file system is asked."""
_digests: dict[str, bytes] = {}
"""Path of a script → SHA-256 of its beginning; the last remembered one is the last."""
_unanswered: dict[str, threading.Thread] = {}
"""Folder → thread that has waited for it for too long."""


@dataclass(frozen=True)
class FileAnswers:
    """What the daemon's host sees of the files of a job. If their file system does not answer, they
    are taken to exist, because the client has seen them.
    """

    script: bool
    """Whether the script is a file."""
    workdir: bool
    """Whether the working directory is one."""


def ask(script: str, workdir: str) -> FileAnswers:
    """Return what the host sees of these files, and remember the content of the script for
    :func:`script_digest`. It may take :data:`ANSWER_S` for each folder.
    """
    answers = FileAnswers(is_file(script), is_folder(workdir))
    with _lock:
        _digests.pop(script, None)  # it may have changed, and not be readable now
    with suppress(OSError, ValueError):  # a path with a NUL byte
        _remember(script, _digest(script))
    return answers


def is_file(path: str) -> bool:
    """Return whether ``path`` is a file; True if its file system does not answer."""
    try:
        return _answer(path, lambda: os.path.isfile(path))
    except TimeoutError:
        return True


def is_folder(path: str) -> bool:
    """Return whether ``path`` is a folder; True if its file system does not answer."""
    try:
        return _answer(os.path.join(path, ""), lambda: os.path.isdir(path))
    except TimeoutError:
        return True


def script_digest(path: str) -> bytes:
    """Return the SHA-256 of the beginning of a script, as it was when a job with it was last
    submitted. Only if none was since the daemon was started, the file is read now.

    Raises:
        OSError: it cannot be read, is no regular file or its file system does not answer.
    """
    digest = _digests.get(path)
    return _remember(path, _digest(path)) if digest is None else digest


def _remember(path: str, digest: bytes) -> bytes:
    with _lock:
        _digests.pop(path, None)
        _digests[path] = digest
        while len(_digests) > MAX_SCRIPTS:
            del _digests[next(iter(_digests))]
    return digest


def _digest(path: str) -> bytes:
    return _answer(path, lambda: hashlib.sha256(_read(path)).digest())


def _read(path: str) -> bytes:
    # A user can name a FIFO, and the thread would wait for a writer for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no regular file", path)
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_SCRIPT_BYTES)
    finally:
        os.close(handle)


def _answer(path: str, ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns. Raises what it raises, or TimeoutError."""
    folder = os.path.dirname(path)
    timed_out = TimeoutError(errno.ETIMEDOUT, "the file system does not answer", path)
    with _lock:
        for other in [name for name, thread in _unanswered.items() if not thread.is_alive()]:
            del _unanswered[other]
            log.info("a file system answers again", folder=other)
        if folder in _unanswered or len(_unanswered) >= MAX_UNANSWERED:
            raise timed_out
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    # Not of the loop's executor: its few threads are needed for other things, and joined at exit.
    thread = threading.Thread(target=run, name="malletrain-user-file", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if errors:
        raise errors[0]
    if answers:
        return answers[0]
    with _lock:
        _unanswered[folder] = thread
    log.warning(
        "a file system does not answer; its files are not checked, and jobs share no curves by "
        "the content of their scripts",
        folder=folder,
    )
    raise timed_out
