"""A person's terminal: bash in a pty, a command at a time, with what it printed and its exit
status. Waits for prompts and words, never for a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pexpect

from tests.waiting import PATIENCE_S

PROMPT = re.compile(r"\[ready (\d+)\] ")
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
"""What moves the cursor or colours the text."""


def close_terminal(child: pexpect.spawn) -> None:
    """End the program in a terminal of pexpect, and wait for its end. pexpect's ``close`` alone
    fails if the program still exists 0.1 s after it was killed.
    """
    try:
        child.close(force=True)
    except pexpect.ExceptionPexpect:
        child.wait()


def plain(shown: str) -> str:
    """The words on a terminal in one line, without colours."""
    return " ".join(CONTROL.sub("", shown).split())


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed, and how it ended."""

    text: str
    """Its words, on standard output and standard error."""
    lines: tuple[str, ...]
    """Its lines as they were shown, without colours."""
    status: int
    """Its exit status."""


class Terminal:
    """A terminal of ``columns`` by ``rows`` characters, in which a person has just logged in.
    Everything typed and shown goes to the file ``typescript``, too.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        place: Path,
        typescript: Path,
        columns: int = 100,
        rows: int = 30,
    ) -> None:
        self._bash = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile", "--noediting"],
            cwd=str(place),
            env={**variables, "TERM": "xterm", "PS1": r"[ready $?] ", "PS2": ""},
            dimensions=(rows, columns),
            echo=False,
            encoding="utf-8",
            codec_errors="replace",
            timeout=PATIENCE_S,
        )
        self._bash.logfile = typescript.open("w", buffering=1)
        self._prompt()

    def _prompt(self) -> CommandOutput:
        self._bash.expect(PROMPT)
        shown = self._bash.before
        lines = tuple(line.rstrip() for line in CONTROL.sub("", shown).splitlines())
        return CommandOutput(plain(shown), lines, int(self._bash.match[1]))

    def type(self, command: str) -> CommandOutput:
        """Type a command and wait until it has ended."""
        self.start(command)
        return self.ended()

    def start(self, command: str) -> None:
        """Type a command that goes on."""
        self._bash.sendline(command)

    def shows(self, words: str) -> None:
        """Wait until the running command shows ``words`` on one line."""
        self._bash.expect_exact(words)

    def press(self, key: str) -> None:
        """Press one key; ``"^C"`` is Ctrl-C."""
        if key.startswith("^"):
            self._bash.sendcontrol(key[1:].lower())
        else:
            self._bash.send(key)

    def ended(self) -> CommandOutput:
        """Wait until the running command has ended."""
        return self._prompt()

    def close(self) -> None:
        """Close the window; what runs in it is hung up."""
        close_terminal(self._bash)
        self._bash.logfile.close()
