"""Builds a daemon: creates all components and connects them. Decides nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from malletrain.config.model import Config
from malletrain.config.nodes import NodesSection
from malletrain.daemon.agent_handlers import AgentHandlers
from malletrain.daemon.agent_python import agent_program
from malletrain.daemon.api import Api
from malletrain.daemon.association_watch import AssociationWatch
from malletrain.daemon.batch import slurm_associations
from malletrain.daemon.clock import Clock
from malletrain.daemon.core import Core
from malletrain.daemon.daemon_state import Send, make_daemon_state
from malletrain.daemon.departures import Departures
from malletrain.daemon.handler_failures import HandlerFailures
from malletrain.daemon.job_dependencies import JobDependencies
from malletrain.daemon.lease_actions import AgentCommand, LeaseActions
from malletrain.daemon.lease_reconciler import LeaseReconciler
from malletrain.daemon.login import Login
from malletrain.daemon.logs import RotatedLog
from malletrain.daemon.logsink import LogSink
from malletrain.daemon.message_router import MessageRouter
from malletrain.daemon.metrics import Metrics
from malletrain.daemon.notices import Notices
from malletrain.daemon.reload import Reload
from malletrain.daemon.retention import Retention
from malletrain.identity.keys import KeyPair, KeyRing
from malletrain.identity.users import Munge
from malletrain.protocol import env
from malletrain.protocol.health import HealthPlan, written
from malletrain.store.store import Store
from scavenger.interface import Scavenger


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
    notices: Notices
    associations: AssociationWatch
    reload: Reload


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
    agent_handlers = AgentHandlers(core, state, departures, lease_actions, logs, boot)
    leases = LeaseReconciler(core, state, lease_actions, departures, keys, scavenger, endpoint)
    munge = Munge(config.daemon.munge_socket) if config.daemon.munge else None
    dependencies = JobDependencies(core)
    notices = Notices(core, config.notify)
    reload = Reload(path, core, state, scavenger, notices, retention, log_file)
    api = Api(
        core,
        state,
        leases,
        dependencies,
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
