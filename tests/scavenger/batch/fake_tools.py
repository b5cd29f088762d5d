"""Small imitations of a scheduler's command-line tools: they print what a test has set, or hang,
fail or print garbage.

Each tool is a shell script in one directory. What it does next stands in files beside it, so that a
test can change it while a scavenger runs; every call is written down.
"""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = """#!/bin/sh
here={here}
printf '%s\\n' "{name} $*" >>"$here/calls"
stdin="$here/{name}.stdin.$$"
if ! [ -c /dev/stdin ]; then
    cat >"$stdin"
    ln -f "$stdin" "$here/{name}.stdin"
fi
# A script of the test's own decides, if there is one.
[ -f "$here/{name}.sh" ] && . "$here/{name}.sh"
mode=
[ -f "$here/{name}.mode" ] && mode=$(cat "$here/{name}.mode")
case "$mode" in
    hang) exec sleep 600;;
    fail*) printf '%s\\n' "${{mode#fail }}" >&2; exit 1;;
esac
[ -f "$here/{name}.out" ] || exit 0
# squeue and sinfo are told the mark of the poll in their format (-o MARK|...): a MARK in the answer
# becomes it.
words="$*"
mark="${{words##*-o }}"
mark="${{mark%%|*}}"
case "$mark" in *[!0-9a-f]*) mark=;; esac
exec sed "s/MARK/$mark/g" "$here/{name}.out"
"""
"""Each process that it starts costs more than all that it does itself."""


class FakeTools:
    """Imitations of ``names`` in ``root``; ``environment`` finds them before the real ones."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = root / name
            path.write_text(SCRIPT.format(here=root, name=name))
            path.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{root}:{os.environ['PATH']}"}

    def answers(self, name: str, text: str) -> None:
        """Let the tool print ``text`` and succeed from now on."""
        (self.root / f"{name}.out").write_text(text)
        (self.root / f"{name}.mode").unlink(missing_ok=True)

    def hangs(self, name: str) -> None:
        """Let the tool give no answer from now on."""
        (self.root / f"{name}.mode").write_text("hang")

    def fails(self, name: str, complaint: str) -> None:
        """Let the tool print a complaint and end with status 1 from now on."""
        (self.root / f"{name}.mode").write_text(f"fail {complaint}")

    def works(self, name: str) -> None:
        """The tool answers again."""
        (self.root / f"{name}.mode").unlink(missing_ok=True)

    def runs(self, name: str, script: str) -> None:
        """Let the tool run this shell text from now on (``$here`` is the directory). If the text
        does not exit, the usual answer follows.
        """
        (self.root / f"{name}.sh").write_text(script)

    def calls(self, name: str = "") -> list[str]:
        """Every call so far, ``NAME ARGUMENTS``."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(name)]

    def stdin(self, name: str) -> bytes:
        """Return the standard input of the tool's last call."""
        return (self.root / f"{name}.stdin").read_bytes()
