"""Checks whether this node is fit for jobs, by the site's own check and by the state of its GPUs,
and reports it to the daemon.

:class:`HealthWatch` decides when the checks run, one after the other: at the start of the lease,
periodically, and at once when workers fail. One failed check makes the node unfit; the daemon
decides what follows.

:class:`CheckProcess` runs a check under a supervisor, so that none of its processes outlives the
check, its time limit or the agent, whatever its process group or session is. The exit code is read
from the supervisor's output, because the agent reaps all its children itself
(:mod:`malletrain.agent.process`).

:func:`trouble` decides from the output of ``nvidia-smi -q`` whether the GPUs of a node are in a
state in which jobs fail. Its tables hold NVIDIA's exit codes and messages (nvidia-smi(1), "RETURN
VALUE"; Xid 79 "GPU has fallen off the bus") and the fields of the long listing. Any other output is
no reason to give up a node.

:class:`NodeFitness` decides what the daemon receives and in which order: nothing before the first
checks have ended, another check when workers failed, and a doubt about the node before the failure
itself. The daemon decides whether the node or the job caused a failure.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from malletrain.agent.config import AgentConfig
from malletrain.agent.launch import supervised_command
from malletrain.protocol import env
from malletrain.protocol.messages import Doubt, Message, Phase, Sick
from malletrain.protocol.phases import BROKEN
from malletrain.protocol.site_rules import HealthPlan

_ENDED = re.compile(r"\nmalletrain-check-ended (\d+)\n")
_SCRIPT = '"$@" </dev/null; printf "\\nmalletrain-check-ended %s\\n" "$?"'
_MAX_OUTPUT_BYTES = 4 << 20


class CheckProcess:
    """One run of a check.

    Args:
        command: the program and its arguments.
        log: file for its output.
        node: name of the node, which the check gets in MALLETRAIN_NODE.

    Raises:
        OSError: the check cannot be started.
    """

    def __init__(self, command: tuple[str, ...], log: Path, node: str) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        argv = supervised_command(["/bin/sh", "-c", _SCRIPT, "sh", *command], os.getpid(), "/", log)
        # The check does not get the variables of the agent (address of the daemon, lease).
        environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLETRAIN_")}
        environment[env.NODE] = node
        self._process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def over(self) -> bool:
        """Return whether the check has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the check and all its descendants. Does not wait for them."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)  # the supervisor kills its descendants

    @property
    def code(self) -> int | None:
        """Exit code; None if the check was killed."""
        match = _ENDED.search(self._read())
        return int(match[1]) if match else None

    @property
    def printed(self) -> str:
        """Output of the check."""
        return _ENDED.sub("", self._read())

    def _read(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _MAX_OUTPUT_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


COMMAND = ("nvidia-smi", "-q")

EXIT_CODES = {
    8: "the external power cables of a GPU are not attached",
    9: "the NVIDIA driver is not loaded",
    10: "the driver has an interrupt issue with a GPU",
    12: "the NVML library cannot be found or loaded",
    14: "the infoROM of a GPU is corrupted",
    15: "a GPU has fallen off the bus or cannot be reached",
}
"""Exit codes of nvidia-smi that mean a broken node. The others (2 to 4, 6, 13, 255) mean that the
call was wrong or unusual.
"""

SENTENCES = tuple(
    re.compile(text, re.IGNORECASE)
    for text in (
        r"Unable to determine the device handle for GPU.*",
        r".*GPU is lost.*",
        r".*GPU requires reset.*",
        r".*GPU has fallen off the bus.*",
        r"No devices were found.*",
        r"Failed to initialize NVML.*",
        r"NVIDIA-SMI has failed.*",
    )
)
"""Output of nvidia-smi, with any exit code, if a GPU or the driver is lost."""


def _is_positive(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def _is_yes(value: str) -> bool:
    return value == "Yes"


def _is_action(value: str) -> bool:
    return value not in ("None", "N/A", "")


FIELDS = (
    (
        re.compile(r"ECC Errors/Volatile/.*Uncorrectable[^/]*"),
        _is_positive,
        "uncorrectable memory errors",
    ),
    (
        re.compile(r"ECC Errors/Volatile/Double Bit/Total"),
        _is_positive,
        "uncorrectable memory errors",
    ),
    (re.compile(r"Retired Pages/Pending.*"), _is_yes, "memory pages wait to be retired"),
    (re.compile(r"Remapped Rows/Pending"), _is_yes, "memory rows wait to be remapped"),
    (re.compile(r"Remapped Rows/Remapping Failure Occurred"), _is_yes, "no spare memory rows left"),
    (re.compile(r"(GPU )?Reset Status/Reset Required"), _is_yes, "a reset is required"),
    (re.compile(r"GPU Recovery Action"), _is_action, "the driver asks for"),
)
"""(path of a field below its GPU, predicate for a bad value, meaning)."""

_GPU = re.compile(r"GPU ([0-9A-Fa-f:.]+)\s*$")
_LINE = re.compile(r"( *)(.*?)(?:\s+: ?(.*))?$")


def trouble(code: int | None, printed: str) -> str:
    """Return the problem of the node's GPUs, as a part of a sentence; empty if none is known.

    Args:
        code: exit code of nvidia-smi; None if it did not end in time.
        printed: its output.
    """
    if code is None:
        return "nvidia-smi hangs"
    for pattern in SENTENCES:
        if match := pattern.search(printed):
            return f"nvidia-smi says: {match[0].strip()}"
    if code in EXIT_CODES:
        return EXIT_CODES[code]
    for gpu, path, value in listing(printed):
        for field, is_bad, meaning in FIELDS:
            if field.fullmatch(path) and is_bad(value):
                return f"GPU {gpu}: {meaning} ({path.rpartition('/')[2]}: {value})"
    return ""


def listing(printed: str) -> Iterator[tuple[str, str, str]]:
    """Yield (GPU, path of the field, value) for each line ``NAME : VALUE`` of ``nvidia-smi -q``.
    The indentation determines the sections.
    """
    gpu = ""
    sections: list[tuple[int, str]] = []
    for line in printed.splitlines():
        if header := _GPU.match(line):
            gpu, sections = header[1], []
            continue
        indent, name, value = _LINE.fullmatch(line.rstrip()).groups()  # type: ignore[union-attr]
        if not gpu or not name:
            continue
        sections = [(depth, section) for depth, section in sections if depth < len(indent)]
        if value is None:
            sections.append((len(indent), name))
        else:
            yield gpu, "/".join([*(section for _, section in sections), name]), value.strip()


class NodeFitness:
    """The health reports of one agent.

    Args:
        config: settings of the agent, with the site's health checks.
        directory: directory for the output of checks.
        send: sends a message to the daemon. Returns False if the daemon is away.
    """

    def __init__(
        self, config: AgentConfig, directory: Path, send: Callable[[Message], bool]
    ) -> None:
        plan, log = config.health, directory / "health.log"
        checks = checks_of(plan, config.gpus)
        self._watch = HealthWatch(
            checks,
            plan.interval_s,
            plan.timeout_s,
            lambda command: CheckProcess(command, log, config.node),
        )
        self._checked = bool(checks)
        self._send = send
        self._doubted = ""
        """Job whose workers failed here, while the checks run because of that; else empty."""
        self._last_doubt: Doubt | None = None
        """The last message that raised or withdrew a doubt."""
        self._sickness_sent = False
        self._first_checks_done = asyncio.Event()
        if self._watch.first_checks_done:
            self._first_checks_done.set()

    @property
    def sick(self) -> str:
        """Reason why the node is not fit for jobs, as a sentence; empty if it is fit."""
        return self._watch.sick

    async def wait_for_first_checks(self) -> None:
        """Wait until it is known whether the node is fit."""
        await self._first_checks_done.wait()

    def send(self, message: Message) -> bool:
        """Send a message about the job. If its workers have failed, check the node."""
        if isinstance(message, Phase):
            broken = message.assignment.phase in BROKEN
            if broken and self._checked and not self._sickness_sent and not self._doubted:
                self._doubted = message.assignment.job
                self._send_doubt(Doubt(self._doubted))
                self._watch.check_soon()
        return self._send(message)

    def step(self, now: float) -> None:
        """Run the checks that are due, and report their results to the daemon. ``now``: seconds of
        a monotonic clock.
        """
        self._watch.step(now)
        if self._watch.first_checks_done:
            self._first_checks_done.set()
        if self._watch.sick and not self._sickness_sent:
            self._sickness_sent = True  # if the daemon is away, Hello reports it
            self._send(Sick(self._watch.sick, bool(self._doubted)))
        if self._doubted and not self._watch.is_checking:
            if not self._watch.sick:
                self._send_doubt(Doubt(self._doubted, over=True))
            self._doubted = ""

    def reconnected(self) -> None:
        """Send the last doubt again after a reconnection, because it may have been lost, and the
        daemon waits for the end of each doubt that it has received.
        """
        if self._last_doubt is not None and not self._watch.sick:
            self._send(self._last_doubt)

    def _send_doubt(self, doubt: Doubt) -> None:
        self._last_doubt = doubt
        self._send(doubt)

    def stop(self) -> None:
        """Stop the checks at the end of the lease."""
        self._watch.stop()


MAX_OUTPUT_CHARACTERS = 500
"""Maximum number of characters of a check's output in a report."""
RETRY_DELAY_S = 1.0
"""Delay before a check runs again that was killed together with the processes of a job, seconds."""
MAX_UNKNOWN_RESULTS = 3
"""Number of consecutive runs without a known result after which the node counts as unfit."""

Verdict = Callable[[int | None, str], str]
"""(exit code, None if the check took too long; output) → problem; empty if there is none."""


class Running(Protocol):
    """A check that was started."""

    def over(self) -> bool:
        """Return whether it has ended."""

    def kill(self) -> None:
        """Kill it and all its descendants."""

    @property
    def code(self) -> int | None:
        """Exit code after its end; None if it was killed."""

    @property
    def printed(self) -> str:
        """Its output."""


@dataclass(frozen=True)
class Check:
    """One check."""

    command: tuple[str, ...]
    """The program and its arguments."""
    verdict: Verdict
    """Interprets its result."""


def checks_of(plan: HealthPlan, gpu_count: int) -> list[Check]:
    """Return the checks of a node with ``gpu_count`` GPUs. The fastest is first."""
    checks = []
    if plan.gpus and gpu_count and shutil.which(COMMAND[0]):
        checks.append(Check(COMMAND, lambda code, printed: _gpu_verdict(code, printed)))
    if plan.check:
        name, limit_s = plan.check[0].rpartition("/")[2], plan.timeout_s
        checks.append(
            Check(plan.check, lambda code, printed: _site_verdict(name, limit_s, code, printed))
        )
    return checks


def _gpu_verdict(code: int | None, printed: str) -> str:
    problem = trouble(code, printed)
    return f"Its GPUs are not fit for use: {problem[:MAX_OUTPUT_CHARACTERS]}." if problem else ""


def _site_verdict(name: str, limit_s: float, code: int | None, printed: str) -> str:
    if code == 0:
        return ""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last_line = f": {lines[-1][:MAX_OUTPUT_CHARACTERS]}" if lines else ", and said nothing"
    if code is None:
        return f"The health check {name} did not end within {limit_s:g} s and was killed{last_line}"
    return f"The health check {name} failed with code {code}{last_line}"


def _verdict_without_result(check: Check) -> str:
    name = check.command[0].rpartition("/")[2]
    return (
        f"The health check {name} ran {MAX_UNKNOWN_RESULTS} times and its result cannot be "
        "written, or is lost: the disk of the agent's run directory may be full"
    )


class HealthWatch:
    """Runs the checks of one node during its lease.

    Args:
        checks: the checks.
        interval_s: time from the end of all checks to their next run, seconds.
        timeout_s: time after which a check is killed, seconds.
        start: starts the command of a check. Raises OSError.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        interval_s: float,
        timeout_s: float,
        start: Callable[[tuple[str, ...]], Running],
    ) -> None:
        self._checks = tuple(checks)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._start = start
        self._remaining = list(self._checks)
        """Checks that have not run yet in the current pass."""
        self._current: Check | None = None
        self._running: Running | None = None
        self._kill_at = 0.0
        self._unknown_results = 0
        """Number of consecutive runs without a known result."""
        self._due = 0.0
        self._stopped = False
        self.first_checks_done = not self._checks
        """Whether all checks have run once."""
        self.sick = ""
        """Problem of the node, as a sentence; empty if none is known."""

    @property
    def is_checking(self) -> bool:
        """Whether checks are running, or about to run."""
        return not self.sick and bool(self._remaining or self._current)

    def check_soon(self) -> None:
        """Run all checks now, because workers have failed on the node."""
        self._remaining, self._due = list(self._checks), 0.0

    def step(self, now: float) -> None:
        """Start the check that is due, or handle the end of the one that runs; called often.
        ``now``: seconds of a monotonic clock.
        """
        if self.sick or self._stopped:
            return
        if self._current is not None and self._running is not None:
            self._poll(self._current, self._running, now)
        elif self._checks and now >= self._due:
            self._remaining = self._remaining or list(self._checks)
            self._begin(self._remaining.pop(0), now)

    def stop(self) -> None:
        """Start no further check, and kill the one that runs."""
        self._stopped = True
        if self._running is not None:
            self._running.kill()

    def _begin(self, check: Check, now: float) -> None:
        self._current, self._kill_at = check, now + self._timeout_s
        try:
            self._running = self._start(check.command)
        except OSError as error:
            self._finish(check.verdict(126, str(error)), now)

    def _poll(self, check: Check, running: Running, now: float) -> None:
        if running.over():
            code = running.code
            self._unknown_results = self._unknown_results + 1 if code is None else 0
            if code is not None:
                self._finish(check.verdict(code, running.printed), now)
            elif self._unknown_results >= MAX_UNKNOWN_RESULTS:
                self._finish(_verdict_without_result(check), now)
            else:
                # It was killed with the processes of a job, so its result is not known.
                self._remaining.insert(0, check)
                self._current = self._running = None
                self._due = now + RETRY_DELAY_S
        elif now >= self._kill_at:
            # Do not wait for the end of the check: it may be impossible to kill, for example while
            # it waits for a disk.
            running.kill()
            self._finish(check.verdict(None, running.printed), now)

    def _finish(self, problem: str, now: float) -> None:
        self._current = self._running = None
        self.sick = problem
        if problem or not self._remaining:
            self.first_checks_done, self._due = True, now + self._interval_s
