"""Reads the owner of a snapshot without torch, without running code of the snapshot and without its
tensors, for commands that copy, export or delete snapshots. Decides nothing. Standard library only.
"""

from __future__ import annotations

import pickle
import zipfile
from typing import Any

from malletrain.training.owner import Owner, owner_of

_RECORD = "data.pkl"
"""Name of the record of torch.save with everything but tensors."""


class _Inert(dict[Any, Any]):
    """Placeholder for every class and every object in a snapshot that is not plain data."""

    def __new__(cls, *args: Any, **named: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **named: Any) -> _Inert:
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As a list has it."""

    def extend(self, values: Any) -> None:
        """As a list has it."""

    def add(self, value: Any) -> None:
        """As a set has it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def owner_in(path: str) -> Owner | None:
    """Return the owner of the snapshot in the file ``path``; None if it cannot be read or names
    none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = next(n for n in archive.namelist() if n.rpartition("/")[2] == _RECORD)
            with archive.open(record) as file:
                payload = _Plain(file).load()
    except Exception:  # absent, damaged, or not a snapshot
        return None
    if not isinstance(payload, dict) or "malletrain_snapshot" not in payload:
        return None
    return owner_of(payload)
