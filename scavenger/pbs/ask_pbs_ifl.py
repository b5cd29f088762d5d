"""Asks PBS through its Python bindings, ``pbs_ifl``, the SWIG module over libpbs that comes with it
(pbs_ifl.h, pbs_statjob(3B), pbs_statvnode(3B)), and prints the answer as JSON.

  python -I ask_pbs_ifl.py FOLDER JOB_ATTRIBUTES NODE_ATTRIBUTES

FOLDER: directory of the bindings, in addition to Python's own. The attributes are names separated
by commas. Without attributes it only reports whether the bindings can be used. It asks the default
server, as the commands do: the name of a server (PBS_SERVER) need not be that of a host, and libpbs
tries the other server of a failover pair only if the one asked is PBS_PRIMARY. This is a separate
process, because calls of the bindings have no time limit and hold Python's global interpreter lock:
a server that does not answer would stop all threads. It requests only the needed attributes, which
the commands cannot do. Errors are printed as a sentence on standard error. Uses the standard
library only.
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
    """PBS cannot be asked. The message says why."""


def main(arguments: list[str]) -> int:
    """Ask PBS, print the answer and return the exit status."""
    folder, *attributes = arguments
    try:
        module = load(folder)
        if len(attributes) > 1:  # a daemon that was started before an update also names a server
            of_jobs, of_nodes = (words.split(",") for words in attributes[-2:])
            json.dump(ask(module, of_jobs, of_nodes), sys.stdout)
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def load(folder: str) -> Any:
    """Return the module ``pbs_ifl``. Raises NoAnswer."""
    sys.path.append(folder)
    try:
        module = importlib.import_module("pbs_ifl")
    except Exception as error:  # ImportError, or any error of its library without PBS
        raise NoAnswer(f"pbs_ifl cannot be imported ({error or type(error).__name__})") from None
    if missing := [name for name in NEEDED if not hasattr(module, name)]:
        raise NoAnswer(f"pbs_ifl lacks {', '.join(missing)}")
    return module


def ask(module: Any, of_jobs: list[str], of_nodes: list[str]) -> dict[str, Any]:
    """Return ``jobs`` and ``nodes``: name → attribute → value. Raises NoAnswer.

    Reads jobs first. A lease that starts between the calls then shows as waiting for a busy node.
    In the other order its node would seem idle.

    Args:
        module: the module ``pbs_ifl``.
        of_jobs: attributes of jobs to read.
        of_nodes: attributes of nodes to read.
    """
    connection = module.pbs_connect("")
    if connection < 0:
        raise NoAnswer(f"PBS's server cannot be reached (error {module.get_pbs_errno()}).")
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
    """Return the attributes as the linked list that libpbs expects."""
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
    """Return an attribute list in the form of the commands' JSON: the resources of one attribute as
    an object.
    """
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
    """Return the text. SWIG returns invalid bytes as surrogates, which JSON cannot represent."""
    return str(value or "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
