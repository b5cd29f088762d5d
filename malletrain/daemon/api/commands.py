"""The operations of ``malletrain exec``.

Decides who may run a command on a node: only the owner of the job that is there, not even an
operator, because code of a job runs only as its owner. Decides also which node a rank is on.
:mod:`malletrain.daemon.nodes.commands` relays the output.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.transactions import Operation, OperationContext
from malletrain.daemon.jobs.admission import RequestRefused, number, text, whole
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.nodes.commands import RelayedCommand, RelayedCommands
from malletrain.daemon.site.clock import MAX_WAIT_S
from malletrain.protocol import messages
from malletrain.protocol.commands import MAX_ARGUMENTS_BYTES, MAX_CHUNK_BYTES, Terminal
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import CommandStarted, CommandView
from scavenger.hostlist import named

MAX_COMMANDS_PER_USER = 16
"""Maximum number of commands of one user at once."""
MAX_RANK = 10_000_000
MAX_BYTES = 2**53
SHOWN_WORD = 80
"""Maximum number of characters of a command's first word in the event."""


class CommandOperations:
    """The operations on commands.

    Args:
        context: finds jobs, and opens transactions.
        commands: the running commands.
    """

    def __init__(self, context: OperationContext, commands: RelayedCommands) -> None:
        self._state, self._context = context.state, context
        self._commands = commands
        self.operations: dict[str, Operation] = {
            "command-start": self._start,
            "command-output": self._output,
            "command-input": self._input,
            "command-resize": self._resize,
            "command-signal": self._signal,
            "command-end": self._end,
        }

    async def _start(self, user: str, params: Mapping[str, Any]) -> CommandStarted:
        argv = msgspec.convert(params["argv"], tuple[str, ...])
        terminal = msgspec.convert(params.get("terminal"), Terminal | None)
        if problem := argv_problem(argv):
            raise RequestRefused(problem, "usage")
        row = self._context.requested(user, params)
        if row.owner != user:
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner can run a command on its "
                "nodes."
            )
        own = [c for c in self._commands if c.user == user and not c.ended]
        if len(own) >= MAX_COMMANDS_PER_USER:
            raise RequestRefused(
                f"{MAX_COMMANDS_PER_USER} of your commands run already; end one of them."
            )
        run = self._state.runs.get(row.id)
        if run is None:
            raise RequestRefused(f"Job {row.id} has no nodes; it is {row.state}.")
        rank = None if params.get("rank") is None else whole(params, "rank", 0, 0, MAX_RANK)
        agent = self._agent(run, text(params, "node", ""), rank)
        word = os.path.basename(argv[0])[:SHOWN_WORD]
        with self._context.transaction():
            self._state.audit.record(
                EventKind.COMMAND_RUN,
                f"{user} runs '{word}'.",
                job=row.id,
                node=agent.node,
                user=user,
                command=word,
            )
            command = self._commands.start(user, row.id, agent, argv, terminal)
        return CommandStarted(command.name, row.id, agent.node)

    def _agent(self, run: ActiveJob, node: str, rank: int | None) -> LeasedAgent:
        """Return the agent on which the command runs. Raises RequestRefused if there is none."""
        job, agents = run.row.id, []
        for name in run.rounds.members:
            agent = self._state.agents.on(name)
            if agent is not None and agent.holds == job and not agent.releasing:
                agents.append(agent)
        if not agents:
            raise RequestRefused(f"No processes of job {job} run now; it is {run.row.state}.")
        if node:
            for agent in agents:
                if agent.node == node:
                    return agent
            names = named(agent.node for agent in agents)
            raise RequestRefused(f"Job {job} is not on node {node}; it is on {names}.")
        if rank is None:
            return agents[0]
        count = 0
        for name in run.rounds.members:
            agent = self._state.agents.on(name)
            gpus = agent.gpus if agent is not None else 0
            layout = self._state.layouts.of_round(run)
            own = run.spec.nproc_per_node if layout is None else layout.processes
            count += own or max(1, gpus)
            if rank < count:
                if agent in agents and agent is not None:
                    return agent
                raise RequestRefused(f"Rank {rank} of job {job} is on {name}, which is leaving.")
        raise RequestRefused(f"Job {job} has no rank {rank} now; its ranks are 0 to {count - 1}.")

    async def _output(self, user: str, params: Mapping[str, Any]) -> CommandView:
        """Return the output from ``cursor`` on: at once if there is any or the command has ended,
        else at the first output within ``wait_s``. Confirms the output before ``cursor``.
        """
        command = self._command(user, params)
        cursor = whole(params, "cursor", 0, 0, MAX_BYTES)
        if (limit := command.confirm(cursor)) is not None and not command.ended:
            self._commands.tell(command, messages.CommandCredit(command.name, limit))
        deadline = self._state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while (
            not (view := command.view()).parts
            and not view.ended
            and (remaining_s := deadline - self._state.clock.now()) > 0
        ):
            await command.change(remaining_s)
        command.requested_at = self._state.clock.now()
        return view

    async def _input(self, user: str, params: Mapping[str, Any]) -> int:
        """Forward input from ``offset`` on, as soon as the process has read enough of the earlier
        input. Return the number of bytes that were accepted in total; fewer than offered if the
        process did not read within ``wait_s``. Input of a command that has ended is accepted and
        dropped.
        """
        command = self._command(user, params)
        offset = whole(params, "offset", 0, 0, MAX_BYTES)
        data = msgspec.convert(params["data"], bytes)
        if len(data) > MAX_CHUNK_BYTES or offset > command.accepted:
            raise RequestRefused(
                f"Input comes in order, in pieces of {MAX_CHUNK_BYTES} bytes at most.", "usage"
            )
        deadline = self._state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while (
            command.input_space < len(data)
            and not command.ended
            and (remaining_s := deadline - self._state.clock.now()) > 0
        ):
            await command.change(remaining_s)
        if command.ended:
            command.accepted = max(command.accepted, offset + len(data))
            return command.accepted
        new = data[max(0, command.accepted - offset) :]
        end = bool(params.get("end")) and not command.input_ended
        if (new or end) and command.input_space >= len(new):
            command.accepted += len(new)
            command.input_ended = end
            self._commands.tell(command, messages.CommandInput(command.name, new, end))
        return command.accepted

    async def _resize(self, user: str, params: Mapping[str, Any]) -> None:
        command = self._command(user, params)
        terminal = msgspec.convert(params["terminal"], Terminal)
        self._commands.tell(command, messages.ResizeTerminal(command.name, terminal))

    async def _signal(self, user: str, params: Mapping[str, Any]) -> None:
        command = self._command(user, params)
        signum = whole(params, "signum", signal.SIGINT, 1, signal.NSIG - 1)
        self._commands.tell(command, messages.SignalCommand(command.name, signum))

    async def _end(self, user: str, params: Mapping[str, Any]) -> None:
        self._commands.remove(self._command(user, params))

    def _command(self, user: str, params: Mapping[str, Any]) -> RelayedCommand:
        command = self._commands.get(text(params, "command"))
        if command is None or command.user != user:
            raise RequestRefused(
                "The daemon does not know this command any more: it has restarted, or it has not "
                "heard of you for a minute. The command is being killed."
            )
        command.requested_at = self._state.clock.now()
        return command


def argv_problem(argv: tuple[str, ...]) -> str:
    """Return why a command line cannot be run, as a sentence; empty if it can."""
    if not argv or not argv[0]:
        return "There is no command. Write it after two dashes: malletrain exec JOB -- nvidia-smi"
    if any("\0" in word for word in argv):
        return "An argument of the command contains a NUL byte."
    if sum(len(word.encode("utf-8", "replace")) + 1 for word in argv) > MAX_ARGUMENTS_BYTES:
        return f"The command line is longer than {MAX_ARGUMENTS_BYTES} bytes; use a script."
    return ""
