"""Commands that owners of jobs run on nodes: relayed between a client and an agent.

Decides how much output the daemon holds of a command (what its client has not confirmed, up to
:data:`malletrain.protocol.commands.OUTPUT_WINDOW`), and when a command ends although its process
has not: the job has left the node, or the client has gone.
:mod:`malletrain.daemon.api.commands` decides who may run one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterator

from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.protocol import messages
from malletrain.protocol.commands import INPUT_WINDOW, OUTPUT_WINDOW, Terminal
from malletrain.protocol.views import CommandPart, CommandView
from malletrain.waits import happens

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
