"""Workers that stop reporting, by the rhythm of their job; agents of the test say where they
stand.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from malletrain.core.events import WorkersFailed
from malletrain.daemon.nodes.stuck import (
    ANSWER_S,
    MAX_NODES_PER_CHECK,
    MIN_REPORTS,
    PAUSE_RATIO,
    STANDSTILL_S,
    HungSteps,
    innermost,
)
from malletrain.protocol.messages import JobSpec, ShowStacks, Stacks
from malletrain.rounds.interface import RoundStage

LEAST = 60.0
STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f0000000000 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2806 in {what}
  File "/home/ann/train.py", line 41 in step
  File "/home/ann/train.py", line 60 in <module>
"""


class Site:
    """One job of two ranks on two nodes."""

    def __init__(self, on_hang="tell"):
        self.events, self.notices, self.fed, self.requests = [], [], [], []
        self.given_up = 0
        self.mean = None
        self.now, self.samples = 0.0, {0: 0.0, 1: 0.0}
        self.nodes = {n: SimpleNamespace(node=n, unreachable_since=None) for n in ("a", "b")}
        self.run = SimpleNamespace(
            row=SimpleNamespace(id="j1"),
            spec=JobSpec("j", "ann", "/x.py", "/", "python", on_hang=on_hang),
            starting_until=None,
            monitor=SimpleNamespace(
                generation=1,
                pending=None,
                by_rank=lambda: dict(self.samples),
                mean_pause=lambda steps: self.mean if steps == MIN_REPORTS + 1 else None,
            ),
            rounds=SimpleNamespace(
                generation=1,
                stage=RoundStage.RUNNING,
                finishing=False,
                members=("a", "b"),
                give_up=self.give_up,
            ),
        )

        @contextmanager
        def begin():
            yield self.now

        state = SimpleNamespace(
            runs={"j1": self.run},
            config=SimpleNamespace(jobs=SimpleNamespace(hang_after=LEAST)),
            agents=SimpleNamespace(
                on=self.nodes.get, tell=lambda node, message: self.requests.append((node, message))
            ),
            audit=SimpleNamespace(
                record=lambda kind, text, **data: self.events.append((text, data))
            ),
            rounds=SimpleNamespace(act=lambda run, actions: None),
            repository=SimpleNamespace(notice=lambda run, text: self.notices.append(text)),
        )
        self.hung = HungSteps(state, SimpleNamespace(begin=begin, feed=self.fed.append))

    def give_up(self):
        self.given_up += 1

    def train(self, until, every=1.0, ranks=(0, 1)):
        """These ranks report every so often."""
        last = self.now
        while self.now < until:
            self.now += 0.5
            if self.now >= last + every:
                last = self.now
                for rank in ranks:
                    self.samples[rank] += 1.0
            self.hung.check(self.now)

    def silence(self, seconds):
        self.train(self.now + seconds, every=1e9)

    def say(self, node, rank, **fields):
        self.hung.receive_stacks(
            self.nodes[node], self.run, Stacks("j1", 1, rank, 100 + rank, **fields)
        )

    def answer(self):
        self.say("a", 0, text=STACK.format(what="all_reduce"))
        self.say("b", 1, text=STACK.format(what="broadcast"))
        self.silence(ANSWER_S)


@pytest.mark.parametrize("on_hang", ["tell", "restart"])
def test_a_collective_that_waits_for_ever_is_told_and_ended_if_that_is_wished(on_hang):
    site = Site(on_hang)
    site.train(20.0)
    site.silence(LEAST - 1.0)
    assert not site.requests
    site.silence(2.0)
    assert site.requests == [(n, ShowStacks("j1", 1)) for n in ("a", "b")]
    site.answer()
    [(sentence, data)] = site.events
    assert sentence.startswith("2 workers of round 1 have reported nothing for 66 s")
    assert "the longest pause before was 1 s" in sentence
    assert "rank 0 on a stands at /v/lib/python3.11/site-packages/torch" in sentence
    assert "line 2806 in all_reduce, called from /home/ann/train.py, line 41 in step" in sentence
    assert list(data["stacks"]) == ["rank 0 on a", "rank 1 on b"]
    assert data["ranks"] == [0, 1]
    assert len(site.notices) == 1
    assert [type(event) for event in site.fed] == [WorkersFailed] * (on_hang == "restart")
    assert site.given_up == (on_hang == "restart")
    site.silence(10 * LEAST)
    assert len(site.events) == 1


def test_a_job_of_long_steps_has_a_rhythm_of_its_own():
    site = Site()
    site.train(400.0, every=100.0)
    site.silence(PAUSE_RATIO * 100.0 - 5.0)
    assert not site.requests
    site.silence(10.0)
    assert site.requests


def test_who_never_showed_a_rhythm_is_left_alone():
    site = Site()
    site.silence(100 * LEAST)
    assert not site.requests


@pytest.mark.parametrize(("mean", "text"), [(0.4, "0.4 s"), (3 * LEAST, "3 min")])
def test_who_hangs_before_this_daemon_has_heard_a_rhythm_is_known_by_its_own_counts(mean, text):
    site = Site()
    site.mean = mean
    site.silence(PAUSE_RATIO * max(mean, LEAST) - 5.0)
    assert not site.requests
    site.silence(10.0)
    assert site.requests
    site.answer()
    [(sentence, _)] = site.events
    assert f"the mean pause between two steps was, by the workers' own counts, {text}: " in sentence
    assert "the longest pause" not in sentence


def test_one_rank_of_two_that_hangs_is_found_by_what_it_says_itself():
    site = Site()
    site.train(20.0)
    site.train(20.0 + LEAST + 2.0, ranks=(0,))
    assert site.requests
    site.say("a", 0, text=STACK.format(what="step"))
    site.say("b", 1, state="in a system call that cannot be interrupted")
    site.train(site.now + ANSWER_S, ranks=(0,))
    [(sentence, data)] = site.events
    assert sentence.startswith("Rank 1 of round 1 has reported nothing")
    assert "rank 1 on b stands in a system call that cannot be interrupted" in sentence
    assert data["ranks"] == [1]


def test_one_rank_that_has_ended_in_order_does_not_hang():
    site = Site()
    site.train(20.0)
    site.train(20.0 + LEAST + 2.0, ranks=(0,))
    site.say("a", 0, text=STACK.format(what="step"))
    site.train(site.now + 10 * LEAST, ranks=(0,))
    assert not site.events
    assert len(site.requests) == 2, "both nodes, once"
    site.silence(2 * LEAST)
    site.say("a", 0, text=STACK.format(what="step"))
    site.silence(ANSWER_S + 1.0)
    [(_, data)] = site.events
    assert data["ranks"] == [0], "the one that was left hangs now"


def test_all_nodes_of_a_large_job_are_asked_a_part_at_each_look():
    """The rank that hangs is on the last node."""
    site = Site()
    names = [f"n{number:03}" for number in range(2 * MAX_NODES_PER_CHECK + 10)]
    site.nodes.update((n, SimpleNamespace(node=n, unreachable_since=None)) for n in names)
    site.samples = dict.fromkeys(range(len(names)), 0.0)
    site.run.rounds.members = tuple(names)
    site.train(20.0, ranks=tuple(site.samples))
    last = len(names) - 1
    site.train(20.0 + LEAST + 1.0, ranks=tuple(range(last)))
    assert len(site.requests) <= 2 * MAX_NODES_PER_CHECK
    site.train(site.now + 1.0, ranks=tuple(range(last)))
    assert [node for node, _ in site.requests] == names, "each once"
    site.say(names[last], last, text=STACK.format(what="all_reduce"))
    site.train(site.now + ANSWER_S, ranks=tuple(range(last)))
    [(sentence, data)] = site.events
    assert f"rank {last} on {names[last]} stands at" in sentence
    assert "all_reduce" in data["stacks"][f"rank {last} on {names[last]}"]


def test_workers_at_the_same_place_are_named_as_lists():
    site = Site()
    names = [f"n{number}" for number in range(12)]
    site.nodes.update((n, SimpleNamespace(node=n, unreachable_since=None)) for n in names)
    site.samples = dict.fromkeys(range(12), 0.0)
    site.run.rounds.members = tuple(names)
    site.train(20.0, ranks=range(12))
    site.silence(LEAST + 2.0)
    for rank in (*range(5), *range(6, 12)):
        site.say(names[rank], rank, text=STACK.format(what="all_reduce"))
    site.say("n5", 5, text=STACK.format(what="broadcast"))
    site.silence(ANSWER_S)
    [(sentence, _)] = site.events
    assert "ranks 0-4, 6-11 on n[0-4,6-9,10-11] stand at" in sentence
    assert "; rank 5 on n5 stands at" in sentence


@pytest.mark.parametrize("trouble", ["rescale", "unreachable", "deaf"])
def test_silence_that_is_not_the_workers_is_no_hang(trouble):
    site = Site()
    site.train(20.0)
    if trouble == "rescale":
        site.run.monitor.pending = "a rescale"
        site.silence(5 * LEAST)
        site.run.monitor.pending = None
    elif trouble == "unreachable":
        site.nodes["b"].unreachable_since = 1.0
        site.silence(5 * LEAST)
        site.nodes["b"].unreachable_since = None
    else:
        site.now += LEAST + STANDSTILL_S
    site.train(site.now + LEAST)
    assert not site.requests


def test_the_main_thread_is_the_one_that_counts():
    assert innermost(STACK.format(what="all_reduce")).endswith("line 41 in step")
    assert innermost("garbage") == innermost("") == ""
