"""A person with terminals and files, who uses the command line only; waiting is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from malletrain.client import Connection
from malletrain.protocol.views import EventView, JobView
from tests import waiting
from tests.firstday.terminal import CommandOutput, Terminal

LOCAL = """\
[daemon]
metrics_listen = ""
agent_timeout = "60 s"
adopt_wait = "60 s"

[scheduler]
kind = "local"
poll_interval = "300 ms"

[scheduler.local]
nodes = 3
grace = "10 min"

[jobs]
max_tries = {tries}
drain_timeout = "1 h"
join_timeout = "1 h"
warmup_timeout = "1 h"
hang_after = "1 h"

[allocation]
debounce = "300 ms"
min_interval = "0 s"
"""
"""The quickstart's configuration with shorter waits, for a machine that may stand still."""


class Person:
    """``work``: the folder they work in; ``variables``: the environment of their shell."""

    def __init__(self, work: Path, variables: Mapping[str, str]) -> None:
        self.work = work
        self.variables = dict(variables)
        self._terminals: list[Terminal] = []
        self._main: Terminal | None = None

    def terminal(self, **size: int) -> Terminal:
        """One terminal more."""
        script = self.work.parent / f"typescript{len(self._terminals)}"
        self._terminals.append(Terminal(self.variables, self.work, script, **size))
        return self._terminals[-1]

    def types(self, command: str) -> CommandOutput:
        """Type a command into the terminal that is open all day."""
        if self._main is None:
            self._main = self.terminal()
        return self._main.type(command)

    def writes(self, name: str, text: str) -> None:
        """Write a file."""
        (self.work / name).write_text(text)

    def leave(self) -> None:
        """Close all terminals."""
        for terminal in self._terminals:
            terminal.close()

    def starts_a_daemon(self, tries: int = 3) -> Terminal:
        """A daemon of their own on an embedded cluster of three nodes, in its own terminal."""
        self.writes("local.toml", LOCAL.format(tries=tries))
        terminal = self.terminal()
        terminal.start("malletraind --config local.toml")
        terminal.shows("listening")
        return terminal

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until ``condition`` holds; fails with the jobs as they are."""
        waiting.until(condition, what, 0.1, lambda: self.types("malletrain status").text)

    def job(self, job: str) -> JobView:
        """A job as it is, asked at less expense than by a command."""
        with self._client() as client:
            return client.job(job).job

    def notices(self, job: str) -> Sequence[str]:
        """The notices to the owner of a job."""
        with self._client() as client:
            return client.job(job).notices

    def events(self, job: str) -> list[EventView]:
        """What happened to a job."""
        with self._client() as client:
            return client.events(limit=1000, job=job)

    def _client(self) -> Connection:
        return Connection.of(Path(self.variables["HOME"]) / ".local" / "state" / "malletrain")

    def until_ended(self, job: str) -> JobView:
        """Wait until a job has ended; the job."""
        self.until(lambda: self.job(job).ended is not None, f"{job} ends")
        return self.job(job)

    def until_it_trains_on(self, job: str, nodes: int) -> None:
        """Wait until a job trains on ``nodes`` nodes."""

        def there() -> bool:
            events = self.events(job)
            formed = [e.data for e in events if e.kind == "round-formed"]
            trained = [e.data["generation"] for e in events if e.kind == "rescale-finished"]
            return (
                bool(formed)
                and len(formed[-1]["members"]) == nodes
                and formed[-1]["generation"] in trained
            )

        self.until(there, f"{job} trains on {nodes} nodes")
