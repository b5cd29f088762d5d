"""A whole site on this machine for tests: embedded cluster, daemon, agents. Real processes, real
sockets, a real database.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from malletrain.agent.stacks import RESPONSE_TIMEOUT_S, handles_signal, stack_file_holders
from malletrain.client import Connection
from malletrain.protocol import messages
from malletrain.protocol.job_files import STACKS_SIGNAL
from malletrain.protocol.views import JobDetail, JobView
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster
from tests import waiting
from tests.forked_daemon import start_daemon
from tests.forks import Forked
from tests.last_words import tail
from tests.light_python import light_python
from tests.waiting import PATIENCE_S

LIMITS = """
max_tries = 2
drain_timeout = "1 h"
join_timeout = "1 h"
warmup_timeout = "1 h"
hang_after = "1 h"
"""
"""Of jobs: none that a machine which stands still for a while reaches."""


def gone(process: psutil.Process) -> bool:
    """Return whether the process has ended, even if its parent has not yet waited for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _under_pytest() -> bool:
    """Whether this is a test and not a benchmark, whose figures are those of new interpreters."""
    return "PYTEST_CURRENT_TEST" in os.environ


class Site:
    """One embedded cluster and one daemon below ``root``. ``environment``: the daemon's, None: this
    process's. ``cluster``: more options of its main scheduler, such as a trace. ``light``: whether
    all jobs have the Python of tests.light_python, which is for scripts that make no optimizer. In
    other sites only those have it whose script names torch and no optimizer.
    """

    environment: Mapping[str, str] | None = None
    python = sys.executable
    """The Python of the daemon and of jobs."""
    _light_python = ""
    """The Python of all jobs, in a site whose scripts make no optimizer; else empty."""
    limits = LIMITS
    """Lines of [jobs]."""
    _since = 0
    """The number of the event before the first one of this test."""
    _standing = False
    """Many tests use it, one after another."""
    _waiting = 0
    """The thread that is in :meth:`until`."""
    _connection: Connection | None = None
    """The connection of that thread: a wait asks many times, and most of its cost is connecting."""

    def __init__(
        self,
        root: Path,
        nodes: int = 3,
        grace_s: float = 600.0,
        config: str = "",
        profiling: str = "enabled = false",
        cluster: Mapping[str, Any] | None = None,
        agent_timeout_s: float = 60.0,
        light: bool = False,
    ) -> None:
        self.root = root
        self.state = root / "state"
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self._light_python = light_python(root) if light else ""
        self.grace_s = grace_s
        self.cluster: ClusterProcess = start_cluster(
            self.state / "cluster", nodes, grace_s=grace_s, timeout_s=PATIENCE_S, **(cluster or {})
        )
        self.config = root / "site.toml"
        self.config.write_text(
            f"""
            [daemon]
            state_dir = "{self.state}"
            metrics_listen = ""
            agent_timeout = "{agent_timeout_s:g} s"
            adopt_wait = "60 s"
            [scheduler]
            kind = "local"
            poll_interval = "0.3 s"
            [scheduler.local]
            nodes = {nodes}
            grace = "{grace_s:g} s"
            autostart = false
            [jobs]
            {self.limits}
            [allocation]
            debounce = "0.3 s"
            min_interval = "0 s"
            """
            + ("" if "lease_wait" in config else 'lease_wait = "1 h"\n')
            + config
            + f"\n[profiling]\n{profiling}\n"
        )
        self.forks_daemon = _under_pytest()
        self.daemon: Forked | subprocess.Popen[bytes] | None = None

    def begin(self, name: str) -> None:
        """Prepare the site for another test: with a new folder, and without traces of earlier
        tests.
        """
        self._standing = True
        self.work = self.root / name
        self.work.mkdir()
        with self.client() as client:
            self._since = max((e.seq for e in client.events(since=-1)), default=0)

    def clear(self) -> None:
        """Have no job, and no node in use, for the next test."""
        assert self.daemon is not None
        if self.daemon.poll() is not None:
            self.start_daemon()
        with self.client() as client:
            jobs = [job.id for job in client.jobs() if job.ended is None]
            if jobs:
                client.cancel(jobs)
            self.until(lambda: all(self.job(job).ended is not None for job in jobs), "all end")
            self.until(
                lambda: all(node.state in ("free", "idle") for node in client.nodes()),
                "no node is in use",
            )

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers."""
        self.launch_daemon()
        self.until(self.answers, "the daemon answers")

    def launch_daemon(self) -> None:
        """Start the daemon."""
        log = (self.root / "daemon.log").open("ab")
        arguments = ["daemon", "--config", str(self.config)]
        if self.forks_daemon and self.python == sys.executable:
            self.daemon = start_daemon(arguments, log.fileno(), self.environment)
        else:
            argv = [self.python, "-m", "malletrain", *arguments]
            self.daemon = subprocess.Popen(argv, stdout=log, stderr=log, env=self.environment)
        log.close()

    def answers(self) -> bool:
        """Whether the daemon that was started last answers."""
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.daemon_log()
        with contextlib.suppress(RuntimeError), self.client() as client:
            return client.status().pid == self.daemon.pid
        return False

    def kill_daemon(self, number: int = signal.SIGKILL) -> int:
        """End the daemon; return its exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        return self.daemon.wait()

    @contextlib.contextmanager
    def client(self) -> Iterator[Connection]:
        """A connection to the daemon; within a wait the same each time, until it fails."""
        if self._waiting != threading.get_ident():
            with Connection.of(self.state) as own:
                yield own
            return
        if self._connection is None:
            self._connection = Connection.of(self.state)
        try:
            yield self._connection
        except RuntimeError:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def script(self, name: str, text: str) -> Path:
        path = self.work / name
        path.write_text(text)
        return path

    def submit(
        self,
        script: Path,
        *args: str,
        nodes: tuple[int, int] = (1, 1),
        name: str = "job",
        **spec: object,
    ) -> str:
        """Submit as ``malletrain submit`` does; return the job's id. A script without torch needs
        no warm interpreter, except where many jobs come to the same nodes.
        """
        text = script.read_text() if script.is_file() else ""
        many_jobs = self._standing or self._light_python
        if not many_jobs and "torch" not in text:
            spec["env"] = {"MALLETRAIN_PRELOAD": "0", **spec.get("env", {})}  # type: ignore[dict-item]
        python = self._light_python or self.python
        if _under_pytest() and python == sys.executable and "torch" in text and "optim" not in text:
            python = light_python(self.root)
        job = messages.JobSpec(
            name,
            "",
            str(script),
            str(self.work),
            python,
            tuple(args),
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            **spec,  # type: ignore[arg-type]
        )
        with self.client() as client:
            return client.submit(job).id

    def job(self, job: str) -> JobView:
        return self.show(job).job

    def show(self, job: str) -> JobDetail:
        with self.client() as client:
            return client.job(job)

    def events(self, kind: str = "", job: str | None = None) -> list:
        with self.client() as client:
            events = client.events(since=self._since, limit=1000, job=job)
            return [e for e in events if not kind or e.kind == kind]

    def until(self, condition: Callable[[], object], what: str) -> object:
        """Wait until ``condition`` holds; fails with the daemon's log."""
        before, self._waiting = self._waiting, threading.get_ident()
        try:
            return waiting.until(condition, what, 0.1, self._details)
        finally:
            self._waiting = before
            if not before:
                self._forget()

    def until_state(self, job: str, *states: str) -> JobView:
        self.until(lambda: self.job(job).state in states, f"{job} is {' or '.join(states)}")
        return self.job(job)

    def until_samples(self, job: str, samples: float) -> None:
        self.until(
            lambda: self.job(job).samples >= samples, f"{job} has processed {samples:g} samples"
        )

    def agents(self) -> dict[str, psutil.Process]:
        """The agent processes, by node."""
        by_node = {}
        for process in psutil.Process(self.cluster.pid).children():
            with contextlib.suppress(psutil.Error):
                if "malletrain.agent" in process.cmdline():
                    by_node[process.environ()["MALLETRAIN_NODE"]] = process
        return by_node

    def workers(self, script: Path) -> list[psutil.Process]:
        """Training processes of this script; forks of the template are named after it."""
        processes = []
        for process in psutil.Process(self.cluster.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                forked = process.name() == script.name[:15]
                if forked or process.cmdline()[1:4:2] == ["-u", str(script)]:
                    processes.append(process)
        return processes

    def has_logged(self, words: str) -> bool:
        """Whether these words are in the daemon's log."""
        return words in self.daemon_log(10**9)

    def daemon_log(self, lines: int = 60) -> str:
        """The last lines of the daemon's log."""
        return tail(self.root / "daemon.log", lines)

    def _details(self) -> str:
        """The daemon's log, and the stacks of all workers: where each one waits."""
        files: dict[Path, int] = {}
        for agent in self.agents().values():
            for folder in Path(tempfile.gettempdir()).glob(f"malletrain-*-{agent.pid}-*/job-*"):
                files |= stack_file_holders(folder)
        sizes = {p: p.stat().st_size for p, pid in files.items() if handles_signal(pid)}
        for path in sizes:
            os.kill(files[path], STACKS_SIGNAL)
        deadline = time.monotonic() + RESPONSE_TIMEOUT_S  # one that is stopped writes nothing
        while any(p.stat().st_size == n for p, n in sizes.items()) and time.monotonic() < deadline:
            time.sleep(0.05)
        stacks = [f"{path.parent.name}/{path.name}:\n{tail(path, 60)}" for path in files]
        return "\n".join([self.daemon_log(), *stacks])

    def stop(self) -> None:
        """End everything; fails when a process is left over."""
        mine = (
            psutil.Process(self.cluster.pid).children(recursive=True)
            if self.cluster.alive()
            else []
        )
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill_daemon(signal.SIGTERM)

        def ended() -> bool:
            if self.cluster.alive():  # a second SIGTERM ends it before the grace time
                os.kill(self.cluster.pid, signal.SIGTERM)
            return not self.cluster.alive()

        waiting.until(ended, "the cluster ends", 0.1)
        _, survivors = psutil.wait_procs(mine, timeout=PATIENCE_S)
        assert not survivors, f"Processes left over: {survivors}"


@contextlib.contextmanager
def site(root: Path, **options: object) -> Iterator[Site]:
    """A site with a running daemon; ended, and looked over for leftovers, at the end."""
    made = Site(root, **options)  # type: ignore[arg-type]
    try:
        made.start_daemon()
        yield made
    finally:
        made.stop()
        os.sync()
