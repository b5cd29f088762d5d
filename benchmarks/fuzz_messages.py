"""Sends mutated messages to the sockets of a daemon, an agent and a launcher, each in a process of
its own. None of them may end, their memory may not grow, and an ordinary client of the daemon must
be served meanwhile.

    python -m benchmarks.fuzz_messages [--messages 1000000] [--seed 1] [--json]

Most messages to the daemon come from agents with the key of a lease; the others from users, from
unauthenticated peers, or as bytes that are not ZeroMQ. The agent gets messages as from its daemon,
from launchers and from workers; the launcher as from its agent and from workers. Shares: daemon 80
%, agent 12 %, launcher 8 %. Exit status 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil
import zmq

from malletrain.client import ClientError, Connection
from malletrain.identity.keys import new_pair
from malletrain.launch.loop import LaunchLoop
from malletrain.protocol import messages
from malletrain.protocol.launcher_channel import LaunchOrder
from tests import mutations
from tests.malletrain.agent.node_side import AgentProcess, FakeDaemon
from tests.malletrain.daemon.forged import USERS, Agent, Imagined, RunningDaemon
from tests.waiting import until

MOST_GROWTH_MB, MOST_P99_MS = 50.0, 100.0
LEASES = 4
MOST_IN_VAIN = 30
"""Number of consecutive messages that nobody accepts after which the daemon counts as gone."""
WARM_UP = 0.1
"""Share of the messages after which memory is first measured, because caches fill up before."""
QUOTA = "[quotas]\nuser_jobs = 30\n"


def daemon_process(pipe: Pipe, folder: str) -> None:
    """Run the daemon, with jobs at work on some nodes. Report how to reach it, and end when
    told.
    """
    machine = Imagined(*(f"n{i}" for i in range(LEASES)))
    running = RunningDaemon(Path(folder), machine, allocation=QUOTA)
    jobs, agents = [], []
    for number in range(LEASES):
        jobs.append(running.submit("ann", name=f"job{number}"))
        until(lambda n=number: len(machine.of("ann")) > n, "another lease")
        agent = Agent(running, machine.of("ann")[-1])
        agent.hello()
        agents.append(agent)
        agent.work(jobs[-1])
    for agent in agents:
        agent.close()
    pipe.send(
        {
            "endpoint": running.daemon.endpoint,
            "server": running.daemon.keys.server.public,
            "own": running.daemon.keys.client,
            "leases": [(r.id, r.node, dict(r.env)) for r in machine.requests.values()],
            "jobs": jobs,
        }
    )
    while not pipe.poll(0.5):
        if running.error is not None:  # the receiver of the reports is gone
            traceback.print_exception(running.error)
            os._exit(1)
    pipe.recv()
    handler_failure = running.daemon.handler_failures.last
    pipe.send(
        (
            running.daemon.handler_failures.count,
            handler_failure.sentence if handler_failure else "",
            running.error,
        )
    )
    os._exit(0)


class Flood:
    """Sends mutated messages of one sender over ZeroMQ, and discards the answers."""

    def __init__(self, context: zmq.Context[Any], at: dict[str, Any], secret: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 200
        self._socket.sndtimeo = 2_000
        self.shut_out = 0
        """Number of messages that were not accepted."""
        self.in_vain = 0
        """Number of consecutive ones at the end."""
        self._socket.curve_secretkey = secret.encode()
        self._socket.curve_publickey = zmq.curve_public(secret.encode())
        self._socket.curve_serverkey = at["server"].encode()
        self._socket.connect(at["endpoint"])

    def send(self, frames: list[bytes]) -> None:
        while self._socket.poll(0):
            self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            self._socket.send_multipart(frames)
            self.in_vain = 0
        except zmq.Again:  # the daemon closed its connection and refuses a new one
            self.shut_out += 1
            self.in_vain += 1


def flood_daemon(at: dict[str, Any], count: int, seed: int) -> None:
    """Send ``count`` messages of senders of all kinds."""
    rng, context = random.Random(seed), zmq.Context()
    leases = {lease: env["MALLETRAIN_LEASE_KEY"] for lease, _, env in at["leases"]}
    names = (*at["jobs"], *leases, *(node for _, node, _ in at["leases"]), "running", "rank0")
    # An agent that announces its departure has nothing more to send.
    stay = [t for t in mutations.of_agents() if t not in (messages.Leaving, messages.Sick)]
    agent_mutator = mutations.Mutator(rng, stay, names, without=("gone_in_s", "sick"))
    client_mutator = mutations.Mutator(rng, (messages.Request, messages.Heartbeat), names)
    agents = [Flood(context, at, secret) for secret in leases.values()]
    users = [Flood(context, at, USERS[name].secret) for name in ("ann", "bob")]
    strangers = [Flood(context, at, new_pair().secret)]
    hostless = at["endpoint"].removeprefix("tcp://").rpartition(":")
    everybody = (*agents, *users, *strangers)
    for number in range(count):
        if sum(flood.in_vain for flood in everybody) > MOST_IN_VAIN:
            raise SystemExit(f"The daemon accepts nothing after {number} messages.")
        draw = rng.random()
        if draw < 0.7:
            rng.choice([a for a in agents if a.shut_out < 3] or strangers).send(
                agent_mutator.frames()
            )
        elif draw < 0.85:
            job = rng.choice(at["jobs"])
            rng.choice(users).send(mutations.request(client_mutator, job))
        elif draw < 0.995:
            strangers[0].send(client_mutator.frames())
        else:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((hostless[0], int(hostless[2])), timeout=10) as raw,
            ):
                raw.sendall(rng.randbytes(rng.choice((1, 64, 4096))))
        if number % 50_000 == 49_999:  # an unauthenticated peer returns with another key
            strangers = [Flood(context, at, new_pair().secret)]
    shut_out = sum(flood.shut_out for flood in (*agents, *users, *strangers))
    print(f"{shut_out} of {count} messages were not accepted", file=sys.stderr)
    context.destroy(linger=1000)


class Ordinary:
    """A client that requests the status ten times per second, as an operator's page does."""

    def __init__(self, at: dict[str, Any]) -> None:
        self.seconds: list[float] = []
        self.failed = 0
        self._at, self._stop = at, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        pair, at = USERS["olga"], self._at
        keys = at["server"].encode(), pair.public.encode(), pair.secret.encode()
        with Connection(at["endpoint"], *keys) as client:
            while not self._stop.wait(0.1):
                begin = time.perf_counter()
                try:
                    client.call("jobs", {"ended": 10})
                except ClientError:
                    self.failed += 1
                self.seconds.append(time.perf_counter() - begin)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def quantile_ms(self, q: float) -> float:
        ordered = sorted(self.seconds)
        return 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def fuzz_daemon(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Test the daemon."""
    pipe, far = multiprocessing.Pipe()
    target = multiprocessing.Process(target=daemon_process, args=(far, str(folder)))
    target.start()
    at = pipe.recv()
    process = psutil.Process(target.pid)
    flood_daemon_apart(at, int(count * WARM_UP), seed)
    before, busy, begin = process.memory_info().rss, cpu_s(process), time.perf_counter()
    ordinary = Ordinary(at)
    flood_daemon_apart(at, count - int(count * WARM_UP), seed + 1)
    ordinary.stop()
    seconds = time.perf_counter() - begin
    grown = (process.memory_info().rss - before) / 1e6
    busy = cpu_s(process) - busy
    pipe.send("end")
    handler_failures, last, error = pipe.recv()
    target.join()
    return {
        "target": "daemon",
        "messages": count,
        "seconds": round(seconds, 1),
        "cpu_s": round(busy, 1),
        "alive": error is None,
        "handler_failures": handler_failures,
        "last_mishap": last,
        "grown_mb": round(grown, 1),
        "asked": len(ordinary.seconds),
        "unanswered": ordinary.failed,
        "p50_ms": round(ordinary.quantile_ms(0.5), 1),
        "p99_ms": round(ordinary.quantile_ms(0.99), 1),
    }


def flood_daemon_apart(at: dict[str, Any], count: int, seed: int) -> None:
    """Run in a process of its own, so that its work does not slow the client."""
    apart = multiprocessing.Process(target=flood_daemon, args=(at, count, seed))
    apart.start()
    apart.join()
    if apart.exitcode:
        raise SystemExit(f"The flood itself failed with {apart.exitcode}; see above.")


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time of a process so far, seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def fuzz_agent(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Test the agent, with messages as from its daemon, launchers and workers."""
    rng, daemon = random.Random(seed), FakeDaemon(heartbeat_s=5.0)
    agent = AgentProcess(daemon, "n0", folder)
    daemon.until(lambda: "n0" in daemon.nodes, "the agent says hello")
    mutator = mutations.Mutator(rng, mutations.of_daemons(), ("j1", "n0", "rank0"))
    launched = mutations.Mutator(
        rng, (messages.Phase, messages.StoreUp, messages.Drained), ("j1", "n0")
    )
    [home] = agent.run_dir.glob("n0-*")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.settimeout(60)
    launcher = zmq.Context.instance().socket(zmq.DEALER)
    launcher.linger = 0
    launcher.connect(f"ipc://{home}/launcher.sock")
    process, before = psutil.Process(agent.process.pid), 0
    begin = time.perf_counter()
    for number in range(count):
        draw = rng.random()
        if draw < 0.4:
            daemon.socket.send_multipart([daemon.nodes["n0"], *mutator.frames()])
        elif draw < 0.6:
            while launcher.poll(0):
                launcher.recv_multipart()
            launcher.send_multipart(launched.frames())
        else:
            datagrams.sendto(datagram(mutator), str(home / "workers.sock"))
        if number % 200 == 0:
            daemon.pump(0.0)
            daemon.seen.clear()
        if number == int(count * WARM_UP):
            before = process.memory_info().rss
    beats = daemon.beats
    daemon.until(lambda: daemon.beats > beats, "the agent beats still")
    row = {
        "target": "agent",
        "messages": count,
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_s": round(cpu_s(process), 1),
        "alive": agent.process.poll() is None,
        "handler_failures": agent.log.read_text(errors="replace").count("could not handle a"),
        "grown_mb": round((process.memory_info().rss - before) / 1e6, 1),
    }
    agent.kill()
    datagrams.close()
    launcher.close(0)
    daemon.close()
    return row


def datagram(mutator: mutations.Mutator) -> bytes:
    """Return what a worker might send."""
    body = {"v": 1, "kind": mutator.rng.choice(("progress", "mark", "metric", "drained", "x"))}
    for name in ("job", "generation", "rank", "pid", "samples", "steps", "batch", "name", "value"):
        if mutator.rng.random() < 0.8:
            body[name] = mutator.rng.choice((0, 1, 1.5, "j1", mutator.oddity()))
    with contextlib.suppress(TypeError, ValueError):
        data = json.dumps(body).encode()[:8000]
        return data if mutator.rng.random() < 0.9 else data[: len(data) // 2]
    return mutator.rng.randbytes(50)


class Silent:
    """A launcher that only receives."""

    def on_message(self, message: Any) -> None: ...

    def on_line(self, connection: Any, line: Any) -> None: ...

    def check_processes(self) -> None: ...

    def stop(self) -> None: ...


def launcher_process(endpoint: str) -> None:
    """The loop of a launcher; it ends when the agent sends Release."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    spec = messages.JobSpec("j", "me", "x", "/", "python")
    order = LaunchOrder("j1", spec, endpoint, "127.0.0.1", "/tmp", 1.0, 60.0)
    os._exit(LaunchLoop(order).run(Silent()))


def fuzz_launcher(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Test the launcher, with messages as from its agent and from workers."""
    rng = random.Random(seed)
    agent = zmq.Context.instance().socket(zmq.ROUTER)
    agent.linger = 0
    endpoint = f"ipc://{folder}/a.sock"
    agent.bind(endpoint)
    target = multiprocessing.Process(target=launcher_process, args=(endpoint,))
    target.start()
    path = str(folder / f"l{target.pid}")
    until(lambda: os.path.exists(path), "the launcher listens")
    mutator = mutations.Mutator(rng, (messages.Round, messages.Drain, messages.Abort), ("j1", "n0"))
    process, before, worker = psutil.Process(target.pid), 0, None
    begin = time.perf_counter()
    identity = b""
    for number in range(count):
        if number % 1000 == 0:
            if worker is not None:
                worker.close()
            worker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            worker.settimeout(60)
            worker.connect(path)
        if not identity and agent.poll(0):
            identity = agent.recv_multipart()[0]
        if identity and rng.random() < 0.5:
            agent.send_multipart([identity, *mutator.frames()])
        assert worker is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.sendall(datagram(mutator) + b"\n")
        if number == int(count * WARM_UP):
            before = process.memory_info().rss
    alive = target.is_alive()
    row = {
        "target": "launcher",
        "messages": count,
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_s": round(cpu_s(process), 1),
        "alive": alive,
        "handler_failures": 0,
        "grown_mb": round((process.memory_info().rss - before) / 1e6, 1),
    }
    target.terminate()
    target.join()
    agent.close(0)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        rows = []
        for fuzz, share in ((fuzz_daemon, 0.8), (fuzz_agent, 0.12), (fuzz_launcher, 0.08)):
            place = Path(folder) / fuzz.__name__
            place.mkdir()
            rows.append(fuzz(max(100, int(options.messages * share)), options.seed, place))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    good = (
        all(
            row["alive"] and not row["handler_failures"] and row["grown_mb"] <= MOST_GROWTH_MB
            for row in rows
        )
        and rows[0]["p99_ms"] < MOST_P99_MS
    )
    load = statistics.mean(os.getloadavg()[:1])
    report = {"seed": options.seed, "load": round(load, 1), "good": good, "rows": rows}
    if options.json:
        print(json.dumps(report))
    else:
        print(f"seed {options.seed}, load {load:.1f}: {'all limits met' if good else 'EXCEEDED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
