"""Disjoint parts of one machine, solved side by side."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import Goal, NodeInfo, Options, ScalingCurve, make_bid, solve
from allocator.trainers import Trainer, TrainerError, Trainers, partition


def machine(cpus: int, gpus: int = 0) -> dict[str, NodeInfo]:
    nodes = {f"c{i:03}": NodeInfo("cpu", group=f"s{i % 3}") for i in range(cpus)}
    return nodes | {f"g{i:03}": NodeInfo("gpu") for i in range(gpus)}


SHARES = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1).filter(
    lambda shares: sum(shares.values()) > 1e-3
)


@given(st.integers(0, 40), st.integers(0, 10), SHARES)
@settings(max_examples=200, deadline=None)
def test_parts_are_disjoint_complete_and_proportional(
    cpus: int, gpus: int, shares: dict[str, float]
) -> None:
    nodes = machine(cpus, gpus)
    parts = partition(nodes, shares)
    together = [node for part in parts.values() for node in part]
    assert sorted(together) == sorted(nodes)
    for name, share in shares.items():
        for node_class, total in (("cpu", cpus), ("gpu", gpus)):
            has = sum(info.node_class == node_class for info in parts[name].values())
            assert abs(has - total * share / sum(shares.values())) < 1 + 1e-9
    assert partition(dict(reversed(nodes.items())), shares) == parts


def test_groups_stay_together() -> None:
    parts = partition(machine(9), {"a": 1.0, "b": 2.0})
    assert {info.group for info in parts["a"].values()} == {"s0"}


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({}, "No trainer has a share"),
        ({"a": 0.0}, "No trainer has a share"),
        ({"a": -1.0, "b": 2.0}, "Trainer a is given a share of -1.0"),
        ({"a": float("nan")}, "Trainer a is given a share of nan"),
    ],
)
def test_shares_that_make_no_sense_are_refused(shares: dict[str, float], says: str) -> None:
    with pytest.raises(TrainerError, match=says):
        partition(machine(2), shares)


def test_each_part_gets_its_own_optimum_in_other_processes() -> None:
    curve = ScalingCurve.of({1: 10.0, 2: 17.0, 8: 40.0})
    parts = partition(machine(12), {"samples": 2.0, "fairness": 1.0})
    trainers = [
        Trainer(
            name,
            parts[name],
            [
                make_bid(f"j{i}", curve, current_class="cpu", max_nodes=8, goal=goal)
                for i in range(3)
            ],
        )
        for name, goal in (("samples", Goal.THROUGHPUT), ("fairness", Goal.EFFICIENCY))
    ]
    with Trainers(2, time_limit_s=30.0) as pool:
        found = pool.solve(trainers)
        again = pool.solve([Trainer(t.name, t.nodes, t.bids, warm=found[t.name]) for t in trainers])
    for trainer in trainers:
        alone = solve(trainer.bids, trainer.capacity)
        assert found[trainer.name].objective == alone.objective
        assert again[trainer.name].sizes == found[trainer.name].sizes
        assert sum(size for _, size in found[trainer.name].sizes.values()) <= len(
            parts[trainer.name]
        )


def test_trainers_that_overlap_are_refused() -> None:
    nodes = machine(2)
    with Trainers(1) as pool:
        with pytest.raises(TrainerError, match="Node c000 belongs to both a and b"):
            pool.solve([Trainer("a", nodes, []), Trainer("b", nodes, [])])
        with pytest.raises(TrainerError, match="Two trainers are called a"):
            pool.solve([Trainer("a", {}, []), Trainer("a", {}, [])])


def test_options_travel_without_the_hash_of_their_process() -> None:
    made = Options([1, 2], [1.0, 2.0])
    hash(made)
    there = pickle.loads(pickle.dumps(made))
    assert there == made
    assert not there._hash
