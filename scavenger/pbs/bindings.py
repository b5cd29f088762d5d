"""Reads PBS through its Python bindings, if they are installed. They run in a separate process
(:mod:`scavenger.pbs.ask_pbs_ifl`), which has a time limit like every command.

The answers are converted into the same values as the commands' output. Leases are always requested
and given back through the commands, because only these can act as another user.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from scavenger.batch.commands import Commands
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
PROGRAM = (sys.executable, "-I", str(Path(__file__).with_name("ask_pbs_ifl.py")))


class _Answer(msgspec.Struct):
    jobs: dict[str, RawJob]
    nodes: dict[str, RawNode]


class BindingsSource:
    """Reads through pbs_ifl; see :class:`scavenger.pbs.source.PbsSource`.

    Args:
        commands: runs the process.
        server: PBS's server; empty: the default one.
        installed: PBS's installation directory; its bindings are in ``lib/python/altair`` there.
            None: Python's search path.
    """

    name = "bindings"

    def __init__(self, commands: Commands, server: str, installed: Path | None = None) -> None:
        self.commands = commands
        folder = "" if installed is None else str(installed / "lib" / "python" / "altair")
        self._argv = [*PROGRAM, folder, server]

    def trouble(self) -> str:
        """Return why the bindings cannot be used; empty if they can."""
        result = self.commands.run(self._argv)
        return "" if result.status == 0 else result.complaint or "pbs_ifl cannot be imported"

    def read(self, prefix: str) -> tuple[dict[str, RawNode], PbsJobTable]:
        """Return the present vnodes and jobs. Raises SchedulerError."""
        attributes = (",".join(JOB_ATTRIBUTES), ",".join(NODE_ATTRIBUTES))
        text = self.commands.ask([*self._argv, *attributes])
        try:
            answer: Any = msgspec.json.decode(text, type=_Answer)
        except msgspec.DecodeError as error:
            raise SchedulerError(
                f"The answer of PBS's Python bindings cannot be understood: {error}. Nothing was "
                "changed."
            ) from None
        return checked_nodes(answer.nodes), job_table(answer.jobs, prefix)
