"""Builds a daemon: creates all components and connects them. Decides nothing else.

:class:`AssociationWatch` reads Slurm's accounts and shares at the start and periodically;
:mod:`malletrain.daemon.engine.parties` decides what follows from them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import structlog

from jpa.costs import RescaleCosts
from malletrain.config.model import Config
from malletrain.config.nodes import NodesSection
from malletrain.core.controller import Controller
from malletrain.core.events import Event
from malletrain.core.unleased_nodes import FailingNodes
from malletrain.daemon.api.changes import Reload
from malletrain.daemon.api.notices import Notices
from malletrain.daemon.api.operations import Api
from malletrain.daemon.api.service_operations import ArrivingFarms
from malletrain.daemon.engine.agents import Agents, LivenessMonitor
from malletrain.daemon.engine.decisions import Decisions, Reachability
from malletrain.daemon.engine.parties import Accounts, Parties, ShareKeeper
from malletrain.daemon.engine.round_shell import RoundShell
from malletrain.daemon.engine.state import (
    LeaseRows,
    MemberNews,
    Send,
    SiteState,
    TransactionOutbox,
    sick_nodes,
    slow_nodes,
)
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import JobDependencies, ServiceValues, UnfinishedJobs
from malletrain.daemon.jobs.curves import Curves
from malletrain.daemon.jobs.goals import JobGoals
from malletrain.daemon.jobs.layouts import Layouts, NodeShape
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import JobRepository, Retention
from malletrain.daemon.leases.actions import AgentCommand, LeaseActions
from malletrain.daemon.leases.arrivals_and_departures import Departures
from malletrain.daemon.leases.reconciler import LeaseReconciler
from malletrain.daemon.nodes.agent_handlers import AgentHandlers
from malletrain.daemon.nodes.commands import RelayedCommands
from malletrain.daemon.nodes.farms import Farms
from malletrain.daemon.server.message_router import Login, MessageRouter
from malletrain.daemon.site.backends import agent_program, slurm_associations
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.handler_failures import HandlerFailures
from malletrain.daemon.site.logs import AuditLog, RotatedLog
from malletrain.daemon.site.metrics import Metrics
from malletrain.daemon.site.settings import controller_settings, planner
from malletrain.identity.keys import KeyPair, KeyRing
from malletrain.identity.users import Munge, Users
from malletrain.protocol import env
from malletrain.protocol.bounds import MAX_PROCESSES
from malletrain.protocol.site_rules import HealthPlan, written
from malletrain.store.store import Store
from scavenger.interface import Scavenger, SchedulerError
from scavenger.slurm.associations import Associations

log = structlog.get_logger(__name__)


class AssociationWatch:
    """Keeps the parties of one daemon up to date. ``read``: queries Slurm; None if accounts are not
    read from Slurm.
    """

    def __init__(
        self, state: SiteState, transactions: Transactions, read: Callable[[], Associations] | None
    ) -> None:
        self._state = state
        self._transactions = transactions
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
        with self._transactions.begin():
            self._state.parties.learned(associations)
            self._state.controller.shares.set_weights(self._state.parties.weights())

    async def run(self) -> None:
        """Read the associations periodically, until cancelled."""
        interval_s = self._state.config.shares.refresh
        while self._read is not None:
            await asyncio.sleep(interval_s)
            await self.learn()


@dataclass(frozen=True)
class Components:
    """The parts of a running daemon, which :mod:`malletrain.daemon.main` starts, uses and stops."""

    state: SiteState
    transactions: Transactions
    jobs: UnfinishedJobs
    agent_handlers: AgentHandlers
    leases: LeaseReconciler
    lease_actions: LeaseActions
    api: Api
    commands: RelayedCommands
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

    def close(self) -> None:
        """Cancel all timers."""
        self.message_router.close()
        self.jobs.close()
        self.transactions.close()


def shape_of(agents: Agents, node: str) -> NodeShape | None:
    """Return what a node has for the processes of a job; None if its agent is not connected."""
    agent = agents.on(node)
    if agent is None:
        return None
    return NodeShape(min(max(1, agent.cores), MAX_PROCESSES), agent.gpus, agent.node_class)


def make_site_state(
    config: Config,
    store: Store,
    clock: Clock,
    metrics: Metrics,
    send: Send,
    job_key_of: Callable[[str], str],
) -> SiteState:
    """Create the state of a daemon.

    Args:
        config: the site's configuration.
        store: the database.
        clock: the daemon's clock.
        metrics: counters for Prometheus.
        send: sends a message to a peer, and returns whether it could be reached.
        job_key_of: returns the secret that the processes of a service share; argument: id of the
            job.
    """
    events: deque[Event] = deque()
    member_news = MemberNews()
    outbox = TransactionOutbox(send)
    accounts = Accounts(config)
    audit = AuditLog(store, clock)
    repository = JobRepository(store, clock, metrics, audit)
    controller = Controller(controller_settings(config), planner(config, perf_counter))
    agents = Agents(outbox.post, accounts.of)
    failing = FailingNodes()
    cost = controller.settings.planning.cost
    costs = RescaleCosts(cost.up_s, cost.down_s, cost.start_s)
    curves = Curves(store, clock, controller, costs)
    layouts = Layouts(
        store,
        clock,
        audit,
        partial(shape_of, agents),
        curves,
        events.append,
        config.profiling.layout_time,
    )
    rounds = RoundShell(
        config,
        clock,
        agents,
        repository,
        audit,
        events.append,
        job_key_of,
        controller.state.lasts_s,
        failing,
        layouts,
        member_news.came,
    )
    return SiteState(
        config=config,
        store=store,
        clock=clock,
        metrics=metrics,
        accounts=accounts,
        parties=Parties(config),
        controller=controller,
        audit=audit,
        repository=repository,
        curves=curves,
        layouts=layouts,
        goals=JobGoals(store, clock, controller, metrics),
        lease_rows=LeaseRows(store),
        shares=ShareKeeper(controller, store),
        agents=agents,
        rounds=rounds,
        outbox=outbox,
        member_news=member_news,
        events=events,
        sick=sick_nodes(config, store, clock.now()),
        failing=failing,
        slow=slow_nodes(config, store, clock.now()),
        liveness=LivenessMonitor(config.daemon.agent_timeout, config.daemon.heartbeat),
    )


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
    users: Users | None,
) -> Components:
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
        users: the list of users; None if there is none.
    """
    state = make_site_state(config, store, clock, metrics, send, keys.job_key)
    logs = LogSink(config.logs_dir, config.jobs.log_limit)
    departures = Departures(state, logs)
    lease_actions = LeaseActions(state, departures, keys, command)
    reachability = Reachability(state)
    transactions = Transactions(state, Decisions(state, reachability, lease_actions))
    jobs = UnfinishedJobs(state, transactions)
    values = ServiceValues(state, transactions, jobs)
    farms = Farms(state, transactions, jobs)
    commands = RelayedCommands(state)
    agent_handlers = AgentHandlers(
        state,
        transactions,
        jobs,
        reachability,
        departures,
        lease_actions,
        logs,
        farms,
        values,
        commands,
        boot,
    )
    leases = LeaseReconciler(
        state, transactions, lease_actions, departures, keys, scavenger, endpoint
    )
    munge = Munge(config.daemon.munge_socket) if config.daemon.munge else None
    dependencies = JobDependencies(state, transactions, jobs)
    arriving = ArrivingFarms(state, transactions, dependencies)
    notices = Notices(state, transactions, config.notify)
    reload = Reload(path, state, transactions, scavenger, notices, retention, log_file)
    api = Api(
        state,
        transactions,
        jobs,
        leases,
        dependencies,
        arriving,
        farms,
        values,
        logs,
        commands,
        boot,
        scavenger.name,
        handler_failures,
        reload,
        users.problems if users is not None else tuple,
    )
    read = partial(slurm_associations, config) if config.shares.weights_from == "slurm" else None
    return Components(
        state,
        transactions,
        jobs,
        agent_handlers,
        leases,
        lease_actions,
        api,
        commands,
        MessageRouter(
            state,
            transactions,
            agent_handlers,
            api,
            Login(keys, munge, users.is_ignored if users is not None else None),
            handler_failures,
            keys.identity,
        ),
        dependencies,
        arriving,
        notices,
        AssociationWatch(state, transactions, read),
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
        nodes: section with the site's health checks and rules for shared hosts.
    """
    plan = HealthPlan(
        check=tuple(nodes.health_check),
        interval_s=nodes.health_interval,
        timeout_s=nodes.health_timeout,
        gpus=nodes.gpu_check,
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
            env.SHARING: written(nodes.sharing),
        }
        return argv, environment

    return command
