"""A model of the agents around one job's rounds: launchers that come up or not, workers that run,
fail and finish, messages in order per node, connections that drop what is on the way. It checks the
promises of the rounds at every step.
"""

from __future__ import annotations

from collections import deque

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundStage,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    WorkersDone,
    WorkersRunning,
)
from malletrain.rounds.restart import RestartRounds

NEWS_OF_A_LOSS_S = 1.5


class FakeAgent:
    """Acts as :mod:`malletrain.agent` for one job, without processes."""

    def __init__(self, world, node):
        self.world = world
        self.node = node
        self.phase = None
        self.generation = 0
        self.failures = ()
        self.releasing = False
        self.assign_next = False
        self.rounds = {}
        self.store_of = None
        self.drain = None
        self.stop_wait = False
        self.down = deque()
        self.up = deque()

    def assignment(self):
        return (
            None
            if self.phase is None
            else Assignment("job", AssignmentPhase(self.phase), self.generation, self.failures)
        )

    def report(self):
        self.up.append(("phase", self.assignment()))

    def receive(self, action):
        if isinstance(action, SendAssign):
            if self.releasing:
                self.assign_next = True
            elif self.phase in (None, "exited"):
                self.start()
            else:
                self.report()
        elif isinstance(action, SendRelease):
            self.assign_next = False
            if self.phase is None:
                self.up.append(("released", None))
            else:
                self.releasing = True
        elif isinstance(action, SendRound) and self.phase is not None and not self.releasing:
            if self.store_of == action.generation and action.store is None:
                self.up.append(("store_up", action.generation))
            elif action.generation > max([self.generation, *self.rounds]):
                self.rounds[action.generation] = action
                self.join()
        elif isinstance(action, SendDrain) and not action.number:
            self.drain, self.stop_wait = None, False
        elif isinstance(action, SendDrain):
            if self.phase == "running" and self.generation == action.generation:
                self.drain = action.generation
            else:
                self.up.append(("drained", action.generation))

    def start(self):
        self.phase, self.generation, self.failures, self.drain, self.store_of = (
            "starting",
            0,
            (),
            None,
            None,
        )
        self.report()

    def join(self):
        newest = max(self.rounds, default=0)
        if newest > self.generation and self.phase in ("ready", "running", "failed", "succeeded"):
            if self.rounds[newest].store is None:
                self.store_of = newest
                self.up.append(("store_up", newest))
            self.phase, self.generation, self.failures, self.drain = "running", newest, (), None
            self.stop_wait = False
            self.report()

    # --- what happens on the node ---

    def can(self):
        steps = {
            "starting": ["comes_up", "exits"],
            "ready": ["exits"],
            "running": ["fails", "succeeds", "exits"],
        }.get(self.phase, [])
        return (["is_free"] if self.releasing else steps) + (
            ["drains"] if self.drain and not self.releasing else []
        )

    def comes_up(self):
        self.phase = "ready"
        self.report()
        self.join()

    def exits(self):
        self.world.handler_failures += 1
        if self.phase == "starting" and self.world.handler_failures % 2:
            self.failures = (Failure(0, 78, self.world.now, cause="There is no such software."),)
        self.phase, self.drain = "exited", None
        self.report()

    def fails(self, tail="ValueError: oops", exitcode=1):
        self.phase, self.failures, self.drain = (
            "failed",
            (Failure(0, exitcode, self.world.now, tail),),
            None,
        )
        self.report()
        self.join()

    def succeeds(self):
        self.phase, self.drain = "succeeded", None
        self.report()
        self.join()

    def drains(self):
        self.stop_wait = True
        self.up.append(("drained", self.drain))
        self.drain = None

    def is_free(self):
        again, up, down = self.assign_next, self.up, self.down
        self.__init__(self.world, self.node)
        self.up, self.down = up, down
        self.up.append(("released", None))
        if again:
            self.start()


class RoundsWorld:
    """Agents, the daemon's bookkeeping around the rounds, and a controller that plans one second
    after an event.
    """

    def __init__(self, nodes, settings, min_nodes):
        self.settings = settings
        self.now = 100.0
        self.rounds = RestartRounds(settings, min_nodes=min_nodes)
        self.agents = {node: FakeAgent(self, node) for node in nodes}
        self.planned_nodes = ()
        self.plan_at = None
        self.losses = {}
        self.handler_failures = 0
        self.saved = [(0, ())]
        self.stores = {}
        self.drained = set()
        self.broke = []
        self.rejected = []
        self.formed = []
        self.adopted = 0  # the round that was complete when a daemon adopted it
        self.finished = False
        self.ended = False

    # --- the controller ---

    def move(self, nodes, within_s=None):
        self.planned_nodes, self.plan_at = tuple(nodes), None
        self.act(self.rounds.move(self.planned_nodes, self.now, within_s))

    def plan(self):
        """Move to those of the planned nodes that are alive, if they are enough."""
        alive = tuple(n for n in self.planned_nodes if n in self.agents)
        self.move(alive if len(alive) >= self.rounds.min_nodes else ())

    # --- the daemon ---

    def act(self, actions):
        for action in actions:
            if isinstance(action, SaveRound):
                assert action.generation > self.saved[-1][0], "generations grow"
                assert action.generation == self.rounds.generation
                assert action.members == self.rounds.members
                assert len(set(action.members)) == len(action.members) >= self.rounds.min_nodes
                assert set(action.members) <= set(self.rounds.target), "members are planned"
                assert set(action.members) <= {*self.agents, *self.losses}, (
                    "members are alive, for all one knows"
                )
                self.saved.append((action.generation, action.members))
            elif isinstance(action, SendRound):
                assert action.generation == self.saved[-1][0], (
                    "a round is saved before anybody hears of it"
                )
                assert self.saved[-1][1][action.rank] == action.node
                assert action.size == len(self.saved[-1][1])
                if action.store is None:
                    assert action.rank == 0
                    assert self.stores.setdefault(action.generation, action.node) == action.node, (
                        "one store a round"
                    )
            elif isinstance(action, SendAssign):
                assert action.node in self.rounds.target
            elif isinstance(action, SendDrain):
                assert action.node == self.rounds.members[0]
                self.drained |= {action.generation} if action.number else set()
            elif isinstance(action, WorkersRunning):
                assert action.members == self.saved[-1][1]
                self.formed.append(action)
            elif isinstance(action, WorkersDone):
                assert not self.finished
                self.finished = True
            elif isinstance(action, NodesRejected):
                assert self.handler_failures or self.now >= 100.0 + min(
                    self.settings.warmup_s, self.settings.warmup_blocking_s
                )
                self.rejected += action.nodes
                self.planned_nodes = tuple(n for n in self.planned_nodes if n not in action.nodes)
                self.plan_at = self.plan_at or self.now + 1.0
            elif isinstance(action, Broke):
                assert action.sentence != "There is no such software."
                late = "in time" in action.sentence or "did not join" in action.sentence
                assert self.handler_failures or late, f"nothing happened, but: {action.sentence}"
                assert not any(
                    "Connection closed by peer" in f.tail for f in action.failures[:1]
                ), "a consequence was taken for the cause"
                self.broke.append(action)
                self.plan_at = self.now
            if isinstance(action, SendRelease) and action.node in self.agents:
                self.check_release(action.node)
            if (
                isinstance(action, SendAssign | SendRelease | SendRound | SendDrain)
                and action.node in self.agents
            ):
                self.agents[action.node].down.append(action)
        self.check()

    def check_release(self, node):
        """No member of a round that trains is released before a snapshot was requested."""
        generation, members = self.saved[-1]
        states = [self.agents[n] for n in members if n in self.agents]
        trains = len(states) == len(members) > 0 and all(
            a.phase == "running" and a.generation == generation for a in states
        )
        quiet = all(not a.up and not a.down for a in states)
        assert (
            not (node in members and trains and quiet) or generation in self.drained or self.ended
        )

    def check(self):
        r = self.rounds
        assert r.holdings.assigned <= {*r.target, *r.members}, "somebody was forgotten"
        assert not r.holdings.assigned & r.holdings.releasing
        assert set(r.holdings.phases) <= r.holdings.assigned
        due = r.next_wakeup()
        assert due is None or r.stage is not RoundStage.COMPLETED

    def say(self, node):
        """The daemon hears the next message of ``node``."""
        agent, r = self.agents[node], self.rounds
        kind, what = agent.up.popleft()
        releasing = node in r.holdings.releasing
        if kind == "hello":
            r.reachable(node)
            if what is None:
                self.act(
                    r.released(node, self.now) if releasing or node in r.holdings.assigned else []
                )
            elif releasing:
                agent.down.append(SendRelease(node))
            else:
                self.act(r.phase(node, what, self.now))
        elif kind == "released":
            self.act(r.released(node, self.now))
        elif releasing:
            return
        elif kind == "phase":
            self.act(r.phase(node, what, self.now))
        elif kind == "store_up":
            self.act(r.store_up(node, what, node, 29500))
        elif kind == "drained":
            self.act(r.drained(node, what, self.now))

    def blip(self, node):
        """The connection of ``node`` ends and comes back: what was on the way is lost, and the
        agent says how things stand.
        """
        agent = self.agents[node]
        agent.up.clear()
        agent.down.clear()
        self.rounds.unreachable(node)
        agent.up.append(("hello", agent.assignment()))

    def restart(self):
        """The daemon is killed and starts again: it knows the last round, and the agents tell the
        rest.
        """
        self.hear_of_losses()
        self.rounds = RestartRounds(self.settings, min_nodes=self.rounds.min_nodes)
        for agent in self.agents.values():
            agent.up.clear()
            agent.down.clear()
        assignments = {n: a.assignment() for n, a in self.agents.items() if a.phase is not None}
        generation, members = self.saved[-1]
        self.act(self.rounds.adopt(generation, members, assignments, self.now))
        self.adopted = generation if self.rounds.stage is RoundStage.RUNNING else self.adopted
        planned_before, self.planned_nodes = self.planned_nodes, tuple(assignments)
        self.plan_at = None
        if (
            assignments
            and not (
                self.rounds.stage is RoundStage.RUNNING
                and set(planned_before) == set(members) == set(assignments)
            )
            and not self.finished
        ):
            self.plan()

    # --- the world ---

    def lose(self, node):
        """The node vanishes. Its peers notice at once, the daemon a moment later."""
        agent = self.agents.pop(node)
        self.losses[node] = self.now
        if agent.phase == "running":
            for other in self.agents.values():
                if other.phase == "running" and other.generation == agent.generation:
                    other.fails(
                        "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer "
                        "[10.0.0.7]:61234"
                    )

    def scripts_end(self):
        """The workers of a round in which one has ended with code 0 end, too."""
        ended = {a.generation for a in self.agents.values() if a.phase == "succeeded"}
        for agent in self.agents.values():
            if agent.phase == "running" and agent.generation in ended:
                agent.succeeds()

    def hear_of_losses(self, older_than=0.0):
        for node in [n for n, t in self.losses.items() if self.now - t >= older_than]:
            del self.losses[node]
            self.act(self.rounds.gone(node, self.now))
            if node in self.planned_nodes:
                self.plan_at = self.plan_at or self.now + 1.0

    def come_back(self, node):
        """Lease the node again, with a new agent that knows of no job."""
        if node in self.losses:
            self.losses[node] = -1e9
            self.hear_of_losses(1e6)
        self.agents[node] = FakeAgent(self, node)

    def run(self, seconds):
        end = self.now + seconds
        ticks = 0
        while True:
            due = [t for t in (self.rounds.next_wakeup(), self.plan_at) if t is not None]
            due += [t + NEWS_OF_A_LOSS_S for t in self.losses.values()]
            at = min(due, default=end)
            if at > end:
                break
            ticks = ticks + 1 if at <= self.now else 0
            assert ticks < 10, f"the rounds wake again and again in {self.rounds.stage}"
            self.now = max(self.now, at)
            self.hear_of_losses(NEWS_OF_A_LOSS_S)
            self.act(self.rounds.tick(self.now))
            if self.plan_at is not None and self.now >= self.plan_at:
                self.plan()
            if not due:
                break
        self.now = max(self.now, end)

    def settle(self):
        """Every message arrives, every launcher comes up, every drain is served, until nothing
        moves.
        """
        for _ in range(200):
            moved = False
            for node, agent in list(self.agents.items()):
                while agent.down:
                    agent.receive(agent.down.popleft())
                    moved = True
                for step in agent.can():
                    if step in ("comes_up", "drains", "is_free"):
                        getattr(agent, step)()
                        moved = True
                        break
                while node in self.agents and self.agents[node].up:
                    self.say(node)
                    moved = True
            if not moved:
                return
        raise AssertionError("the agents and the rounds talk without end")
