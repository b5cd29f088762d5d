"""A launcher on one node, as a process and as one end of the agent's channel. What it makes of a
round is that of its mode: :mod:`tests.dst.restart`, :mod:`tests.dst.live`,
:mod:`tests.dst.service`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from malletrain.protocol import worker_channel as local
from malletrain.protocol.messages import (
    Alive,
    Assign,
    Assignment,
    Error,
    Failure,
    Message,
    Phase,
    Release,
)
from malletrain.protocol.phases import AssignmentPhase
from malletrain.protocol.wire import decode, encode
from tests.dst.machine import Node
from tests.dst.training import Trainings

PEER_LOST = "RuntimeError: Connection closed by peer [10.0.0.7]:61234"
CRASHED = "ValueError: the script has a mistake"


class VirtualFlags:
    """Replaces the agent's :class:`malletrain.protocol.flags.FlagsWriter`; the worker reads it at
    its next step.
    """

    def __init__(self, path: str) -> None:
        self.path, self.number = path, 0
        self.on_drain: Callable[[int], None] = lambda number: None

    def request_drain(self, number: int, heirs: tuple[str, ...] = ()) -> None:
        self.number = number
        self.on_drain(number)

    def expect_loss(self, in_s: float) -> None:
        """The worker makes nothing of it."""

    def advise_batch(self, size: int) -> None:
        """Nor of that."""

    def close(self) -> None:
        self.on_drain = lambda number: None


class VirtualLauncher:
    """Replaces the agent's :class:`malletrain.agent.fork_servers.Launched`. ``router``: the agent's
    socket; ``workers``: takes datagrams of workers; ``number``: number of the process.
    """

    def __init__(
        self,
        assign: Assign,
        node: Node,
        trainings: Trainings,
        router: Any,
        workers: Callable[[local.Datagram], None],
        flags: VirtualFlags,
        number: int,
    ) -> None:
        self.job, self.node, self.number = assign.job, node, number
        self._trainings = trainings
        self._router, self._workers, self._flags = router, workers, flags
        self._rng, self._later = trainings.rng, trainings.later
        self._identity = f"launcher{number}".encode()
        self._code: int | None = None
        self._last_code = 0
        """Exit code of the process when it is told to end."""
        self._epoch = 0
        """Counts what makes pending steps void."""
        self.truth = trainings.of(assign.job, assign.spec)
        flags.on_drain = self._flagged
        node.launchers.append(self)
        if any(other.job != self.job for other in node.launchers):
            jobs = sorted({other.job for other in node.launchers})
            trainings.broken(f"{node.name} has processes of {' and '.join(jobs)}")
        router.join(self._identity, self._from_agent)
        self._begin()

    # --- what its mode does ---

    def _begin(self) -> None:
        """Begin, just after the start of the process."""

    def _heard(self, message: Any) -> None:
        """A message of the agent that is not the end."""

    def _flagged(self, number: int) -> None:
        """A drain is asked for, or (0) taken back."""

    def _stop_worker(self) -> None:
        """End the worker, at the latest when the launcher ends."""

    def crash(self) -> None:
        """The job's own script fails here."""

    # --- as a process ---

    @property
    def alive(self) -> bool:
        return self._code is None

    def exit_code(self) -> int | None:
        return self._code

    def terminate(self) -> None:
        self._after(self._rng.uniform(0.0, 0.4), self._exit, self._last_code)

    def forget(self) -> None:
        """The agent has swept everything."""

    def kill(self) -> None:
        """SIGKILL."""
        self._exit(-9)

    def _exit(self, code: int) -> None:
        if self._code is None:
            self._stop_worker()
            self._code = code
            self.node.launchers.remove(self)

    def _after(self, in_s: float, call: Callable[..., None], *args: Any) -> None:
        def do() -> None:
            if self._code is None:
                call(*args)

        self._later(in_s, do)

    def _next(self, in_s: float, call: Callable[..., None], *args: Any) -> None:
        """As :meth:`_after`, unless something newer comes up meanwhile."""
        self._epoch += 1
        epoch = self._epoch

        def do() -> None:
            if self._code is None and self._epoch == epoch:
                call(*args)

        self._later(in_s, do)

    # --- the channel to the agent ---

    def _say(self, message: Message) -> None:
        if not self._router.alive:
            self._after(0.01, self._exit, 0)  # the agent is gone
            return
        self._router.hear(self._identity, encode(message))

    def _phase(
        self,
        phase: AssignmentPhase,
        generation: int,
        failures: tuple[Failure, ...] = (),
        address: str = "",
    ) -> None:
        self._say(Phase(Assignment(self.job, phase, generation, failures, address)))

    def _from_agent(self, frames: list[bytes]) -> None:
        if self._code is not None:
            return
        message = decode(frames)
        if isinstance(message, Release):
            self.terminate()
        elif isinstance(message, Error):
            self._exit(1)
        elif not isinstance(message, Alive):
            self._heard(message)
