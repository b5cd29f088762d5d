"""A change is rehearsed by one process alone before it says that it is ready, and nothing depends
on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from malletrain.elastic.checkin import CheckIn
from malletrain.elastic.link import Place
from malletrain.elastic.sharded import rehearsal
from malletrain.elastic.sharded.setup import Shards, sharded_training
from malletrain.elastic.sharded.training import MeshCache, ShardedTraining
from malletrain.training import rng
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.sharded import scripts
from tests.malletrain.elastic.sharded.test_live import counts_as_if_undisturbed
from tests.malletrain.elastic.test_run import change_at, records
from tests.torch_versions import reuses_meshes, trains_shards
from tests.waiting import until


def noted(folder: str, options: dict[str, Any], how: str = "") -> None:
    """The training of the other tests; each mesh that ``parallelize`` gets is written down.
    ``how``: what it does with one of a rehearsal.
    """
    inner, shard = os.getpid(), scripts.parallelize

    def parallelize(model: scripts.Net, mesh: Any) -> None:
        with Path(folder, f"meshes-{inner}").open("a") as file:
            file.write(json.dumps([mesh.size(), mesh.get_rank()]) + "\n")
        if how == "raises" and not Path(folder, "go-5").exists():
            raise ValueError("this model needs two ranks")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "dies at its place" and mesh.size() > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        shard(model, mesh)

    scripts.parallelize = parallelize
    scripts.train(folder, options)


def meshes(folder: Path, pid: int) -> list[list[int]]:
    path = folder / f"meshes-{pid}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


OPTIONS = {"samples": 120, "gates": [5]}


@trains_shards
def test_a_newcomer_rehearses_before_the_others_stop(tmp_path):
    """Alone before it is ready, at its place before the round begins, and then in the round."""
    with conducted(tmp_path, noted, str(tmp_path), OPTIONS) as c:
        members, new = c.start(1), c.start(1)
        c.round(members)
        pid = new[0].process.pid
        c.until(lambda: new[0].heard("ready"), "the newcomer is ready")
        assert meshes(tmp_path, pid) == [[1, 0]]
        change_at(c, tmp_path, 5)
        c.round([*members, *new], wait=False)
        # The other one is still in its step.
        c.until(c.all_checked_in, "all have checked in")
        assert meshes(tmp_path, pid) == [[1, 0], [2, 1]]
        assert not any(r["size"] == 2 for r in records(tmp_path))
        (tmp_path / "go-5").touch()
        c.finish()
        assert meshes(tmp_path, pid) == [[1, 0], [2, 1], [2, 1]]
        assert "rehearsal" not in c.outputs()
    counts_as_if_undisturbed(tmp_path, OPTIONS)


@trains_shards
def test_a_rehearsal_that_raises_costs_nothing_but_a_notice(tmp_path):
    with conducted(tmp_path, noted, str(tmp_path), OPTIONS) as c:
        members, new = c.start(1), c.start(1, "raises")
        c.round(members)
        change_at(c, tmp_path, 5)
        c.round([*members, *new], wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-5").touch()
        c.finish()
        output = new[0].output.read_text()
    assert output.count("alone, failed (ValueError: this model needs two ranks).") == 1
    counts_as_if_undisturbed(tmp_path, OPTIONS)
    assert {r["size"] for r in records(tmp_path)} == {1, 2}


@pytest.mark.parametrize("how", ["dies", "dies at its place"])
@trains_shards
def test_a_newcomer_that_dies_in_its_rehearsal_costs_the_others_nothing(tmp_path, how):
    """They do not stop for it: no step is given up or done again."""
    with conducted(tmp_path, noted, str(tmp_path), OPTIONS) as c:
        members, new = c.start(2), c.start(1, how)
        c.round(members)
        change_at(c, tmp_path, 5)
        if how == "dies at its place":
            c.round([*members, *new], wait=False)
        c.until(lambda: not new[0].alive, "it has died")
        if how == "dies at its place":
            assert not c.all_checked_in()
            for worker in members:
                worker.tell(abort=c.generation)
            c.round(members, wait=False)
        (tmp_path / "go-5").touch()
        c.finish()
    counts_as_if_undisturbed(tmp_path, OPTIONS, all_changes_came=False)
    done = [(r["step"], r["rank"]) for r in records(tmp_path)]
    assert len(done) == len(set(done))


def training_of(**options: Any) -> ShardedTraining:
    arguments = {"build": scripts.Net, "parallelize": scripts.parallelize, "over": "all", **options}
    shards = Shards(arguments["build"], arguments["parallelize"], arguments["over"], 0)
    objects = {"optimizer": scripts.optimizer_of, "scheduler": scripts.scheduler_of}
    return sharded_training(shards, objects, torch.device("cpu"), None, 60.0, None)


@pytest.mark.parametrize(
    "over",
    [
        pytest.param("all", marks=reuses_meshes),
        pytest.param("node", marks=trains_shards),  # gloo of torch 2.7 averages over no replicas
    ],
)
def test_a_rehearsal_leaves_nothing_behind(capsys, over):
    training, called = training_of(over=over), []
    optimizer = training.optimizer
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before = rng.state(), optimizer.state_dict(), training.others["scheduler"].state_dict()
    rehearsal.rehearse(training, "gloo")
    if over == "all":
        rehearsal.rehearse_at(training, Place(3, 1, 4))
        assert training.meshes.is_cached(Place(9, 1, 4))
        assert not training.meshes.is_cached(Place(9, 2, 4))
    assert not dist.is_initialized()
    after = rng.state(), optimizer.state_dict(), training.others["scheduler"].state_dict()
    assert torch.equal(before[0].pop("torch"), after[0].pop("torch"))
    assert str(before) == str(after)
    assert called == []
    assert all(p.is_meta and p.grad is None for p in training.model.module.parameters())
    assert capsys.readouterr().err == ""


@reuses_meshes
def test_a_mesh_comes_again_with_the_group_of_the_new_round():
    mesh_cache, before = MeshCache("cpu", is_hsdp=False), None
    for generation in (1, 2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = mesh_cache.mesh_for(Place(generation, 0, 1), 1)
            assert mesh.get_group() is dist.group.WORLD
            assert before in (None, mesh)
            before = mesh
        finally:
            dist.destroy_process_group()


TOUCHED = """
import resource, torch
from malletrain.elastic.state import keep_freed
from malletrain.elastic.sharded.rehearsal import touch

torch.set_num_threads(1)
assert keep_freed()
tensors = {str(n): torch.empty(1 << 20, device="meta") for n in range(16)}
if touched:
    touch(tensors, torch.device("cpu"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rooms = [torch.empty(1 << 20).fill_(1) for _ in tensors]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.thorough
def test_memory_that_was_touched_is_there_when_it_is_needed():
    """64 MB are 16,384 pages, each of which is faulted in once. How much of what was freed the C
    library finds again depends on where the heap lies: all of it mostly, half of it at worst.
    """
    faults = []
    for touched in (False, True):
        argv = [sys.executable, "-c", f"touched = {touched}{TOUCHED}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    assert faults[1] < faults[0] * 3 / 4


class _Nothing:
    """A member that checks in and has no memory to prepare."""

    def for_joiners(self) -> str:
        return "[]"

    def make_room(self, data: str) -> None:
        pass


def checking_in(port: int, rank: int, holding: str, rehearses: Callable[[], bool]) -> CheckIn:
    return CheckIn(
        Place(2, rank, 2, port),
        "",
        _Nothing(),
        lambda: None,
        holding,
        lambda words: list(range(len(words))),
        rehearses,
    )


def test_who_has_come_to_train_meanwhile_is_not_waited_for():
    """It had no state when the next round came, and entered the one before all the same: its
    rehearsal is not called any more.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    trains = threading.Event()
    both = [
        checking_in(store.port, 0, "a part", lambda: False),
        checking_in(store.port, 1, "null", lambda: not trains.is_set()),
    ]
    until(lambda: store.check(["order"]), "both have told")
    assert not store.check(["all"])
    trains.set()
    until(lambda: all(one.everyone for one in both), "both are there")
