"""The daemon's metrics for Prometheus.

Decides names, labels and buckets, and serves the metrics over HTTP. It measures nothing: the daemon
calls a method for each event. Labels have few values: only current jobs and nodes are shown, and at
most MAX_SHOWN_JOBS jobs. Names follow the Prometheus conventions (base units, ``_total``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from heapq import nlargest, nsmallest
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from malletrain.config.model import Config
from malletrain.core.step_times import SHARES

_RESCALE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 12, 18, 25, 40, 60, 120)
_PLAN_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 2, 5)
_LAG_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
BACKOFF_CAUSES = ("busy", "refused", "nothing")
COUNTED_RESCALES = ("start", "up", "down", "loss", "same")
LEASE_ENDS = ("released", "reclaimed", "sick", "preempted", "ended", "not-started", "not-yet")
SENDERS = ("agent", "client", "unknown")
NODE_USES = ("training", "free", "leaving")
STANDINGS = ("on_track", "at_risk", "infeasible", "missed")
ENDS = ("completed", "failed", "cancelled")
MAX_SHOWN_JOBS = 200
"""Maximum number of jobs with a label of their own in each metric. More would burden a site's
Prometheus.
"""
JOB_STATES = ("queued", "profiling", "running", "suspended", "completed", "failed", "cancelled")


class MetricsError(RuntimeError):
    """The metrics cannot be served; the message is a sentence for the operator."""


class Metrics:
    """All metrics of one daemon, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._server: tuple[WSGIServer, threading.Thread] | None = None

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"malletrain_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"malletrain_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"malletrain_{name}", text, labels, buckets=buckets, registry=registry)

        self._idle = gauge(
            "idle_nodes", "Nodes that the main scheduler leaves idle, as of the last poll."
        )
        self._leased = gauge("leased_nodes", "Nodes held now, by use.", "use")
        self._jobs = gauge("jobs", "Jobs by state.", "state")
        self._rate = gauge("job_samples_per_second", "Throughput of a job now.", "job")
        self._job_nodes = gauge("job_nodes", "Nodes a job runs on now.", "job")
        self._step_share = gauge(
            "job_step_share",
            "Share of a job's step by part: data (waiting for it), computing, others (waiting for "
            "other ranks), transfer, snapshot. Absent if not measured.",
            "job",
            "part",
        )
        self._ended = counter("jobs_ended_total", "Jobs that have ended, by final state.", "state")
        self._memory = gauge(
            "snapshot_memory_bytes", "Memory of a job's nodes that its snapshots occupy.", "job"
        )
        self._goals = gauge(
            "goals", "Unfinished jobs with a deadline or a budget, by standing.", "standing"
        )
        self._danger = gauge(
            "deadlines_in_danger",
            "Jobs that may miss their deadline and could still meet it with more nodes.",
        )
        self._slack = gauge(
            "job_deadline_slack_seconds", "A job's deadline less its forecast end.", "job"
        )
        self._budget = gauge("job_budget_left_node_seconds", "Remaining budget of a job.", "job")
        self._shown: set[str] = set()
        self._samples = counter("samples_total", "Samples processed by all jobs.")
        self._job_samples = gauge(
            "job_samples", "Samples a job has processed so far, over all its restarts.", "job"
        )
        self._rescales = counter("rescales_total", "Rescales finished, by kind.", "kind")
        self._rescale_seconds = histogram(
            "rescale_seconds",
            "Cost of a rescale: last sample before to first sample after.",
            _RESCALE_BUCKETS,
            "kind",
        )
        self._preemptions = counter(
            "preemptions_total",
            "Nodes the main scheduler took back, with or without notice.",
            "notice",
        )
        self._leased_nodes = gauge(
            "leased_node",
            "Nodes held now, one by one, by class and use; always 1.",
            "node",
            "node_class",
            "use",
        )
        self._leased_nodes_now: set[tuple[str, str, str]] = set()
        self._users_problems = gauge(
            "users_list_problems",
            "Ignored lines of the list of users, plus 1 if the list cannot be read.",
        )
        self._paused = gauge("leasing_paused", "1 while operators have paused leasing.")
        self._restricted = gauge(
            "restrained_nodes", "Nodes that operators have drained or excluded.", "how"
        )
        self._warm = gauge(
            "fork_server_bytes", "Total memory of warm fork servers on leased nodes."
        )
        self._sick = gauge("sick_nodes", "Nodes left alone now because they failed a health check.")
        self._leases_requested = counter("leases_requested_total", "Leases requested.")
        self._leases_ended = counter("leases_ended_total", "Leases ended, by reason.", "reason")
        self._plans = histogram("plan_seconds", "Time to find a plan.", _PLAN_BUCKETS)
        self._gap = gauge(
            "plan_gap",
            "Proven distance of the last plan from the best one, relative (0: it is the best).",
        )
        self._invalid = counter(
            "invalid_messages_total",
            "Messages refused because they did not fit the protocol, by sender.",
            "sender",
        )
        self._dropped = counter(
            "dropped_messages_total",
            "Messages dropped unread because too many of their sender waited, by kind of sender.",
            "sender",
        )
        self._failed = counter(
            "failed_messages_total",
            "Messages that the daemon failed to handle (a defect of it), by sender.",
            "sender",
        )
        self._poll_failures = counter(
            "poll_failures_total", "Polls of the main scheduler that failed."
        )
        self._polled = gauge(
            "last_poll_timestamp_seconds",
            "Time of the last poll that succeeded, seconds since the epoch.",
        )
        self._missed = gauge(
            "polls_missed",
            "Consecutive polls of the main scheduler without an answer, including a late one; 0 if "
            "it answers.",
        )
        self._calls = counter(
            "scheduler_calls_total",
            "Calls of the main scheduler, by command and outcome (ok, failed, busy, silent).",
            "command",
            "outcome",
        )
        self._last_calls: dict[tuple[str, str], int] = {}
        self._backoff = gauge(
            "scheduler_backoff_seconds",
            "Remaining seconds without lease requests: the main scheduler is busy, it refused "
            "submissions, or leases failed.",
            "cause",
        )
        self._failed_starts = gauge(
            "failed_starts",
            "Consecutive leases of one user from which no agent reported; 0 if there was none "
            "within an hour.",
        )
        self._node_seconds = counter("node_seconds_total", "Node time held, by use.", "use")
        self._charged = counter(
            "charged_node_seconds_total",
            "Node time of leases by the prices of their classes (price of a kind of slots, times "
            "accounting.charge_factor).",
            "node_class",
        )
        self._gpu_seconds = counter(
            "gpu_seconds_total", "GPU time of leased slots, by kind.", "node_class"
        )
        self._energy = counter(
            "energy_joules_total",
            "Energy of leased nodes, computed from accounting.watts.",
            "node_class",
        )
        self._lag = histogram(
            "event_loop_lag_seconds",
            "Delay with which the daemon's loop woke up.",
            _LAG_BUCKETS,
        )
        self._up = gauge("info", "Version of the running daemon; always 1.", "version")
        self.jobs({})
        self.nodes(0, 0, 0)
        self.restricted(False, 0, 0)
        for state in ENDS:
            self._ended.labels(state)
        self.goals({}, {}, {})
        # Counters start at 0, so that rate() shows the first event.
        for kind in COUNTED_RESCALES:
            self._rescales.labels(kind)
            self._rescale_seconds.labels(kind)
        for reason in LEASE_ENDS:
            self._leases_ended.labels(reason)
        for sender in SENDERS:
            self._invalid.labels(sender)
        for notice in ("yes", "no"):
            self._preemptions.labels(notice)
        for cause in BACKOFF_CAUSES:
            self._backoff.labels(cause)

    # --- updates ---

    def started(self, version: str) -> None:
        """Set the version of the running daemon."""
        self._up.labels(version).set(1)

    def nodes(self, training: int, free: int, leaving: int) -> None:
        """Set the numbers of leased nodes: with a job, without a job, and leaving.

        Args:
            training: number of nodes with a job.
            free: number of nodes without a job.
            leaving: number of nodes that are about to be taken back.
        """
        for use, count in zip(NODE_USES, (training, free, leaving), strict=True):
            self._leased.labels(use).set(count)

    def leased_nodes(self, nodes: Iterable[tuple[str, str, str]]) -> None:
        """Set the leased nodes: (node, class, one of NODE_USES) of each."""
        now = set(nodes)
        for removed in self._leased_nodes_now - now:
            self._leased_nodes.remove(*removed)
        for added in now - self._leased_nodes_now:
            self._leased_nodes.labels(*added).set(1)
        self._leased_nodes_now = now

    def users_problems(self, count: int) -> None:
        """Set the number of problems in the list of users."""
        self._users_problems.set(count)

    def restricted(self, paused: bool, drained: int, excluded: int) -> None:
        """Set what operators keep from being leased: whether leasing is paused, and the numbers of
        drained and excluded nodes.

        Args:
            paused: whether leasing is paused.
            drained: number of drained nodes.
            excluded: number of excluded nodes.
        """
        self._paused.set(paused)
        self._restricted.labels("drained").set(drained)
        self._restricted.labels("excluded").set(excluded)

    def jobs(self, by_state: Mapping[str, int]) -> None:
        """Set the number of jobs in each state; 0 for missing states."""
        for state in JOB_STATES:
            self._jobs.labels(state).set(by_state.get(state, 0))

    def job(self, job: str, rate: float, nodes: int, samples: float) -> bool:
        """Set the gauges of one job. Return whether it is shown.

        Args:
            job: id of the job.
            rate: current throughput, samples/s.
            nodes: number of its nodes.
            samples: samples processed so far.
        """
        if job not in self._shown and len(self._shown) >= MAX_SHOWN_JOBS:
            return False
        self._shown.add(job)
        self._rate.labels(job).set(rate)
        self._job_nodes.labels(job).set(nodes)
        self._job_samples.labels(job).set(samples)
        return True

    def step_shares(self, by_job: Mapping[str, Mapping[str, float]]) -> None:
        """Set job → part of a step → its share. Only jobs with other gauges are shown."""
        self._step_share.clear()
        for job, shares in by_job.items():
            if job in self._shown:
                for part, share in shares.items():
                    self._step_share.labels(job, part).set(share)

    def memory(self, by_job: Mapping[str, int]) -> None:
        """Set job → bytes of memory that its snapshots occupy on its nodes."""
        self._memory.clear()
        for job, number in nlargest(MAX_SHOWN_JOBS, by_job.items(), key=lambda each: each[1]):
            self._memory.labels(job).set(number)

    def goals(
        self,
        standings: Mapping[str, int],
        slack_s: Mapping[str, float],
        left_s: Mapping[str, float],
        in_danger: int = 0,
    ) -> None:
        """Set the gauges of deadlines and budgets. Only the jobs with the smallest values are
        shown.

        Args:
            standings: standing → number of jobs.
            slack_s: job → deadline minus forecast end, seconds.
            left_s: job → remaining budget, node-seconds.
            in_danger: number of jobs that may miss their deadline and could meet it with more
                nodes.

        """
        self._danger.set(in_danger)
        for standing in STANDINGS:
            self._goals.labels(standing).set(standings.get(standing, 0))
        for metric, values in ((self._slack, slack_s), (self._budget, left_s)):
            metric.clear()
            for job, value in nsmallest(MAX_SHOWN_JOBS, values.items(), key=lambda each: each[1]):
                metric.labels(job).set(value)

    def job_ended(self, job: str, state: str) -> None:
        """Count an ended job and remove its gauges. ``state``: one of ENDS."""
        self._ended.labels(state).inc()
        self._shown.discard(job)
        for metric in (self._rate, self._job_nodes, self._job_samples):
            with contextlib.suppress(KeyError):  # a job that never ran has no gauges
                metric.remove(job)
        for part in SHARES:
            with contextlib.suppress(KeyError):
                self._step_share.remove(job, part)

    def samples(self, count: float) -> None:
        """Count processed samples."""
        if count > 0:
            self._samples.inc(count)

    def node_seconds(self, use: str, seconds: float) -> None:
        """Count node time; ``use`` is one of NODE_USES."""
        if seconds > 0:
            self._node_seconds.labels(use).inc(seconds)

    def charged(self, node_class: str, node_seconds: float, gpu_seconds: float) -> None:
        """Count charged node time and GPU time of a class, seconds."""
        if node_seconds > 0:
            self._charged.labels(node_class).inc(node_seconds)
        if gpu_seconds > 0:
            self._gpu_seconds.labels(node_class).inc(gpu_seconds)

    def energy(self, node_class: str, joules: float) -> None:
        """Count energy of leased nodes of a class, joules."""
        if joules > 0:
            self._energy.labels(node_class).inc(joules)

    def rescale(self, kind: str, cost_s: float | None) -> None:
        """Count a finished rescale; ``cost_s`` is None if no sample followed it."""
        self._rescales.labels(kind).inc()
        if cost_s is not None:
            self._rescale_seconds.labels(kind).observe(cost_s)

    def preemption(self, notice: bool) -> None:
        """Count a preemption; ``notice``: whether the main scheduler gave notice."""
        self._preemptions.labels("yes" if notice else "no").inc()

    def warm(self, memory_bytes: int) -> None:
        """Set the memory of all fork servers on leased nodes."""
        self._warm.set(memory_bytes)

    def sick(self, count: int) -> None:
        """Set the number of nodes that are left alone because they failed a health check."""
        self._sick.set(count)

    def lease_requested(self, count: int = 1) -> None:
        """Count requested leases."""
        self._leases_requested.inc(count)

    def lease_ended(self, reason: str) -> None:
        """Count an ended lease; ``reason`` is one of LEASE_ENDS."""
        self._leases_ended.labels(reason).inc()

    def plan(self, seconds: float, gap: float) -> None:
        """Record a plan: its computing time, and its relative distance from the bound."""
        self._plans.observe(seconds)
        self._gap.set(gap)

    def dropped_messages(self, sender: str, number: int) -> None:
        """Count messages that were dropped unread; ``sender`` as in :meth:`invalid_message`."""
        self._dropped.labels(sender).inc(number)

    def invalid_message(self, sender: str) -> None:
        """Count an invalid message; ``sender`` is ``agent``, ``client`` or ``unknown``."""
        self._invalid.labels(sender).inc()

    def failed_message(self, sender: str) -> None:
        """Count a message that could not be handled; ``sender`` as in :meth:`invalid_message`."""
        self._failed.labels(sender).inc()

    def polled(self, time: float, idle_nodes: int) -> None:
        """Record a successful poll. ``time``: seconds since the epoch."""
        self._polled.set(time)
        self._idle.set(idle_nodes)

    def poll_failed(self) -> None:
        """Count a failed poll."""
        self._poll_failures.inc()

    def polls_missed(self, number: int) -> None:
        """Set the number of consecutive polls without an answer."""
        self._missed.set(number)

    def scheduler_calls(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set (command, outcome) → number of calls since the daemon's start."""
        for (command, outcome), count in counts.items():
            increment = count - self._last_calls.get((command, outcome), 0)
            if increment > 0:
                self._calls.labels(command, outcome).inc(increment)
        self._last_calls = dict(counts)

    def scheduler_backoff(self, cause: str, seconds: float) -> None:
        """Set the remaining seconds without lease requests; ``cause`` is one of BACKOFF_CAUSES."""
        self._backoff.labels(cause).set(seconds)

    def failed_starts(self, count: int) -> None:
        """Set the number of consecutive leases from which no agent reported."""
        self._failed_starts.set(count)

    def loop_lag(self, seconds: float) -> None:
        """Record by how many seconds the daemon's loop woke up late."""
        self._lag.observe(max(0.0, seconds))

    # --- serving ---

    def serve(self, listen: str) -> int:
        """Serve the metrics at ``HOST:PORT`` from a thread. Return the port, which the system
        chooses if 0 is given. Raises MetricsError.
        """
        host, _, port = listen.rpartition(":")
        try:
            self._server = start_http_server(int(port), host.strip("[]"), self.registry)
        except OSError as error:
            raise MetricsError(
                f"The metrics cannot be served at {listen}: {error.strerror}. Choose another "
                '[daemon] metrics_listen, or "off".'
            ) from None
        return int(self._server[0].server_port)

    def stop(self) -> None:
        """Stop serving, if the metrics are served."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()


def count_costs(
    metrics: Metrics,
    config: Config,
    prices: Mapping[str, float],
    leased: Mapping[tuple[str, bool], int],
    since_s: float,
) -> None:
    """Count what the leased nodes have cost: charged time, GPU time, energy.

    Args:
        metrics: the metrics.
        config: configuration of the site.
        prices: kind of slots → node-hours that one hour of a slot counts.
        leased: (class, whether a job is there) → number of leased nodes.
        since_s: seconds since the last call.
    """
    gpus = {kind.name: kind.gpus for kind in config.scheduler.table.slot_sections}
    watts_by_class = config.accounting.watts_by_class
    for (node_class, busy), count in leased.items():
        charge = config.accounting.charge_factor * prices.get(node_class, 1.0)
        gpu_s = count * gpus.get(node_class, 0) * since_s
        metrics.charged(node_class, count * charge * since_s, gpu_s)
        if watts := watts_by_class.get(node_class):
            metrics.energy(node_class, count * (watts.busy if busy else watts.idle) * since_s)
