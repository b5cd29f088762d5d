"""Rounds that make no step: the ways between their nodes are tried, by agents of the test."""

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from malletrain.core.events import NodeRejected, RoundInterrupted, WorkersFailed
from malletrain.daemon.nodes.probes import LISTEN_S, TRY_S, Probes
from malletrain.daemon.nodes.stuck import StuckRounds
from malletrain.protocol.messages import JobSpec, Probed, ProbeOpen, ProbeTo, ProbeUp
from malletrain.protocol.payloads import ProbeResult
from malletrain.rounds.interface import RoundStage

LIMIT = 300.0


class Agents:
    """Answer the daemon; ``shut``: ways that are blocked, ``deaf``: who says nothing."""

    def __init__(self, shut=(), deaf=()):
        self.shut, self.deaf = set(shut), set(deaf)
        self.probes = None
        self.answers = deque()
        self.trials = 0

    def tell(self, node, message):
        if node in self.deaf:
            return
        if isinstance(message, ProbeOpen):
            self.trials += node == "a"
            self.answers.append((self.probes.up, node, ProbeUp(message.number, 4000)))
        elif isinstance(message, ProbeTo):
            results = tuple(
                ProbeResult(t.node, (node, t.node) not in self.shut, trouble="timed out")
                for t in message.targets
            )
            self.answers.append((self.probes.tried, node, Probed(message.number, results)))

    def answer(self):
        while self.answers:
            take, node, message = self.answers.popleft()
            take(node, message)


class Site:
    """One job on a, b and c in its first round, and the part of the daemon that watches it."""

    def __init__(self, shut=(), deaf=(), mode="restart", samples=0.0):
        self.agents = Agents(shut, deaf)
        self.events, self.notices, self.fed = [], [], []
        self.run = SimpleNamespace(
            row=SimpleNamespace(id="j1"),
            spec=JobSpec("j", "ann", "/x.py", "/", "python", mode=mode),
            barred=0,
            monitor=SimpleNamespace(
                total=samples, generation=1, first_sample=None, pending="a rescale"
            ),
            rounds=SimpleNamespace(
                finishing=False,
                generation=1,
                stage=RoundStage.RUNNING,
                members=("a", "b", "c"),
                min_nodes=1,
                give_up=lambda: self.fed.append("given up"),
            ),
        )

        @contextmanager
        def begin():
            yield self.now

        self.state = SimpleNamespace(
            runs={"j1": self.run},
            config=SimpleNamespace(jobs=SimpleNamespace(warmup_timeout=LIMIT)),
            rounds=SimpleNamespace(
                place=lambda run, node: ("", f"10.0.0.{ord(node)}"), act=lambda run, actions: None
            ),
            audit=SimpleNamespace(record=lambda kind, text, **_: self.events.append(text)),
            repository=SimpleNamespace(notice=lambda run, text: self.notices.append(text)),
        )
        self.transactions = SimpleNamespace(begin=begin, feed=self.fed.append)
        self.probes = self.agents.probes = Probes(self.agents)
        self.stuck = StuckRounds(self.state, self.transactions, self.probes)
        self.now = 0.0

    def reports(self, samples):
        """Steps of the present round."""
        monitor = self.run.monitor
        monitor.total, monitor.first_sample = samples, monitor.first_sample or self.now

    def forms(self, generation):
        """The job's next round."""
        self.run.rounds.generation = self.run.monitor.generation = generation
        self.run.monitor.first_sample = None

    def at(self, now):
        self.now = now
        self.probes.tick(now)
        self.stuck.check(now)
        self.agents.answer()


def rejected(site):
    return [event.node for event in site.fed if isinstance(event, NodeRejected)]


def test_a_blocked_way_is_named_and_one_of_its_ends_left_out():
    site = Site(shut=[("b", "c"), ("c", "b")])
    site.at(0.0)
    site.at(LIMIT - 1)
    assert not site.agents.trials
    site.at(LIMIT)
    assert rejected(site) == ["c"]
    assert site.fed[-1] == RoundInterrupted("j1")
    assert "Round 1 has made no step within 5 min: b cannot connect to c" in site.events[0]
    assert "The job continues without c" in site.events[0]
    assert "firewall" in site.notices[0]


def test_where_workers_say_that_there_is_no_way_the_ways_are_tried_at_once():
    """A firewall that rejects lets nobody wait: the workers fail, before their first step."""
    site = Site(shut=[("b", "c"), ("c", "b")])
    site.at(0.0)
    site.run.barred = 1
    site.at(0.5)
    assert rejected(site) == ["c"]
    assert site.fed[-1] == RoundInterrupted("j1")
    assert (
        "The workers of round 1 failed before their first step: b cannot connect to c"
        in (site.events[0])
    )


@pytest.mark.parametrize("steps", [0.0, 20.0])
def test_where_all_ways_are_open_what_workers_say_is_told_as_every_failure(steps):
    site = Site()
    site.at(0.0)
    if steps:
        site.reports(steps)
    site.run.barred = 1
    for now in (0.5, 1.0, 1.5):
        site.at(now)
    assert site.agents.trials == (0 if steps else 1)
    assert not site.fed
    assert not site.notices


def test_a_script_that_never_reported_is_left_alone_and_its_owner_told():
    site = Site()
    site.at(0.0)
    site.at(LIMIT)
    assert not site.fed
    assert "does not call malletrain.report()" in site.notices[0]


def at_work(pause, **options):
    """A job that reported ``pause`` seconds after its start, and whose second round began then."""
    site = Site(**options)
    site.at(0.0)
    site.now = pause
    site.reports(20.0)
    site.at(pause)
    site.forms(2)
    site.at(pause)
    return site


def test_workers_that_made_steps_before_are_started_again():
    site = at_work(10.0)
    site.at(10.0 + LIMIT)
    given_up, failed = site.fed
    assert given_up == "given up"  # else the plan, which is the old one, would change nothing
    assert isinstance(failed, WorkersFailed)
    assert "nodes reach each other" in failed.reason


def test_who_reports_seldom_is_waited_for_longer():
    site = at_work(0.8 * LIMIT)
    for number in (1, 2):
        site.at((0.8 + number) * LIMIT)
    assert site.agents.trials == 2
    assert not site.fed
    site.at(3.8 * LIMIT)
    assert [type(event) for event in site.fed] == [str, WorkersFailed]


def test_who_was_not_seen_to_report_since_the_daemons_start_is_left_alone():
    site = Site(samples=10.0)
    site.at(0.0)
    site.at(LIMIT)
    assert not site.fed
    assert site.notices


def test_a_round_that_was_adopted_works():
    site = Site(samples=10.0, shut=[("a", "b")])
    site.run.monitor.pending = None
    for now in (0.0, LIMIT, 2 * LIMIT):
        site.at(now)
    assert not site.agents.trials


def test_a_job_that_breaks_while_it_is_looked_at_ends_nothing():
    site = at_work(10.0)
    site.run.rounds.members = ("a",)
    site.transactions.feed = lambda event: (site.fed.append(event), site.state.runs.clear())
    site.at(10.0 + LIMIT)
    assert [type(event) for event in site.fed] == [str, WorkersFailed]


def test_late_steps_of_the_round_before_are_none_of_this_one():
    site = at_work(10.0, shut=[("a", "b")])
    site.run.monitor.total = 30.0
    site.at(11.0)
    site.at(11.0 + LIMIT)
    assert rejected(site) == ["b"]


@pytest.mark.parametrize("deaf", ["abc", "c"])
def test_where_agents_do_not_answer_nobody_says_that_nodes_reach_each_other(deaf):
    site = at_work(10.0, deaf=deaf)
    for late in (0.0, LISTEN_S, LISTEN_S + TRY_S):
        site.at(10.0 + LIMIT + late)
    assert not site.fed
    assert not site.events
    [notice] = site.notices
    assert "could not be tested" in notice


@pytest.mark.parametrize(
    "change",
    [
        {"stage": RoundStage.WARMING},
        {"members": ("a", "b"), "generation": 3},
        {"generation": 3},
    ],
)
def test_what_is_found_out_too_late_is_not_acted_on(change):
    site = at_work(10.0)
    site.now = 10.0 + LIMIT
    site.stuck.check(site.now)
    vars(site.run.rounds).update(change)
    site.agents.answer()
    assert site.agents.trials
    assert not site.fed
    assert not site.notices


def test_rounds_that_follow_each_other_without_a_step_are_one_wait():
    """Live mode forms a round again and again where its group cannot connect."""
    site = Site(shut=[("a", "b")], mode="live")
    for number in range(10):
        site.forms(number + 1)
        site.run.rounds.stage = (RoundStage.FORMING, RoundStage.RUNNING)[number % 2]
        site.at(number * LIMIT / 9)
    assert rejected(site) == ["b"]


@pytest.mark.parametrize(
    "change",
    [
        {"stage": RoundStage.WARMING},
        {"stage": RoundStage.IDLE},
        {"stage": RoundStage.COMPLETED},
    ],
)
def test_a_job_that_waits_for_nodes_is_not_stuck(change):
    site = Site(shut=[("a", "b")])
    vars(site.run.rounds).update(change)
    for now in (0.0, LIMIT, 2 * LIMIT):
        site.at(now)
    assert not site.agents.trials


def test_a_service_makes_no_steps():
    site = Site(mode="service")
    site.at(0.0)
    site.at(LIMIT)
    assert not site.agents.trials


def test_who_says_nothing_is_not_waited_for_and_not_blamed():
    site = Site(shut=[("a", "b")], deaf=["c"])
    for now in (0.0, LIMIT, LIMIT + LISTEN_S, LIMIT + LISTEN_S + TRY_S):
        site.at(now)
    assert rejected(site) == ["b"]


def test_steps_made_while_the_ways_are_tried_count():
    site = Site(shut=[("a", "b")])
    site.at(0.0)
    site.now = LIMIT
    site.stuck.check(LIMIT)
    site.reports(5.0)
    site.stuck.check(LIMIT + 1)
    site.agents.answer()
    assert not site.fed
