"""Forwards the reports of workers to the daemon. Validates and combines them, and keeps them while
the daemon is away.

Decides which reports are forwarded and how often: the newest counts of each worker at most every
FLUSH_INTERVAL_S (they are cumulative), the first value of a metric at once and further values of
that metric METRICS_INTERVAL_S later, all other reports at once. After a reconnection the newest
counts and metrics are sent again, because it is unknown which of them arrived.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from malletrain.protocol import bounds, messages
from malletrain.protocol import worker_channel as local
from malletrain.protocol.fault_points import FaultPoint, reached

FLUSH_INTERVAL_S = 0.2
METRICS_INTERVAL_S = 0.5
_MAX_ENTRIES = 256
"""Maximum number of workers, of metrics and of unsent messages that are kept."""
_MAX_DATAGRAMS_PER_READ = 512

log = logging.getLogger("malletrain.agent")

NO_SNAPSHOTS_NOTICE = (
    "The script keeps no snapshot: the job started from the beginning when its nodes changed, and "
    "will at every change. Add malletrain.Snapshot to it (docs/training-scripts.md)."
)
"""Notice to the owner of a job in restart mode at its first rescale."""


@dataclass(frozen=True)
class DrainServed:
    """A worker has served a drain request."""

    generation: int
    """Number of the round."""
    number: int
    """Number of the request."""
    saved: bool
    """Whether the worker has saved."""
    sentence: str
    """The reason, if it has not."""


class WorkerReports:
    """The reports of the workers of one job.

    Args:
        job: id of the job.
        send: sends a message to the daemon. Returns False if the daemon is away.
        tuned: whether the daemon needs the facts on which the layouts depend that the job may get.
    """

    def __init__(
        self, job: str, send: Callable[[messages.Message], bool], *, tuned: bool = False
    ) -> None:
        self.job = job
        self._tuned = tuned
        self.capable: set[int] = set()
        """Rounds in which a worker here takes snapshots on request."""
        self._send = send
        self._counts: OrderedDict[tuple[int, int, int], messages.Progress] = OrderedDict()
        self._metrics: OrderedDict[tuple[int, str], messages.Metric] = OrderedDict()
        self._over: dict[tuple[int, int, int], int] = {}
        """Number of reported steps of each worker that has no samples left to train on."""
        self._between: dict[tuple[int, int, int], int] = {}
        """Number of reported steps of each worker in the code after the steps of an epoch."""
        self._points: dict[tuple[int, int, str], list[messages.MetricSample]] = {}
        """Unsent values of each metric."""
        self._due: dict[tuple[int, int, str], float] = {}
        """Time at which further values of a metric are sent."""
        self._unsent: set[tuple[int, int, int]] = set()
        self._backlog: deque[messages.Message] = deque(maxlen=_MAX_ENTRIES)

    def take_all(self, datagrams: Iterable[local.Datagram], now: float) -> list[DrainServed]:
        """Handle datagrams of workers, and send the metrics that are due. Return the drains that
        were served. ``now``: seconds of a monotonic clock.
        """
        served = [drain for datagram in datagrams if (drain := self.take(datagram)) is not None]
        self._flush_metrics_due(now)
        return served

    def take(self, datagram: local.Datagram) -> DrainServed | None:
        """Handle a datagram of a worker. Return the drain that it serves, if any."""
        sender = datagram.sender
        if sender.job != self.job:
            return None  # a late datagram of a job that was here before
        match datagram:
            case local.WorkerProgress():
                key = (sender.generation, sender.rank, sender.pid)
                self._counts[key] = messages.Progress(
                    self.job,
                    sender.generation,
                    sender.rank,
                    sender.pid,
                    float(datagram.samples),
                    datagram.steps,
                    float(datagram.batch),
                    datagram.first,
                    datagram.last,
                    datagram.busy,
                    datagram.data,
                    datagram.exchange,
                    datagram.snapshot,
                )
                self._counts.move_to_end(key)
                for ends in (self._over, self._between):
                    if datagram.steps > ends.get(key, datagram.steps):
                        del ends[key]  # it has continued to train
                self._unsent.add(key)
                while len(self._counts) > _MAX_ENTRIES:
                    self._unsent.discard(self._counts.popitem(last=False)[0])
            case local.StartupMark():
                self._send_or_queue(
                    messages.Mark(
                        self.job, sender.generation, sender.rank, datagram.name, datagram.time
                    )
                )
            case local.ScriptMetric():
                self._add_metric(datagram)
            case local.SnapshotTaken():
                data: dict[str, bounds.Fact] = {
                    "saved": datagram.saved,
                    "path": datagram.path,
                    "bytes": datagram.bytes,
                    "seconds": datagram.seconds,
                    "samples": datagram.samples,
                    "steps": datagram.steps,
                    "nodes": datagram.nodes,
                    "replicated": datagram.replicated,
                    "generation": sender.generation,
                }
                self._send_or_queue(
                    messages.Notice(self.job, sender.rank, "snapshot", datagram.sentence, data)
                )
            case local.ModelFacts():
                facts: dict[str, bounds.Fact] = {
                    "parameters": datagram.parameters,
                    "flops_per_sample": datagram.flops_per_sample,
                }
                self._send_or_queue(messages.Notice(self.job, sender.rank, "profile", "", facts))
            case local.WorkLeft():
                key = (sender.generation, sender.rank, sender.pid)
                if datagram.samples == 0:
                    self._over[key] = self._steps_of(key)
                    return None  # the daemon knows the amount of work from earlier reports
                self._over.pop(key, None)
                work: dict[str, bounds.Fact] = {
                    "left": float(datagram.samples),
                    "generation": sender.generation,
                }
                self._send_or_queue(messages.Notice(self.job, sender.rank, "work", "", work))
            case local.BetweenEpochs():
                key = (sender.generation, sender.rank, sender.pid)
                if datagram.entered:
                    self._between[key] = self._steps_of(key)
                else:
                    self._between.pop(key, None)
            case local.Capable():
                self.capable.add(sender.generation)
                self._send_layout_fact(sender, {"saves": True})
            case local.BatchFacts():
                self._send_layout_fact(sender, {"global_batch": datagram.global_batch})
                if datagram.global_batch and datagram.base_batch:
                    batch: dict[str, bounds.Fact] = {
                        "current": datagram.global_batch,
                        "base": datagram.base_batch,
                        "most": datagram.most,
                        "noise_scale": datagram.noise_scale,
                    }
                    self._send_or_queue(messages.Notice(self.job, sender.rank, "batch", "", batch))
            case local.DataCacheFacts():
                reads: dict[str, bounds.Fact] = {
                    name: value for name, value in vars(datagram).items() if name != "sender"
                }
                reads["process"] = f"{sender.generation}.{sender.pid}"
                self._send_or_queue(messages.Notice(self.job, sender.rank, "data", "", reads))
            case local.OwnerNotice():
                self._send_or_queue(
                    messages.Notice(self.job, sender.rank, "script", datagram.sentence)
                )
            case local.DrainDone():
                reached(FaultPoint.AGENT_DRAINED)
                return DrainServed(
                    sender.generation, datagram.number, datagram.saved, datagram.sentence
                )
        return None

    def _send_layout_fact(self, sender: local.Sender, facts: dict[str, bounds.Fact]) -> None:
        if self._tuned:
            facts["generation"] = sender.generation
            self._send_or_queue(messages.Notice(self.job, sender.rank, "layout", "", facts))

    def ranks(self, generation: int) -> dict[int, int]:
        """Return the rank of each worker of a round that has reported, by process id."""
        return {pid: rank for g, rank, pid in self._counts if g == generation}

    def _steps_of(self, key: tuple[int, int, int]) -> int:
        counted = self._counts.get(key)
        return counted.steps if counted is not None else 0

    def is_between_epochs(self, generation: int) -> bool:
        """Return whether a worker of a round is in the code after the steps of an epoch."""
        return any(key[0] == generation for key in self._between)

    def is_over(self, generation: int) -> bool:
        """Return whether a worker of a round has reported that no samples are left."""
        return any(key[0] == generation for key in self._over)

    def trains_unsaved(self, generation: int) -> bool:
        """Return whether a worker of a round has trained here while none takes snapshots on
        request.
        """
        trained = any(g == generation and c.samples for (g, *_), c in self._counts.items())
        return trained and generation not in self.capable

    def flush(self) -> None:
        """Send the newest counts that have not been sent yet."""
        for key in [key for key in self._counts if key in self._unsent]:
            if not self._send(self._counts[key]):
                return
            self._unsent.discard(key)

    def flush_due(self, now: float) -> None:
        """Send the counts and the metrics that are due. ``now``: seconds of a monotonic clock."""
        self.flush()
        self._flush_metrics_due(now)

    def _flush_metrics_due(self, now: float) -> None:
        due = [key for key in self._points if now >= self._due.get(key, now)]
        if due:
            self.flush_metrics(due)
            if len(self._due) > _MAX_ENTRIES:
                self._due.clear()
            self._due.update(dict.fromkeys(due, now + METRICS_INTERVAL_S))

    def flush_metrics(self, which: Collection[tuple[int, int, str]] | None = None) -> None:
        """Send the unsent values of metrics, after the counts that belong to them. ``which``: the
        metrics; None for all.
        """
        self.flush()
        for key in list(self._points) if which is None else which:
            (generation, rank, name), points = key, self._points[key]
            last = points[-1].value
            metric = messages.Metric(self.job, rank, name, last, generation, tuple(points))
            if not self._send(metric):
                return  # it is sent after the reconnection
            del self._points[key]
            self._metrics[rank, name] = metric
            self._metrics.move_to_end((rank, name))
            while len(self._metrics) > _MAX_ENTRIES:
                self._metrics.popitem(last=False)

    def reconnected(self) -> None:
        """Send all reports that the daemon may not have received, after a reconnection."""
        for message in self._backlog:
            self._send(message)
        self._backlog.clear()
        self._unsent.update(self._counts)
        self.flush()
        for metric in self._metrics.values():
            self._send(metric)
        self.flush_metrics()

    def _add_metric(self, datagram: local.ScriptMetric) -> None:
        """Add a value of a metric. If too many values are unsent, only the smallest and the largest
        of each four are kept.
        """
        sender = datagram.sender
        key = (sender.generation, sender.rank, datagram.name)
        if key not in self._points and len(self._points) >= _MAX_ENTRIES:
            del self._points[next(iter(self._points))]
        points = self._points.setdefault(key, [])
        if len(points) >= bounds.MAX_ITEMS:
            points[:] = halved(points)
        points.append(
            messages.MetricSample(
                float(datagram.time or time.time()),
                float(datagram.value),
                float(datagram.samples),
                datagram.step,
            )
        )

    def _send_or_queue(self, message: messages.Message) -> None:
        if not self._send(message):
            self._backlog.append(message)


def halved(points: Sequence[messages.MetricSample]) -> list[messages.MetricSample]:
    """Return the smallest and the largest of each four values, in their order."""
    samples: list[messages.MetricSample] = []
    for begin in range(0, len(points), 4):
        four = points[begin : begin + 4]
        # NaN counts as the largest value, so that it is kept.
        sizes = [math.inf if math.isnan(point.value) else point.value for point in four]
        low, high = sizes.index(min(sizes)), sizes.index(max(sizes))
        samples += [four[i] for i in sorted({low, high})]
    return samples


class WorkerSocket:
    """The datagram socket to which workers send. Only its owner can read and write it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.refused = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind(path)
        os.chmod(path, 0o600)

    def fileno(self) -> int:
        """Return the file descriptor, for the event loop."""
        return self._socket.fileno()

    def receive(self) -> list[local.Datagram]:
        """Return the datagrams that have arrived, up to a maximum per call. Invalid datagrams are
        counted and dropped.
        """
        datagrams: list[local.Datagram] = []
        for _ in range(_MAX_DATAGRAMS_PER_READ):
            try:
                data = self._socket.recv(local.MAX_DATAGRAM_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                break
            try:
                datagrams.append(local.decode_datagram(data))
            except ValueError as error:
                self.refused += 1
                if self.refused <= 10:
                    log.warning("dropped a worker's datagram: %s", error)
        return datagrams

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass
