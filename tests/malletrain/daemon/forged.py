"""A real daemon of several users on an imaginary main scheduler, and agents that say whatever a
test wants.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from sqlalchemy import make_url

from malletrain import __version__
from malletrain.client import Connection
from malletrain.config.model import parse_config
from malletrain.daemon import main as daemon_main
from malletrain.daemon.site import backends
from malletrain.identity.keys import new_pair
from malletrain.identity.state_directory import lock_state_dir
from malletrain.protocol import env, messages, wire
from malletrain.store.store import Store
from scavenger.interface import Contact, Gap, Lease, LeaseState, PollResult
from tests.waiting import PATIENCE_S, until

USERS = {name: new_pair() for name in ("ann", "bob", "olga")}
CONFIG = """
[daemon]
log_level = "error"
state_dir = "{folder}/state"
metrics_listen = ""
adopt_wait = "10 min"
heartbeat = "5 s"
agent_timeout = "10 min"
{daemon}
[scheduler]
kind = "slurm"
[scheduler.slurm]
{lines}
[allocation]
debounce = "50 ms"
{allocation}
[profiling]
enabled = false
"""
SEVERAL = 'users = "{folder}/users"\noperators = ["olga"]'
SUBMIT_AS = 'submit_as = ["sudo", "-n", "-u", "{owner}", "--"]'


class Imagined:
    """A main scheduler whose leases run as soon as they are requested, except those of the user
    ``refuses``.
    """

    name = "imagined"
    begins = LeaseState.RUNNING
    """How a lease begins. A pending one begins to run when the test has it :meth:`run`: no wait for
    its agent is counted before.
    """

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes
        self.requests: dict[str, Any] = {}
        self.leases: dict[str, Lease] = {}
        self.refuses = ""

    def poll(self) -> PollResult:
        leases = tuple(self.leases.values())  # a test may change them meanwhile
        leased_nodes = {lease.node for lease in leases}
        gaps = tuple(Gap(node, time.time()) for node in self.nodes if node not in leased_nodes)
        return PollResult(time.time(), gaps, leases, len(self.nodes), 0, (), 0.2)

    def take(self, requests: Any) -> list[Lease]:
        for r in requests:
            self.requests[r.id] = r
            if r.owner != self.refuses:
                self.leases[r.id] = Lease(r.id, r.id, self.begins, r.node)
        return [
            self.leases.get(r.id) or Lease(r.id, "", LeaseState.ENDED, r.node, "invalid account")
            for r in requests
        ]

    def run(self, lease: str) -> None:
        """The lease begins to run."""
        self.leases[lease] = replace(self.leases[lease], state=LeaseState.RUNNING)

    def give_back(self, leases: Any) -> None:
        for lease in leases:
            self.leases.pop(lease.id, None)

    def contact(self) -> Contact:
        return Contact()

    def know(self, leases: Any, nodes: Any, jobs: Any) -> None:
        """Learn of the leases from before the daemon's last start."""

    def of(self, owner: str | None) -> list[str]:
        """The leases asked for as this user."""
        return [
            lease
            for lease, r in list(self.requests.items())
            if r.owner == owner and lease in self.leases
        ]


@functools.cache
def empty_database() -> bytes:
    """An SQLite file with all tables and no rows, as each daemon here would make it by a tenth of a
    second of migrations.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        Store.open(f"sqlite:///{path}").close()
        return path.read_bytes()


def provide_tables(url: str) -> None:
    """Create the database, unless it exists."""
    path = Path(make_url(url).database or "")
    if not path.exists():
        path.write_bytes(empty_database())


class RunningDaemon:
    """A daemon in a thread of this process. ``folder`` outlives it, so that another can take
    over.
    """

    def __init__(
        self, folder: Path, machine: Imagined, several: bool = True, allocation: str = ""
    ) -> None:
        self.machine = machine
        (folder / "users").write_text(
            "".join(f"{name} {pair.public}\n" for name, pair in USERS.items())
        )
        daemon, lines = (SEVERAL.format(folder=folder), SUBMIT_AS) if several else ("", "")
        self.config = parse_config(
            CONFIG.format(folder=folder, daemon=daemon, lines=lines, allocation=allocation)
        )
        self._backend = backends.Backend(
            lambda config: machine,
            lambda config: None,
            lambda config: iter(()),
            lambda config: 30.0,
            lambda config: iter(()),
        )
        self.error: BaseException | None = None
        self.daemon: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(
            lambda: (
                self.error or (self.daemon and (self.config.state_dir / "daemon.json").exists())
            ),
            "the daemon listens",
        )
        assert self.error is None, self.error

    def _run(self) -> None:
        async def serve(store: Store) -> None:
            self._loop = asyncio.get_running_loop()
            # not in a thread
            self._loop.add_signal_handler = lambda *a: None  # type: ignore[method-assign]
            self.daemon = daemon_main.Daemon(self.config, store, self._backend)
            self._task = asyncio.ensure_future(self.daemon.serve())
            await self._task

        try:
            (self.config.state_dir / "daemon.json").unlink(missing_ok=True)
            with lock_state_dir(self.config.state_dir):
                provide_tables(self.config.database_url)
                with Store.open(self.config.database_url) as store:
                    asyncio.run(serve(store))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error

    @property
    def components(self) -> Any:
        """The daemon's parts."""
        return self.daemon.components

    def ended(self) -> BaseException | None:
        """Wait for its end; return what ended it."""
        self._thread.join(PATIENCE_S)
        return self.error

    def stop(self) -> None:
        """End it as kill does: nothing is given back."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_S)
        assert self.error is None, self.error

    def call(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in the daemon's own thread."""
        self._loop.call_soon_threadsafe(function)

    def client(self, user: str = "") -> Connection:
        pair = USERS[user] if user else self.daemon.keys.client
        return Connection(
            self.daemon.endpoint,
            self.daemon.keys.server.public.encode(),
            pair.public.encode(),
            pair.secret.encode(),
        )

    def submit(self, user: str, **fields: Any) -> str:
        """A job of ``user``; return its id."""
        values = {
            "name": user,
            "owner": "",
            "script": "/x.py",
            "workdir": "/",
            "python": "python",
            "profile": False,
            **fields,
        }
        with self.client(user) as client:
            return client.submit(messages.JobSpec(**values)).id

    def job(self, job: str) -> Any:
        with self.client() as client:
            return client.job(job).job

    def jobs(self) -> list[Any]:
        with self.client() as client:
            return client.jobs()

    def events(self) -> list[Any]:
        with self.client() as client:
            return client.events(limit=1000)

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of the metric ``malletrain_NAME`` with these labels; None if there is none."""
        value: float | None = self.daemon.metrics.registry.get_sample_value(
            f"malletrain_{name}", labels
        )
        return value

    def alive(self) -> bool:
        """Whether it still answers."""
        with self.client() as client:
            return bool(client.status().pid) and self.error is None


class Agent:
    """The agent of one lease, by hand: :meth:`say` something, :meth:`hear` something."""

    def __init__(self, running: RunningDaemon, lease: str) -> None:
        request = running.machine.requests[lease]
        self.lease, self.node = lease, request.node
        secret = request.env[env.LEASE_KEY].encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.curve_secretkey, self._socket.curve_publickey = (
            secret,
            zmq.curve_public(secret),
        )
        self._socket.curve_serverkey = running.daemon.keys.server.public.encode()
        self._socket.connect(running.daemon.endpoint)

    def send_raw(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def say(self, message: messages.Message) -> None:
        self._socket.send_multipart(wire.encode(message))

    def hello(self, **fields: Any) -> None:
        self.say(
            messages.Hello(
                **{
                    "node": self.node,
                    "lease": self.lease,
                    "host": "127.0.0.1",
                    "pid": 1,
                    "version": __version__,
                    **fields,
                }
            )
        )

    def hear(self, kind: type | tuple[type, ...]) -> Any:
        """The next message of this kind, or of one of these; others are passed over."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._socket.poll(50) and isinstance(
                message := wire.decode(self._socket.recv_multipart()), kind
            ):
                return message
        raise AssertionError(f"No {kind} within {PATIENCE_S:g} s.")

    def work(self, job: str) -> messages.Assign:
        """Take the job and go through its first round. Return the message that assigned it."""
        assigned = self.hear(messages.Assign)
        self.say(messages.Phase(messages.Assignment(job, "ready")))
        message = self.hear(messages.Round)
        if message.group_rank == 0:
            self.say(messages.StoreUp(job, message.generation, "127.0.0.1", 5000))
        self.say(messages.Phase(messages.Assignment(job, "running", message.generation)))
        return assigned

    def close(self) -> None:
        self._context.destroy(linger=0)
