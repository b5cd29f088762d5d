"""Asks PBS through its Python bindings, ``pbs_ifl``, the SWIG module over libpbs that comes with it
(pbs_ifl.h, pbs_statjob(3B), pbs_statvnode(3B)), and prints the answer as JSON.

    python -I ask_pbs_ifl.py FOLDER SERVER JOB_ATTRIBUTES NODE_ATTRIBUTES

FOLDER: where the bindings lie besides Python's own folders; the attributes are words with commas
between them. Without any it says only whether the bindings can be used. A process of its own,
because its calls have no time limit and hold Python's lock while they wait: a server that gives no
answer would stop every thread. Only what is needed is asked for, which the commands cannot do. What
goes wrong stands in a sentence on standard error. Standard library only.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

NEEDED = (
    "pbs_connect",
    "pbs_disconnect",
    "pbs_statjob",
    "pbs_statvnode",
    "pbs_statfree",
    "attrl",
    "get_pbs_errno",
)


class NoAnswer(Exception):
    """What went wrong, in a sentence."""


def main(arguments: list[str]) -> int:
    """Ask; returns the exit status."""
    folder, server, *attributes = arguments
    try:
        module = load(folder)
        if attributes:
            of_jobs, of_nodes = (words.split(",") for words in attributes)
            json.dump(ask(module, server, of_jobs, of_nodes), sys.stdout)
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def load(folder: str) -> Any:
    """``pbs_ifl``. Raises NoAnswer."""
    sys.path.append(folder)
    try:
        module = importlib.import_module("pbs_ifl")
    except Exception as error:  # ImportError, or whatever its library does when it finds no PBS
        raise NoAnswer(f"pbs_ifl cannot be imported ({error or type(error).__name__})") from None
    if missing := [name for name in NEEDED if not hasattr(module, name)]:
        raise NoAnswer(f"pbs_ifl lacks {', '.join(missing)}")
    return module


def ask(module: Any, server: str, of_jobs: list[str], of_nodes: list[str]) -> dict[str, Any]:
    """``jobs`` and ``nodes``: name → attribute → value. Raises NoAnswer.

    Jobs first: a lease that starts meanwhile is then waiting for a node in use, never on an idle
    one unseen.
    """
    connection = module.pbs_connect(server)
    if connection < 0:
        raise NoAnswer(
            f"PBS's server {server or '(default)'} cannot be reached (error "
            f"{module.get_pbs_errno()})."
        )
    try:
        return {
            "jobs": _stat(module, module.pbs_statjob, connection, of_jobs),
            "nodes": _stat(module, module.pbs_statvnode, connection, of_nodes),
        }
    finally:
        module.pbs_disconnect(connection)


def _stat(module: Any, call: Any, connection: int, names: list[str]) -> dict[str, Any]:
    first = call(connection, "", _attribute_list(module, names), None)
    if first is None:
        if number := module.get_pbs_errno():
            raise NoAnswer(f"PBS refused to answer (error {number}).")
        return {}
    try:
        return {status.name: _values(status.attribs) for status in _chain(first)}
    finally:
        module.pbs_statfree(first)


def _attribute_list(module: Any, names: list[str]) -> Any:
    """The attributes as the linked list that libpbs wants."""
    head = None
    for name in reversed(names):
        item = module.attrl()
        item.name, item.resource, item.value, item.next = name, None, "", head
        head = item
    return head


def _chain(item: Any) -> Iterator[Any]:
    while item is not None:
        yield item
        item = item.next


def _values(attributes: Any) -> dict[str, Any]:
    """An attribute list as in the commands' JSON: resources of one attribute together."""
    values: dict[str, Any] = {}
    for attribute in _chain(attributes):
        value = _text(attribute.value)
        if attribute.resource:
            group = values.setdefault(attribute.name, {})
            if isinstance(group, dict):
                group[attribute.resource] = value
        else:
            values[attribute.name] = value
    return values


def _text(value: Any) -> str:
    """SWIG gives bytes that are no characters as halves of some, of which JSON knows nothing."""
    return str(value or "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
