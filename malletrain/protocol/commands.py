"""Messages about the commands that the owner of a job runs on one of its nodes.

A client never speaks to an agent: the daemon relays. Counts of bytes are cumulative, so that a
message that is repeated has no effect. The agent sends output up to the limit of the newest
:class:`CommandCredit`, which follows what the client has read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import Code, Count, Id, Message, Sentence

OUTPUT_WINDOW = 256 * 1024
"""Maximum output of a command that its client has not read, bytes."""
INPUT_WINDOW = 64 * 1024
"""Maximum input of a command that its process has not read, bytes."""
MAX_CHUNK_BYTES = 32 * 1024
"""Maximum number of bytes in one message."""
MAX_ARGUMENTS_BYTES = 128 * 1024
"""Maximum size of a command line, bytes."""

Chunk = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_BYTES)]
Side = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class Terminal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A terminal of a client."""

    rows: Side
    columns: Side
    kind: Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[\w.+-]*\Z")] = ""
    """Its type, as TERM names it."""


class StartCommand(Message, frozen=True):
    """Run a command in the environment of the job; answer CommandOutput and CommandEnded.
    ``terminal``: run it in a pseudo-terminal; None: with three pipes.
    """

    command: str
    job: str
    argv: tuple[str, ...]
    terminal: Terminal | None = None


class CommandInput(Message, frozen=True):
    """Input of a command. ``end``: no more follows."""

    command: str
    data: Chunk
    end: bool = False


class CommandCredit(Message, frozen=True):
    """The agent may send the output of the command up to ``limit`` bytes in total."""

    command: str
    limit: Count


class ResizeTerminal(Message, frozen=True):
    """The terminal of the client has another size."""

    command: str
    terminal: Terminal


class SignalCommand(Message, frozen=True):
    """Send a signal to the processes of the command."""

    command: str
    signum: int


class EndCommand(Message, frozen=True):
    """Kill the processes of the command: its client has gone."""

    command: str


class CommandOutput(Message, frozen=True):
    """Output of a command. ``error``: of its standard error."""

    command: Id
    data: Chunk
    error: bool = False


class CommandInputRead(Message, frozen=True):
    """The process has read (or will never read) ``count`` bytes of its input in total."""

    command: Id
    count: Count


class CommandEnded(Message, frozen=True):
    """The command has ended, and all its output was sent. ``code``: as of a shell, 128 + signal if
    a signal ended it; None if there is none, because of ``sentence``.
    """

    command: Id
    code: Code | None = None
    sentence: Sentence = ""
