"""Commands that owners of jobs run on nodes (``malletrain exec``): the operations of clients, and
the relay between a client and an agent.

Decides who may run a command on a node: only the owner of the job that is there, not even an
operator, because code of a job runs only as its owner. Decides also which node a rank is on, how
much output the daemon holds of a command (what its client has not confirmed, up to
:data:`malletrain.protocol.commands.OUTPUT_WINDOW`), and when a command ends although its process
has not: the job has left the node, or the client has gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Operation, OperationContext
from malletrain.daemon.jobs.admission import RequestRefused, number, text, whole
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.site.clock import MAX_WAIT_S
from malletrain.protocol import messages
from malletrain.protocol.commands import (
    INPUT_WINDOW,
    MAX_ARGUMENTS_BYTES,
    MAX_CHUNK_BYTES,
    OUTPUT_WINDOW,
    Terminal,
)
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import CommandPart, CommandStarted, CommandView
from malletrain.waits import happens
from scavenger.hostlist import named

CLIENT_TIMEOUT_S = 60.0
"""Time without a request of the client after which a command is killed, seconds."""
INTERRUPTED = "The connection between the daemon and the node was interrupted."


class RelayedCommand:
    """The state of one command. Knows no sockets and no clock.

    Args:
        name: id of the command.
        user: user who runs it.
        job: id of the job.
        agent: agent of the node.
        now: time of its start, seconds.
    """

    def __init__(self, name: str, user: str, job: str, agent: LeasedAgent, now: float) -> None:
        self.name, self.user, self.job = name, user, job
        self.node, self.lease = agent.node, agent.lease
        self.requested_at = now
        """Time of the client's newest request, seconds."""
        self.accepted = 0
        """Bytes of input that were accepted of the client, in total."""
        self.input_ended = False
        """Whether no more input follows."""
        self._input_read = 0
        self._parts: deque[CommandPart] = deque()
        """Output that the client has not confirmed."""
        self._received = self._confirmed = 0
        """Bytes of output that the agent sent, and that the client confirmed, in total."""
        self._ended, self._sentence = False, ""
        self._code: int | None = None
        self._changed = asyncio.Event()

    # --- the agent ---

    def output(self, message: messages.CommandOutput) -> bool:
        """Take output. Return False if the agent sent more than it was allowed to."""
        size = self._received + len(message.data) - self._confirmed
        if self._ended or size > OUTPUT_WINDOW:
            return self._ended
        self._received += len(message.data)
        self._parts.append(CommandPart(message.data, message.error))
        self._notify()
        return True

    def input_read(self, count: int) -> None:
        """Record that the process has read ``count`` bytes of its input in total."""
        self._input_read = max(self._input_read, min(count, self.accepted))
        self._notify()

    def end(self, code: int | None, sentence: str = "") -> None:
        """Record the end; the first one counts. ``sentence``: why there is no exit code."""
        if not self._ended:
            self._ended, self._code, self._sentence = True, code, sentence
            self._notify()

    # --- the client ---

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._ended

    @property
    def input_space(self) -> int:
        """Number of bytes of input that the agent can take now."""
        return max(0, INPUT_WINDOW - (self.accepted - self._input_read))

    def confirm(self, cursor: int) -> int | None:
        """Drop the output before ``cursor``, which the client has. Return the new limit of output
        for the agent; None if it does not change. Raises ValueError for a cursor that was never
        returned.
        """
        if not self._confirmed <= cursor <= self._received:
            raise ValueError(
                f"the cursor {cursor} is not between {self._confirmed} and {self._received}"
            )
        before = self._confirmed
        while self._parts and self._confirmed + len(self._parts[0].data) <= cursor:
            self._confirmed += len(self._parts.popleft().data)
        return self._confirmed + OUTPUT_WINDOW if self._confirmed != before else None

    def view(self) -> CommandView:
        """Return the output that the client has not confirmed, and the end."""
        return CommandView(
            tuple(self._parts), self._received, self._ended, self._code, self._sentence
        )

    async def change(self, wait_s: float) -> None:
        """Return at the next change, or after ``wait_s`` seconds."""
        await happens(self._changed, wait_s)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RelayedCommands:
    """All commands of one daemon. ``state``: the daemon's state."""

    def __init__(self, state: SiteState) -> None:
        self._state = state
        self._commands: dict[str, RelayedCommand] = {}

    def __iter__(self) -> Iterator[RelayedCommand]:
        return iter(list(self._commands.values()))

    def get(self, name: str) -> RelayedCommand | None:
        """Return the command with this id; None if there is none."""
        return self._commands.get(name)

    def start(
        self,
        user: str,
        job: str,
        agent: LeasedAgent,
        argv: tuple[str, ...],
        terminal: Terminal | None,
    ) -> RelayedCommand:
        """Make an agent start a command.

        Args:
            user: user who runs it.
            job: id of the job on the agent's node.
            agent: the agent.
            argv: the command line.
            terminal: the client's terminal; None if there is none.
        """
        name = uuid.uuid4().hex
        command = RelayedCommand(name, user, job, agent, self._state.clock.now())
        self._commands[name] = command
        self.tell(command, messages.StartCommand(name, job, argv, terminal))
        return command

    def tell(self, command: RelayedCommand, message: messages.Message) -> None:
        """Send a message about a command to its agent. If the agent cannot be reached, the command
        ends.
        """
        agent = self._state.agents.of_lease(command.lease)
        if agent is None or not self._state.agents.reach(agent, message):
            command.end(None, INTERRUPTED)

    def remove(self, command: RelayedCommand) -> None:
        """Forget a command. If its process has not ended, it is killed."""
        if self._commands.pop(command.name, None) is not None and not command.ended:
            self.tell(command, messages.EndCommand(command.name))
            command.end(None, "The command was ended by its client.")

    def handle(
        self,
        agent: LeasedAgent,
        message: messages.CommandOutput | messages.CommandInputRead | messages.CommandEnded,
    ) -> None:
        """Handle a message of an agent. An agent reports only on its own commands."""
        command = self._commands.get(message.command)
        if command is None or command.lease != agent.lease:
            return
        if isinstance(message, messages.CommandInputRead):
            command.input_read(message.count)
        elif isinstance(message, messages.CommandEnded):
            command.end(message.code, message.sentence)
        elif not command.output(message):
            self.tell(command, messages.EndCommand(command.name))
            command.end(None, "The node sent more output than it may; the command was killed.")

    def interrupted(self, lease: str) -> None:
        """End the commands of an agent that has connected again; it has killed them, because
        messages may be lost.
        """
        for command in self:
            if command.lease == lease:
                command.end(None, INTERRUPTED)

    def tick(self, now: float) -> None:
        """End the commands whose job has left their node, and those whose client has gone. Call it
        about every half second. ``now``: time, seconds.
        """
        for command in self:
            agent = self._state.agents.of_lease(command.lease)
            if agent is None:
                command.end(None, f"Node {command.node} was lost or has left.")
            elif agent.holds != command.job:
                command.end(None, f"Job {command.job} has left node {command.node}.")
            if now - command.requested_at > CLIENT_TIMEOUT_S:
                self.remove(command)


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
