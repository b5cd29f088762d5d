"""The order of the tests over several workers."""

from tests.dealing import deal


def test_each_worker_begins_with_its_share_of_the_slow_modules():
    sizes = {"a": 2, "slow 1": 3, "b": 6, "slow 2": 1, "slow 3": 2, "c": 4}
    order = deal(sizes, {"slow 1", "slow 2", "slow 3"}, 2)
    assert order == ["slow 1", "slow 3", "c", "slow 2", "b", "a"]
    assert sum(sizes[name] for name in order[:3]) == sum(sizes.values()) / 2


def test_one_worker_has_all_the_slow_ones_first():
    assert deal({"a": 1, "slow": 1}, {"slow"}, 1) == ["slow", "a"]


def test_half_of_the_workers_begin_with_those_that_need_the_fork_server():
    sizes = dict.fromkeys(("fork 1", "site 1", "fork 2", "fork 3", "site 2", "site 3"), 1)
    order = deal(sizes, sizes, 2, {"fork 1", "fork 2", "fork 3"})
    assert order == ["fork 1", "fork 2", "fork 3", "site 1", "site 2", "site 3"]
