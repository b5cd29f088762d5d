"""Slots of virtual hosts: what main jobs have, who has to leave, which GPUs a lease gets."""

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.embedded.hosts import Division, VirtualHost

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 1000})
CPU = SlotKind("cpu", {"cpus": 4, "memory_mb": 100}, nodes=frozenset({"n1"}))
HOST = {"gpu": 4, "cpus": 9, "memory_mb": 8000}
DIVISION = Division(HOST, (GPU, CPU))


def host(idle_units, units=4, division=DIVISION, number=0):
    return VirtualHost(f"n{number + 1}", number, division, units, idle_units)


def idle(one, leases=()):
    facts = one.facts(dict.fromkeys(leases, "l"), {}, 10.0)
    return [f.name for f in facts if f.idle and not f.beside]


def test_a_host_has_the_slots_of_the_kinds_that_cover_it():
    assert DIVISION.slots("n1") == [f"n1/gpu.{k}" for k in range(4)] + ["n1/cpu.0", "n1/cpu.1"]
    assert DIVISION.slots("n2") == [f"n2/gpu.{k}" for k in range(4)]
    assert Division().slots("n1") == ["n1"]
    assert Division(HOST, (SlotKind("huge", {"gpu": 8}),)).slots("n1") == []


def test_main_jobs_have_their_part_of_each_resource_rounded_up():
    assert host(3).main_jobs == {"gpu": 1, "cpus": 3, "memory_mb": 2000}
    assert host(4).main_jobs == {"gpu": 0, "cpus": 0, "memory_mb": 0}
    assert host(0).main_jobs == HOST


def test_the_idle_slots_are_those_that_fit_beside_main_jobs_and_leases():
    assert idle(host(3)) == ["n1/gpu.0", "n1/gpu.1", "n1/gpu.2", "n1/cpu.0"]
    assert idle(host(3), ["n1/gpu.1"]) == ["n1/gpu.0", "n1/gpu.2", "n1/cpu.0"]
    assert idle(host(3), ["n1/cpu.0"]) == ["n1/gpu.0"]
    assert idle(host(0)) == []


def test_a_kind_that_shares_with_nobody_needs_a_host_without_main_jobs():
    alone = Division(HOST, (SlotKind("gpu", dict(GPU.amounts), "nobody"),))
    assert idle(host(3, division=alone)) == []
    assert len(idle(host(4, division=alone))) == 4


def test_the_newest_lease_that_has_what_is_short_leaves():
    leases = ["n1/gpu.2", "n1/gpu.0", "n1/gpu.1"]
    assert host(3).preempted(leases) == []
    assert host(2).preempted(leases) == ["n1/gpu.1"]
    assert host(0).preempted(leases) == ["n1/gpu.1", "n1/gpu.0", "n1/gpu.2"]
    # 9 processors, of which main jobs have 3: short of processors, not of GPUs.
    assert host(3).preempted(["n1/gpu.0", "n1/cpu.0", "n1/cpu.1"]) == ["n1/cpu.1"]


def test_a_lease_gets_the_lowest_gpus_that_no_other_has():
    two = Division(HOST, (SlotKind("pair", {"gpu": 2}),))
    assert host(4, division=two).devices("n1/pair.1", {}) == (0, 1)
    assert host(4, division=two, number=1).devices("n2/pair.1", {}) == (4, 5)
    assert host(4).devices("n1/gpu.3", {"n1/gpu.0": (0,), "n1/gpu.1": (2,)}) == (1,)
    assert host(4).devices("n1/cpu.0", {}) == ()


def test_a_division_is_read_from_its_json():
    assert Division.from_json(DIVISION.to_json()) == DIVISION
    for text in ("", "[]", '{"total": {}}', '{"total": {}, "kinds": [{}]}'):
        with pytest.raises(ValueError, match="--slots is not the JSON of a division"):
            Division.from_json(text)
