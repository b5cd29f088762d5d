"""Random lives of a job: nodes come and go, launchers and workers fail, messages are late or lost;
the rounds' promises hold, and when quiet returns the job runs on exactly the nodes it was given.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from malletrain.rounds.interface import RoundSettings, RoundStage
from tests.draws import cases
from tests.malletrain.rounds.rounds_world import RoundsWorld

NODES = ["a", "b", "c", "d"]


class RoundsMachine(RuleBasedStateMachine):
    """Each rule is something that happens; :class:`RoundsWorld` checks at every step."""

    @initialize(min_nodes=st.integers(1, 3))
    def begin(self, min_nodes):
        self.world = RoundsWorld(NODES, RoundSettings(), min_nodes)

    @rule(
        nodes=st.lists(st.sampled_from(NODES), unique=True),
        within=st.sampled_from([None, None, 0.5, 5.0, 30.0]),
    )
    def controller_moves(self, nodes, within):
        w = self.world
        alive = [n for n in nodes if n in w.agents]
        if w.finished or 0 < len(alive) < w.rounds.min_nodes:
            return
        w.move(alive, within)

    @rule(node=st.sampled_from(NODES), within=st.sampled_from([0.0, 2.0, 20.0]))
    def a_departure_is_hastened(self, node, within):
        w = self.world
        if node in w.agents and node not in w.rounds.target:
            w.act(w.rounds.hasten(node, w.now, within))

    @precondition(lambda self: any(a.up for a in self.world.agents.values()))
    @rule(data=st.data(), most=st.integers(1, 4))
    def daemon_hears(self, data, most):
        w = self.world
        node = data.draw(st.sampled_from([n for n, a in w.agents.items() if a.up]))
        for _ in range(min(most, len(w.agents[node].up))):
            w.say(node)

    @precondition(lambda self: any(a.down for a in self.world.agents.values()))
    @rule(data=st.data(), most=st.integers(1, 4))
    def agent_hears(self, data, most):
        agent = data.draw(st.sampled_from([a for a in self.world.agents.values() if a.down]))
        for _ in range(min(most, len(agent.down))):
            agent.receive(agent.down.popleft())

    @precondition(lambda self: any(a.can() for a in self.world.agents.values()))
    @rule(data=st.data())
    def node_does(self, data):
        w = self.world
        agent = data.draw(st.sampled_from([a for a in w.agents.values() if a.can()]))
        step = data.draw(st.sampled_from(agent.can()))
        if step == "fails":
            w.handler_failures += 1
        getattr(agent, step)()

    @precondition(lambda self: self.world.planned_nodes and not self.world.finished)
    @rule()
    def layout_changes(self):
        """The same nodes are used in another layout."""
        w = self.world
        w.rounds.outdate()
        w.plan()

    @rule()
    def everybody_catches_up(self):
        self.world.settle()

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def node_vanishes(self, data):
        self.world.lose(data.draw(st.sampled_from(sorted(self.world.agents))))

    @precondition(lambda self: len(self.world.agents) < len(NODES))
    @rule(data=st.data())
    def node_returns(self, data):
        self.world.come_back(
            data.draw(st.sampled_from([n for n in NODES if n not in self.world.agents]))
        )

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def connection_blips(self, data):
        self.world.blip(data.draw(st.sampled_from(sorted(self.world.agents))))

    @precondition(lambda self: not self.world.finished)
    @rule()
    def daemon_is_killed(self):
        self.world.restart()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 20.0, 100.0]))
    def time_passes(self, seconds):
        self.world.run(seconds)

    def teardown(self):
        """Nothing more happens but that a script that is ending ends everywhere; a job whose round
        broke gets another try.
        """
        if not hasattr(self, "world"):
            return
        w = self.world
        for _ in range(12):
            w.scripts_end()
            w.settle()
            w.run(20.0)
        if w.finished:
            assert w.rounds.stage is RoundStage.COMPLETED
            w.ended = True
            w.act(w.rounds.stop())
            w.settle()
            w.planned_nodes = ()
        elif w.planned_nodes:
            assert w.rounds.stage is RoundStage.RUNNING, w.rounds
            assert set(w.rounds.members) == set(w.planned_nodes)
            assert all(w.agents[n].phase in ("running", "succeeded") for n in w.planned_nodes)
            assert all(w.agents[n].generation == w.rounds.generation for n in w.planned_nodes)
            assert not any(
                w.agents[n].stop_wait and w.agents[n].phase == "running" for n in w.planned_nodes
            )
            formed = [f.generation for f in w.formed[-1:]]
            assert w.rounds.generation in (*formed, w.adopted), "a whole round is told of"
        assert {n for n, a in w.agents.items() if a.phase is not None} == set(w.planned_nodes), (
            "somebody was left with the job"
        )


RoundsMachine.TestCase.settings = settings(
    max_examples=cases(100),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRounds = RoundsMachine.TestCase
