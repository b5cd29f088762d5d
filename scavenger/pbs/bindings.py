"""Reading PBS through its Python bindings: ``pbs_ifl``, the SWIG module over libpbs that comes with
PBS's test framework (pbs_ifl.h, pbs_statjob(3B), pbs_statvnode(3B)).

libpbs has no time limit of its own, so its calls are made in a thread and given up when they take
too long. Only what is needed is asked for, which the commands cannot do. The answers are turned
into the same values as the commands' output. Leases are asked for and given back by the commands in
any case, which alone can do so as another user.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from scavenger.batch.commands import shorten
from scavenger.interface import SchedulerError
from scavenger.pbs.parse import (
    JOB_ATTRIBUTES,
    PbsJobTable,
    RawJob,
    RawNode,
    checked_nodes,
    job_table,
)

NODE_ATTRIBUTES = ("state", "jobs", "resv", "comment", "queue", "resources_available")
NEEDED = (
    "pbs_connect",
    "pbs_disconnect",
    "pbs_statjob",
    "pbs_statvnode",
    "pbs_statfree",
    "attrl",
    "get_pbs_errno",
)


def load_module(installed: Path | None = None) -> tuple[ModuleType | None, str]:
    """``pbs_ifl``, if it can be imported and has what is needed; else None and why not.

    Args:
        installed: where PBS is installed; its bindings are in ``lib/python/altair`` there.
    """
    folders = [] if installed is None else [str(installed / "lib" / "python" / "altair")]
    before = list(sys.path)
    try:
        sys.path += folders
        module = importlib.import_module("pbs_ifl")
    except Exception as error:  # ImportError, or whatever its library does when it finds no PBS
        return (
            None,
            f"pbs_ifl cannot be imported ({shorten(str(error) or type(error).__name__, 80)})",
        )
    finally:
        sys.path[:] = before
    missing = [name for name in NEEDED if not hasattr(module, name)]
    return (None, f"pbs_ifl lacks {', '.join(missing)}") if missing else (module, "")


class BindingsSource:
    """Reads through pbs_ifl; see :class:`scavenger.pbs.source.PbsSource`."""

    name = "bindings"

    def __init__(self, module: Any, server: str = "", timeout_s: float = 20.0) -> None:
        self.module = module
        self.server = server
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pbs_ifl")
        self._running: Future[Any] | None = None

    def read(self, prefix: str) -> tuple[dict[str, RawNode], PbsJobTable]:
        """Vnodes and jobs now. Raises SchedulerError."""
        if self._running is not None and not self._running.done():
            raise SchedulerError("PBS still gives its Python bindings no answer.")
        self._running = self._pool.submit(self._read, prefix)
        try:
            nodes, jobs = self._running.result(self.timeout_s)
        except FutureTimeout:
            raise SchedulerError(
                f"PBS gave its Python bindings no answer within {self.timeout_s:g} s."
            ) from None
        except SchedulerError:
            raise
        except Exception as error:  # anything that an interface changed since may raise
            raise SchedulerError(
                f"PBS's Python bindings failed: {shorten(str(error) or type(error).__name__)}"
            ) from None
        return checked_nodes(nodes), jobs

    def _read(self, prefix: str) -> tuple[dict[str, RawNode], PbsJobTable]:
        connection = self.module.pbs_connect(self.server)
        if connection < 0:
            raise SchedulerError(
                f"PBS's server {self.server or '(default)'} cannot be reached (error "
                f"{self.module.get_pbs_errno()})."
            )
        try:
            jobs = self._ask(self.module.pbs_statjob, connection, JOB_ATTRIBUTES)
            nodes = self._ask(self.module.pbs_statvnode, connection, NODE_ATTRIBUTES)
        finally:
            self.module.pbs_disconnect(connection)
        return (
            {name: msgspec.convert(values, RawNode) for name, values in nodes.items()},
            job_table(
                {name: msgspec.convert(values, RawJob) for name, values in jobs.items()}, prefix
            ),
        )

    def _ask(
        self, call: Any, connection: int, attributes: tuple[str, ...]
    ) -> dict[str, dict[str, Any]]:
        first = call(connection, "", self._wanted(attributes), None)
        if first is None:
            if number := self.module.get_pbs_errno():
                raise SchedulerError(f"PBS refused to answer (error {number}).")
            return {}
        try:
            return {status.name: _values(status.attribs) for status in _chain(first)}
        finally:
            self.module.pbs_statfree(first)

    def _wanted(self, attributes: tuple[str, ...]) -> Any:
        """The attributes as the linked list that libpbs wants."""
        head = None
        for name in reversed(attributes):
            item = self.module.attrl()
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
        if attribute.resource:
            group = values.setdefault(attribute.name, {})
            if isinstance(group, dict):
                group[attribute.resource] = attribute.value
        else:
            values[attribute.name] = attribute.value
    return values
