"""A gateway on the loopback with simulated engines behind it, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn
from llmserve.engine_model import EngineTimes
from llmserve.gateway.configuration import read
from llmserve.gateway.keys import KeyFile
from llmserve.gateway.server import Gateway, GatewayServer, open_gateway
from llmserve.live_engine import LiveEngine
from llmserve.replicas import Capacity
from llmserve.simulated_server import listen, make_app

from tests.waiting import NEVER_S, PATIENCE_S, until

ROOT = Path(__file__).parents[3]
TIMES = EngineTimes(0.0005, 0.0, 0.0, 0.0)
CONFIGURATION = """
listen = "127.0.0.1:0"
metrics_for = ["operator"]
comment_interval_s = 0.05
[models.simulated]
engines = {engines}
engine_slots = 8
engine_kv_tokens = 100000
tokenizer = "simulated"
[users.alice]
[users.bob]
[users.operator]
"""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """The result of a coroutine that runs there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function that is called there."""

        async def called() -> Any:
            return function()

        return self.run(called())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


LISTENS = r"The gateway listens on (http://\S+)"


@contextlib.contextmanager
def running(
    configuration: Path, key: str, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    """A gateway as a process, and a client of it.

    Args:
        configuration: file of the gateway.
        key: of a user.
        options: of ``llmserve gateway``.
    """
    command = [sys.executable, "-m", "llmserve.cli", "gateway", "--config", str(configuration)]
    path = configuration.with_suffix(".log")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "jobscripts" / "llm")}
    with open(path, "w") as log:
        process = subprocess.Popen([*command, *options], stderr=log, env=env)
        try:
            match = until(
                lambda: process.poll() is not None or re.search(LISTENS, path.read_text()),
                "the gateway listens",
                details=path.read_text,
            )
            assert match is not True, path.read_text()
            yield process, openai.OpenAI(base_url=match[1], api_key=key, timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()


def metric(client: openai.OpenAI, name: str) -> float:
    """Return the sum of a metric of a gateway over all its labels.

    Args:
        client: of a user in ``metrics_for``.
        name: as in ``/metrics``, such as ``llmserve_moves_total``.
    """
    url = client.base_url.join("/metrics")
    answer = httpx2.get(str(url), headers={"Authorization": f"Bearer {client.api_key}"})
    assert answer.status_code == 200, answer.text
    values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", answer.text, re.MULTILINE)
    return sum(map(float, values))


class GatewaySite:
    """Engines and a gateway in one process.

    Args:
        folder: for sockets and files.
        configuration: of the gateway; ``{engines}`` is the list of the engines' addresses.
        engines: number of engines.
        times: of their iterations.
        clock: of the engines, seconds.
    """

    def __init__(
        self,
        folder: Path,
        configuration: str = CONFIGURATION,
        engines: int = 1,
        times: EngineTimes = TIMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.folder = folder
        self.engines: list[LiveEngine] = []
        self.engine_servers: list[uvicorn.Server] = []
        self.loop = Loop()
        self._stack = contextlib.AsyncExitStack()
        self._servers: list[tuple[uvicorn.Server, Any]] = []
        self.sockets = [f"unix:{folder}/engine{number}" for number in range(engines)]
        for address in self.sockets:
            self.start_engine(address, times)
        path = folder / "gateway.toml"
        path.write_text(configuration.replace("{engines}", str(self.sockets)))
        self.configuration = read(path)
        self.keys = KeyFile(self.configuration.keys)
        self.gateway: Gateway
        self.start_gateway()

    def start_engine(self, address: str, times: EngineTimes = TIMES) -> uvicorn.Server:
        """Start an engine at an address; return its server."""
        engine = LiveEngine(times, Capacity(8, 100_000), self._clock)
        self.engines.append(engine)
        config = uvicorn.Config(
            make_app(engine, "simulated"), log_level="warning", timeout_graceful_shutdown=0
        )
        server = uvicorn.Server(config)
        self.engine_servers.append(server)
        return self.serve(server, [listen(Path(address.removeprefix("unix:")))])

    def start_gateway(self) -> None:
        """Start the gateway."""

        async def enter() -> Gateway:
            return await self._stack.enter_async_context(
                open_gateway(self.configuration, self.folder, None)
            )

        self.gateway = self.loop.run(enter())
        config = uvicorn.Config(
            self.gateway.app(), host="127.0.0.1", port=0, log_level="warning",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        self.server = GatewayServer(config, self.gateway.admission)
        self.serve(self.server, None)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop_gateway(self) -> None:
        """Stop the gateway as SIGTERM does."""
        self.stop(self.server)
        self.loop.run(self._stack.aclose())
        self._stack = contextlib.AsyncExitStack()

    def stop(self, server: uvicorn.Server) -> None:
        """Stop a server, and wait for its end."""
        server.should_exit = True
        future = next(each for mine, each in self._servers if mine is server)
        future.result(PATIENCE_S)

    def key(self, user: str = "alice", application: str = "") -> str:
        """A new key of a user."""
        return self.keys.add(user, application)[1]

    def client(self, user: str = "alice", **more: Any) -> openai.OpenAI:
        """The stock client with a new key."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key(user),
            timeout=PATIENCE_S,
            **{"max_retries": 0, **more},
        )

    def http(self, user: str = "alice") -> httpx2.Client:
        """A plain client with a new key."""
        headers = {"Authorization": f"Bearer {self.key(user)}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def wait_for_replica(self) -> None:
        """Wait until requests are answered."""
        (model,) = self.gateway.admission.models.values()
        until(lambda: self.loop.call(lambda: model.has_ready_replica), "a replica is ready")

    @property
    def running(self) -> int:
        """Number of requests on the engines."""
        return sum(engine.running for engine in self.engines)

    def close(self) -> None:
        """Stop everything."""
        for server, future in self._servers:
            server.should_exit = True
            future.result(PATIENCE_S)
        self.loop.run(self._stack.aclose())
        self.loop.close()

    def serve(self, server: uvicorn.Server, sockets: Any) -> uvicorn.Server:
        """Run a server until the end; return it when it listens."""
        future = asyncio.run_coroutine_threadsafe(server.serve(sockets), self.loop.loop)
        self._servers.append((server, future))
        until(lambda: server.started or future.done(), "a server listens")
        return server


@contextlib.contextmanager
def site(folder: Path, **options: Any) -> Iterator[GatewaySite]:
    """A gateway with engines, stopped at the end."""
    made = GatewaySite(folder, **options)
    try:
        yield made
    finally:
        made.close()


SLOW = EngineTimes(NEVER_S, 0.0, 0.0, 0.0)
"""An engine that generates nothing."""
