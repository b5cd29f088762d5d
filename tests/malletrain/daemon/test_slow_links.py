"""When pairs of nodes are measured, and what is done about a slow link."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from malletrain.config.model import parse_config
from malletrain.core.events import JobState
from malletrain.core.slow_nodes import SlowNodes
from malletrain.daemon.engine.state import slow_nodes
from malletrain.daemon.nodes.slow_nodes import SEND_S, SlowLinkWatch
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.payloads import ProbeResult
from malletrain.rounds.interface import RoundStage

NODES = ("a", "b", "c", "d")
EVERY_S = 10.0


class LinkSite:
    """One job on four nodes, two more that nobody uses, and links of these speeds, Mbit/s."""

    def __init__(self, slow_nodes="swap", every="10 s", **speeds):
        self.now, self.events, self.reclaimed, self.under_way = 0.0, [], [], []
        self.pairs, self.speeds, self.fabric = [], speeds, None
        agents = {
            node: SimpleNamespace(
                node=node,
                node_class="cpu",
                gone_at=None,
                unreachable_since=None,
                holds="j1" if node in NODES else None,
            )
            for node in (*NODES, "e", "f")
        }
        self.agents = agents
        self.record = SimpleNamespace(state=JobState.RUNNING, rescaling=False)
        self.rounds = SimpleNamespace(stage=RoundStage.RUNNING, members=NODES)

        class All:
            def __iter__(self):
                return iter(agents.values())

            def on(self, node):
                return agents.get(node)

        @contextmanager
        def begin():
            yield self.now

        def record(kind, sentence, **data):
            self.events.append((kind, data))

        text = f'[scheduler]\nkind = "slurm"\n[nodes]\nslow_nodes = "{slow_nodes}"\n'
        self.config = parse_config(f'{text}link_every = "{every}"\n')
        self.slow = SlowNodes(1.25, 3600.0)
        state = SimpleNamespace(
            config=self.config,
            slow=self.slow,
            agents=All(),
            clock=SimpleNamespace(now=lambda: self.now),
            runs={"j1": SimpleNamespace(rounds=self.rounds)},
            controller=SimpleNamespace(
                jobs={"j1": self.record}, settings=SimpleNamespace(reclaim_s=30.0)
            ),
            rounds=SimpleNamespace(
                networks=lambda nodes: self.fabric, address_of=lambda node: self.address(node)
            ),
            audit=SimpleNamespace(record=record),
        )
        self.address = lambda node: f"10.0.0.{ord(node)}"
        lease_actions = SimpleNamespace(reclaim=lambda nodes, s, why: self.reclaimed.extend(nodes))
        self.watch = SlowLinkWatch(state, SimpleNamespace(begin=begin), lease_actions, self)

    def begin(self, places, tries, now, done, seconds):
        """Stands where :class:`malletrain.daemon.nodes.probes.Probes` does."""
        assert seconds == SEND_S
        assert set(places) == set(tries[0])
        self.pairs.append(tries[0])
        self.under_way.append((tries[0], done))

    def answer(self, reached=True):
        pair, done = self.under_way.pop()
        mbit = min(self.speeds.get(node, 10_000.0) for node in pair)
        done({pair: ProbeResult(pair[1], reached, mbit if reached else 0.0)})

    def look(self, seconds=EVERY_S):
        self.now += seconds
        self.watch.check(self.now)

    def play(self, times):
        for _ in range(times):
            self.look()
            while self.under_way:
                self.answer()

    def kinds_and_nodes(self):
        return [(kind, data["node"]) for kind, data in self.events]


def test_a_node_with_a_slow_link_is_named_and_remembered_once():
    site = LinkSite(c=1000.0)
    site.play(24)
    assert site.kinds_and_nodes() == [(EventKind.NODE_SLOW, "c")]
    (link,) = site.slow.links(site.now).values()
    assert (link.slowdown, link.link_mbit) == (10.0, 10_000.0)
    assert site.slow.current(site.now)["c"].sentence.startswith(
        "The link of c carries 1e+03 Mbit/s"
    )
    assert site.events[0][1]["job"] == "j1"
    assert not site.reclaimed, "whether the job is better off without it is not decided here"


def test_all_slow_alike_or_two_of_four_is_nobodys_link():
    for speeds in (dict.fromkeys("abcdef", 100.0), {"a": 100.0, "b": 100.0}, {}):
        site = LinkSite(**speeds)
        site.play(30)
        assert not site.events


def test_a_free_node_is_given_back():
    site = LinkSite(e=100.0)
    for node in NODES:
        site.agents[node].holds = None
    site.play(30)
    assert site.kinds_and_nodes() == [(EventKind.NODE_SLOW, "e")]
    assert site.reclaimed == ["e"]
    site = LinkSite("name", e=100.0)
    for node in NODES:
        site.agents[node].holds = None
    site.play(30)
    assert (site.kinds_and_nodes(), site.reclaimed) == ([(EventKind.NODE_SLOW, "e")], [])


def test_a_link_that_is_measured_well_again_is_forgotten():
    site = LinkSite(c=1000.0)
    site.play(24)
    site.speeds.clear()
    site.play(24)
    assert site.kinds_and_nodes() == [(EventKind.NODE_SLOW, "c"), (EventKind.NODE_NOT_SLOW, "c")]
    assert not site.slow.current(site.now)


def test_what_was_found_is_known_to_a_daemon_that_is_started_again():
    site = LinkSite(c=1000.0)
    site.play(24)

    def next_slow_nodes():
        rows = [
            SimpleNamespace(
                kind=kind,
                seq=seq,
                time=site.now,
                node=data["node"],
                data={"sentence": "x", **data},
            )
            for seq, (kind, data) in enumerate(site.events)
        ]
        store = SimpleNamespace(events_of=lambda kind, since: [r for r in rows if r.kind == kind])
        return slow_nodes(site.config, store, site.now)

    assert next_slow_nodes().links(site.now)["c"].link_mbit == 10_000.0
    site.speeds.clear()
    site.play(24)
    assert not next_slow_nodes().current(site.now)


def test_pairs_are_of_one_job_one_at_a_time_and_not_too_often():
    site = LinkSite()
    site.look()
    for _ in range(3):
        site.look()
    assert len(site.pairs) == 1, "the first is not over"
    site.answer()
    site.look()
    assert len(site.pairs) == 2
    site.answer()
    site.look(2 * EVERY_S / 6 - 0.1)
    assert len(site.pairs) == 2, "six nodes: a pair in a third of the time"
    site.play(30)
    assert {node for pair in site.pairs for node in pair} == set(NODES), "two others are too few"


def test_who_is_not_reached_is_not_judged_by_it():
    site = LinkSite()
    for _ in range(20):
        site.look()
        site.answer(reached=False)
    assert not site.events


@pytest.mark.parametrize(
    "change",
    [
        lambda site: setattr(site.record, "rescaling", True),
        lambda site: setattr(site.record, "state", JobState.PROFILING),
        lambda site: setattr(site.rounds, "stage", RoundStage.FORMING),
        lambda site: setattr(site, "address", lambda node: "127.0.0.1"),
        lambda site: setattr(site, "address", lambda node: ""),
        lambda site: setattr(site.agents["a"], "gone_at", 5.0),  # three are left
    ],
)
def test_nothing_is_measured_meanwhile(change):
    site = LinkSite()
    change(site)
    site.play(5)
    assert not site.pairs


@pytest.mark.parametrize("options", [{"slow_nodes": "off"}, {"every": "0 s"}])
def test_nothing_is_measured_where_it_is_off(options):
    site = LinkSite(**options)
    site.play(5)
    assert not site.pairs


def test_the_network_of_the_jobs_is_the_one_that_is_measured():
    site, measurements = LinkSite(), []
    site.fabric = SimpleNamespace(places={n: SimpleNamespace(address=f"ib-{n}") for n in NODES})
    site.begin = lambda places, *more: measurements.append(places)
    site.look()
    (places,) = measurements
    assert all(places[node] == f"ib-{node}" for node in NODES)
