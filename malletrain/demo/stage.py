"""The processes of a demo: cluster, daemon, undisturbed runs. Decides how they are started and that
none is left, whatever happens.

The embedded cluster is a session of its own and lives for :data:`LIFETIME_S` more than the jobs
are watched for; the daemon and the undisturbed runs are killed by the kernel when the demo dies. So
even ``kill -9`` of the demo leaves nothing for long.
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
"""What the cluster lives beyond the watching: starting it all, and what comes after."""
PAGE_START_S = 120.0
PAGE_AT = re.compile(r"^The page is at (\S+)$", re.MULTILINE)
DAEMON_START_S = 120.0
LOADING_LIMIT_S = 120.0
ACCURACY = re.compile(r"^test accuracy ([0-9.]+)$", re.MULTILINE)


class DemoError(RuntimeError):
    """The demo cannot go on; the message is a sentence."""


@dataclass(frozen=True)
class Folder:
    """Where a demo keeps everything."""

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
    """A folder taken by this demo, and what runs in it. Use as a context manager: leaving it ends
    everything.
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
        """Empty the folder of an earlier demo and lock it. Raises DemoError when it is something
        else, or in use.
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
        with contextlib.suppress(SchedulerError):  # what a demo left that was killed
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
        """The embedded cluster for jobs that are watched for ``watched_s`` seconds at most;
        ``options`` as :func:`scavenger.embedded.cluster_process.start_cluster`.
        """
        with _later():
            self.cluster = start_cluster(
                self.folder.cluster,
                nodes,
                lifetime_s=watched_s + LIFETIME_S,
                **options,  # type: ignore[arg-type]
            )

    def go_on(self) -> None:
        """Let nodes come and go from now on."""
        if self.cluster is not None:
            self.cluster.go_on()

    def start_daemon(self) -> None:
        """The daemon as ``malletraind`` starts it, its log in ``daemon.log``. Returns at once; see
        :meth:`client`.
        """
        with open(self.folder.daemon_log, "ab") as log, _later():
            self.daemon = self._supervised(
                [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.folder.config)],
                log,
            )

    def client(self) -> Connection:
        """A client of the daemon, once it answers. Raises DemoError with the daemon's last words
        when it does not come up.
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
        """``malletrain web`` for the daemon, which answers already; returns the page's address.
        Raises DemoError when it does not come up.
        """
        log_file = self.folder.page_log
        with open(log_file, "ab") as log, _later():
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
        """kill -9, and wait until it is gone."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()

    def loading_s(self) -> float:
        """Seconds in which a process loads PyTorch here. The first time fetches it from the disk
        and does not count when it took long.
        """
        took = 0.0
        for _ in range(2):
            began = time.monotonic()
            try:
                # The optimizer loads what a bare import leaves out.
                subprocess.run(
                    [sys.executable, "-c", "import torch._dynamo"],
                    check=True,
                    capture_output=True,
                    timeout=LOADING_LIMIT_S,
                )
            except subprocess.SubprocessError as error:
                raise DemoError(
                    f"PyTorch cannot be loaded ({error}); run: pip install 'malletrain[demo]'"
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
        with open(self.folder.undisturbed / f"{name}.log", "wb") as log, _later():
            command = ["nice", "-n", "19", sys.executable, str(script), *arguments]
            self._undisturbed.append(self._supervised(command, log, environment))

    def undisturbed_accuracy(self, name: str) -> float | None:
        """Test accuracy of the undisturbed run of ``name``; None while it is not over, or when it
        failed.
        """
        text = (self.folder.undisturbed / f"{name}.log").read_text(errors="replace")
        accuracies = ACCURACY.findall(text)
        return float(accuracies[-1]) if accuracies else None

    def wait_for_undisturbed(self, timeout_s: float) -> bool:
        """Whether all undisturbed runs ended well within the time."""
        deadline = time.monotonic() + timeout_s
        for process in self._undisturbed:
            try:
                if process.wait(max(0.01, deadline - time.monotonic())) != 0:
                    return False
            except subprocess.TimeoutExpired:
                return False
        return True

    def undisturbed_running(self) -> int:
        """How many undisturbed runs are not over."""
        return sum(process.poll() is None for process in self._undisturbed)

    def _supervised(
        self, command: list[str], log: IO[bytes], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own (Ctrl-C is not for it) that dies with this
        one.
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
        """End everything; ``at_once``: without the grace times. Ctrl-C is not heard meanwhile, so
        that nothing is left half-way.
        """
        with _deaf():
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
def _deaf() -> Iterator[list[int]]:
    """Only note SIGINT, SIGTERM and SIGHUP in the body; yields the list of those that came.
    (Ignoring them would be inherited.)
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
def _later() -> Iterator[None]:
    """A request to stop is obeyed after the body, so that no process is started whose number nobody
    has.
    """
    with _deaf() as came:
        yield
    if came:
        raise KeyboardInterrupt


def free_port() -> int:
    """A TCP port of the loopback that is free now. A fixed one lets agents find the daemon again
    after it was killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
