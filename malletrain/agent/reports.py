"""Forwards the reports of workers to the daemon: validated, coalesced, kept while the daemon is
away.

Decides what is forwarded and how often: the newest counts of each worker at most every
FLUSH_INTERVAL_S (they are cumulative), the first value of a metric at once and further ones of that
name METRICS_INTERVAL_S later, everything else at once. After a reconnection the newest counts and
metrics are sent again, because it is unknown which of them arrived.
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
_REMEMBERED = 256
_BURST = 512

log = logging.getLogger("malletrain.agent")

BEGINS_ANEW = (
    "The script keeps no snapshot: the job began anew when its nodes changed, and will at every "
    "change. Add malletrain.Snapshot to it (docs/training-scripts.md)."
)
"""What the owner of a job in restart mode is told at its first rescale."""


@dataclass(frozen=True)
class DrainServed:
    """The worker has served drain request ``number``."""

    generation: int
    number: int
    saved: bool
    sentence: str


class WorkerReports:
    """What the workers of one job report. ``send`` returns whether the daemon's connection took
    the message.
    """

    def __init__(self, job: str, send: Callable[[messages.Message], bool]) -> None:
        self.job = job
        self.capable: set[int] = set()
        """Generations with a worker here that takes a snapshot on request."""
        self._send = send
        self._counts: OrderedDict[tuple[int, int, int], messages.Progress] = OrderedDict()
        self._metrics: OrderedDict[tuple[int, str], messages.Metric] = OrderedDict()
        self._over: dict[tuple[int, int, int], int] = {}
        """Workers that have no samples left to train on, and how many steps they had reported."""
        self._between: dict[tuple[int, int, int], int] = {}
        """The same of workers in the code after the steps of an epoch."""
        self._points: dict[tuple[int, int, str], list[messages.MetricSample]] = {}
        self._due: dict[tuple[int, int, str], float] = {}
        """When more values of this metric go."""
        self._unsent: set[tuple[int, int, int]] = set()
        self._backlog: deque[messages.Message] = deque(maxlen=_REMEMBERED)

    def take_all(self, datagrams: Iterable[local.Datagram], now: float) -> list[DrainServed]:
        """Some datagrams of workers, at ``now`` on a monotonic clock. Returns the drains that they
        end. Values that somebody may wait for go at once.
        """
        served = [drain for each in datagrams if (drain := self.take(each)) is not None]
        self._flush_metrics_due(now)
        return served

    def take(self, datagram: local.Datagram) -> DrainServed | None:
        """One datagram of a worker. Returns a drain that it ends, if it does."""
        who = datagram.sender
        if who.job != self.job:
            return None  # a straggler of a job that was here before
        match datagram:
            case local.WorkerProgress():
                key = (who.generation, who.rank, who.pid)
                self._counts[key] = messages.Progress(
                    self.job,
                    who.generation,
                    who.rank,
                    who.pid,
                    float(datagram.samples),
                    datagram.steps,
                    float(datagram.batch),
                    datagram.first,
                    datagram.last,
                    datagram.busy,
                )
                self._counts.move_to_end(key)
                for ends in (self._over, self._between):
                    if datagram.steps > ends.get(key, datagram.steps):
                        del ends[key]  # it trains on
                self._unsent.add(key)
                while len(self._counts) > _REMEMBERED:
                    self._unsent.discard(self._counts.popitem(last=False)[0])
            case local.StartupMark():
                self._pass_on(
                    messages.Mark(self.job, who.generation, who.rank, datagram.name, datagram.time)
                )
            case local.ScriptMetric():
                self._measured(datagram)
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
                    "generation": who.generation,
                }
                self._pass_on(
                    messages.Notice(self.job, who.rank, "snapshot", datagram.sentence, data)
                )
            case local.ModelFacts():
                facts: dict[str, bounds.Fact] = {
                    "parameters": datagram.parameters,
                    "flops_per_sample": datagram.flops_per_sample,
                }
                self._pass_on(messages.Notice(self.job, who.rank, "profile", "", facts))
            case local.WorkLeft():
                key = (who.generation, who.rank, who.pid)
                if datagram.samples == 0:
                    self._over[key] = self._steps_of(key)
                    return None  # how much there was to do is known from its beginning
                self._over.pop(key, None)
                work: dict[str, bounds.Fact] = {
                    "left": float(datagram.samples),
                    "generation": who.generation,
                }
                self._pass_on(messages.Notice(self.job, who.rank, "work", "", work))
            case local.BetweenEpochs():
                key = (who.generation, who.rank, who.pid)
                if datagram.entered:
                    self._between[key] = self._steps_of(key)
                else:
                    self._between.pop(key, None)
            case local.Capable():
                self.capable.add(who.generation)
            case local.DrainDone():
                reached(FaultPoint.AGENT_DRAINED)
                return DrainServed(
                    who.generation, datagram.number, datagram.saved, datagram.sentence
                )
        return None

    def ranks(self, generation: int) -> dict[int, int]:
        """Process id → rank of the workers of this round that have reported."""
        return {pid: rank for g, rank, pid in self._counts if g == generation}

    def _steps_of(self, key: tuple[int, int, int]) -> int:
        counted = self._counts.get(key)
        return counted.steps if counted is not None else 0

    def is_between_epochs(self, generation: int) -> bool:
        """Whether a worker of this round is in the code after the steps of an epoch."""
        return any(key[0] == generation for key in self._between)

    def is_over(self, generation: int) -> bool:
        """Whether a worker of this round has trained to the end, as its script says."""
        return any(key[0] == generation for key in self._over)

    def trains_unsaved(self, generation: int) -> bool:
        """Whether a worker of this round has trained here without anything to save on request."""
        trained = any(g == generation and c.samples for (g, *_), c in self._counts.items())
        return trained and generation not in self.capable

    def flush(self) -> None:
        """Send the newest counts that were not sent yet."""
        for key in [key for key in self._counts if key in self._unsent]:
            if not self._send(self._counts[key]):
                return
            self._unsent.discard(key)

    def flush_due(self, now: float) -> None:
        """Send what it is time for, at ``now`` on a monotonic clock."""
        self.flush()
        self._flush_metrics_due(now)

    def _flush_metrics_due(self, now: float) -> None:
        due = [key for key in self._points if now >= self._due.get(key, now)]
        if due:
            self.flush_metrics(due)
            if len(self._due) > _REMEMBERED:
                self._due.clear()
            self._due.update(dict.fromkeys(due, now + METRICS_INTERVAL_S))

    def flush_metrics(self, which: Collection[tuple[int, int, str]] | None = None) -> None:
        """Send the values of metrics that came since the last time, after the counts that they go
        with; of ``which`` only, if given.
        """
        self.flush()
        for key in list(self._points) if which is None else which:
            (generation, rank, name), points = key, self._points[key]
            last = points[-1].value
            metric = messages.Metric(self.job, rank, name, last, generation, tuple(points))
            if not self._send(metric):
                return  # after the reconnection then
            del self._points[key]
            self._metrics[rank, name] = metric
            self._metrics.move_to_end((rank, name))
            while len(self._metrics) > _REMEMBERED:
                self._metrics.popitem(last=False)

    def reconnected(self) -> None:
        """The daemon hears us again: send what it may have missed."""
        for message in self._backlog:
            self._send(message)
        self._backlog.clear()
        self._unsent.update(self._counts)
        self.flush()
        for metric in self._metrics.values():
            self._send(metric)
        self.flush_metrics()

    def _measured(self, datagram: local.ScriptMetric) -> None:
        """One value of a metric. Of many that wait, the smallest and largest of each four stay."""
        who = datagram.sender
        key = (who.generation, who.rank, datagram.name)
        if key not in self._points and len(self._points) >= _REMEMBERED:
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

    def _pass_on(self, message: messages.Message) -> None:
        if not self._send(message):
            self._backlog.append(message)


def halved(points: Sequence[messages.MetricSample]) -> list[messages.MetricSample]:
    """Of each four values the smallest and the largest, in their order."""
    samples: list[messages.MetricSample] = []
    for begin in range(0, len(points), 4):
        four = points[begin : begin + 4]
        # what is no number is above all, so that it stays
        sizes = [math.inf if math.isnan(point.value) else point.value for point in four]
        low, high = sizes.index(min(sizes)), sizes.index(max(sizes))
        samples += [four[i] for i in sorted({low, high})]
    return samples


class WorkerSocket:
    """The datagram socket that workers send to, readable and writable by the owner only."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.refused = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind(path)
        os.chmod(path, 0o600)

    def fileno(self) -> int:
        """For the event loop."""
        return self._socket.fileno()

    def receive(self) -> list[local.Datagram]:
        """What has arrived, at most some hundreds at once; what does not fit the protocol is
        counted and dropped.
        """
        datagrams: list[local.Datagram] = []
        for _ in range(_BURST):
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
