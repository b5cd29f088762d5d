"""The file with the state of a federated training after its last round, and the lock on it.

A round counts when its file has replaced the file of the round before. That is one rename, so that
a kill leaves one or the other. Only one server at a time can hold the lock, so two servers never
make the same round.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import zipfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fedcase.clients import ClientRecord
from fedcase.training_state import RoundRecord, TrainingState

FILE, LOCK = "state.npz", "lock"
_FACTS = "facts.json"


class TrainingStateError(RuntimeError):
    """The state cannot be used; the message says why and what to do."""


def lock(path: Path) -> int:
    """Lock a file and write this process's id into it. Return its descriptor; closing that unlocks
    the file.

    Raises:
        TrainingStateError: another process has locked it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise TrainingStateError(
            f"Another server trains with the state in {path.parent}. Wait until it has ended, or "
            "name another folder."
        ) from None
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    return file


def end_holder(path: Path) -> None:
    """Kill the process that has locked a file, if there is one: a run whose SuperLink has died. The
    round that it has not saved is lost.
    """
    try:
        os.close(lock(path))
    except TrainingStateError:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


class StateFolder:
    """The folder of one training. Use it as a context manager, which holds the lock.

    Raises:
        TrainingStateError: another server holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def __enter__(self) -> StateFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path / LOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def load(self) -> TrainingState | None:
        """Return the state after the last round; None if there is none yet.

        Raises:
            TrainingStateError: the file is damaged.
        """
        return load(self.path)

    def save(self, state: TrainingState) -> None:
        """Make the last round of ``state`` count.

        Raises:
            TrainingStateError: it is not the round after the one in the file.
            OSError: it cannot be written.
        """
        number = last_round(self.path)
        if number is not None and state.round != number + 1:
            raise TrainingStateError(
                f"Round {state.round} cannot be saved in {self.path}: the last one there is round "
                f"{number}."
            )
        temporary = self.path / f".{FILE}-{os.getpid()}"
        with temporary.open("wb") as file:
            _write(file, state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / FILE)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def last_round(folder: Path) -> int | None:
    """Return the number of the last round that counts, without reading the model; None if there is
    no state yet.

    Raises:
        TrainingStateError: the file is damaged.
    """
    path = folder / FILE
    try:
        with zipfile.ZipFile(path) as archive:
            rounds = json.loads(archive.read(_FACTS))["rounds"]
        return int(rounds[-1]["number"]) if rounds else 0
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def load(folder: Path) -> TrainingState | None:
    """Return the state in ``folder`` after the last round, whoever holds the lock; None if there is
    none yet.

    Raises:
        TrainingStateError: the file is damaged.
    """
    path = folder / FILE
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(_FACTS))
            arrays = {
                name: np.load(io.BytesIO(archive.read(f"{number}.npy")), allow_pickle=False)
                for number, name in enumerate(facts["arrays"])
            }
        random = Random()
        version, words, gauss = facts["random"]
        random.setstate((version, tuple(words), gauss))
        return TrainingState(
            arrays,
            {record["client"]: ClientRecord(**record) for record in facts["records"]},
            facts["rule"],
            random,
            [RoundRecord(**{**one, "clients": tuple(one["clients"])}) for one in facts["rounds"]],
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> TrainingStateError:
    return TrainingStateError(
        f"The state in {path} cannot be read ({error}). Restore the file from a copy, or name "
        "another folder to begin anew."
    )


def _write(file: Any, state: TrainingState) -> None:
    facts = {
        "arrays": list(state.arrays),
        "records": [asdict(record) for record in state.records.values()],
        "rule": state.rule,
        "random": state.random.getstate(),
        "rounds": [asdict(one) for one in state.rounds],
    }
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_FACTS, json.dumps(facts))
        for number, array in enumerate(state.arrays.values()):
            content = io.BytesIO()
            np.save(content, np.asarray(array), allow_pickle=False)
            archive.writestr(f"{number}.npy", content.getvalue())
