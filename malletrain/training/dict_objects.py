"""Tells the user when a load replaces modules, optimizers and other objects in the script's dicts.

A dict is stored by value, so that a load puts copies of its objects in it. A script that takes them
from the dict afterwards trains these. One that uses variables of its own trains what it made, which
nobody restores::

    nets = {"gen": gen}
    snapshot = Snapshot(nets=nets, sampler=sampler)
    snapshot.restore()  # now nets["gen"] is not gen
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from malletrain.training import report

MAX_DEPTH = 3
"""Number of containers within each other that are searched."""
MAX_ITEMS = 1000
"""Number of items of a container that are searched."""
MAX_NAMED = 5
"""Number of objects that the message names."""


def tell_copies(own: Mapping[Any, Any], saved: Mapping[Any, Any], source: str) -> None:
    """Tell the user, once, which objects of a dict are replaced.

    Args:
        own: the script's dict, before the load.
        saved: the values that it gets.
        source: description of ``saved``, for the message.
    """
    paths = list(_replaced(own, saved))
    if not paths:
        return
    names = ", ".join(paths[:MAX_NAMED]) + (", …" if len(paths) > MAX_NAMED else "")
    report.tell(
        f"{source} replaces objects in this dict by copies: {names}. Variables for the objects "
        "that were there before are not restored. Pass each object under a name of its own, or "
        "take all of them from the dict after the load.",
        once=f"copies in {source}",
    )


def _replaced(own: Any, saved: Any, depth: int = 1) -> Iterator[str]:
    """Yield the paths of the objects with a state in ``own`` for which ``saved`` has others."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        pairs = [(key, value, saved[key]) for key, value in own.items() if key in saved]
    elif isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        pairs = [(n, *values) for n, values in enumerate(zip(own, saved, strict=False))]
    else:
        return
    for key, value, other in pairs[:MAX_ITEMS]:
        if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
            if value is not other and other is not None:
                yield f"[{key!r}]"
        elif depth < MAX_DEPTH:
            for path in _replaced(value, other, depth + 1):
                yield f"[{key!r}]{path}"
