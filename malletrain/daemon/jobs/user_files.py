"""Asks for files of users. Their file system may not answer, such as NFS whose server is away, and
a thread that asks it cannot be interrupted. The daemon therefore asks in threads of their own and
stops waiting after a while. Decides what it takes for granted then.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
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
_unanswered: dict[str, threading.Thread] = {}
"""Folder → thread that has waited for it for too long."""


def is_file(path: str) -> bool:
    """Return whether ``path`` is a file; True if its file system does not answer, because the
    client has seen it.
    """
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


def read_script(path: str) -> bytes:
    """Return the beginning of a script. Raises OSError, also if it is no regular file or if its
    file system does not answer.
    """
    return _answer(path, lambda: _read(path))


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
    for other in [name for name, thread in _unanswered.items() if not thread.is_alive()]:
        del _unanswered[other]
        log.info("a file system answers again", folder=other)
    timed_out = TimeoutError(errno.ETIMEDOUT, "the file system does not answer", path)
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
    _unanswered[folder] = thread
    log.warning(
        "a file system does not answer; its files are not checked, and jobs share no curves by "
        "the content of their scripts",
        folder=folder,
    )
    raise timed_out
