"""The processes of a demo: cluster, daemon, undisturbed runs. Decides how they are started, and
ensures that none is left. The embedded cluster is a separate session and ends :data:`LIFETIME_S`
after the maximum time of the jobs; the kernel kills the daemon and the undisturbed runs when the
demo ends. So even after ``kill -9`` of the demo no process is left for long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from malletrain.client import ClientError, Connection
from malletrain.launch import supervisor
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster
from scavenger.interface import SchedulerError

LIFETIME_S = 900.0
"""Lifetime of the cluster beyond the maximum time of the jobs, seconds: for start and end of the
demo."""
PAGE_START_S = 120.0
PAGE_AT = re.compile(r"^The page is at (\S+)$", re.MULTILINE)
DAEMON_START_S = 120.0
LOADING_LIMIT_S = 120.0
ACCURACY = re.compile(r"^test accuracy ([0-9.]+)$", re.MULTILINE)


class DemoError(RuntimeError):
    """The demo cannot continue; the message is a sentence."""


@dataclass(frozen=True)
class Folder:
    """The folder of a demo and the paths in it."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def cluster(self) -> Path:
        return self.root / "cluster"

    @property
    def config(self) -> Path:
        return self.root / "malletrain.toml"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def undisturbed(self) -> Path:
        return self.root / "undisturbed"

    @property
    def trace(self) -> Path:
        return self.root / "trace.csv"

    @property
    def daemon_log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def page_log(self) -> Path:
        return self.root / "web.log"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.png"

    @property
    def moving(self) -> Path:
        return self.root / "timeline.svg"

    @property
    def lock(self) -> Path:
        return self.root / "demo.lock"


class DemoStage:
    """The locked folder of this demo, and its processes. Use as a context manager, which ends all
    processes.
    """

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root.resolve())
        self.cluster: ClusterProcess | None = None
        self.daemon: subprocess.Popen[bytes] | None = None
        self.page: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._undisturbed: list[subprocess.Popen[bytes]] = []
        self._lock = self._take_folder()

    def _take_folder(self) -> int:
        """Empty the folder of an earlier demo and lock it. Raises DemoError if it is another
        folder, or in use.
        """
        root, lock = self.folder.root, self.folder.lock
        try:
            if root.is_dir() and any(root.iterdir()) and not lock.exists():
                raise DemoError(
                    f"{root} is not empty and not the folder of an earlier demo; give another "
                    "with --output."
                )
            root.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DemoError(
                f"The output folder {root} cannot be used: {error.strerror}; give another with "
                "--output."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise DemoError(
                f"Another demo runs in {root}; wait for its end, or give another folder with "
                "--output."
            ) from None
        with contextlib.suppress(SchedulerError):  # the cluster of a killed demo
            ClusterProcess.attach(self.folder.cluster).stop(2.0)
        for entry in root.iterdir():
            if entry != lock:
                shutil.rmtree(
                    entry
                ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for path in (self.folder.snapshots, self.folder.undisturbed):
            path.mkdir()
        return handle

    def __enter__(self) -> DemoStage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(at_once=exc[0] is not None)

    def start_cluster(self, nodes: int, watched_s: float, **options: object) -> None:
        """Start the embedded cluster for jobs that take at most ``watched_s`` seconds;
        ``options`` as :func:`scavenger.embedded.cluster_process.start_cluster`.
        """
        with _defer_signals():
            self.cluster = start_cluster(
                self.folder.cluster,
                nodes,
                lifetime_s=watched_s + LIFETIME_S,
                **options,  # type: ignore[arg-type]
            )

    def go_on(self) -> None:
        """Let the trace continue, so that nodes become idle and busy."""
        if self.cluster is not None:
            self.cluster.go_on()

    def start_daemon(self) -> None:
        """Start the daemon like ``malletraind``, with its log in ``daemon.log``. Return at once;
        see :meth:`client`.
        """
        with open(self.folder.daemon_log, "ab") as log, _defer_signals():
            self.daemon = self._supervised(
                [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.folder.config)],
                log,
            )

    def client(self) -> Connection:
        """Return a client of the daemon, once it answers. Raises DemoError with the end of the
        daemon's log if it does not start.
        """
        deadline = time.monotonic() + DAEMON_START_S
        while True:
            client = None
            try:
                client = Connection.of(self.folder.state)
                client.status()
                return client
            except ClientError as error:
                if client is not None:
                    client.close()
                ended = self.daemon is not None and self.daemon.poll() is not None
                if ended or time.monotonic() > deadline:
                    words = (
                        self.folder.daemon_log.read_text(errors="replace").strip().splitlines()[-5:]
                    )
                    message = "\n".join(words) or "it said nothing"
                    raise DemoError(
                        f"The daemon did not come up ({error}) See "
                        f"{self.folder.daemon_log}:\n{message}"
                    ) from None
            time.sleep(0.1)

    def start_page(self) -> str:
        """Start ``malletrain web`` for the running daemon; return the page's address. Raises
        DemoError if it does not start.
        """
        log_file = self.folder.page_log
        with open(log_file, "ab") as log, _defer_signals():
            self.page = self._supervised(
                [
                    *(sys.executable, "-m", "malletrain", "web", "--no-browser"),
                    *("--state-dir", str(self.folder.state)),
                ],
                log,
            )
        deadline = time.monotonic() + PAGE_START_S
        while not (address_match := PAGE_AT.search(log_file.read_text(errors="replace"))):
            if self.page.poll() is not None or time.monotonic() > deadline:
                words = log_file.read_text(errors="replace").strip() or "it said nothing"
                raise DemoError(f"The page did not come up: {words}")
            time.sleep(0.1)
        return address_match[1]

    def kill_daemon(self) -> None:
        """Kill the daemon (kill -9) and wait for its end."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()

    def loading_s(self) -> float:
        """Return the time in which a process loads PyTorch here, seconds. The first attempt reads
        it from the disk and does not count if it was slow.
        """
        took = 0.0
        for _ in range(2):
            began = time.monotonic()
            try:
                # The optimizer loads modules that a bare import does not.
                subprocess.run(
                    [sys.executable, "-c", "import torch._dynamo"],
                    check=True,
                    capture_output=True,
                    timeout=LOADING_LIMIT_S,
                )
            except subprocess.SubprocessError as error:
                raise DemoError(
                    f"PyTorch cannot be loaded ({error}); run: "
                    "pip install --find-links WHEELS 'malletrain[demo]'"
                ) from None
            took = time.monotonic() - began
            if took < 4.0:
                break
        return took

    def run_undisturbed(self, name: str, script: Path, arguments: Sequence[str]) -> None:
        """Start the same training in one process, without MalleTrain, at the lowest priority."""
        environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("MALLETRAIN_") and k not in ("RANK", "WORLD_SIZE")
        }
        with open(self.folder.undisturbed / f"{name}.log", "wb") as log, _defer_signals():
            command = ["nice", "-n", "19", sys.executable, str(script), *arguments]
            self._undisturbed.append(self._supervised(command, log, environment))

    def undisturbed_accuracy(self, name: str) -> float | None:
        """Return the test accuracy of the undisturbed run of ``name``; None if it has not ended,
        or failed.
        """
        text = (self.folder.undisturbed / f"{name}.log").read_text(errors="replace")
        accuracies = ACCURACY.findall(text)
        return float(accuracies[-1]) if accuracies else None

    def wait_for_undisturbed(self, timeout_s: float) -> bool:
        """Wait for the undisturbed runs. Return whether all succeeded within the time."""
        deadline = time.monotonic() + timeout_s
        for process in self._undisturbed:
            try:
                if process.wait(max(0.01, deadline - time.monotonic())) != 0:
                    return False
            except subprocess.TimeoutExpired:
                return False
        return True

    def undisturbed_running(self) -> int:
        """Return the number of undisturbed runs that have not ended."""
        return sum(process.poll() is None for process in self._undisturbed)

    def _supervised(
        self, command: list[str], log: IO[bytes], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a new session (so Ctrl-C does not reach it) that the kernel kills when
        this one ends.
        """
        supervise = [
            sys.executable,
            "-I",
            "-S",
            str(Path(supervisor.__file__)),
            "--parent",
            str(os.getpid()),
            "--",
        ]
        return subprocess.Popen(
            [*supervise, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    def close(self, at_once: bool = False) -> None:
        """End all processes; ``at_once``: without the grace times. Ctrl-C is deferred meanwhile, so
        that the cleanup completes.
        """
        with _record_signals():
            for process in (*self._undisturbed, *([self.page] if self.page else [])):
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if self.daemon is not None and self.daemon.poll() is None:
                self.daemon.terminate()
                try:
                    self.daemon.wait(1.0 if at_once else 10.0)
                except subprocess.TimeoutExpired:
                    self.kill_daemon()
            if self.cluster is not None:
                self.cluster.stop(0.2 if at_once else 20.0)
            os.close(self._lock)


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Only record SIGINT, SIGTERM and SIGHUP in the body; yields the list of received signals.
    (Child processes would inherit ignored signals.)
    """
    came: list[int] = []
    before = {
        s: signal.signal(s, lambda number, frame: came.append(number))
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer a request to stop until after the body, so that no process is started without its id
    being stored.
    """
    with _record_signals() as came:
        yield
    if came:
        raise KeyboardInterrupt


def free_port() -> int:
    """Return a free TCP port of the loopback. With a fixed port, agents find the daemon again
    after it was killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
