"""The windows that nodes are compared over, of counts as they come from workers."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from malletrain.config.model import parse_config
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, Tick
from malletrain.core.slow_nodes import MIN_SLOW_WINDOWS, SlowNode, SlowNodes
from malletrain.daemon.nodes.slow_nodes import SlowNodeWatch
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import Progress
from malletrain.rounds.interface import RoundStage

NODES = ("a", "b", "c")


class SlowSite:
    """One job on three nodes, and the part of the daemon that compares them."""

    def __init__(self, slow_nodes="swap", spare=0):
        text = f'[scheduler]\nkind = "slurm"\n[nodes]\nslow_nodes = "{slow_nodes}"\n'
        self.now, self.events, self.notices, self.reclaimed = 0.0, [], [], []
        controller = Controller()
        for k in range(3 + spare):
            controller.handle(NodeJoined("abcdefgh"[k]), 0.0)
        controller.handle(JobSubmitted("j1", 1, 3), 0.0)
        controller.handle(Tick(), 5.0)
        assert len(controller.jobs["j1"].nodes) == 3
        controller.state.rescaled(controller.jobs["j1"], 5.0)
        self.run = SimpleNamespace(
            row=SimpleNamespace(id="j1"),
            rounds=SimpleNamespace(
                generation=1, stage=RoundStage.RUNNING, members=controller.jobs["j1"].nodes
            ),
        )

        @contextmanager
        def begin():
            yield self.now

        def record(kind, sentence, **of):
            self.events.append((kind, of["node"]))

        self.slow = SlowNodes(1.25, 3600.0)
        state = SimpleNamespace(
            runs={"j1": self.run},
            config=parse_config(text),
            clock=SimpleNamespace(now=lambda: self.now),
            controller=controller,
            audit=SimpleNamespace(record=record),
            repository=SimpleNamespace(notice=lambda run, text: self.notices.append(text)),
            slow=self.slow,
        )
        lease_actions = SimpleNamespace(reclaim=lambda nodes, s, why: self.reclaimed.extend(nodes))
        self.watch = SlowNodeWatch(state, SimpleNamespace(begin=begin), lease_actions)
        self.steps = dict.fromkeys(self.run.rounds.members, 0)
        self.busy = dict.fromkeys(self.run.rounds.members, 0.0)

    def pass_window(self, busy, steps=100, silent=()):
        """10 s in which every node makes so many steps. ``busy``: node → seconds of work a step."""
        self.now += 10.0
        for rank, node in enumerate(self.run.rounds.members):
            self.steps[node] += steps
            self.busy[node] += steps * busy[node]
            reported_busy = None if node in silent else self.busy[node]
            generation = self.run.rounds.generation
            counts = (self.steps[node] * 8.0, self.steps[node], 8.0, 0.0, self.now, reported_busy)
            self.watch.heard(node, self.run, Progress("j1", generation, rank, 7, *counts))
        self.watch.check(self.now)

    def pass_windows(self, busy, count=MIN_SLOW_WINDOWS + 1, **more):
        for _ in range(count):
            self.pass_window(busy, **more)


BUSY = {"a": 0.04, "b": 0.09, "c": 0.04}


def test_a_slow_node_is_named_and_swapped_out():
    site = SlowSite()
    site.pass_windows(BUSY, MIN_SLOW_WINDOWS)
    assert not site.events, "the first counts only begin the first window"
    site.pass_window(BUSY)
    assert site.events == [(EventKind.NODE_SLOW, "b")]
    assert site.reclaimed == ["b"]
    assert site.slow.current(site.now)["b"].slowdown == pytest.approx(2.25)


@pytest.mark.parametrize(
    ("site", "busy", "named", "gone"),
    [
        (SlowSite("name"), BUSY, ["b"], []),
        (SlowSite("off"), BUSY, [], []),
        (SlowSite(), {**BUSY, "b": 0.06}, ["b"], []),  # two do less than three
        (SlowSite(spare=1), {**BUSY, "b": 0.07}, ["b"], ["b"]),  # three do more
        (SlowSite(), dict.fromkeys("abc", 0.09), [], []),
    ],
)
def test_what_is_done_about_it(site, busy, named, gone):
    site.pass_windows(busy)
    assert [node for _, node in site.events] == named
    assert site.reclaimed == gone


def test_who_says_nothing_is_not_compared_and_nobody_with_it():
    site = SlowSite()
    site.pass_windows(BUSY, silent="c")
    assert not site.events


def test_a_window_with_few_steps_goes_on():
    site = SlowSite()
    busy = {node: 100 * seconds for node, seconds in BUSY.items()}
    site.pass_windows(busy, 3 * MIN_SLOW_WINDOWS, steps=1)  # three of them make one
    assert not site.events
    site.pass_window(busy, steps=1)
    assert [node for _, node in site.events] == ["b"]


def test_a_new_round_begins_anew():
    site = SlowSite()
    site.pass_windows(BUSY, MIN_SLOW_WINDOWS)
    site.run.rounds.generation = 2
    site.pass_window(BUSY)
    assert not site.events, "its first counts only begin its first window"
    site.pass_window(BUSY)
    assert [node for _, node in site.events] == ["b"], "what was seen of the node before counts"


def test_a_job_whose_ranks_have_unequal_work_is_told():
    site = SlowSite("name")
    site.pass_windows({"a": 0.09, "b": 0.04, "c": 0.04})
    assert site.events == [(EventKind.NODE_SLOW, "a")]
    site.run.rounds.generation, site.run.rounds.members = 2, ("b", "c")
    site.pass_windows({"b": 0.09, "c": 0.04}, 2 * MIN_SLOW_WINDOWS + 2)
    assert site.events[1:] == [(EventKind.NODE_NOT_SLOW, "a")]
    assert len(site.notices) == 1
    assert not site.slow.current(site.now)


IDLE = dict.fromkeys("abc", 0.001)


@pytest.mark.parametrize(
    ("busy", "times", "gone"),
    [
        (IDLE, 10.0, ["b"]),  # 99 % of a step is waited, a tenth as long without b
        (IDLE, 1.3, []),  # three do more
        (dict.fromkeys("abc", 0.095), 10.0, []),  # hardly anybody waits
    ],
)
def test_a_job_goes_on_without_a_slow_link_where_that_pays(busy, times, gone):
    site = SlowSite()
    site.slow.remember("b", SlowNode(0.0, times, "The link of b is slow.", 1e4))
    site.pass_windows(busy, 2)
    assert site.reclaimed == gone
    assert not site.events


def test_who_is_slow_is_no_spare():
    """Three do as much as three, but the fourth is slow, too."""
    site, other = SlowSite(spare=1), SlowSite(spare=1)
    for one in (site, other):
        one.slow.remember("b", SlowNode(0.0, 1.4, "The link of b is slow.", 1e4))
    site.slow.remember("d", SlowNode(0.0, 10.0, "The link of d is slow.", 1e4))
    site.pass_windows(IDLE, 2)
    other.pass_windows(IDLE, 2)
    assert (site.reclaimed, other.reclaimed) == ([], ["b"])
