"""Runs a script of the zoo in restart mode without agents: the driver plays agent, launcher and
daemon for real processes of the script.

A round is a set of processes that is started anew. A planned change asks for a drain at the
boundary, with the real flags, and stops the processes when rank 0 has answered; a loss kills a
process at the boundary and stops the others.

What the second round does follows from the files of the first one. Boundaries that leave the same
files (:mod:`tests.zoo.states`) share one second round.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from malletrain.protocol.flags import FlagsWriter
from malletrain.protocol.worker_channel import DrainDone, decode_datagram
from tests.forked import CONTEXT, work
from tests.zoo.compare import Run
from tests.zoo.rounds import HANG_S, MOST, STOP_GRACE_S, Change, RunFailed, log_ends, result_of
from tests.zoo.states import state_of
from tests.zoo.trace import STEP, read
from tests.zoo.worker import GO, NONE, REACHED, TRACE, WATCHED, files_of, run_script

_LOOK_S = 0.002


CHANGES = {
    change.name: change
    for change in (
        Change("same", 1, 1),
        Change("grow", 1, 2),
        Change("shrink", 3, 2),
        Change("loss", 2, 1, is_loss=True, actor=1),
        Change("loss-of-all", 1, 1, is_loss=True),
    )
}


class _Round:
    """The processes of one round, their socket and their flags."""

    def __init__(
        self,
        main: str,
        folder: Path,
        number: int,
        world_size: int,
        gate: tuple[int, int],
        save_every_s: float,
    ) -> None:
        self._number = number
        # pytest's tmp_path may be too long for a socket
        self._own = Path(tempfile.mkdtemp(prefix="zoo"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._own / "agent"))
        self._socket.setblocking(False)
        self.flags = FlagsWriter(str(self._own / "flags"))
        store = self._store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=HANG_S),
        )
        actor, point = gate
        self.processes = []
        for rank in range(world_size):
            environment = {
                "MALLETRAIN_SOCKET": str(self._own / "agent"),
                "MALLETRAIN_FLAGS": self.flags.path,
                "MALLETRAIN_JOB": "zoo",
                "MALLETRAIN_JOB_KEY": "ab" * 16,
                "MALLETRAIN_GENERATION": str(number),
                "MALLETRAIN_MAX_WORLD_SIZE": str(MOST),
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "1",
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            arguments = (main, str(folder), save_every_s, point if rank == actor else NONE)
            output = str(folder / f"round{number}-rank{rank}.log")
            process = CONTEXT.Process(
                target=work, args=(run_script, environment, output, arguments), daemon=True
            )
            process.start()
            self.processes.append(process)

    def drained(self) -> bool:
        """Whether rank 0 has saved on demand. Takes what has arrived."""
        answered = False
        with contextlib.suppress(BlockingIOError):
            while True:
                message = decode_datagram(self._socket.recv(65536))
                answered |= isinstance(message, DrainDone) and message.saved
        return answered

    def wait_for_step(self, trace: Path) -> None:
        """Wait until every rank has recorded the step that rank 0 saved after. Rank 0 saves as soon
        as the gradients are averaged; another rank may be behind the averaging.
        """

        def behind() -> bool:
            steps = [0] * len(self.processes)
            for record in read(trace):
                if record.round == self._number and record.names_step:
                    steps[record.rank] += 1
            return any(
                own < steps[0] and process.is_alive()
                for own, process in zip(steps, self.processes, strict=True)
            )

        deadline = time.monotonic() + HANG_S
        while behind():
            if time.monotonic() > deadline:
                self.show_stacks()
                raise RunFailed(f"a rank stays behind rank 0\n{log_ends(trace.parent)}", True)
            time.sleep(_LOOK_S)

    def ended(self) -> bool:
        """Whether all processes have ended, or one with an error."""
        codes = self.exit_codes()
        return None not in codes or any(codes)

    def exit_codes(self) -> list[Any]:
        """Exit code of each rank; None for one that runs."""
        return [process.exitcode for process in self.processes]

    def show_stacks(self) -> None:
        """Have the processes write to their logs where they are."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for processes that remain after the grace time."""
        for number, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, HANG_S)):
            for process in self.processes:
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            deadline = time.monotonic() + grace_s
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.stop()
        for process in self.processes:
            process.close()
        self.flags.close()
        self._socket.close()
        shutil.rmtree(self._own, ignore_errors=True)


def _shares_first_round(change: Change) -> bool:
    """Return whether another change begins with the same round: drained, on as many ranks."""
    begun = [(other.before, other.actor) for other in CHANGES.values() if not other.is_loss]
    return not change.is_loss and begun.count((change.before, change.actor)) > 1


class RestartDriver:
    """Runs scripts, one at a time, in folders below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number = 0
        self._first_rounds: dict[tuple[Any, ...], tuple[Path, Path]] = {}
        """(script, ranks, point) → folder of a first round that was drained there, and a copy of
        it, for another change that begins with the same round.
        """
        self._second_rounds: dict[tuple[Any, ...], Run | RunFailed] = {}
        """(script, ranks, state) → the second round of that run."""

    def undisturbed(self, main: str, world_size: int, watched: int = -1) -> Run:
        """A run without a change, in which the rank ``watched`` is watched.

        Raises:
            RunFailed: when a process ends with an error.
        """
        folder = self._folder()
        self._round(main, folder, 1, world_size, (watched, WATCHED), 3600.0)
        return result_of(folder)

    def disturbed(self, main: str, change: Change, point: int) -> Run:
        """A run with a change at the actor's ``point``.

        Raises:
            RunFailed: when a process ends with an error.
        """
        save_every_s = 0.0 if change.is_loss else 3600.0
        begun = (main, change.before, point)
        if not change.is_loss and begun in self._first_rounds:
            folder, copy = self._first_rounds.pop(begun)
            copy.rename(folder)  # files may have the path in them
        else:
            folder = self._folder()
            gate = (change.actor, point)
            if self._round(main, folder, 1, change.before, gate, save_every_s, change):
                return result_of(folder)
            if _shares_first_round(change):
                copy = self._folder()
                shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
                self._first_rounds[begun] = folder, copy
        key = (main, change.after, save_every_s, state_of(folder))
        first = read(folder / TRACE)
        if key not in self._second_rounds:
            self._second_rounds[key] = self._second(main, folder, change.after, save_every_s)
        shutil.rmtree(folder)
        second = self._second_rounds[key]
        if isinstance(second, RunFailed):
            raise second
        return Run([*first, *second.trace], second.files)

    def _second(
        self, main: str, folder: Path, world_size: int, save_every_s: float
    ) -> Run | RunFailed:
        """Return the run of a script that begins anew in ``folder``."""
        before = len(read(folder / TRACE))
        try:
            self._round(main, folder, 2, world_size, (0, NONE), save_every_s)
        except RunFailed as error:
            return error
        return Run(read(folder / TRACE)[before:], files_of(folder))

    def _folder(self) -> Path:
        self._number += 1
        folder = self.root / f"run{self._number}"
        folder.mkdir(parents=True)
        return folder

    def _round(
        self,
        main: str,
        folder: Path,
        number: int,
        world_size: int,
        gate: tuple[int, int],
        save_every_s: float,
        change: Change | None = None,
    ) -> bool:
        """Return whether the script came to its end."""
        round_ = _Round(main, folder, number, world_size, gate, save_every_s)
        try:
            deadline = time.monotonic() + HANG_S
            while not round_.ended():
                if time.monotonic() > deadline:
                    round_.show_stacks()
                    raise RunFailed(f"hangs\n{log_ends(folder)}", True)
                if change is not None and (folder / REACHED).exists():
                    (folder / REACHED).unlink()
                    if change.is_loss:
                        os.kill(round_.processes[change.actor].pid, signal.SIGKILL)
                        return False
                    round_.flags.request_drain(7)
                    (folder / GO).touch()
                if round_.drained():
                    round_.wait_for_step(folder / TRACE)
                    return False
                time.sleep(_LOOK_S)
            codes = round_.exit_codes()
            if any(codes):
                trained = any(record.kind == STEP for record in read(folder / TRACE))
                raise RunFailed(log_ends(folder), trained)
            return True
        finally:
            round_.close()
