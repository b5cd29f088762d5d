"""Snapshots in the memory of the nodes, on real ranks, each with a memory, a keeper and a disk of
its own: no folder is shared. The state after a change is that of before it, bit for bit.
"""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from malletrain.memory.folder import SHARED_MEMORY, MemoryFolder, bytes_below, private_folder
from malletrain.memory.keeper import Keeper
from tests.malletrain.training.many_ranks import Ranks
from tests.torch_versions import trains_shards

pytestmark = pytest.mark.slow

SECRET = bytes.fromhex("5e" * 32)
KINDS = ("whole", pytest.param("sharded", marks=trains_shards))
SHARDED_AT_SITES = ("whole", pytest.param("sharded", marks=pytest.mark.thorough))
THOROUGH_SHARDS = (pytest.mark.thorough, trains_shards)


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks("memory_scripts")
    yield ranks
    ranks.close()


class Nodes:
    """Nodes by name, each with a memory folder and a launcher's keeper."""

    def __init__(self):
        self.base = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
        self.by_name = {}

    def __call__(self, names, **more):
        return [{**self._node(name), **more} for name in names]

    def _node(self, name):
        if name not in self.by_name:
            memory, disk = private_folder(name, self.base), self.base / f"disk-{name}"
            disk.mkdir()
            keeper = Keeper(MemoryFolder(memory, 1 << 30), SECRET, "job-1", "127.0.0.1")
            self.by_name[name] = keeper, memory, disk
        keeper, memory, disk = self.by_name[name]
        return {"address": keeper.address, "memory": str(memory), "disk": str(disk)}

    def addresses(self, names):
        return [node["address"] for node in self(names)]

    def lose(self, name):
        """As ``kill -9`` of everything on it."""
        keeper, memory, disk = self.by_name.pop(name)
        keeper.close()
        shutil.rmtree(memory)
        shutil.rmtree(disk)

    def files(self, name):
        _, memory, _ = self.by_name[name]
        return sorted(p for p in memory.rglob("*") if p.is_file())

    def close(self):
        for name in list(self.by_name):
            self.lose(name)
        shutil.rmtree(self.base)


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(ranks):
    """Losses and states of a run that nothing happens to."""
    alone = Nodes()
    record = ranks.run(1, "rounds", nodes=alone("a"), steps=12)[0]
    alone.close()
    return record


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_over_2_4_and_3_nodes_is_that_of_an_undisturbed_run(
    ranks, nodes, undisturbed, kind
):
    """Grown, shrunk by the first node and by another, with nothing on any disk."""
    losses, after, position = [], None, 0
    sizes = ("ab", "abcd", "bce", "")
    for generation, (now, following) in enumerate(itertools.pairwise(sizes), 1):
        records = ranks.run(
            *(len(now), "rounds"),
            nodes=nodes(now),
            steps=4,
            heirs=nodes.addresses(following) or None,
            kind=kind,
            generation=generation,
            seed=generation - 1,
        )
        assert {each["restored"] for each in records} == {after is not None}
        if after is not None:
            assert all(each["before"] == after for each in records)
            assert {each["position"] for each in records} == {position}
        if following:
            assert records[0]["drained"] == [True]
        assert all(each["on disk"] == [] for each in records)
        after, position = records[0]["after"], position + 48
        losses += records[0]["losses"]
        for gone in set(now) - set(following):
            nodes.lose(gone)
    assert losses == pytest.approx(undisturbed["losses"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", ["a", pytest.param("c", marks=pytest.mark.thorough)])
def test_a_loss_without_notice_goes_back_to_the_newest_replica(ranks, nodes, kind, lost):
    """Replicas after the second and the fourth step; a node goes after the fifth."""
    options = {"kind": kind, "replicate_every": 2}
    record = ranks.run(3, "rounds", nodes=nodes("abc"), steps=5, **options)[0]
    nodes.lose(lost)
    survivors = "abc".replace(lost, "")
    after = ranks.run(2, "rounds", nodes=nodes(survivors), steps=2, generation=2, seed=5, **options)
    assert all(each["restored"] and each["before"] == record["states"][3] for each in after)
    assert {each["position"] for each in after} == {48}
    assert after[0]["losses"][0] == pytest.approx(record["losses"][4], rel=1e-5)
    assert after[0]["on disk"] == []


@pytest.mark.parametrize(
    ("hand_over", "kind"),
    [
        (1000, "whole"),
        pytest.param(1 << 30, "whole", marks=pytest.mark.thorough),
        pytest.param(1000, "sharded", marks=THOROUGH_SHARDS),
        pytest.param(1 << 30, "sharded", marks=THOROUGH_SHARDS),
    ],
)
def test_what_cannot_be_handed_over_in_time_has_a_copy_without_being_asked(
    ranks, nodes, kind, hand_over
):
    """A snapshot is due after every step. The first node, which has the only disk, is lost."""
    options = {"kind": kind, "hand_over": hand_over, "every_s": 0.0}
    record = ranks.run(3, "rounds", nodes=nodes("abc"), steps=6, **options)[0]
    nodes.lose("a")
    after = ranks.run(2, "rounds", nodes=nodes("bc"), steps=2, generation=2, seed=5, **options)
    assert {each["restored"] for each in after} == {hand_over == 1000}
    if hand_over == 1000:
        steps = after[0]["position"] // 12
        assert 1 <= steps <= 6
        assert all(each["before"] == record["states"][steps - 1] for each in after)


@trains_shards
@pytest.mark.thorough
def test_two_neighbours_lost_at_once_are_more_than_replicas_stand(ranks, nodes):
    options = {"kind": "sharded", "replicate_every": 1}
    ranks.run(3, "rounds", nodes=nodes("abc"), steps=2, **options)
    for lost in "bc":
        nodes.lose(lost)
    assert ranks.run(1, "rounds", nodes=nodes("a"), steps=2, **options)[0]["restored"] is False


@pytest.mark.parametrize("kind", SHARDED_AT_SITES)
def test_killed_at_any_moment_of_a_replicas_update_the_state_is_that_of_one_step(
    ranks, nodes, kind
):
    results = ranks.run(1, "killed", nodes=nodes("a"), kind=kind)[0]
    assert all(good for _, good in results), results
    steps = [step for step, _ in results]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 2)
    assert len(steps) >= 4


def test_a_damaged_copy_is_passed_over(ranks, nodes):
    options = {"kind": "whole", "replicate_every": 1}
    record = ranks.run(2, "rounds", nodes=nodes("ab"), steps=2, **options)[0]
    for name in "ab":
        (newest,) = nodes.files(name)
        content = bytearray(newest.read_bytes())
        if name == "a":
            content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    after = ranks.run(2, "rounds", nodes=nodes("ab"), steps=2, generation=2, **options)
    assert all(each["before"] == record["after"] for each in after)


@trains_shards
@pytest.mark.thorough
def test_a_damaged_shard_is_read_from_its_replica(ranks, nodes):
    options = {"kind": "sharded", "replicate_every": 1}
    record = ranks.run(2, "rounds", nodes=nodes("ab"), steps=2, **options)[0]
    (own,) = (p for p in nodes.files("a") if p.name.startswith("__0"))
    content = bytearray(own.read_bytes())
    content[len(content) // 2] ^= 1
    own.write_bytes(content)
    after = ranks.run(2, "rounds", nodes=nodes("ab"), steps=2, generation=2, **options)
    assert all(each["before"] == record["after"] for each in after)


def test_a_newer_one_on_disk_comes_before_memory_and_an_older_one_after(ranks, nodes):
    """The disk of node a alone has one: it goes to the others from there."""
    record = ranks.run(2, "rounds", nodes=nodes("ab"), steps=3, every_s=0.0)[0]
    assert record["on disk"] == ["x.pt", "x.pt.prev"]
    for name in "ab":
        for path in nodes.files(name):
            path.unlink()
    after = ranks.run(
        2, "rounds", nodes=nodes("ab"), steps=2, generation=2, heirs=nodes.addresses("b")
    )
    assert all(each["restored"] for each in after)
    assert after[0]["before"] == record["after"]
    third = ranks.run(1, "rounds", nodes=nodes("b"), steps=2, generation=3)[0]
    assert third["before"] == after[0]["after"]


def test_memory_is_bounded_and_the_disk_is_used_beyond(ranks, nodes):
    """One that does not fit at all, and one of which a single one does."""
    cramped = nodes("ab", limit=1000)
    record = ranks.run(2, "rounds", nodes=cramped, steps=2, heirs=nodes.addresses("ab"))[0]
    assert (record["drained"], record["on disk"]) == ([True], ["x.pt"])
    assert nodes.files("a") == nodes.files("b") == []
    size = os.path.getsize(Path(cramped[0]["disk"]) / "x.pt")
    room = nodes("cd", limit=4 * size)
    ranks.run(2, "rounds", nodes=room, steps=6, replicate_every=1)
    for node in room:
        assert 0 < bytes_below(Path(node["memory"])) < 1.5 * size


def test_a_node_without_memory_takes_part(ranks, nodes):
    record = ranks.run(2, "rounds", nodes=nodes("ab"), steps=2, heirs=nodes.addresses("ab"))[0]
    after = ranks.run(3, "rounds", nodes=nodes("abc"), steps=2, generation=2, lacking=(2,))
    assert all(each["before"] == record["after"] for each in after)


def test_the_snapshot_of_another_job_is_not_used(ranks, nodes):
    ranks.run(1, "rounds", nodes=nodes("a"), steps=2, heirs=nodes.addresses("a"))
    (path,) = nodes.files("a")
    theirs = path.read_bytes()
    assert b"job-1" in theirs
    output = ranks.run(1, "renamed", nodes=nodes("a"), path=str(path))[0]
    assert "belongs to job job-2" in output
