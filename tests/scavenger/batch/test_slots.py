"""Which slots of a host are idle: a table, and what holds for every host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.rules import GapRules, NodeFacts, choose, explain
from scavenger.batch.slots import (
    DeviceParts,
    HostResources,
    LeasedSlot,
    Neighbour,
    SlotKind,
    capacity,
    described,
    parts_of_hosts,
    slot_facts,
)
from scavenger.interface import host_of, kind_of, slot_name

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 8, "memory_mb": 1000})
PAIR = SlotKind("gpu2", {"gpu": 2, "cpus": 8, "memory_mb": 1000})
CPU = SlotKind("cpu", {"cpus": 4, "memory_mb": 500})
TOTAL = {"gpu": 4, "gpu:a100": 4, "cpus": 64, "memory_mb": 8000}
HOST = NodeFacts("c1", "mixed", idle=False, partitions=("batch",))


def used(gpu=0, cpus=0, memory_mb=0):
    return {"gpu": gpu, "gpu:a100": gpu, "cpus": cpus, "memory_mb": memory_mb}


def idle(use, *kinds, leased=None):
    facts = slot_facts(HOST, use, kinds, leased or {}, {}, 0.0)
    return [fact.name for fact in facts if fact.idle]


@pytest.mark.parametrize(
    ("use", "kind", "expected"),
    [
        (used(), GPU, [0, 1, 2, 3]),
        (used(gpu=1, cpus=8), GPU, [0, 1, 2]),
        (used(gpu=3), GPU, [0]),
        (used(gpu=4), GPU, []),
        (used(cpus=64), GPU, []),  # GPUs without processors
        (used(cpus=50), GPU, [0]),
        (used(memory_mb=7001), GPU, []),
        (used(gpu=1), PAIR, [0]),
        (used(gpu=4, cpus=50), CPU, [0, 1, 2]),
    ],
)
def test_a_slot_is_idle_if_everything_that_it_has_is(use, kind, expected):
    assert idle(HostResources(TOTAL, use), kind) == [f"c1/{kind.name}.{n}" for n in expected]


@pytest.mark.parametrize(
    ("host_idle", "why", "leased", "expected"),
    [
        (True, {}, {}, [0, 1]),
        (True, {"closed": "where jobs have whole nodes"}, {}, [0, 1]),
        (False, {}, {}, []),  # a job uses some of it
        (True, {}, {"c1/gpu2.1": LeasedSlot("l1", False)}, []),  # its job waits for the host
        (False, {}, {"c1/gpu2.1": LeasedSlot("l1", True)}, []),  # the other one is held by it
    ],
)
def test_slots_of_a_kind_with_whole_hosts_are_idle_together(host_idle, why, leased, expected):
    host, kind = HOST._replace(idle=host_idle), replace(PAIR, whole_host=True)
    facts = slot_facts(host, HostResources(TOTAL, used(), **why), [kind], leased, {}, 0.0)
    assert [fact.name for fact in facts] == ["c1/gpu2.0", "c1/gpu2.1"]
    assert [f.name for f in facts if f.idle] == [f"c1/gpu2.{n}" for n in expected]
    assert {fact.lease for fact in facts if fact.lease} == {
        lease.lease for lease in leased.values()
    }


def test_a_running_lease_keeps_its_name_and_a_waiting_one_counts_as_used():
    leased = {"c1/gpu.1": LeasedSlot("l1", True), "c1/gpu.2": LeasedSlot("l2", False)}
    use = HostResources(TOTAL, used(gpu=2, cpus=16))  # one of a main job, one of l1
    assert idle(use, GPU, leased=leased) == ["c1/gpu.0"]
    facts = {f.name: f for f in slot_facts(HOST, use, [GPU], leased, {"c1/gpu.0": 3.0}, 9.0)}
    assert [facts[f"c1/gpu.{n}"].lease for n in range(4)] == ["", "l1", "l2", ""]
    assert facts["c1/gpu.0"].idle_since == 3.0
    assert facts["c1/gpu.3"].idle_since is None
    assert "with 1 of 4 gpu, 40 of 64 cpus, 7000 of 8000 MiB idle" in facts["c1/gpu.3"].state


def test_a_leased_slot_stays_known_on_a_host_that_lost_a_device():
    leased = {"c1/gpu.3": LeasedSlot("l4", True)}
    use = HostResources({**TOTAL, "gpu": 2, "gpu:a100": 2}, used(gpu=2))
    facts = slot_facts(HOST, use, [GPU], leased, {}, 0.0)
    assert {f.name: f.lease for f in facts}["c1/gpu.3"] == "l4"
    assert not any(f.idle for f in facts)


def test_an_amount_can_be_part_of_an_idle_slot_of_each_kind():
    assert idle(HostResources(TOTAL, used(gpu=2)), GPU, PAIR) == [
        "c1/gpu.0",
        "c1/gpu.1",
        "c1/gpu2.0",
    ]


SHARDS = {"gpu": 4, "shard": 8, "cpus": 64, "memory_mb": 8000}


def sharded(free, gpu=0):
    """A host of 4 GPUs with 2 shards each."""
    taken = {"gpu": gpu, "shard": 8 - sum(free), "cpus": 0, "memory_mb": 0}
    return HostResources(SHARDS, taken, parts={"shard": DeviceParts("gpu", (2,) * 4, free)})


@pytest.mark.parametrize(
    ("free", "gpu", "shards", "expected"),
    [
        ((2, 2, 2, 2), 0, 1, 8),
        ((2, 2, 2, 2), 0, 2, 4),
        ((2, 2, 2, 2), 0, 3, 0),  # no device has so many
        ((2, 2), 2, 1, 4),  # two of four GPUs are allocated
        ((2, 1, 1), 3, 2, 1),  # two shards of two devices are not one slot
        ((), 4, 1, 0),
    ],
)
def test_a_slot_has_shards_of_one_device(free, gpu, shards, expected):
    kind = SlotKind("shard", {"shard": shards, "cpus": 1, "memory_mb": 1})
    assert len(idle(sharded(free, gpu), kind)) == expected


@pytest.mark.parametrize(
    ("waiting", "gpus", "shards"),
    [
        ([], 4, 8),
        (["c1/gpu.0"], 3, 6),
        (["c1/shard.0"], 3, 7),
        (["c1/shard.0", "c1/shard.1"], 3, 6),  # on one device
        (["c1/shard.0", "c1/shard.1", "c1/shard.2"], 2, 5),
        (["c1/gpu.0", "c1/shard.0"], 2, 5),
    ],
)
def test_a_waiting_lease_has_a_device_as_a_whole_or_in_parts(waiting, gpus, shards):
    kinds = (
        SlotKind("gpu", {"gpu": 1, "cpus": 1, "memory_mb": 1}),
        SlotKind("shard", {"shard": 1, "cpus": 1, "memory_mb": 1}),
    )
    leased = {name: LeasedSlot(name, False) for name in waiting}
    names = idle(sharded((2, 2, 2, 2)), *kinds, leased=leased)
    assert Counter(map(kind_of, names)) == {"gpu": gpus, "shard": shards}


@pytest.mark.parametrize("typed", [{"gpu:a100": 1}, {"gpu": 1, "gpu:a100": 1}])
def test_a_waiting_lease_of_a_gpu_of_one_type_leaves_fewer_gpus_and_shards(typed):
    kinds = (
        SlotKind("a100", {**typed, "cpus": 1, "memory_mb": 1}),
        SlotKind("gpu", {"gpu": 1, "cpus": 1, "memory_mb": 1}),
        SlotKind("shard", {"shard": 1, "cpus": 1, "memory_mb": 1}),
    )
    host = sharded((2, 2, 2, 2))
    host = replace(host, total={**SHARDS, "gpu:a100": 4}, used={**host.used, "gpu:a100": 0})
    names = idle(host, *kinds, leased={"c1/a100.0": LeasedSlot("l1", False)})
    assert Counter(map(kind_of, names)) == {"a100": 3, "gpu": 3, "shard": 6}
    parted = idle(host, *kinds, leased={"c1/shard.0": LeasedSlot("l1", False)})
    assert Counter(map(kind_of, parted)) == {"a100": 3, "gpu": 3, "shard": 7}


def test_a_host_that_a_user_keeps_has_no_idle_slot():
    use = HostResources(TOTAL, used(gpu=1), closed="kept for jobs of ann")
    [fact, *_] = slot_facts(HOST, use, [GPU], {}, {}, 0.0)
    assert not fact.idle
    assert fact.state == "mixed, kept for jobs of ann"


@pytest.mark.parametrize(
    ("beside", "owner", "passes"),
    [
        ("any", "", True),
        ("nobody", "", False),
        ("own-user", "ann", False),
        ("own-user", "bob", True),
        ("own-user", "", False),  # several users: nobody's job is known to be the lease's own
        ("partition:batch", "", True),
        ("partition:debug,batch", "", True),
        ("partition:debug", "", False),
    ],
)
def test_whose_jobs_may_be_beside_a_slot(beside, owner, passes):
    kind = SlotKind("gpu", GPU.amounts, beside)
    neighbours = (Neighbour("bob", "batch"),)
    rules, host = GapRules(idle_for_s=0.0), HostResources(TOTAL, used(gpu=1), neighbours)
    facts = slot_facts(HOST, host, [kind], {}, {}, 0.0, owner)
    choice = choose(facts, rules, 0.0, lambda _: None)
    assert bool(choice.gaps) is passes
    answer = {rule: ok for rule, ok, _ in explain(facts[0], rules, choice, 0.0).rules}
    assert answer["beside"] is passes
    empty = slot_facts(HOST, HostResources(TOTAL, used()), [kind], {}, {}, 0.0, owner)
    assert choose(empty, rules, 0.0, lambda _: None).gaps, "an empty host is free for all"


BOB = (Neighbour("bob", "batch"),)


@pytest.mark.parametrize(
    ("part", "free_mb", "taken"),
    [
        (0.25, 1000, 4),
        (0.25, 999, 3),
        (0.25, 249, 0),
        (1.0, 2999, 2),
        (0.25, None, 4),  # not known
        (0.0, 0, 4),  # not looked at
    ],
)
def test_memory_that_nobody_requested_but_that_is_not_free(part, free_mb, taken):
    """Each idle slot of a host needs free memory of its own."""
    kind = replace(GPU, free_memory=part)
    assert kind.amounts["memory_mb"] == 1000
    rules = GapRules(idle_for_s=0.0)
    host = HostResources(TOTAL, used(), BOB, free_memory_mb=free_mb)
    facts = slot_facts(HOST, host, [kind], {}, {}, 0.0)
    choice = choose(facts, rules, 0.0, lambda _: None)
    assert sorted(node.name for node in choice.gaps) == [f"c1/gpu.{n}" for n in range(taken)]
    for number, fact in enumerate(facts):
        answers = {rule: ok for rule, ok, _ in explain(fact, rules, choice, 0.0).rules}
        assert answers["idle"]
        assert answers["memory"] is (number < taken)


def test_the_memory_of_a_host_without_other_jobs_is_page_cache():
    kind = replace(GPU, free_memory=1.0)
    host = HostResources(TOTAL, used(), free_memory_mb=0)
    assert not any(fact.memory for fact in slot_facts(HOST, host, [kind], {}, {}, 0.0))
    assert kind.needs_neighbours
    assert not GPU.needs_neighbours, "nobody looks at memory unless the site says so"


def test_the_memory_of_a_lease_that_does_not_run_yet_is_not_free():
    kind = replace(GPU, free_memory=0.5)
    host = HostResources(TOTAL, used(), BOB, free_memory_mb=1000)
    leased = {"c1/gpu.0": LeasedSlot("l1", False)}
    facts = {f.name: f for f in slot_facts(HOST, host, [kind], leased, {}, 0.0)}
    assert facts["c1/gpu.1"].memory == ""
    assert facts["c1/gpu.2"].memory == (
        "its host has 1000 MiB of free memory, and 2 idle slots of kind gpu need 1500 MiB free "
        "(0.5 of the memory of a slot): jobs may use more than they requested, or it is page cache"
    )


def test_a_kind_of_other_hosts():
    kind = SlotKind("gpu", GPU.amounts, nodes=frozenset({"c2"}))
    assert slot_facts(HOST, HostResources(TOTAL, used()), [kind], {}, {}, 0.0) == []


def test_names():
    assert slot_name("c1", "gpu2", 10) == "c1/gpu2.10"
    assert (host_of("c1/gpu2.10"), kind_of("c1/gpu2.10")) == ("c1", "gpu2")
    assert (host_of("c1.site.org"), kind_of("c1.site.org")) == ("c1.site.org", "")


def test_amounts_in_words():
    assert described({"gpu": 1, "cpus": 8, "memory_mb": 61440}) == "1 gpu, 8 cpus, 60 GiB"
    assert described({"cpus": 1, "memory_mb": 500}) == "1 cpu, 500 MiB"


AMOUNT = st.integers(0, 12)
KINDS = st.builds(
    SlotKind,
    st.just("k"),
    st.fixed_dictionaries({"cpus": st.integers(1, 5)}, optional={"gpu": st.integers(1, 3)}),
)


@given(KINDS, AMOUNT, AMOUNT, AMOUNT, AMOUNT, st.sets(st.integers(0, 11)), st.sets(AMOUNT))
def test_idle_slots_fit_into_what_is_free(kind, cpus, gpu, used_cpus, used_gpu, running, waiting):
    total = {"cpus": cpus, "gpu": gpu}
    use = HostResources(total, {"cpus": min(cpus, used_cpus), "gpu": min(gpu, used_gpu)})
    leased = {slot_name("c1", "k", n): LeasedSlot(f"w{n}", False) for n in waiting}
    leased |= {slot_name("c1", "k", n): LeasedSlot(f"r{n}", True) for n in running}
    facts = slot_facts(HOST, use, [kind], leased, {}, 0.0)
    count = sum(fact.idle for fact in facts)
    waits = len(waiting - running)
    for resource, amount in kind.amounts.items():
        free = total[resource] - use.used[resource]
        assert count == 0 or (count + waits) * amount <= free
    assert len({fact.name for fact in facts}) == len(facts)
    assert {f.name: f.lease for f in facts if f.lease} == {n: s.lease for n, s in leased.items()}
    # None is forgotten: another one does not fit, or all of the host's are idle or leased.
    rest = {r: total[r] - use.used[r] - (count + waits) * kind.amounts.get(r, 0) for r in total}
    assert capacity(rest, kind.amounts) == 0 or all(fact.idle or fact.lease for fact in facts)


def test_the_part_of_a_host_that_a_slot_is():
    names = [*(f"a/gpu.{n}" for n in range(4)), "b/gpu.0", "b/cpu.0", "b/cpu.1", "whole"]
    assert parts_of_hosts(names) == {"gpu": 0.25, "cpu": 0.5}
    assert parts_of_hosts(["n1", "n2"]) == {}


def test_a_host_of_which_a_slot_is_left_alone_is_left_alone():
    facts = [
        NodeFacts(f"c1/gpu2.{n}", "idle", idle=True, idle_since=since, kind="gpu2", unit="c1")
        for n, since in enumerate((0.0, 90.0))
    ]
    choice = choose(facts, GapRules(idle_for_s=30.0, min_free_s=0.0), 100.0, lambda _: None)
    assert choice.gaps == ()
    assert choice.exclusions["c1/gpu2.0"][1] == "another slot of its host is left alone"
    assert len(choose(facts, GapRules(idle_for_s=5.0), 100.0, lambda _: None).gaps) == 2
