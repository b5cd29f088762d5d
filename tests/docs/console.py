"""The commands of a page of the docs, and a shell that runs them as a reader would type them.

Commands are the lines of ``console`` blocks that begin with ``$ ``; the other lines are what must
be printed. An HTML comment above a block says what a reader takes from the text:

``<!-- file: NAME -->``
    the block is written to this file
``<!-- until interrupted -->``
    each command is interrupted as soon as it has printed something
``<!-- own terminal, ready at: TEXT -->``
    the last command goes on in a terminal of its own; it is ready when it has printed TEXT
``<!-- with NAME=VALUE -->``
    an environment variable, to keep the test short (``tests/packaging`` has the demo run in full)
``<!-- not run: REASON -->``
    cannot be run by a test, or is no command
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import marked
from tests.waiting import readable

PATIENCE_S = 900.0
"""Far beyond what the busiest machine needs for any command of the pages."""
BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<note>[^\n]*?) -->\n+ *)?```(?P<kind>\w+)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    """The language that the page gives, such as ``console``."""
    text: str
    """Lines of the block."""
    note: str
    """The comment above it, or nothing."""

    def note_after(self, begin: str) -> str | None:
        """Return the rest of the note after the words ``begin``; None if it does not begin with
        them.
        """
        return self.note[len(begin) :].strip() if self.note.startswith(begin) else None


@dataclass
class Command:
    """A command of a page."""

    text: str
    """Text that the reader types."""
    says: list[str] = field(default_factory=list)
    """Lines that it must print."""


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for match in BLOCK.finditer(page):
        yield Block(match["kind"], match["text"], match["note"] or "")


def commands(block: Block) -> list[Command]:
    """The commands of a ``console`` block with what they must print. Raises ValueError where its
    first line is none.
    """
    entries: list[Command] = []
    for line in block.text.splitlines():
        line = line.strip()
        if line.startswith("$ "):
            entries.append(Command(line[2:]))
        elif not entries:
            raise ValueError(f"A console block begins without a command: {line}")
        elif entries[-1].text.endswith("\\"):
            entries[-1].text += f"\n{line.removeprefix('> ')}"
        elif line:
            entries[-1].says.append(line)
    return entries


class Session:
    """A login shell of a reader: directory and variables last from command to command."""

    def __init__(self, variables: dict[str, str], inside: Sequence[str], folder: Path) -> None:
        self.variables = variables
        self.inside = list(inside)
        self.place = folder
        self.notes = folder / ".notes"
        self.notes.mkdir()
        self.log: list[str] = []
        self.terminals: list[subprocess.Popen[bytes]] = []

    def page(self, text: str) -> int:
        """Do what a page says; the number of commands that were run."""
        done = 0
        for block in blocks(text):
            if (name := block.note_after("file:")) is not None:
                (self.place / name).write_text(block.text)
            elif block.kind == "console" and block.note_after("not run:") is None:
                done += self._block(block)
        return done

    def _block(self, block: Block) -> int:
        todo = commands(block)
        variable = block.note_after("with ") or ""
        ready = block.note_after("own terminal, ready at:")
        for number, command in enumerate(todo, 1):
            began = time.monotonic()
            self.log.append(f"$ {command.text}")
            if block.note == "until interrupted":
                self._watch(command.text)
            elif ready is not None and number == len(todo):
                self._terminal(command.text, ready)
            else:
                text = self._run(command.text, variable)
                for line in command.says:
                    assert line in text, f"{command.text} did not say {line!r} but:\n{text}"
            self.log.append(f"({time.monotonic() - began:.1f} s)")
        return len(todo)

    def _run(self, command: str, variable: str) -> str:
        """Run a command to its end; what it printed."""
        after, typed = self.notes / "after", self.notes / "typed"
        typed.write_text(command + "\n")
        name, _, value = variable.partition("=")
        script = f'source "{typed}"; status=$?; {{ pwd; env -0; }} >"{after}"; exit $status'
        output = self.notes / "output"
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*self.inside, "bash", "-c", f'cd "{self.place}"; {script}'],
                env={**self.variables, **({name: value} if name else {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.log.append(output.read_text(errors="replace"))
                raise AssertionError(
                    f"{command} did not end in {PATIENCE_S:.0f} s:\n{self.tell()}"
                ) from None
        text = output.read_text(errors="replace")
        self.log.append(text)
        assert status == 0, f"{command} ended with {status}:\n{self.tell()}"
        place, _, variables = after.read_text().partition("\n")
        self.place = Path(place)
        self.variables = dict(v.split("=", 1) for v in variables.split("\0") if "=" in v)
        if name:
            self.variables.pop(name, None)
        return text

    def _open(self, command: str, terminal: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.inside, "bash", "-c", f'cd "{self.place}"; {command}'],
            env={**self.variables, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )

    def _watch(self, command: str) -> None:
        """Interrupt a command without an end, once it has printed something."""
        ours, theirs = pty.openpty()
        process = self._open(command, theirs)
        os.close(theirs)
        try:
            text = _read_until(ours, process, "")
            os.killpg(process.pid, signal.SIGINT)
            self.log.append(text + _drained(ours))
            assert process.wait(PATIENCE_S) in (0, 130, -signal.SIGINT), self.tell()
        finally:
            os.close(ours)
        assert "Traceback" not in self.log[-1], self.log[-1]

    def _terminal(self, command: str, ready: str) -> None:
        """Leave a command running; its terminal is a file that is read until it is ready."""
        output = self.notes / f"terminal{len(self.terminals)}"
        with open(output, "wb") as file:
            process = self._open(command, file.fileno())
        self.terminals.append(process)
        end = time.monotonic() + PATIENCE_S
        while ready not in output.read_text(errors="replace"):
            text = output.read_text(errors="replace")
            assert process.poll() is None, f"{command} ended before it was ready:\n{text}"
            assert time.monotonic() < end, f"{command} is not ready:\n{text}"
            time.sleep(0.05)
        self.log.append(output.read_text(errors="replace"))

    def tell(self) -> str:
        """Everything that was typed and printed."""
        terminals = (self.notes / f"terminal{k}" for k in range(len(self.terminals)))
        return "\n".join([*self.log, *(t.read_text(errors="replace") for t in terminals)])[-8000:]


@contextmanager
def session(
    variables: dict[str, str], folder: Path, inside: Sequence[str] = ()
) -> Iterator[Session]:
    """A session whose processes are gone at its end. ``inside``: a command put before all."""
    token = str(folder)
    made = Session({**variables, marked.MARK: token}, inside, folder)
    try:
        with marked.session(token):
            yield made
    finally:
        for terminal in made.terminals:
            terminal.wait()


def _read_until(terminal: int, process: subprocess.Popen[bytes], text: str) -> str:
    """Return the output of a terminal until ``text`` (or anything) appears."""
    data = b""
    end = time.monotonic() + PATIENCE_S
    while not data or text.encode() not in data:
        assert time.monotonic() < end, f"{process.args} printed nothing"
        if readable(terminal, 1.0):
            try:
                data += os.read(terminal, 65536)
            except OSError:
                break
    return data.decode(errors="replace")


def _drained(terminal: int) -> str:
    """The rest of what a terminal shows, until its program has closed it."""
    data = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # EIO: no process has the other side open any more
            return data.decode(errors="replace")
        if not piece:
            return data.decode(errors="replace")
        data += piece
