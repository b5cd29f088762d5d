"""Builds a daemon: creates all components and connects them. Decides nothing else.

:class:`AssociationWatch` reads Slurm's accounts and shares at the start and periodically;
:mod:`malletrain.daemon.engine.parties` decides what follows from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from malletrain.config.model import Config
from malletrain.config.nodes import NodesSection
from malletrain.daemon.api.farm_operations import ArrivingFarms
from malletrain.daemon.api.job_dependencies import JobDependencies
from malletrain.daemon.api.notices import Notices
from malletrain.daemon.api.operations import Api
from malletrain.daemon.api.reload import Reload
from malletrain.daemon.engine.core import Core
from malletrain.daemon.engine.state import DaemonState, Send, make_daemon_state
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import Retention
from malletrain.daemon.leases.actions import AgentCommand, LeaseActions
from malletrain.daemon.leases.departures import Departures
from malletrain.daemon.leases.reconciler import LeaseReconciler
from malletrain.daemon.nodes.agent_handlers import AgentHandlers
from malletrain.daemon.nodes.farms import Farms
from malletrain.daemon.server.message_router import Login, MessageRouter
from malletrain.daemon.site.backends import agent_program, slurm_associations
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.handler_failures import HandlerFailures
from malletrain.daemon.site.logs import RotatedLog
from malletrain.daemon.site.metrics import Metrics
from malletrain.identity.keys import KeyPair, KeyRing
from malletrain.identity.users import Munge
from malletrain.protocol import env
from malletrain.protocol.health import HealthPlan, written
from malletrain.store.store import Store
from scavenger.interface import Scavenger, SchedulerError
from scavenger.slurm.associations import Associations

log = structlog.get_logger(__name__)


class AssociationWatch:
    """Keeps the parties of one daemon up to date. ``read``: queries Slurm; None if accounts are not
    read from Slurm.
    """

    def __init__(
        self, core: Core, state: DaemonState, read: Callable[[], Associations] | None
    ) -> None:
        self._core = core
        self._state = state
        self._read = read

    async def learn(self) -> None:
        """Read the associations once. If Slurm does not answer, the last ones stay."""
        if self._read is None:
            return
        try:
            associations = await asyncio.to_thread(self._read)
        except SchedulerError as error:
            log.warning("associations not read", reason=str(error))
            return
        with self._core.transaction():
            self._state.parties.learned(associations)
            self._state.controller.shares.set_weights(self._state.parties.weights())

    async def run(self) -> None:
        """Read the associations periodically, until cancelled."""
        interval_s = self._state.config.shares.refresh
        while self._read is not None:
            await asyncio.sleep(interval_s)
            await self.learn()


@dataclass(frozen=True)
class Service:
    """The components that :mod:`malletrain.daemon.main` starts, uses and stops."""

    core: Core
    agent_handlers: AgentHandlers
    leases: LeaseReconciler
    lease_actions: LeaseActions
    api: Api
    message_router: MessageRouter
    dependencies: JobDependencies
    arriving: ArrivingFarms
    notices: Notices
    associations: AssociationWatch
    reload: Reload

    def check_waiting(self) -> None:
        """Start or cancel the jobs that wait for others, or for their tasks."""
        self.dependencies.check()
        self.arriving.check()


def compose(
    config: Config,
    store: Store,
    keys: KeyRing,
    clock: Clock,
    metrics: Metrics,
    scavenger: Scavenger,
    endpoint: str,
    command: AgentCommand,
    send: Send,
    boot: str,
    handler_failures: HandlerFailures,
    retention: Retention,
    path: Path | None,
    log_file: RotatedLog | None,
    users_problems: Callable[[], tuple[str, ...]],
) -> Service:
    """Create and connect the components of one daemon. Call it within the daemon's loop.

    Args:
        config: the site's configuration.
        store: the database.
        keys: keys of the daemon, its leases and jobs.
        clock: the daemon's clock.
        metrics: counters for Prometheus.
        scavenger: connection to the main scheduler.
        endpoint: address at which agents reach the daemon.
        command: returns the command that starts an agent.
        send: sends a message to a peer, and returns whether it could be reached.
        boot: id of this start of the daemon.
        handler_failures: messages that could not be handled; outlives the components.
        retention: deletes old rows.
        path: file of the configuration; None if there is none.
        log_file: file of the log; None for standard error.
        users_problems: returns what is wrong with the list of users, as sentences.
    """
    state = make_daemon_state(config, store, clock, metrics, send, keys.job_key)
    logs = LogSink(config.state_dir / "logs", config.jobs.log_limit)
    departures = Departures(state, logs)
    lease_actions = LeaseActions(state, departures, keys, command)
    core = Core(state, lease_actions)
    farms = Farms(core)
    agent_handlers = AgentHandlers(core, state, departures, lease_actions, logs, farms, boot)
    leases = LeaseReconciler(core, state, lease_actions, departures, keys, scavenger, endpoint)
    munge = Munge(config.daemon.munge_socket) if config.daemon.munge else None
    dependencies = JobDependencies(core)
    arriving = ArrivingFarms(core, dependencies)
    notices = Notices(core, config.notify)
    reload = Reload(path, core, state, scavenger, notices, retention, log_file)
    api = Api(
        core,
        state,
        leases,
        dependencies,
        arriving,
        farms,
        logs,
        boot,
        scavenger.name,
        handler_failures,
        reload,
        users_problems,
    )
    read = partial(slurm_associations, config) if config.shares.weights_from == "slurm" else None
    return Service(
        core,
        agent_handlers,
        leases,
        lease_actions,
        api,
        MessageRouter(
            core, agent_handlers, api, Login(keys, munge), handler_failures, keys.identity
        ),
        dependencies,
        arriving,
        notices,
        AssociationWatch(core, state, read),
        reload,
    )


def agent_command(
    endpoint: str, server_key: str, grace_s: float, nodes: NodesSection
) -> Callable[[str, KeyPair], tuple[tuple[str, ...], dict[str, str]]]:
    """Return a function that returns the command and environment of a lease's agent.

    Args:
        endpoint: address at which agents reach the daemon.
        server_key: the daemon's public key.
        grace_s: seconds between the notice of a preemption and its end.
        nodes: section with the site's health checks of nodes.
    """
    plan = HealthPlan(
        tuple(nodes.health_check), nodes.health_interval, nodes.health_timeout, nodes.gpu_check
    )

    def command(lease: str, key: KeyPair) -> tuple[tuple[str, ...], dict[str, str]]:
        argv = (
            *agent_program(),
            *("--endpoint", endpoint),
            *("--server-key", server_key),
            *("--lease", lease),
        )
        environment = {
            env.LEASE_KEY: key.secret,
            env.GRACE_S: f"{grace_s:g}",
            env.HEALTH: written(plan),
        }
        return argv, environment

    return command
