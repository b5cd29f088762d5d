"""Runs the daemon: locks the state directory, listens, restores the state, polls, adopts jobs. On
SIGTERM it stops and leaves the jobs running.

After a failed transaction or a change of the host's clock it replaces its components and adopts the
jobs again within the same process. Agents and clients keep their connections.

Decides which changes of the clock matter. Stored times are shifted, so that durations computed from
them exclude the change. The time of a suspension of the host counts, because jobs continued. If two
services set the clock against each other, the daemon follows ``MAX_CHANGES`` of their changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from malletrain import __version__
from malletrain.config.model import Config, ConfigError
from malletrain.config.units import show_duration
from malletrain.core.unleased_nodes import EVERY_NODE
from malletrain.daemon.compose import Components, agent_command, compose
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.jobs.admission import RequestRefused
from malletrain.daemon.jobs.repository import Retention
from malletrain.daemon.server.message_router import MessageFailed
from malletrain.daemon.server.transport import Transport
from malletrain.daemon.site import logs
from malletrain.daemon.site.advertise import AddressError
from malletrain.daemon.site.backends import Backend, backend
from malletrain.daemon.site.clock import CHANGES_PERIOD_S, MAX_CHANGES, MIN_CHANGE_S, Clock
from malletrain.daemon.site.handler_failures import HandlerFailures, cause_of
from malletrain.daemon.site.metrics import NODE_USES, Metrics, MetricsError, count_costs
from malletrain.daemon.site.process import (
    MemoryTrim,
    allow_many,
    extended_start,
    freeze_objects,
    full_collections_rare,
    tell_service_manager,
)
from malletrain.daemon.site.startup import (
    claim_database,
    record_address,
    refusals,
    remember_database,
)
from malletrain.identity.keys import KeyRing
from malletrain.identity.state_directory import (
    INFO,
    DaemonInfo,
    StateDirError,
    lock_state_dir,
    remove_daemon_info,
    write_atomically,
    write_daemon_info,
)
from malletrain.identity.users import Users
from malletrain.protocol import messages
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.database import StatementRefused
from malletrain.store.ownership import BEAT_S, own
from malletrain.store.schema import shift_times
from malletrain.store.store import Store, StoreError
from scavenger.interface import SchedulerError


class ClockWasSet(RuntimeError):
    """The host's clock was set.

    Args:
        by_s: change of the clock, seconds; negative if it was set back.
        slept_s: time for which the host was suspended, seconds.
        last: whether the daemon does not follow the next changes for a while.

    """

    def __init__(self, by_s: float, slept_s: float = 0.0, last: bool = False) -> None:
        if slept_s >= MIN_CHANGE_S:
            span = show_duration(slept_s)
            super().__init__(f"The daemon's host was suspended for {span}.")
            return
        direction = "forward" if by_s > 0 else "back"
        span = show_duration(abs(by_s))
        often = (
            f" That was {MAX_CHANGES} times within {show_duration(CHANGES_PERIOD_S)}: something "
            "keeps setting it, and the daemon keeps its own time until changes are less frequent."
        )
        super().__init__(
            f"The clock of the daemon's host was set {direction} by {span}.{often if last else ''}"
        )


def look_at_the_clock(components: Components, clock: Clock) -> None:
    """Replace the components if the host's clock differs by at least ``MIN_CHANGE_S``."""
    state, transactions = components.state, components.transactions
    by_s, slept_s = clock.behind_s(), clock.slept_s()
    too_often = clock.sets() >= MAX_CHANGES and slept_s < MIN_CHANGE_S
    if abs(by_s) < MIN_CHANGE_S or too_often or transactions.failed.done():
        return
    with transactions.begin() as now:
        state.shares.keep(now, at_once=True)
        state.goals.keep(at_once=True)
        for run in state.runs.values():
            state.repository.save(run)
        with state.store.transaction() as connection:
            shift_times(connection, by_s - slept_s)
    transactions.fail(ClockWasSet(by_s, slept_s, last=clock.sets() == MAX_CHANGES - 1))


@dataclass(frozen=True)
class ComponentFailure:
    """Why the daemon's components have failed, and which agents they knew."""

    kind: EventKind
    """Kind of the event that records the failure."""
    sentence: str
    """Description of the failure for users."""
    peers: tuple[bytes, ...]
    """Connections of the agents that they knew."""

    @classmethod
    def of(cls, failure: BaseException, components: Components) -> ComponentFailure:
        """Return the description of the failure that ended these components."""
        has_sentence = isinstance(failure, MessageFailed | ClockWasSet)
        clock_set = isinstance(failure, ClockWasSet)
        return cls(
            EventKind.CLOCK_SET if clock_set else EventKind.MESSAGE_FAILED,
            str(failure) if has_sentence else f"The daemon failed: {cause_of(failure)}",
            tuple(agent.peer for agent in components.state.agents),
        )


def show_gauges(components: Components, metrics: Metrics, since_s: float) -> None:
    """Set all gauges.

    Args:
        components: the daemon's components.
        metrics: the metrics.
        since_s: seconds since the last call, for counters of node-seconds and energy.
    """
    state = components.state
    agents = list(state.agents)
    leased = [(agent.node, agent.node_class, use_of(agent)) for agent in agents]
    uses = Counter(use for *_, use in leased)
    metrics.nodes(*(uses[use] for use in NODE_USES))
    metrics.leased_nodes(leased)
    restrictions = components.leases.restrictions.now
    metrics.restricted(
        restrictions.paused is not None or EVERY_NODE in restrictions.drained,
        len(restrictions.drained.keys() - {EVERY_NODE}),
        len(restrictions.excluded),
    )
    metrics.warm(sum(agent.warm_bytes for agent in agents))
    for use in NODE_USES:
        metrics.node_seconds(use, uses[use] * since_s)
    busy = Counter((agent.node_class, agent.holds is not None) for agent in agents)
    count_costs(metrics, state.config, state.prices, busy, since_s)
    components.leases.update_health()
    metrics.jobs(Counter(job.state.value for job in state.controller.jobs.values()))
    metrics.memory(state.agents.memory())
    now = state.clock.now()
    shares = {}
    for run in state.runs.values():
        if run.row.started is not None:
            job = run.row.id
            if metrics.job(job, run.rate(now), len(run.nodes), run.monitor.total):
                shares[job] = run.step_shares()
    metrics.step_shares(shares)


def use_of(agent: LeasedAgent) -> str:
    """Return the current use of a leased node, one of NODE_USES."""
    if agent.gone_at is not None:
        return "leaving"
    return "training" if agent.holds is not None else "free"


log = structlog.get_logger(__name__)

WATCH_EVERY_S = 0.5
"""Interval of the periodic checks, seconds."""
LOST_WAIT_S = 600.0
"""Maximum time for which a start waits for the end of leases whose agents cannot find the daemon,
seconds.
"""


def run(config: Config, path: Path | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT. Return the exit code (0: stopped by a signal, 1:
    could not run). ``path``: file of the configuration, for reloads.
    """
    section = config.daemon
    allow_many()
    try:
        with contextlib.ExitStack() as stack:
            file = None
            if section.log_file is not None:
                file = stack.enter_context(
                    contextlib.closing(logs.RotatedLog(section.log_file, section.log_file_limit))
                )
            logs.configure(section.log_level, section.log_format, file)
            stack.enter_context(lock_state_dir(config.state_dir))
            if problems := refusals(config):
                for sentence in problems:
                    print(f"malletraind: {sentence}", file=sys.stderr)
                return 1
            owned = stack.enter_context(own(config.database_url, _daemon_name(config), _stand_by))
            with extended_start():
                store = Store.open(config.database_url, owned.verify)
            with store:
                remember_database(config)
                daemon = Daemon(config, store, backend(config), path, file, owned.check)
                return asyncio.run(daemon.serve())
    except (StateDirError, StoreError, SchedulerError, MetricsError, AddressError, OSError) as e:
        print(f"malletraind: {e}", file=sys.stderr)
        return 1


def _daemon_name(config: Config) -> str:
    """Return the name of this daemon among those that share a database."""
    return f"malletraind {socket.gethostname()} pid {os.getpid()} {config.state_dir}"


def _stand_by(owner: str) -> None:
    """Report that this daemon waits for the database of another one. The service manager is
    notified, too, because it would take a waiting daemon for one that failed to start.
    """
    log.warning("the database is another daemon's; this one waits and takes over", owner=owner)
    tell_service_manager(f"READY=1\nSTATUS=Waits for the database, which {owner} has.")


def _all_reported(state: SiteState) -> bool:
    """Whether the agents of all running leases have sent Hello."""
    running = [row.id for row in state.lease_rows.active.values() if row.started]
    return all(state.agents.of_lease(lease) for lease in running)


class Daemon:
    """The daemon's process, from its start to its end."""

    def __init__(
        self,
        config: Config,
        store: Store,
        scheduler: Backend,
        path: Path | None = None,
        log_file: logs.RotatedLog | None = None,
        others: Callable[[], list[str]] = list,
    ) -> None:
        self.config = config
        self._path, self._log_file, self._others = path, log_file, others
        self.endpoint = ""
        """Address at which agents and clients reach it; empty before it listens."""
        self._lost_agents = ""
        """Why the agents of earlier leases cannot find it, as a sentence; empty if they can.
        """
        self.components: Components | None = None
        """Its components; None before the main scheduler is connected."""
        self.users = Users(config.daemon.users) if config.daemon.users is not None else None
        self._users_problems: tuple[str, ...] = ()
        self.keys = KeyRing(
            config.state_dir,
            lookup=self.users.user_of if self.users is not None else lambda key: None,
            unauthenticated=config.daemon.several_users,
        )
        claim_database(config, store)
        self._store = store
        self._scheduler = scheduler
        self._boot = str(store.boot())
        self._clock = Clock()
        self.metrics = Metrics()
        self.handler_failures = HandlerFailures(self.metrics, time.monotonic)
        self._retention = Retention(
            store, config.logs_dir, config.accounting.keep, config.jobs.keep_logs
        )
        self._memory_trim = MemoryTrim()
        self._transport = Transport(self.keys.server, self.keys.identity)

    async def serve(self) -> int:
        """Run until a signal to stop, or an error that restarting the components does not cure."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        reload_requested = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, reload_requested.set)
        try:
            bound = self._listen()
            host = await asyncio.to_thread(self._scheduler.host, self.config)
            self.endpoint = f"tcp://{host}:{bound.rpartition(':')[2]}"
            await asyncio.to_thread(self._scheduler.prepare, self.config)
            server_key = self.keys.server.public
            self._lost_agents = record_address(self.config, self._store, server_key, self.endpoint)
            self.components = self._connect()
            self._serve_metrics()
            self.metrics.started(__version__)
            with full_collections_rare():
                # Nothing here refers to the failed components, else freeze_objects would keep
                # their memory.
                failed = await self._live(self.components, stop, reload_requested)
                while failed is not None:
                    self.components = self._connect()
                    failed = await self._live(self.components, stop, reload_requested, failed)
            return 0
        finally:
            tell_service_manager("STOPPING=1")
            self.metrics.stop()
            self._transport.stop()

    def _serve_metrics(self) -> None:
        """Serve the metrics. Raises MetricsError if a required address is not available."""
        settings = self.config.daemon
        if not settings.metrics_listen:
            return
        try:
            log.info("metrics", port=self.metrics.serve(settings.metrics_listen))
        except MetricsError as error:
            if settings.metrics_required:
                raise
            log.warning("no metrics", reason=str(error))

    async def _live(
        self,
        components: Components,
        stop: asyncio.Event,
        reload_requested: asyncio.Event,
        before: ComponentFailure | None = None,
    ) -> ComponentFailure | None:
        """Serve with these components until a signal to stop, or until they have failed.

        Args:
            components: the components.
            stop: set by a signal to stop.
            reload_requested: set by a signal to reload the configuration.
            before: failure of the previous components; None at the start of the daemon.

        Returns:
            The failure, after which new components can take over; None after a signal to stop.

        """
        loop, tasks = asyncio.get_running_loop(), []
        try:
            await components.associations.learn()
            # Restore first: agents may have called already, and report earlier jobs.
            wait_s = self._restore(components, before)
            reached(FaultPoint.DAEMON_RESTORED)
            freeze_objects()
            self._transport.serve(components.message_router)
            for peer in before.peers if before is not None else ():
                self._transport.send(peer, messages.WhoAreYou(self._boot))
            for work in (
                self._lead(components, wait_s),
                components.leases.run(),
                components.leases.work(),
                components.notices.run(),
                components.associations.run(),
                self._watch(components),
                self._reload(components, reload_requested),
                self._keep_database(),
            ):
                tasks.append(loop.create_task(work))
                tasks[-1].add_done_callback(components.transactions.task_ended)
            if before is None:
                self._announce()
                tell_service_manager("READY=1")
            failure = await self._until(stop, components)
        finally:
            self._transport.hold()
            components.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failure is None:
            return None
        await components.leases.quiet()
        self.config = components.state.config  # with what was reloaded
        self._boot = str(self._store.boot())
        return ComponentFailure.of(failure, components)

    def _connect(self) -> Components:
        return compose(
            self.config,
            self._store,
            self.keys,
            self._clock,
            self.metrics,
            self._scheduler.connect(self.config),
            self.endpoint,
            agent_command(
                self.endpoint,
                self.keys.server.public,
                self._scheduler.grace_s(self.config),
                self.config.nodes,
            ),
            self._transport.send,
            self._boot,
            self.handler_failures,
            self._retention,
            self._path,
            self._log_file,
            self.users,
        )

    async def _until(self, stop: asyncio.Event, components: Components) -> BaseException | None:
        state, transactions = components.state, components.transactions
        waiting = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [waiting, transactions.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if transactions.failed.done():
            error = transactions.failed.exception()
            assert error is not None
            if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
                raise error  # nothing can be stored: the service manager restarts the daemon
            has_sentence = isinstance(error, MessageFailed | ClockWasSet)
            if not (has_sentence or self.handler_failures.may_begin_anew(error)):
                raise error
            if isinstance(error, ClockWasSet):
                self._clock.set()
            return error
        with transactions.begin() as now:
            state.shares.keep(now, at_once=True)
            for run in state.runs.values():
                state.repository.save(run)
            running = sum(bool(run.rounds.members) for run in state.runs.values())
            nodes = len(list(state.agents))
            state.audit.record(
                EventKind.DAEMON_STOPPED,
                f"The daemon stops; {counted(running, 'job')} "
                f"{'continues' if running == 1 else 'continue'} without it on "
                f"{counted(nodes, 'node')}.",
            )
        # The announcement to the site stays: it is valid again at the next start.
        remove_daemon_info(self.config.state_dir / INFO)
        return None

    def _restore(self, components: Components, before: ComponentFailure | None) -> float:
        """Take over the jobs and leases in the store. Return the maximum time to wait for agents,
        seconds.
        """
        state, lease_count = components.state, len(components.leases.active)
        wait = self.config.daemon.adopt_wait if lease_count else 0.0
        state.controller.hold(state.clock.now() + wait + 60.0)
        components.leases.slot_prices.restore()
        components.jobs.restore()
        inventory = (
            f"{counted(len(state.runs), 'unfinished job')} and {counted(lease_count, 'lease')}"
        )
        if before is None:
            kind, sentence = EventKind.DAEMON_STARTED, f"The daemon runs; it knows {inventory}."
        else:
            kind = before.kind
            sentence = (
                f"{before.sentence} It has taken over {inventory} again; the jobs "
                "continued meanwhile."
            )
        with components.transactions.begin():
            state.audit.record(kind, sentence, boot=self._boot)
        return wait

    async def _lead(self, components: Components, wait_s: float) -> None:
        """Wait for the agents to report, then adopt the jobs and start to plan."""
        loop = asyncio.get_running_loop()
        due = loop.time() + wait_s
        # both reports and ends of leases count: polling is simpler than two notifications
        while loop.time() < due and not _all_reported(components.state):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if self._lost_agents:
            await self._end_lost(components)
        reached(FaultPoint.DAEMON_ADOPTS)
        components.agent_handlers.adopt()
        reached(FaultPoint.DAEMON_ADOPTED)

    async def _end_lost(self, components: Components) -> None:
        """End the leases whose agents cannot find this daemon, and wait until they have ended, so
        that no job runs twice at once.
        """
        sentence, self._lost_agents = self._lost_agents, ""
        with components.transactions.begin() as now:
            lost = components.leases.end_lost(sentence)
            components.state.controller.hold(now + LOST_WAIT_S + 60.0)
        if not lost:
            return
        log.warning("leases ended", reason=sentence, leases=sorted(lost))
        due = asyncio.get_running_loop().time() + LOST_WAIT_S
        while asyncio.get_running_loop().time() < due:
            if not lost & components.leases.active.keys():
                return
            await asyncio.sleep(0.1)
        log.warning("leases have not ended", leases=sorted(lost & components.leases.active.keys()))

    async def _watch(self, components: Components) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + WATCH_EVERY_S
            await asyncio.sleep(WATCH_EVERY_S)
            self.metrics.loop_lag(loop.time() - due)
            look_at_the_clock(components, self._clock)
            components.agent_handlers.watch()
            components.check_waiting()
            self._look_at_users()
            components.message_router.end_waiting()
            with components.transactions.begin():
                components.state.goals.keep()
            self._retention.delete_old(self._clock.now())
            connection_bytes = self._transport.connection_bytes
            self._transport.end_unreadable(self._memory_trim.swollen(connection_bytes))
            self._memory_trim.update(time.monotonic(), connection_bytes)
            show_gauges(components, self.metrics, WATCH_EVERY_S)

    def _look_at_users(self) -> None:
        """Log each problem of the list of users once. If the list cannot be read, removed users
        still have access; a user whose line is wrong has none.
        """
        if self.users is None:
            return
        self.users.user_of("")
        before, self._users_problems = self._users_problems, self.users.problems()
        for problem in self._users_problems:
            if problem not in before:
                log.warning("list of users not read whole", reason=problem)
        self.metrics.users_problems(len(self._users_problems))

    async def _keep_database(self) -> None:
        """Check periodically that the database still belongs to this daemon, and log which other
        daemons wait for it.
        """
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(BEAT_S)
            others = set(await asyncio.to_thread(self._others))
            for other in others - waiting:
                log.warning("another daemon waits for the database of this one", waiting=other)
            waiting = others

    async def _reload(self, components: Components, reload_requested: asyncio.Event) -> None:
        """Reload the configuration at each SIGHUP."""
        while True:
            await reload_requested.wait()
            reload_requested.clear()
            try:
                config = await asyncio.to_thread(components.reload.read)
            except (ConfigError, RequestRefused) as error:
                components.reload.failed(str(error), "SIGHUP")
            else:
                changes_ = components.reload.apply(config, "SIGHUP")
                log.info("configuration reloaded", **changes_)

    # --- address ---

    def _listen(self) -> str:
        """Bind the address. Port 0 means the port of the last start, because agents of a daemon
        that was killed reconnect to that.
        """
        listen, port_file = self.config.daemon.listen, self.config.state_dir / "port"
        if not listen.endswith(":0"):
            return self._transport.bind(listen)
        if port_file.exists():
            try:
                return self._transport.bind(listen[:-1] + port_file.read_text().strip())
            except OSError as e:
                log.warning(
                    "the last port is taken; agents of the last daemon will not find this one",
                    reason=str(e),
                )
        bound = self._transport.bind(listen)
        write_atomically(port_file, bound.rpartition(":")[2] + "\n")
        return bound

    def _announce(self) -> None:
        info = DaemonInfo(
            self.endpoint,
            self.keys.server.public,
            os.getpid(),
            socket.gethostname(),
            __version__,
            self._clock.now(),
        )
        write_daemon_info(self.config.state_dir / INFO, info)
        if self.config.daemon.announce is not None:
            write_daemon_info(self.config.daemon.announce, info)
        self._look_at_users()
        log.info("listening", endpoint=self.endpoint, state_dir=str(self.config.state_dir))
