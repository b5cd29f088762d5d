"""Which names of modules a pickle has: whoever reads it needs them."""

from __future__ import annotations

import io
import pickle
from typing import Any


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add((module, name))
        return super().find_class(module, name)


def names_in(data: bytes) -> set[tuple[str, str]]:
    """The modules in a pickle, each with what it defines."""
    reader = _Reader(data)
    reader.load()
    return reader.names
