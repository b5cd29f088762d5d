"""Values that the processes of one training send each other as pickles. After an upgrade, processes
of two versions of malletrain train together.

Decides how objects of malletrain's own classes are written. A pickle names the module of a class,
which another version may not have. Therefore such an object is written as the name of its class and
its fields, for :func:`rebuilt`. A class can move then, but :func:`rebuilt` cannot. Workers whose
exchange (:data:`malletrain.elastic.step_exchange.EXCHANGES`) has no ``by_name`` get pickles that
name the module; ``pickle.loads`` reads both. Objects of the script's classes are pickled as usual.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

C = TypeVar("C", bound=type[Any])

MAKERS: dict[str, Callable[..., Any]] = {}
"""What makes an object from its fields, by the name under which it is sent."""
_REDUCERS: dict[type, Callable[[Any], Any]] = {}
"""What a pickler writes for an object, by its class."""


def exchanged(cls: C) -> C:
    """Decorate a data class of which processes send each other objects. Its name and the names of
    its fields are never changed or removed while workers send them; a new field is a new version of
    the exchange.
    """
    names = tuple(field.name for field in fields(cls))
    written = register(cls.__name__, cls)
    _REDUCERS[cls] = lambda value: written({name: getattr(value, name) for name in names})
    return cls


def register(name: str, make: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Have :func:`rebuilt` call ``make`` with the values that were sent under ``name``. Return a
    function that returns what a pickler writes for such values.
    """
    MAKERS[name] = make
    return lambda values: (rebuilt, (name, values))


def rebuilt(name: str, values: dict[str, Any]) -> Any:
    """Return the object that was sent as the name of its class and its fields. Pickles name this
    function and its module, so it stays where it is.
    """
    return MAKERS[name](**values)


class PeerPickler(pickle.Pickler):
    """Pickles a value for another process.

    Args:
        file: where the pickle is written.
        by_name: whether the receivers know :func:`rebuilt`.
    """

    def __init__(self, file: io.BytesIO, by_name: bool) -> None:
        super().__init__(file)
        self.by_name = by_name
        if by_name:
            self.dispatch_table: Mapping[type, Any] = {**copyreg.dispatch_table, **_REDUCERS}


def dumps(value: Any, by_name: bool) -> bytes:
    """Return ``value`` pickled, see :class:`PeerPickler`. ``pickle.loads`` reads it."""
    file = io.BytesIO()
    PeerPickler(file, by_name).dump(value)
    return file.getvalue()
