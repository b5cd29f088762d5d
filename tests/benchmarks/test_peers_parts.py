"""Parts of benchmarks/peers.py and sharded.py that need no training."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks import peers_environments
from benchmarks.peers import by_move, settled
from benchmarks.peers_account import Logs, lines_of
from benchmarks.peers_environments import NotInstalled, python_of
from benchmarks.rescale_modes import until
from benchmarks.sharded import losses, walk
from benchmarks.switched_cluster import Switches, start, switch


def test_a_framework_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    missing = tmp_path / "absent-1.0-py3-none-any.whl"
    monkeypatch.setitem(peers_environments.PACKAGES, "absent", (str(missing),))
    with pytest.raises(NotInstalled, match=r"absent was not installed: ERROR.*absent-1\.0"):
        python_of("absent", tmp_path / "environments")
    assert not (tmp_path / "environments" / "absent" / "made").exists()


def test_a_training_has_settled_when_its_newest_steps_are_of_the_new_size():
    def log(*worlds):
        return [lines_of("".join(f"{t} done {t} {w} 0\n" for t, w in enumerate(worlds, 1)))]

    assert settled(log(2, 2, 3, 3, 3), 3, since=0.0, steps=3)
    assert not settled(log(2, 2, 3, 3), 3, since=0.0, steps=3)
    assert not settled(log(3, 3, 3, 2), 3, since=0.0, steps=3)
    assert not settled(log(3, 3, 3, 3), 3, since=2.0, steps=3)  # most of them are from before


def test_nodes_are_switched_by_lines_that_are_whole(tmp_path):
    switches = Switches(tmp_path / "switches")
    assert switches.advance(0.0) == []
    switch(tmp_path, "n1", "idle")
    with switches.path.open("a") as file:
        file.write("n2 bu")
    assert [(c.node, c.idle) for c in switches.advance(1.0)] == [("n1", True)]
    with switches.path.open("a") as file:
        file.write("sy\n")
    assert [(c.node, c.idle) for c in switches.advance(2.0)] == [("n2", False)]
    assert switches.advance(3.0) == []


@pytest.mark.slow
def test_a_node_of_the_switched_cluster_is_idle_when_it_is_switched(tmp_path):
    cluster = start(tmp_path / "cluster", 2)
    try:
        switch(tmp_path / "cluster", "n2", "idle")
        until(lambda: [gap.node for gap in cluster.scavenger().poll().gaps] == ["n2"], "n2 is idle")
    finally:
        cluster.stop()


def test_a_loss_is_the_sum_of_its_parts_when_all_are_there(tmp_path):
    facts = [
        {"kind": "loss", "time": 1.0, "step": 1, "loss": 3.0},
        {"kind": "part of loss", "time": 2.0, "step": 2, "world": 2, "rank": 0, "loss": 1.0},
        {"kind": "part of loss", "time": 2.1, "step": 2, "world": 2, "rank": 1, "loss": 3.0},
        {"kind": "part of loss", "time": 3.0, "step": 3, "world": 2, "rank": 0, "loss": 1.0},
    ]
    (tmp_path / "facts-1").write_text("".join(json.dumps(line) + "\n" for line in facts))
    assert losses(tmp_path) == {1: 3.0, 2: 2.0}


def test_the_trace_changes_the_size_at_every_step():
    path = walk([8, 4, 6, 8], 20)
    assert len(path) == 21
    assert set(path) <= set(range(4, 9))
    assert all(a != b for a, b in itertools.pairwise(path))
    assert path == walk([8, 4, 6, 8], 20)


def test_pauses_by_move_are_those_of_all_runs():
    first = {f"{n} {'join' if n % 2 else 'lose'}": n / 100 for n in range(1, 201)}
    rows = by_move([{"pauses_s": first}, {"pauses_s": {"1 join": 9.0}}])
    assert rows == {
        "join": {"changes": 101, "median_s": 1.01, "p99_s": 1.99, "longest_s": 9.0},
        "lose": {"changes": 100, "median_s": 1.01, "p99_s": 1.98, "longest_s": 2.0},
    }


def test_logs_are_read_as_they_grow(tmp_path):
    logs, path = Logs(tmp_path), tmp_path / "rank-1"
    path.write_text("1.0 done 1 1 0\n2.0 done 2 1 0\n3.0 do")
    assert [[line.step for line in log] for log in logs.look()] == [[1, 2]]
    with path.open("a") as file:
        file.write("ne 3 1 0\n")
    assert [[line.step for line in log] for log in logs.look(2.0)] == [[3]]
    assert [[line.step for line in log] for log in logs.look()] == [[1, 2, 3]]
