"""Cores of a lease, and threads of its workers: known answers by table."""

from types import SimpleNamespace

import pytest

from malletrain.launch.cores import (
    allowed_cores,
    allowed_processors,
    apply_threads,
    cores_within,
    distinct_cores,
    threads_per_worker,
)


@pytest.mark.parametrize(
    ("affinity", "quotas", "cores"),
    [
        (64, [], 64),
        (64, ["max 100000"], 64),
        (64, ["1600000 100000"], 16),
        (64, ["max 100000\n", "800000 100000\n", "3200000 100000\n"], 8),  # the smallest counts
        (4, ["1600000 100000"], 4),
        (64, ["150000 100000"], 1),  # one and a half
        (64, ["50000 100000"], 1),  # half a core is still one thread
        (64, ["", "100000", "a b", "100000 0"], 64),  # no quota in any form
    ],
)
def test_cores_are_those_of_the_lease(affinity, quotas, cores):
    assert cores_within(affinity, quotas) == cores


@pytest.mark.parametrize(
    ("slot", "cores"),
    [("", 64), ("8", 8), ("100", 64), ("0", 64), ("eight", 64), ("2", 2)],
)
def test_a_slot_has_a_part_of_the_host(slot, cores):
    assert cores_within(64, [], slot) == cores
    assert cores_within(64, ["400000 100000"], slot) == min(cores, 4)


@pytest.mark.parametrize(
    ("core_count", "slot", "threads_per_core", "cores"),
    [
        (32, "8", 2, 4),  # not confined: 8 of 64 processors are 4 cores
        (4, "8", 2, 4),  # confined to both hardware threads of 4 cores
        (8, "8", 1, 8),  # to one hardware thread of each of 8 cores
        (32, "9", 2, 4),
        (32, "1", 2, 1),
        (32, "", 2, 32),
    ],
)
def test_the_processors_of_a_slot_are_hardware_threads(core_count, slot, threads_per_core, cores):
    assert cores_within(core_count, [], slot, threads_per_core) == cores


def test_a_host_with_two_hardware_threads_of_each_core(monkeypatch):
    siblings = {n: f"{n % 32},{n % 32 + 32}\n" for n in range(64)}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("malletrain.launch.cores._siblings", lambda _: siblings)
    monkeypatch.setattr("malletrain.launch.cores._quotas", list)
    assert allowed_cores({}) == 32
    assert allowed_cores({"MALLETRAIN_SLOT_CPUS": "16"}) == 8
    assert allowed_processors({"MALLETRAIN_SLOT_CPUS": "16"}) == 16


@pytest.mark.parametrize(
    ("processors", "siblings", "cores"),
    [
        ({0, 1, 2, 3}, {}, 4),  # unknown: each is a core
        ({0, 1, 2, 3}, {n: f"{n}\n" for n in range(4)}, 4),  # one hardware thread each
        ({0, 1, 32, 33}, {0: "0,32\n", 32: "0,32\n", 1: "1,33\n", 33: "1,33\n"}, 2),
        ({0, 1, 2, 3}, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 2),
        ({0, 2}, {0: "0-1", 2: "2-3"}, 2),  # bound to one hardware thread of each core
        (set(range(8)), {n: "0-3" if n < 4 else "4-7" for n in range(8)}, 2),  # four of each
        ({0, 1, 7}, {0: "0-1", 1: "0-1"}, 2),
    ],
)
def test_hardware_threads_of_a_core_count_once(processors, siblings, cores):
    assert distinct_cores(processors, siblings) == cores


@pytest.mark.parametrize(
    ("cores", "processes", "environment", "threads"),
    [
        (64, 1, {}, 64),
        (64, 4, {}, 16),
        (2, 2, {}, 1),
        (10, 4, {}, 2),  # rounded down: the processes never have more threads than cores
        (2, 8, {}, 1),
        (64, 0, {}, 64),
        (64, 4, {"OMP_NUM_THREADS": "1"}, 0),
        (64, 4, {"OMP_NUM_THREADS": "24"}, 0),
        (64, 4, {"OMP_NUM_THREADS": "4,2"}, 0),  # nested levels, as OpenMP allows
        (64, 4, {"OMP_NUM_THREADS": ""}, 16),  # empty is not set
        (64, 4, {"MKL_NUM_THREADS": "3"}, 16),  # MKL prefers its own variable
    ],
)
def test_threads_of_a_worker(cores, processes, environment, threads):
    assert threads_per_worker(cores, processes, environment) == threads


@pytest.mark.parametrize(
    ("value", "calls"),
    [("3", [3]), ("4,2", []), ("", []), ("0", []), (None, [])],
)
def test_a_fork_uses_the_number_of_its_environment(value, calls):
    made = []
    environment = {} if value is None else {"OMP_NUM_THREADS": value}
    apply_threads(environment, SimpleNamespace(set_num_threads=made.append))
    assert made == calls
    apply_threads(environment, None)  # torch is not imported
