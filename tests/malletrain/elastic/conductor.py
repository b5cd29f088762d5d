"""Plays launcher and daemon for live workers: starts processes, forms rounds, loses members. Real
workers, real sockets, real gloo.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.forked import CONTEXT, work
from tests.last_words import tail
from tests.waiting import PATIENCE_S


class Worker:
    """One worker process and its messages."""

    def __init__(self, process: Any, output: Path) -> None:
        self.process = process
        self.output = output
        self.connection: socket.socket | None = None
        self.messages: list[dict[str, Any]] = []

    def heard(self, what: str, generation: int = 0) -> bool:
        return any(m["say"] == what and m.get("generation", 0) >= generation for m in self.messages)

    def tell(self, **message: Any) -> None:
        """Send ``message``. A script that ended before it joined gets nothing."""
        if self.connection is None:
            assert not self.alive, "it has not said hello yet"
            return
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def kill(self, signum: int = signal.SIGKILL) -> None:
        try:
            os.kill(self.process.pid, signum)
        except ProcessLookupError:
            pass

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())


class Conductor:
    """Forms rounds of workers that run ``script(*arguments)``."""

    def __init__(
        self,
        folder: Path,
        script: Callable[..., None],
        *arguments: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.script = script
        self.arguments = arguments
        self.environment = environment or {}
        self.generation = 0
        self.workers: list[Worker] = []
        self.members: list[Worker] = []
        self._stores: list[TCPStore] = []
        self._heard: list[tuple[socket.socket, threading.Thread]] = []
        path = str(folder / "live")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self.path = path
        self._changed = threading.Condition()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    # --- processes ---

    def start(self, count: int = 1, *more: Any) -> list[Worker]:
        """Start workers; they warm up until a round comes."""
        made = []
        for _ in range(count):
            number = len(self.workers)
            output = self.folder / f"worker{number}.log"
            environment = {
                "MALLETRAIN_LIVE": self.path,
                "MALLETRAIN_MAX_WORLD_SIZE": "8",
                "LOCAL_RANK": str(number),
                "RANK": "0",
                "WORLD_SIZE": "1",
                **self.environment,
            }
            process = CONTEXT.Process(
                target=work,
                args=(self.script, environment, str(output), (*self.arguments, *more)),
                daemon=True,
            )
            worker = Worker(process, output)
            self.workers.append(worker)
            made.append(worker)
            process.start()
        return made

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            listening = threading.Thread(target=self._listen, args=(connection,), daemon=True)
            listening.start()
            self._heard.append((connection, listening))

    def _listen(self, connection: socket.socket) -> None:
        worker: Worker | None = None
        with connection.makefile("rb") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    if message["say"] == "hello":
                        worker = self.workers[message["local_rank"]]
                        worker.connection = connection
                    assert worker is not None
                    with self._changed:
                        worker.messages.append(message)
                        self._changed.notify_all()
            except OSError:
                pass

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                for worker in self.workers:
                    worker.kill(signal.SIGUSR1)  # where they hang is the better half of the message
                time.sleep(0.3)
                raise AssertionError(f"Not within {PATIENCE_S:g} s: {what}.\n{self.outputs()}")
            with self._changed:
                self._changed.wait(0.01)

    def outputs(self) -> str:
        workers = [w for w in self.workers if w.output.exists()]
        return "\n".join(
            f"--- {w.output.name} (exit {w.process.exitcode})\n{tail(w.output)}" for w in workers
        )

    # --- rounds ---

    def round(self, members: list[Worker], wait: bool = True) -> int:
        """Form a round of ``members``, rank 0 first; with ``wait`` until all of them run."""
        self.until(
            lambda: all(w.heard("ready") or not w.alive for w in members), "the workers are ready"
        )
        self.generation += 1
        self.members = list(members)
        store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        self._stores.append(store)
        for rank, worker in enumerate(members):
            worker.tell(
                round=self.generation,
                rank=rank,
                size=len(members),
                port=store.port,
            )
        if wait:
            self.run()
        return self.generation

    def run(self) -> None:
        """Wait until all members run in the newest round."""
        number = self.generation
        self.until(
            lambda: all(w.heard("running", number) for w in self.members), f"round {number} runs"
        )

    def all_checked_in(self) -> bool:
        """Whether all members have found the newest round's store, and one another there."""
        return bool(self._stores[-1].check(["all"]))

    def has_come(self, rank: int) -> bool:
        """Whether the member of that rank has found the newest round's store."""
        return bool(self._stores[-1].check([f"here/{rank}"]))

    def script_ends(self) -> int:
        """Members of the newest round that have come to the end of their script."""
        return int(self._stores[-1].add("ended", 0))

    def abort(self) -> None:
        """Say that a member of the newest round is lost."""
        for worker in self.members:
            if worker.alive:
                for generation in (self.generation - 1, self.generation):
                    worker.tell(abort=generation)

    def lose(self, *lost: Worker, signum: int = signal.SIGKILL) -> list[Worker]:
        """Kill workers and have the others go on; return the others."""
        for worker in lost:
            worker.kill(signum)
        survivors = [w for w in self.members if w not in lost]
        for worker in survivors:
            worker.tell(abort=self.generation)
        return survivors

    def finish(self) -> None:
        """Wait until all members have ended well."""
        self.until(lambda: not any(w.alive for w in self.members), "the script ends")
        codes = [w.process.exitcode for w in self.members]
        assert codes == [0] * len(codes), self.outputs()

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.process.join()
        # Closing it wakes no thread that waits for a caller.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for connection, listening in self._heard:
            with suppress(OSError):  # where the worker has hung up already
                connection.shutdown(socket.SHUT_RDWR)
            listening.join()
            connection.close()
        for worker in self.workers:
            worker.process.close()
        self._stores.clear()


@contextmanager
def conducted(
    folder: Path, script: Callable[..., None], *arguments: Any, **options: Any
) -> Iterator[Conductor]:
    made = Conductor(folder, script, *arguments, **options)
    try:
        yield made
    finally:
        made.stop()
