"""Runs a script of the zoo in live mode without agents: real workers, and a conductor that plays
launcher and daemon (:mod:`tests.malletrain.elastic.conductor`).

At the boundary one worker stands still. The next round is announced, and the worker goes on when
all members of that round have checked in: the change falls into the first place after the boundary
at which live mode makes changes.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from malletrain.protocol.phases import RESTART_CODE
from tests.last_words import tail
from tests.malletrain.elastic.conductor import Conductor, Worker, conducted
from tests.zoo.compare import Run
from tests.zoo.rounds import HANG_S, MOST, STOP_GRACE_S, Change, RunFailed, log_ends, result_of
from tests.zoo.trace import STEP, read
from tests.zoo.worker import GO, NONE, REACHED, SETTLED, TRACE, WATCHED, run_script

CHANGES = {
    change.name: change
    for change in (
        Change("grow", 1, 2),
        Change("grow-more", 2, 3),
        Change("shrink", 2, 1),
        Change("shrink-first", 2, 1, leaver=0),
        Change("loss", 2, 1, is_loss=True, actor=1),
        Change("loss-first", 2, 1, is_loss=True),
        Change("loss-of-all", 1, 1, is_loss=True),
    )
}
_LOOK_S = 0.002
_LOST_A_PEER = ("gloo/transport", "Interrupted: A peer is lost")
"""Texts in the last output of a script that met the loss in a collective of its own."""


class LiveDriver:
    """Runs scripts, one at a time, in folders below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number = 0

    def undisturbed(self, main: str, world_size: int, watched: int = -1) -> Run:
        """A run without a change, in which the rank ``watched`` is watched.

        Raises:
            RunFailed: when a process ends with an error.
        """
        return self._run(main, Change("none", world_size, world_size, actor=watched), WATCHED)

    def disturbed(self, main: str, change: Change, point: int) -> Run:
        """A run with a change at the actor's ``point``.

        Raises:
            RunFailed: when a process ends with an error.
        """
        return self._run(main, change, point)

    def _run(self, main: str, change: Change, point: int) -> Run:
        self._number += 1
        folder = self.root / f"run{self._number}"
        folder.mkdir(parents=True)
        # pytest's tmp_path may be too long for a socket
        sockets = Path(tempfile.mkdtemp(prefix="zoo"))
        save_every_s = 0.0 if change.is_loss else 3600.0
        environment = {
            "MALLETRAIN_MAX_WORLD_SIZE": str(MOST),
            "MALLETRAIN_JOB": "zoo",
            "MALLETRAIN_GENERATION": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        arguments = (run_script, main, str(folder), save_every_s)
        try:
            with conducted(sockets, *arguments, environment=environment) as conductor:
                _Play(conductor, folder, sockets, change, point).play()
        except AssertionError as late:  # the conductor's wait
            raise RunFailed(str(late), True) from late
        finally:
            shutil.rmtree(sockets, ignore_errors=True)
        return result_of(folder)


class _Play:
    """One run: the first round, the change, the end."""

    def __init__(
        self, conductor: Conductor, folder: Path, logs: Path, change: Change, point: int
    ) -> None:
        self.conductor = conductor
        self.folder = folder
        self.logs = logs
        self.change = change
        self.deadline = time.monotonic() + HANG_S
        self.first = [
            conductor.start(1, point if rank == change.actor else NONE)[0]
            for rank in range(change.before)
        ]
        joins = point >= 0 and change.after > change.before
        self.joiners = conductor.start(1, NONE) if joins else []
        self.dead: list[Worker] = []
        """Workers that were killed on purpose."""

    def play(self) -> None:
        self.conductor.round(self.first, wait=False)
        self._until(lambda: self._reached() or self._over(self.first))
        if self._reached():
            rest = self._changed()
            self._until(lambda: self._over(rest))
            if self.change.is_loss and not any(worker.heard("running", 2) for worker in rest):
                # The others were done, and the script is not done on the lost one: it begins anew.
                rest = self.conductor.start(1, NONE)
                self.conductor.round(rest, wait=False)
                self._until(lambda: self._over(rest))
            for worker in self.first:
                if worker not in rest:
                    self._kill(worker)

    def _reached(self) -> bool:
        return (self.folder / REACHED).exists()

    def _changed(self) -> list[Worker]:
        """Make the change; return the workers whose end is the end of the run."""
        change = self.change
        if change.is_loss:
            lost = self.first[change.actor]
            self._kill(lost)
            rest = self.conductor.lose(lost)
            if not rest:
                rest = self.conductor.start(1, NONE)
            self._go_on()
            self.conductor.round(rest, wait=False)
            return rest
        leaving = self.first[change.leaver] if change.after < change.before else None
        rest = [worker for worker in self.first if worker is not leaving]
        self.conductor.round([*rest, *self.joiners], wait=False)
        self._until(lambda: self.conductor.all_checked_in() or self._over(self.first))
        self._go_on()
        second = self.conductor.generation
        self._until(
            lambda: all(worker.heard("running", second) for worker in rest) or self._over(rest)
        )
        if leaving is not None:
            settled = self.folder / SETTLED.format(pid=leaving.process.pid)
            self._until(lambda: settled.exists() or not leaving.alive)
            self._stop(leaving)
        # A joiner that is not in a round when the others end is stopped, as a launcher does.
        return rest + [worker for worker in self.joiners if worker.heard("running", second)]

    def _go_on(self) -> None:
        (self.folder / GO).touch()

    def _kill(self, worker: Worker) -> None:
        self.dead.append(worker)
        worker.kill()
        worker.process.join()

    def _stop(self, worker: Worker) -> None:
        """End a worker that leaves, as a launcher does."""
        self.dead.append(worker)
        worker.kill(signal.SIGTERM)
        worker.process.join(STOP_GRACE_S)
        self._kill(worker)

    def _over(self, workers: list[Worker]) -> bool:
        """Whether all of ``workers`` have ended. Raises RunFailed for one that ended badly."""
        for worker in self.conductor.workers:
            if worker in self.dead or worker.alive or not worker.process.exitcode:
                continue
            if not self.change.is_loss or not self._has_lost_a_peer(worker):
                self._fail(f"exit code {worker.process.exitcode}")
            self._start_again(worker, workers)
        return not any(worker.alive for worker in workers)

    def _has_lost_a_peer(self, worker: Worker) -> bool:
        """Whether it ended because of the loss: in a collective of the library or of the script."""
        if worker.process.exitcode == RESTART_CODE:
            return True
        last = tail(worker.output)
        return worker in self.first and any(words in last for words in _LOST_A_PEER)

    def _start_again(self, worker: Worker, workers: list[Worker]) -> None:
        """Replace a worker that could not give up its step after a loss, as a launcher does."""
        self.dead.append(worker)
        rest = self.conductor.lose(worker)
        workers[:] = [*rest, *self.conductor.start(1, NONE)]
        self.conductor.round(workers, wait=False)

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if time.monotonic() > self.deadline:
                for worker in self.conductor.workers:
                    worker.kill(signal.SIGUSR1)
                time.sleep(0.3)
                self._fail("hangs")
            time.sleep(_LOOK_S)

    def _fail(self, what: str) -> None:
        trained = any(record.kind == STEP for record in read(self.folder / TRACE))
        raise RunFailed(f"{what}: {log_ends(self.logs)}", trained)
