"""Trainers: which nodes each plans with, that nothing is added up over them, and the rules of whose
a job is.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import Goal, NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.commands import Start, TakeLeases
from malletrain.core.controller import Controller
from malletrain.core.events import GapsSeen, JobSubmitted, NodeJoined, RescaleFinished, Tick
from malletrain.core.goals import GoalStanding, OwnerGoals
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings
from malletrain.core.trainer_plans import TrainerPlanner, divide
from malletrain.core.trainers import Trainer, Trainers

GPU = Trainer("gpu", Goal.EFFICIENCY, only=frozenset({"a100"}))
CPU = Trainer("cpu", never=frozenset({"a100"}))
ONE, TWO = Trainer("one", part=1.0), Trainer("two", Goal.EFFICIENCY, part=3.0)
FREE = RescaleCost(0.0, 0.0)


def nodes(count, node_class="default", begin=0):
    return {f"n{k:03}": NodeInfo(node_class) for k in range(begin, begin + count)}


def linear(rate, most=64):
    return ScalingCurve.of({1: rate, most: rate * most})


def test_nothing_changes_where_there_is_one():
    seen = []

    def planner(*args):
        seen.append(args)
        return make_plan(*args)

    candidates = [Candidate("j1", 1, 4, (), trainer=GPU), Candidate("j2", 1, 4, (), trainer=GPU)]
    machine = {**nodes(4, "a100"), **nodes(4, begin=4)}
    plan = TrainerPlanner(planner)(candidates, machine, PlanningSettings())
    assert seen == [(candidates, machine, PlanningSettings(), ())]
    assert sorted(n for mine in plan.nodes.values() for n in mine) == [f"n00{k}" for k in range(4)]


def test_each_has_the_nodes_of_its_classes():
    candidates = [Candidate("j1", 1, 9, (), trainer=GPU), Candidate("j2", 1, 9, (), trainer=CPU)]
    plan = TrainerPlanner(make_plan)(
        candidates, {**nodes(3, "a100"), **nodes(4, begin=3)}, PlanningSettings()
    )
    assert plan.nodes == {"j1": ("n000", "n001", "n002"), "j2": ("n003", "n004", "n005", "n006")}
    assert math.isnan(plan.objective)


def test_a_large_number_in_one_unit_takes_nothing_from_another():
    """In one plan of samples per second the first job would have every node."""
    candidates = [
        Candidate("fast", 1, 8, (), curve=linear(1e6), trainer=ONE),
        Candidate("slow", 1, 8, (), curve=linear(1.0), goal=Goal.EFFICIENCY, trainer=TWO),
    ]
    plan = TrainerPlanner(make_plan)(candidates, nodes(8), PlanningSettings())
    assert {job: len(mine) for job, mine in plan.nodes.items()} == {"fast": 2, "slow": 6}
    alone = [Candidate(c.job, 1, 8, (), curve=c.curve) for c in candidates]
    assert len(make_plan(alone, nodes(8), PlanningSettings()).nodes["fast"]) == 8


def test_what_one_has_no_use_for_the_other_has():
    candidates = [
        Candidate("j1", 1, 12, (), curve=linear(1.0), trainer=ONE),
        Candidate("j2", 1, 2, (), curve=linear(1.0), trainer=TWO),
    ]
    plan = TrainerPlanner(make_plan)(candidates, nodes(10), PlanningSettings())
    assert {job: len(mine) for job, mine in plan.nodes.items()} == {"j1": 8, "j2": 2}


def test_a_part_that_grows_back_takes_free_nodes_first_and_leaves_jobs_theirs():
    machine = nodes(8)
    first_nodes = tuple(machine)[:2]
    candidates = [
        Candidate("j1", 1, 8, first_nodes, curve=linear(1.0), trainer=ONE),
        Candidate("j2", 1, 8, (), curve=linear(1.0), trainer=TWO),
    ]
    plan = TrainerPlanner(make_plan)(candidates, machine, PlanningSettings())
    assert plan.nodes["j1"] == first_nodes
    assert len(plan.nodes["j2"]) == 6


def test_two_shared_classes_are_both_used():
    """A job runs on one class only: each trainer's is at home in one of them, and has all of it."""
    machine = {**nodes(4, "a"), **nodes(4, "b", begin=4)}
    candidates = [
        Candidate("j1", 1, 4, (), curve=linear(1.0), trainer=ONE),
        Candidate("j2", 1, 4, (), curve=linear(1.0), trainer=Trainer("two")),
    ]
    plan = TrainerPlanner(make_plan)(candidates, machine, PlanningSettings())
    assert {job: len(mine) for job, mine in plan.nodes.items()} == {"j1": 4, "j2": 4}


def test_a_class_that_stands_empty_draws_a_job_from_a_full_one():
    machine = {**nodes(4, "a"), **nodes(8, "b", begin=4)}
    first_nodes = tuple(machine)[:4]
    candidates = [
        Candidate("j1", 1, 8, first_nodes[:2], curve=linear(1.0), cost=FREE, trainer=ONE),
        Candidate(
            "j2", 1, 8, first_nodes[2:], curve=linear(1.0), cost=FREE, trainer=Trainer("two")
        ),
    ]
    plan = TrainerPlanner(make_plan)(candidates, machine, PlanningSettings())
    assert sorted(len(mine) for mine in plan.nodes.values()) == [4, 8]


def test_who_has_few_jobs_has_its_part_of_two_classes():
    machine = {**nodes(4, "a"), **nodes(4, "b", begin=4)}
    candidates = [
        *(Candidate(f"j{k}", 1, 4, (), curve=linear(1.0), trainer=ONE) for k in range(3)),
        Candidate("k", 1, 4, (), curve=linear(1.0), trainer=Trainer("two")),
    ]
    plan = TrainerPlanner(make_plan)(candidates, machine, PlanningSettings())
    assert len(plan.nodes["k"]) == 4


def test_nodes_too_few_for_one_are_the_others():
    candidates = [
        Candidate("wide", 6, 8, (), curve=linear(1.0), trainer=ONE),
        Candidate("j", 1, 8, (), curve=linear(1.0), trainer=Trainer("two")),
    ]
    plan = TrainerPlanner(make_plan)(candidates, nodes(8), PlanningSettings())
    assert {job: len(mine) for job, mine in plan.nodes.items()} == {"wide": 0, "j": 8}


sizes = st.integers(1, 12)


@st.composite
def machines(draw):
    """Candidates of up to three trainers, and nodes of up to two classes, some of them held."""
    kinds = draw(
        st.lists(
            st.builds(
                Trainer,
                st.sampled_from("xyz"),
                part=st.sampled_from([0.5, 1.0, 3.0]),
                only=st.sampled_from([None, frozenset("a"), frozenset("b"), frozenset("ab")]),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda t: t.name,
        )
    )
    machine = {
        f"n{k:02}": NodeInfo(c)
        for k, c in enumerate(draw(st.lists(st.sampled_from("ab"), max_size=16)))
    }
    free, candidates = list(machine), []
    for number in range(draw(st.integers(0, 6))):
        trainer, most = draw(st.sampled_from(kinds)), draw(sizes)
        home = draw(st.sampled_from("ab"))
        count = draw(st.integers(0, most))
        mine = [n for n in free if machine[n].node_class == home and trainer.may_use(home)][:count]
        free = [n for n in free if n not in mine]
        fixed = bool(mine) and draw(st.booleans())
        must = not fixed and draw(st.booleans())
        candidates.append(
            Candidate(
                *(f"j{number}", 1, max(most, len(mine)), tuple(mine)),
                fixed=fixed,
                must_run=must,
                trainer=trainer,
            )
        )
    return candidates, machine


@settings(max_examples=60)
@given(machines())
def test_the_parts_are_disjoint_and_keep_what_stays(drawn):
    candidates, machine = drawn
    groups = {}
    for c in candidates:
        groups.setdefault(c.trainer.name, []).append(c)
    parts = divide(groups, machine)
    used_nodes = [node for mine in parts.values() for node in mine]
    assert len(used_nodes) == len(set(used_nodes))
    for name, group in groups.items():
        able = {node for node in machine if group[0].trainer.may_use(machine[node].node_class)}
        assert set(parts[name]) <= able
        for c in group:
            if c.fixed:
                assert set(c.nodes) <= set(parts[name])


@settings(max_examples=60)
@given(machines())
def test_no_node_is_left_that_a_job_could_use_where_it_is(drawn):
    candidates, machine = drawn
    plan = TrainerPlanner(make_plan)(
        [
            replace(c, cost=FREE, curve=linear(1.0), nodes=c.nodes if c.fixed else ())
            for c in candidates
        ],
        machine,
        PlanningSettings(),
    )
    taken = {node for mine in plan.nodes.values() for node in mine}
    free_counts = Counter(info.node_class for node, info in machine.items() if node not in taken)
    for c in candidates:
        mine = plan.nodes[c.job]
        if c.fixed or len(mine) == c.max_nodes:
            continue
        for pool, count in free_counts.items():
            assert not mine or machine[mine[0]].node_class != pool or not c.may_use(pool)
            assert len(mine) >= count or not c.may_use(pool)


@settings(max_examples=60)
@given(machines())
def test_a_plan_gives_each_job_nodes_that_it_may_use(drawn):
    candidates, machine = drawn
    plan = TrainerPlanner(make_plan)(candidates, machine, PlanningSettings())
    assert set(plan.nodes) == {c.job for c in candidates}
    taken = [node for mine in plan.nodes.values() for node in mine]
    assert len(taken) == len(set(taken))
    for c in candidates:
        mine = plan.nodes[c.job]
        assert all(c.may_use(machine[node].node_class) for node in mine)
        assert len(mine) <= c.max_nodes
        if c.fixed:
            assert mine == c.nodes


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=4), st.integers(0, 200))
def test_parts_are_kept_where_all_want_more(parts, count):
    groups = {
        str(k): [Candidate(f"j{k}", 1, 500, (), trainer=Trainer(str(k), part=part))]
        for k, part in enumerate(parts)
    }
    nodes_of_group = divide(groups, nodes(count))
    assert sum(map(len, nodes_of_group.values())) == count
    for k, part in enumerate(parts):
        assert abs(len(nodes_of_group[str(k)]) - count * part / sum(parts)) < 2


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
    c = controller(ONE, TWO, planning=PlanningSettings(max_running=2))
    for k in range(5):
        submit(c, f"a{k}", "one")
    submit(c, "b", "two")
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


@pytest.mark.parametrize("name", ["one", "two"])
def test_all_of_a_trainers_jobs_are_valued_alike_whatever_their_owners_said(name):
    seen = {}

    def planner(candidates, *rest):
        seen.update({x.job: x.goal for x in candidates})
        return make_plan(candidates, *rest)

    c = Controller(ControllerSettings(trainers=(ONE, TWO)), planner)
    c.handle(NodeJoined("n1"), 0.0)
    submit(c, "j1", name, goal=Goal.THROUGHPUT)
    submit(c, "j2", name, goal=Goal.EFFICIENCY)
    c.handle(Tick(), 10.0)
    assert set(seen.values()) == {Trainers((ONE, TWO)).of(name).goal}


def test_the_phrase():
    assert GPU.phrase() == "gpu: efficiency, on nodes of a100"
    assert CPU.phrase() == "cpu: throughput, on all nodes but a100"
    assert Trainer("d", Goal.EFFICIENCY, 100.0, part=2.0).phrase() == (
        "d: deadlines, on all nodes, part 2"
    )
