"""A model of the world around the controller: carries its commands out, remembers what it may
expect, and checks every promise.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from allocator import ScalingCurve
from malletrain.core.commands import (
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    Start,
    Stop,
    Suspend,
    TakeLeases,
)
from malletrain.core.controller import Controller
from malletrain.core.events import (
    CurveChanged,
    GapsSeen,
    JobState,
    JobSubmitted,
    LeaseDeferred,
    LeaseNotTaken,
    NodeJoined,
    NodeLost,
    RescaleFinished,
    Tick,
)

EPS = 1e-9
MOST_TICKS_AT_ONCE = 25


WORTHLESS = ScalingCurve.of({1: 0.0})


class World:
    """Nodes, leases and jobs as they really are. A node that is released is a gap until the main
    scheduler takes it.

    ``do`` feeds one event; ``run_until`` lets time pass and wakes the controller when it asks for
    it.
    """

    def __init__(self, settings, classes):
        self.controller = Controller(settings)
        self.settings = settings
        self.classes = dict(classes)
        self.now = 1000.0
        self.gaps = {}
        self.polled = {}
        self.pending = {}
        self.owner = defaultdict(str)
        self.leased = {}
        self.leaving = {}
        self.unfit_until = {}
        self.running = {}
        self.rescaling = {}
        self.specs = {}
        self.breaks = Counter()
        self.served = {}
        self.worthless = set()
        """Services to which nodes are worth nothing."""
        self.log = []
        self.restored = True

    # --- what happens ---

    def do(self, event):
        commands = self.controller.handle(event, self.now)
        self.log.append((self.now, event, commands))
        if isinstance(event, JobSubmitted):
            self.specs[event.job] = event
        for command in commands:
            self.carry_out(command)
        if self.restored:
            self.check(commands)
        return commands

    def run_until(self, end):
        ticks = 0
        while (due := self.controller.next_wakeup()) is not None and due <= end:
            ticks = ticks + 1 if due <= self.now else 0
            assert ticks < MOST_TICKS_AT_ONCE, (
                f"the controller wakes again and again at {self.now}: {self.log[-3:]}"
            )
            self.now = max(self.now, due)
            self.do(Tick())
        self.now = max(self.now, end)

    def poll(self):
        self.polled = {
            n: g for n, g in self.gaps.items() if n not in self.leased and n not in self.pending
        }
        self.do(GapsSeen(dict(self.polled)))

    def come_up(self, node):
        del self.pending[node]
        self.leased[node] = self.now
        self.do(
            NodeJoined(
                node, self.classes[node], self.gaps.get(node, (None, ""))[0], owner=self.owner[node]
            )
        )

    def refuse(self, node):
        del self.pending[node]
        self.do(LeaseNotTaken(node, self.owner[node]))

    def put_off(self, node):
        del self.pending[node]
        self.do(LeaseDeferred(node, self.owner[node]))

    def lose(self, node):
        self.forget(node)
        self.do(NodeLost(node))

    def forget(self, node):
        self.leased.pop(node, None)
        self.leaving.pop(node, None)
        for nodes in self.running.values():
            nodes.discard(node)

    def finish(self, job):
        self.rescaling.pop(job, None)
        self.do(RescaleFinished(job))

    def unfinished(self):
        return [
            job
            for job in self.specs
            if job in self.controller.jobs and not self.controller.jobs[job].state.ended
        ]

    def restart(self):
        """kill -9 and start again: a new controller is told what the store, the agents and the main
        scheduler know.
        """
        old, self.controller, self.restored = self.controller, Controller(self.settings), False
        self.controller.hold(self.now + 5.0)
        for job, record in old.jobs.items():
            spec = self.specs[job]
            again = {
                f: getattr(spec, f)
                for f in ("min_nodes", "max_nodes", "weight", "curve", "sizes", "profile", "owner")
            }
            self.do(
                JobSubmitted(
                    job,
                    **again,
                    state=record.state,
                    tries=record.tries,
                    last_failure_at=record.last_failure_at,
                )
            )
        for job in sorted(self.worthless):
            self.do(CurveChanged(job, WORTHLESS))
        holder = {node: job for job, nodes in self.running.items() for node in nodes}
        for node in list(self.leased):
            if node not in self.leaving:
                self.do(
                    NodeJoined(
                        node, self.classes[node], None, None, holder.get(node), self.owner[node]
                    )
                )
        for node in list(self.leaving):
            self.forget(node)
        self.pending.clear()
        self.unfit_until.clear()
        self.restored = True
        self.check([])

    # --- what the controller wants ---

    def carry_out(self, command):
        if isinstance(command, TakeLeases):
            assert command.nodes
            for node in command.nodes:
                assert node in self.polled, f"{node} is no gap"
                assert node not in self.leased, f"{node} is leased already"
                horizon = self.polled[node][0]
                assert horizon is None or horizon >= self.settings.min_horizon_s
                unfit = self.unfit_until.get((node, command.owner), 0)
                assert self.now >= unfit, f"{node} was found unfit for {command.owner} a moment ago"
                assert (
                    self.now >= self.pending.get(node, -1e9) + self.settings.lease_wait_s - EPS
                ), f"{node} was asked for already"
                assert any(self.specs[job].owner == command.owner for job in self.unfinished()), (
                    f"{command.owner} has no job"
                )
                self.pending[node] = self.now
                self.owner[node] = command.owner
        elif isinstance(command, ReleaseLeases):
            for node in command.nodes:
                assert node in self.leased
                assert node not in self.leaving
                assert not any(node in nodes for job, nodes in self.running.items()), (
                    f"{node} is in use"
                )
                self.forget(node)
                self.gaps[node] = (None, self.classes[node])
        elif isinstance(command, ReclaimNodes):
            for node in command.nodes:
                assert node in self.leased
                assert node not in self.leaving
                assert any(
                    self.specs[job].owner != self.owner[node] for job in self.unfinished()
                ), "nobody else is there"
                self.leaving[node] = self.now + command.within_s
        elif isinstance(command, Start | Rescale):
            job, spec = command.job, self.specs[command.job]
            assert job in self.unfinished()
            assert len(set(command.nodes)) == len(command.nodes)
            assert spec.min_nodes <= len(command.nodes) <= spec.max_nodes
            assert spec.sizes is None or len(command.nodes) in spec.sizes
            assert len({self.classes[n] for n in command.nodes}) == 1, "a job runs on one class"
            for node in command.nodes:
                assert node in self.leased, f"{node} is gone"
                assert node not in self.leaving, f"{node} is leaving"
                assert self.owner[node] == spec.owner, f"{node} is not {spec.owner}'s"
            if isinstance(command, Start):
                assert not self.running.get(job), "a start is for a job without nodes"
                self.check_place(job)
            else:
                assert self.running.get(job), "a rescale is for a job with nodes"
                gone = [self.leaving[n] for n in self.running[job] if n in self.leaving]
                assert (command.within_s is None) == (not gone)
                assert (
                    command.within_s is None
                    or command.within_s <= max(0.0, min(gone) - self.now) + EPS
                )
            self.running[job] = set(command.nodes)
            self.rescaling[job] = self.now
            self.served[job] = self.now
        elif isinstance(command, Suspend):
            assert self.controller.jobs[command.job].state is JobState.SUSPENDED
            self.running[command.job] = set()
            self.rescaling.pop(command.job, None)
        elif isinstance(command, Stop):
            assert command.state.ended
            if command.state is JobState.FAILED:
                assert self.breaks[command.job] >= self.settings.max_tries, (
                    "a job failed that was not to blame"
                )
            self.running.pop(command.job, None)
            self.rescaling.pop(command.job, None)

    # --- what must hold ---

    def usable(self, owner):
        return Counter(
            self.classes[n] for n in self.leased if n not in self.leaving and self.owner[n] == owner
        )

    def smallest(self, job):
        spec = self.specs[job]
        return min(
            k
            for k in (spec.sizes or range(spec.min_nodes, spec.max_nodes + 1))
            if spec.min_nodes <= k <= spec.max_nodes
        )

    def fits(self, job, by_class):
        return job not in self.worthless and self.smallest(job) <= max(by_class.values(), default=0)

    def check_place(self, job):
        """Check first come, first served: among the earlier jobs of its owner that could run, there
        are fewer than may run at once.
        """
        owner = self.specs[job].owner
        before = [
            other
            for other in self.unfinished()[: self.unfinished().index(job)]
            if self.specs[other].owner == owner
        ]
        assert (
            sum(self.fits(other, self.usable(owner)) for other in before)
            < self.settings.planning.max_running
        )

    def placed(self, by_class):
        """The jobs that may run if all these nodes are anybody's: the first of each owner, then the
        second, …
        """
        places = Counter()
        order = []
        for number, job in enumerate(self.unfinished()):
            if self.fits(job, by_class):
                places[self.specs[job].owner] += 1
                order.append((places[self.specs[job].owner], number, job))
        return [job for _, _, job in sorted(order)][: self.settings.planning.max_running]

    def check(self, commands):
        c = self.controller
        busy_nodes = [node for record in c.jobs.values() for node in record.nodes]
        assert len(busy_nodes) == len(set(busy_nodes)), "a node belongs to two jobs"
        for name, record in c.jobs.items():
            assert set(record.nodes) == self.running.get(name, set()), (
                f"{name} and the world disagree"
            )
            assert all(c.nodes[n].job == name for n in record.nodes)
            assert len(record.nodes) <= record.submitted.max_nodes
            assert not (record.state.ended and record.nodes)
        assert set(c.nodes) == set(self.leased)
        assert all(n.job is None or name in c.jobs[n.job].nodes for name, n in c.nodes.items())
        # These were reclaimed after the plan, which may still have them.
        reclaimed = {node for x in commands if isinstance(x, ReclaimNodes) for node in x.nodes}
        if any(isinstance(x, Start | Rescale | Suspend) for x in commands):
            at_work = [r for r in c.jobs.values() if r.nodes]
            assert not self.worthless.intersection(r.submitted.job for r in at_work)
            assert len(at_work) <= self.settings.planning.max_running
            for record in at_work:
                assert len(record.nodes) >= record.submitted.min_nodes, (
                    "a job under its minimum is suspended"
                )
                assert record.state in (JobState.RUNNING, JobState.PROFILING)
                assert not any(n in self.leaving and n not in reclaimed for n in record.nodes)
