"""The gateway as a process: composes its parts, and serves until it is stopped."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from llmserve.gateway.access import Access
from llmserve.gateway.admission import Admission
from llmserve.gateway.app import Background, make_app
from llmserve.gateway.batch_api import batch_router
from llmserve.gateway.batch_runner import BatchRunner
from llmserve.gateway.configuration import ConfigurationError, GatewayConfiguration, ModelSection
from llmserve.gateway.database import GatewayDatabase
from llmserve.gateway.demand import Demand, DemandLimits
from llmserve.gateway.keys import KeyFile
from llmserve.gateway.models import ServedModel
from llmserve.gateway.overview import Overviews
from llmserve.gateway.page import page_router
from llmserve.gateway.page_link import PageLink
from llmserve.gateway.request_log import RequestLog
from llmserve.gateway.scaling import Scaler
from llmserve.live_dispatcher import LiveDispatcher
from llmserve.model_tokenizer import SIMULATED, tokenizer_of
from llmserve.replicas import Capacity
from llmserve.service_members import ReplicaFollower
from llmserve.text import Tokenizer
from malletrain import AsyncClient

log = logging.getLogger(__name__)

GRACE_S = 5
"""Seconds for which connections may read their last events when the gateway stops."""


@dataclass
class Gateway:
    """The parts of a running gateway."""

    configuration: GatewayConfiguration
    access: Access
    admission: Admission
    database: GatewayDatabase
    runner: BatchRunner
    overviews: Overviews
    background: list[Background] = field(default_factory=list)

    def app(self) -> FastAPI:
        """Return the application."""
        routes = batch_router(
            self.access,
            self.admission,
            self.database,
            self.runner,
            self.configuration.max_file_bytes,
        )
        return make_app(
            self.configuration,
            self.access,
            self.admission,
            (*self.background, self.runner.run, self.overviews.run),
            (routes, page_router(self.access, self.overviews)),
        )


class GatewayServer(uvicorn.Server):
    """A server that ends streams with an error event when it is stopped.

    Args:
        config: the configuration of uvicorn.
        admission: the open requests of the gateway.
    """

    def __init__(self, config: uvicorn.Config, admission: Admission) -> None:
        super().__init__(config)
        self._admission = admission

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await super().startup(sockets)
        for server in self.servers:
            for each in server.sockets:
                host, port = each.getsockname()[:2]
                log.info("The gateway listens on http://%s:%d/v1", host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests, then the connections."""
        self._admission.stop()
        await super().shutdown(sockets)


@contextlib.asynccontextmanager
async def open_gateway(
    configuration: GatewayConfiguration, folder: Path, client: AsyncClient | None
) -> AsyncIterator[Gateway]:
    """Yield the parts of a gateway, in the running event loop.

    Args:
        configuration: the operator's configuration.
        folder: folder of the configuration, to which its paths are relative.
        client: a client of the daemon; None if all models have engines with fixed addresses.

    Raises:
        DatabaseError: the database cannot be used.
        ConfigurationError: a tokenizer cannot be read, or a service belongs to another user.
        RuntimeError: the daemon does not answer, or knows no such service.
    """
    async with contextlib.AsyncExitStack() as stack:
        database = GatewayDatabase(configuration.database)
        stack.callback(database.close)
        models = {}
        for name, section in configuration.models.items():
            service = ServiceAccess()
            if client is not None and section.job:
                service = await service_access(client, section.job)
            dispatcher = await stack.enter_async_context(
                LiveDispatcher(
                    configuration.make_policy(),
                    configured_tokenizer(section.tokenizer, folder),
                    section.engine_model or name,
                    key=service.key,
                    max_request_tokens=section.max_request_tokens,
                )
            )
            demand = Demand(_limits(configuration), time.monotonic(), service.nodes)
            models[name] = ServedModel(name, dispatcher, demand, section.max_request_tokens)
            _add_engines(dispatcher, section)
        access = Access(configuration, KeyFile(configuration.keys))
        admission = Admission(configuration, access, models)
        runner = BatchRunner(database, admission, access)
        overviews = Overviews(configuration, admission, runner, database)
        gateway = Gateway(configuration, access, admission, database, runner, overviews)
        if configuration.keep_requests_days:
            requests = RequestLog(configuration.database, configuration.keep_requests_days)
            stack.callback(requests.close)
            admission.observers.append(requests.observe)
            gateway.background.append(requests.run)
        if client is not None:
            for name, section in configuration.models.items():
                if section.job:
                    _follow(gateway, models[name], section.job, client)
        yield gateway


async def serve(
    configuration: GatewayConfiguration, folder: Path, state_dir: Path | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        configuration: the operator's configuration.
        folder: folder of the configuration, to which its paths are relative.
        state_dir: state directory of the daemon; None: your own daemon, else the site's.

    Raises:
        DatabaseError: the database cannot be used.
        ConfigurationError: a model cannot be served as configured.
        OSError: the address cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        client = None
        if any(section.job for section in configuration.models.values()):
            client = await stack.enter_async_context(AsyncClient(state_dir))
        gateway = await stack.enter_async_context(open_gateway(configuration, folder, client))
        host, port = configuration.address
        config = uvicorn.Config(
            gateway.app(),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,
        )
        await GatewayServer(config, gateway.admission).serve()


@dataclass(frozen=True)
class ServiceAccess:
    """The daemon's answer about a service when the gateway starts."""

    key: bytes = b""
    """The secret that the replicas require."""
    nodes: int = 0
    """Number of nodes that the service has."""


async def service_access(client: AsyncClient, job: str) -> ServiceAccess:
    """Return the key and the size of the service of a model.

    Args:
        client: a client of the daemon.
        job: name or id of the service.

    Raises:
        ConfigurationError: the service belongs to another user.
        RuntimeError: the daemon does not answer, or knows no such service.
    """
    view = await client.members(job)
    if not view.key:
        raise ConfigurationError(
            f"Service {job} belongs to another user, so its replicas do not answer this gateway. "
            "Run the gateway as the user who submitted the service."
        )
    staying = sum(member.gone_in_s is None for member in view.members)
    return ServiceAccess(bytes.fromhex(view.key), staying)


def configured_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Return the tokenizer of a model.

    Args:
        name: ``simulated``, or a folder as in the configuration.
        folder: folder to which a relative path is relative.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return tokenizer_of(name if name == SIMULATED else str(folder / Path(name).expanduser()))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _limits(configuration: GatewayConfiguration) -> DemandLimits:
    scaling = configuration.scaling
    return DemandLimits(
        scaling.idle_s,
        scaling.node_value,
        scaling.requests_per_node,
        scaling.max_nodes,
        scaling.scale_down_s,
    )


def _add_engines(dispatcher: LiveDispatcher, section: ModelSection) -> None:
    capacity = Capacity(section.engine_slots, section.engine_kv_tokens)
    for address in section.engines:
        dispatcher.add_replica(address, address, capacity)


def _follow(gateway: Gateway, model: ServedModel, job: str, client: AsyncClient) -> None:
    """Follow the members of a service, and report to the daemon what nodes are worth to it."""
    scaler = Scaler(
        client,
        job,
        model.demand,
        lambda: model.open_requests + gateway.runner.backlog(model.name),
        gateway.configuration.scaling.interval_s,
    )

    def wake(waiting: ServedModel) -> None:
        if waiting is model:
            scaler.wake()

    gateway.admission.on_wait(wake)
    follower = ReplicaFollower(model.dispatcher)
    gateway.background += [scaler.run, lambda: follower.run(client, job)]
    if url := gateway.configuration.url:
        gateway.background.append(PageLink(client, job, url).run)
