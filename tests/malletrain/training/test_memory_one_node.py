"""Snapshots in memory on one node, in one process: what counts beside the disk, and what must not
stop a run.
"""

import math
import sys

import pytest

import malletrain
from malletrain import Snapshot, SnapshotError
from malletrain.config.sections import JobsSection
from malletrain.memory.folder import MemoryFolder
from malletrain.training import memory_snapshots, owner, snapshot_file
from malletrain.training.memory_snapshots import HEIR_SILENCE_S, MemorySnapshots
from malletrain.training.memory_tier import MemoryRestore, MemoryTier
from malletrain.training.side_group import Team
from tests.malletrain.training.worker_side import as_worker, process_ends

pytest.importorskip("torch")

ADDRESS = "127.0.0.1:1"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The node's folder in memory, of a launcher with a keeper."""
    made = tmp_path / "memory"
    made.mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("MALLETRAIN_MEMORY", str(made))
    monkeypatch.setenv("MALLETRAIN_MEMORY_LIMIT", str(1 << 30))
    monkeypatch.setenv("MALLETRAIN_KEEPER", ADDRESS)
    monkeypatch.delenv("MALLETRAIN_RESUME_FROM", raising=False)
    return made


def test_under_a_launcher_without_a_keeper_nothing_is_kept_in_memory(
    tmp_path, monkeypatch, memory, capfd
):
    """As torchrun is: the other nodes could not have what one has."""
    monkeypatch.delenv("MALLETRAIN_KEEPER")
    with as_worker(monkeypatch):
        snapshot = Snapshot(tmp_path / "x.pt", replicate_every=1, every_s=0, facts={"n": 1})
        snapshot.restore()
        snapshot.step()
    assert list(memory.iterdir()) == []
    assert (tmp_path / "x.pt").exists()
    assert "This node keeps no snapshots in memory" in "".join(capfd.readouterr())


def test_a_run_that_began_from_anothers_snapshot_goes_on_from_its_own_in_memory(
    tmp_path, monkeypatch, memory
):
    """Both at one path; the other job had more rounds."""
    path = tmp_path / "x.pt"
    with as_worker(monkeypatch, generation=40):
        assert Snapshot(path, facts={"n": 1}).save()
    for generation, expected in ((1, 1), (2, 5), (3, 5)):
        with as_worker(monkeypatch, generation=generation):
            monkeypatch.setenv("MALLETRAIN_JOB", "job-2")
            monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "job-1")
            facts = {"n": 0}
            snapshot = Snapshot(path, every_s=math.inf, replicate_every=1, facts=facts)
            assert snapshot.restore()
            assert facts == {"n": expected}
            facts["n"] = 5
            snapshot.step()
    assert snapshot.save()
    assert snapshot_file.read(str(path))["owner"]["job"] == "job-2"


class AnotherRankCannotRead(Team):
    """A rank of several, of which another one does not see the snapshot on disk."""

    on_disk = False

    def run_on_all(self, work):
        done = super().run_on_all(work)
        if self.on_disk:
            self.on_disk = False
            raise SnapshotError("Rank 1 cannot see it.")
        return done


def test_what_another_rank_cannot_read_on_disk_is_not_gone_on_from(tmp_path, monkeypatch, memory):
    """Else some went on from the disk and others from memory, or waited for each other."""
    path, team, facts = tmp_path / "x.pt", AnotherRankCannotRead(), {"n": 0}

    def from_disk():
        team.on_disk = True
        payload = snapshot_file.read(str(path))
        facts.update(payload["objects"]["facts"])
        return payload

    with as_worker(monkeypatch, generation=1):
        snapshot = Snapshot(path, every_s=math.inf, replicate_every=1, facts={"n": 1})
        snapshot.restore()
        snapshot.step()
    with as_worker(monkeypatch, generation=2):
        assert Snapshot(path, facts={"n": 2}).save()
        run = MemorySnapshots(
            *(str(path), owner.this_run(), {"facts": facts}, dict, dict, lambda: team)
        )
        monkeypatch.setattr(memory_snapshots, "label_of", lambda *_: "")
        assert run.restore(from_disk)["objects"]["facts"] == {"n": 1}
    assert facts == {"n": 1}


def test_what_was_saved_in_an_epochs_end_that_was_lost_is_not_newer_than_memory(
    tmp_path, monkeypatch, memory
):
    path = tmp_path / "x.pt"

    def script(**options):
        sampler = malletrain.ElasticSampler(4, global_batch_size=2, rank=0, world_size=1)
        snapshot = Snapshot(path, sampler=sampler, every_s=math.inf, replicate_every=1, **options)
        snapshot.restore()
        return sampler, snapshot

    with as_worker(monkeypatch, generation=1):
        sampler, snapshot = script()
        epochs = sampler.epochs(3)
        assert next(epochs) == 0
        for _ in sampler:
            sampler.advance()
            snapshot.step()
        snapshot.save()
    process_ends()
    with as_worker(monkeypatch, generation=2):
        sampler, _ = script()
        assert (sampler.epoch, sampler.position) == (0, 2)


@pytest.mark.parametrize("trouble", ["damaged", "no room"])
def test_what_cannot_go_from_one_nodes_disk_into_memory_is_told(
    tmp_path, monkeypatch, memory, trouble, capfd
):
    path = tmp_path / "x.pt"
    with as_worker(monkeypatch):
        assert Snapshot(path, facts={"n": 1}).save()
        if trouble == "damaged":
            path.write_bytes(path.read_bytes()[:-100])
        tier = MemoryTier(MemoryFolder(memory, 10), "0" * 16, ADDRESS)
        MemoryRestore(tier, tier.label, str(path), owner.this_run(), Team()).copy_from_disk(ADDRESS)
        assert tier.moments() == []
    assert "does not go to other nodes by memory" in "".join(capfd.readouterr())


def test_a_silent_node_leaves_time_for_the_disk():
    """Within a drain, as long as it is where the site says nothing."""
    assert JobsSection().drain_timeout >= 2 * HEIR_SILENCE_S
