"""Pools: a class of nodes and whose leases they are. Trainers: a plan each, of their own jobs and
nodes.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import Goal, NodeInfo, ScalingCurve
from malletrain.core.commands import ReleaseLeases, Rescale, Start, TakeLeases
from malletrain.core.controller import Controller
from malletrain.core.events import (
    GapsSeen,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    RescaleFinished,
    Tick,
)
from malletrain.core.goals import GoalStanding, OwnerGoals
from malletrain.core.planning import Candidate, make_plan, plan_each_trainer
from malletrain.core.pools import Pool, Trainer, Trainers, by_class, largest, pool_sizes
from malletrain.core.profiling import Machine
from malletrain.core.settings import ControllerSettings, PlanningSettings, ProfilingSettings
from malletrain.core.state import ControllerState
from scavenger.horizon import GapForecast
from tests.draws import cases


@pytest.mark.parametrize(
    ("pool", "words"),
    [(Pool("default"), "default"), (Pool("gpu", "alice"), "gpu of alice")],
)
def test_the_name_of_a_pool_in_sentences(pool, words):
    assert f"{pool}" == str(pool) == words


def test_there_is_one_object_for_a_pool():
    pool = Pool("gpu", "alice")
    assert Pool("gpu", "alice") is pool
    assert pickle.loads(pickle.dumps(pool)) is copy.deepcopy(pool) is pool
    assert len({pool, Pool("gpu", "alice"), Pool("gpu", "bob"), Pool("gpu")}) == 3
    with pytest.raises(AttributeError, match="cannot be changed"):
        pool.owner = "bob"
    with pytest.raises(AttributeError, match="cannot be changed"):
        del pool.owner


def test_pools_are_ordered_by_class_then_by_owner():
    first, second, third = Pool("a", "z"), Pool("b"), Pool("b", "a")
    assert sorted([third, first, second], key=lambda pool: pool.order) == [first, second, third]
    assert repr(first) == "Pool('a', 'z')"


def test_a_pool_is_of_its_class_and_of_any():
    pool = Pool("gpu", "alice")
    assert pool.is_of_class("gpu")
    assert pool.is_of_class("")
    assert not pool.is_of_class("cpu")


def test_pools_added_up():
    sizes = {
        Pool("gpu", "alice"): 2,
        Pool("gpu", "bob"): 3,
        Pool("cpu", "bob"): 4,
        Pool("cpu", "carol"): 0,
    }
    assert by_class(sizes) == {"gpu": 5, "cpu": 4}
    assert {owner: largest(sizes, owner) for owner in ("alice", "bob", "carol", "dave")} == {
        "alice": 2,
        "bob": 4,
        "carol": 0,
        "dave": 0,
    }


def test_the_nodes_of_each_pool_are_counted():
    nodes = {
        "a": NodeInfo(Pool("gpu", "alice")),
        "b": NodeInfo(Pool("gpu", "alice"), 60.0),
        "c": NodeInfo(Pool("gpu")),
    }
    assert pool_sizes(nodes) == {Pool("gpu", "alice"): 2, Pool("gpu"): 1}


@pytest.mark.parametrize("owner", ["", "alice"])
def test_a_node_has_one_set_of_properties_in_both_its_pools(owner):
    state = ControllerState()
    state.node_joined(NodeJoined("a", "gpu", 60.0, "rack", owner=owner), 0.0)
    state.forecasts_updated({"a": GapForecast(0.0, 900.0, 0.0)})
    node = state.nodes["a"]
    assert node.info == state.usable["a"] == NodeInfo(Pool("gpu", owner), 900.0, "rack")
    assert node.ownerless_info == NodeInfo(Pool("gpu"), 900.0, "rack")
    assert (node.owner, node.pool) == (owner, Pool("gpu", owner))


GPU = Trainer("gpu", Goal.EFFICIENCY, node_classes=frozenset({"a100", "h100"}))
CPU = Trainer("cpu", other_classes=frozenset({"a100", "h100"}))
CLASSES = {"gpu": ("a100", "h100"), "cpu": ("xeon", "default")}


def nodes(count, node_class="default", begin=0):
    return {f"n{k:03}": NodeInfo(Pool(node_class)) for k in range(begin, begin + count)}


def linear(rate, most=64):
    return ScalingCurve.of({1: rate, most: rate * most})


def test_each_has_the_nodes_of_its_classes():
    candidates = [Candidate("j1", 1, 9, (), trainer=GPU), Candidate("j2", 1, 9, (), trainer=CPU)]
    plan = plan_each_trainer(
        make_plan, candidates, {**nodes(3, "a100"), **nodes(4, begin=3)}, PlanningSettings()
    )
    assert plan.nodes == {"j1": ("n000", "n001", "n002"), "j2": ("n003", "n004", "n005", "n006")}
    assert math.isnan(plan.objective)


def test_nodes_of_a_trainer_without_jobs_stay_idle():
    candidates = [Candidate("j", 1, 9, (), curve=linear(1.0), trainer=GPU)]
    machine = {**nodes(2, "a100"), **nodes(6, begin=2)}
    plan = plan_each_trainer(make_plan, candidates, machine, PlanningSettings())
    assert plan.nodes == {"j": ("n000", "n001")}


def test_a_job_that_must_stay_keeps_nodes_that_became_those_of_another_trainer():
    """The daemon was started with other node classes of the trainers."""
    candidates = [
        Candidate("stays", 1, 2, ("n000", "n001"), fixed=True, trainer=CPU),
        Candidate("goes", 1, 2, ("n002",), curve=linear(1.0), trainer=CPU),
        Candidate("j", 1, 9, (), curve=linear(1.0), trainer=GPU),
    ]
    plan = plan_each_trainer(make_plan, candidates, nodes(4, "a100"), PlanningSettings())
    assert plan.nodes == {"stays": ("n000", "n001"), "goes": (), "j": ("n002", "n003")}


# --- two trainers and two machines ---


@st.composite
def machines(draw):
    """Steps of a machine with two trainers: (time, events), with a trainer of each event."""
    joined, submitted, gaps, lost = [], [], [], []
    for trainer in (GPU, CPU):
        for node_class in CLASSES[trainer.name]:
            for k in range(draw(st.integers(0, 6))):
                joined.append((trainer, NodeJoined(f"{node_class}-{k}", node_class)))
                if draw(st.integers(0, 3)) == 0:
                    lost.append((trainer, NodeLost(f"{node_class}-{k}")))
            for k in range(draw(st.integers(0, 3))):
                gaps.append((trainer, f"{node_class}-gap{k}", node_class))
        for k in range(draw(st.integers(0, 4))):
            least = draw(st.integers(1, 4))
            curve = draw(st.sampled_from([None, linear(1.0), linear(30.0)]))
            submitted.append(
                (
                    trainer,
                    JobSubmitted(
                        f"{trainer.name}{k}",
                        least,
                        least + draw(st.integers(0, 6)),
                        weight=draw(st.sampled_from([1.0, 2.0])),
                        curve=curve,
                        trainer=trainer.name,
                        sweep=draw(st.sampled_from(["", f"sweep of {trainer.name}"])),
                    ),
                )
            )
    return joined, submitted, gaps, lost


def decided(drawn, trainers, machine):
    """All decisions of ``machine``, a controller that knows only jobs and nodes of ``trainers``."""
    joined, submitted, gaps, lost = (
        [(of, *rest) for of, *rest in part if of in trainers] for part in drawn
    )
    steps = [
        (0.0, [event for _, event in (*joined, *submitted)]),
        (20.0, [Tick()]),
        (100.0, [event for _, event in lost]),
        (120.0, [Tick()]),
        (300.0, [GapsSeen({name: (None, of_class) for _, name, of_class in gaps})]),
        (320.0, [Tick()]),
        (900.0, [Tick()]),
    ]
    decisions = []
    for now, events in steps:
        commands = machine.handle_all(events, now)
        moved = [RescaleFinished(x.job) for x in commands if isinstance(x, Start | Rescale)]
        for x in [*commands, *machine.handle_all(moved, now + 5.0)]:
            if isinstance(x, TakeLeases | ReleaseLeases):
                decisions += [(type(x).__name__, name) for name in x.nodes]
            else:
                decisions.append((x.job, repr(x)))
    return sorted(decisions)


@settings(max_examples=cases(60))
@given(machines())
def test_two_trainers_decide_what_two_machines_of_their_own_would(drawn):
    site = ControllerSettings(planning=PlanningSettings(max_running=3), starvation_s=200.0)
    together = Controller(replace(site, trainers=(GPU, CPU)))
    apart = []
    for trainer in (GPU, CPU):
        joined, submitted, *rest = drawn
        own = [(of, replace(job, goal=trainer.goal, trainer="")) for of, job in submitted]
        apart += decided((joined, own, *rest), (trainer,), Controller(site))
    assert decided(drawn, (GPU, CPU), together) == sorted(apart)


@settings(max_examples=cases(60))
@given(machines())
def test_no_job_has_a_node_of_another_trainer(drawn):
    machine = Controller(ControllerSettings(trainers=(GPU, CPU), starvation_s=200.0))
    decided(drawn, (GPU, CPU), machine)
    for job in machine.jobs.values():
        trainer = machine.trainers.of(job.submitted.trainer)
        assert all(trainer.may_use(machine.nodes[name].pool.node_class) for name in job.nodes)


# --- in the controller ---


def controller(*trainers, **more):
    return Controller(ControllerSettings(trainers=trainers, **more))


def submit(c, job, trainer, now=0.0, **more):
    return c.handle(JobSubmitted(job, 1, 4, trainer=trainer, **more), now)


def test_jobs_run_on_the_nodes_of_their_trainer():
    c = controller(GPU, CPU)
    c.handle(NodeJoined("g1", "a100"), 0.0)
    c.handle(NodeJoined("c1", "xeon"), 0.0)
    submit(c, "j1", "gpu")
    submit(c, "j2", "cpu")
    submit(c, "j3", "")  # no trainer names its owner
    commands = c.handle(Tick(), 10.0)
    started = {x.job: x.nodes for x in commands if isinstance(x, Start)}
    assert started == {"j1": ("g1",), "j2": ("c1",)}
    assert c.trainers.of("") is CPU


def test_leases_are_taken_for_who_may_use_them():
    c = controller(GPU, CPU)
    submit(c, "j1", "gpu")
    gaps = {**{f"g{k}": (None, "a100") for k in range(9)}, "c0": (None, "xeon")}
    commands = c.handle(GapsSeen(gaps), 1.0)
    (request,) = [x for x in commands if isinstance(x, TakeLeases)]
    assert len(request.nodes) == 4
    assert all(node.startswith("g") for node in request.nodes)


@pytest.mark.parametrize(
    ("trainer", "standing"), [("gpu", GoalStanding.INFEASIBLE), ("cpu", GoalStanding.ON_TRACK)]
)
def test_a_job_without_nodes_is_foretold_on_nodes_that_it_may_use(trainer, standing):
    """The work takes four nodes 21 minutes, and one node 85; only the common class has four."""
    c = controller(GPU, CPU)
    gaps = {"g": (None, "a100"), **{f"c{k}": (None, "xeon") for k in range(8)}}
    c.handle(GapsSeen(gaps), 0.0)
    goals = OwnerGoals(deadline=3600.0, work=43200.0)
    submit(c, "j", trainer, curve=linear(10.0), goals=goals)
    for other in range(5):  # they may use only nodes that the first may not
        submit(c, f"k{other}", "cpu" if trainer == "gpu" else "gpu")
    c.handle(Tick(), 1.0)
    assert c.goals.records["j"].standing is standing


def test_where_no_node_of_its_class_was_seen_a_deadline_cannot_be_held():
    c = controller(GPU, CPU)
    c.handle(GapsSeen({f"c{k}": (None, "default") for k in range(8)}), 0.0)
    submit(c, "j", "gpu", curve=linear(10.0), goals=OwnerGoals(deadline=1e6, work=100.0))
    c.handle(Tick(), 1.0)
    assert c.goals.records["j"].standing is GoalStanding.INFEASIBLE


def test_a_full_queue_of_one_keeps_no_job_of_another_waiting():
    c = controller(GPU, CPU, planning=PlanningSettings(max_running=2))
    for k in range(5):
        submit(c, f"a{k}", "gpu")
    submit(c, "b", "cpu")
    for k in range(4):
        c.handle(NodeJoined(f"n{k}"), 0.0)
    commands = c.handle(Tick(), 10.0)
    assert "b" in {x.job for x in commands if isinstance(x, Start)}


def test_a_job_that_starves_for_lack_of_nodes_of_its_own_blocks_no_other_trainer():
    c = controller(GPU, CPU, starvation_s=100.0)
    submit(c, "g", "gpu", owner="ann")
    submit(c, "c0", "cpu", owner="bob", weight=1e6)
    submit(c, "c1", "cpu", owner="bob", now=1.0)
    c.handle(NodeJoined("x", "xeon", owner="bob"), 1.0)
    c.handle(Tick(), 5.0)
    assert c.jobs["c0"].nodes
    c.handle(RescaleFinished("c0"), 6.0)
    for now in (10.0, 200.0, 210.0):  # a node for the first is there, and not its owner's yet
        c.handle(GapsSeen({"y": (None, "a100")}), now)
        c.handle(Tick(), now)
    assert c.jobs["g"].starving
    assert c.jobs["c1"].nodes, "it starved, and was served in its turn"


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_all_of_a_trainers_jobs_are_valued_alike_whatever_their_owners_said(name):
    seen = {}

    def planner(candidates, *rest):
        seen.update({x.job: x.goal for x in candidates})
        return make_plan(candidates, *rest)

    c = Controller(ControllerSettings(trainers=(GPU, CPU)), planner)
    c.handle(NodeJoined("n1"), 0.0)
    c.handle(NodeJoined("g1", "a100"), 0.0)
    submit(c, "j1", name, goal=Goal.THROUGHPUT)
    submit(c, "j2", name, goal=Goal.EFFICIENCY)
    c.handle(Tick(), 10.0)
    assert set(seen.values()) == {Trainers((GPU, CPU)).of(name).goal}


def test_a_profile_begins_on_nodes_of_the_jobs_trainer():
    """Of the idle nodes, most are of the class of the other trainer."""
    c = controller(GPU, CPU, profiling=ProfilingSettings(when_worth=False))
    for k in range(4):
        c.handle(NodeJoined(f"c{k}", "xeon"), 0.0)
    for k in range(2):
        c.handle(NodeJoined(f"g{k}", "a100"), 0.0)
    c.handle(JobSubmitted("j", 1, 2, trainer="gpu", profile=True), 0.0)
    [start] = [x for x in c.handle(Tick(), 10.0) if isinstance(x, Start)]
    assert sorted(start.nodes) == ["g0", "g1"]
    assert c.profiles.holds(c.jobs["j"])


@pytest.mark.parametrize("own", [(), ("c0", "c1")], ids=["none", "of the other trainer"])
def test_a_profile_is_requested_in_a_class_of_the_jobs_trainer_when_it_has_no_nodes(own):
    """Its earlier nodes may be of another trainer: the daemon was started with other classes."""
    c = controller(GPU, CPU, profiling=ProfilingSettings(when_worth=False))
    c.handle(JobSubmitted("j", 1, 2, trainer="gpu", profile=True), 0.0)
    for name in own:
        c.handle(NodeJoined(name, "xeon", job="j"), 0.0)
    job, profiler = c.jobs["j"], c.profiles.profiler
    assert job.nodes == own
    for now in (0.0, 10_000.0):  # it waits for nodes of its largest size, but not for ever
        profiler.review([job], Machine(c.state.usable, ()), now)
    assert profiler.pool_of("j").node_class == ("xeon" if own else "a100")
    profiler.review([job], Machine({}, ()), 10_001.0)
    assert profiler.pool_of("j").node_class == "a100"


def candidates_of(classes, *jobs, **more):
    """The candidates of the first plan of a machine with nodes of these classes, by job."""
    seen = {}

    def planner(candidates, *rest):
        seen.update({x.job: x for x in candidates})
        return make_plan(candidates, *rest)

    c = Controller(ControllerSettings(trainers=(GPU, CPU), **more), planner)
    for number, node_class in enumerate(classes):
        c.handle(NodeJoined(f"n{number}", node_class), 0.0)
    for job in jobs:
        c.handle(job, 0.0)
    c.handle(Tick(), 10.0)
    return seen


def test_nodes_of_another_trainer_make_no_even_share_larger():
    """Four jobs of which nothing is known want two of four nodes each, more than an even share."""
    jobs = [JobSubmitted(f"j{k}", 2, 4, trainer="gpu", profile=True) for k in range(4)]
    classes = ["a100"] * 4 + ["xeon"] * 12
    seen = candidates_of(classes, *jobs, profiling=ProfilingSettings())
    assert [seen[job.job].must_run for job in jobs] == [False] * 4


def test_nodes_of_another_trainer_do_not_count_for_the_weight_of_a_sweep():
    """Only two of its four trials can run at once: 3/2 of the samples of one node on two."""
    curve = ScalingCurve.of({1: 2.0, 2: 3.0, 4: 4.0})
    jobs = [JobSubmitted(f"j{k}", 1, 4, trainer="gpu", curve=curve, sweep="s") for k in range(4)]
    seen = candidates_of(["a100"] * 2 + ["xeon"] * 12, *jobs)
    assert [seen[job.job].weight for job in jobs] == [0.75] * 4


def test_the_phrase():
    assert GPU.phrase() == "gpu: efficiency, on nodes of a100, h100"
    assert CPU.phrase() == "cpu: throughput, on all nodes but a100, h100"
    assert Trainer("d", Goal.EFFICIENCY, 100.0).phrase() == "d: deadlines, on all nodes"
