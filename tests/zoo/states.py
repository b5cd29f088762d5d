"""Whether two rounds have left the same behind: what a script can read when it begins anew."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from tests.zoo.worker import GO, REACHED, TRACE

_OWN = (TRACE, GO, REACHED)
_UNREAD = ("training_args.bin",)
"""Files that no script reads; this one has a time in it."""
_TIMES = ("id", "time", "save_s", "disk_since")
"""Entries of snapshots that say when one was made."""
_RATES = ("_runtime", "_per_second")
"""Ends of names in Trainer's log, of how long something took."""


def state_of(folder: Path) -> str:
    """A digest of the files that a script has left in ``folder``. Equal ones hold the same, apart
    from the times at which they were made.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.name in _OWN or path.name in _UNREAD or path.suffix == ".log":
            continue
        content = _content(path) if path.is_file() else b""
        content = content.replace(str(folder).encode(), b"")
        for part in (str(path.relative_to(folder)).encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    try:
        if zipfile.is_zipfile(path):
            return repr(_plain(torch.load(path, weights_only=False), path)).encode()
        if path.suffix == ".json":
            return repr(_plain(json.loads(path.read_text()), path)).encode()
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        pass  # a file that is no state of ours is compared by its bytes
    return path.read_bytes()


def _plain(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _plain(item, path)
            for name, item in value.items()
            if name not in _TIMES and not str(name).endswith(_RATES)
        }
    if isinstance(value, list | tuple):
        return [_plain(item, path) for item in value]
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
