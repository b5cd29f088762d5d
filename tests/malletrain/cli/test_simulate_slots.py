"""``malletrain simulate --slot``: slots and whole nodes of one trace with amounts."""

import json

import pytest

from scavenger.trace.amounts import HEADER

TRACE = f"""{HEADER}
0,c1,idle,3
0,c1,busy,1
0,c2,idle,4
3600,c1,idle,1
7200,c1,busy,4
7200,c2,busy,4
"""
"""For two hours 3 and then 4 GPUs of c1 are idle, and all 4 of c2."""


@pytest.mark.parametrize(
    ("slot", "nodes", "idle_node_hours"),
    [("1", 8, 3 + 4 + 4 + 4), ("2", 4, 1 + 2 + 2 + 2), ("node", 2, 0 + 1 + 1 + 1)],
)
def test_the_trace_is_divided_as_asked(run, tmp_path, slot, nodes, idle_node_hours):
    file = tmp_path / "gpus.csv"
    file.write_text(TRACE)
    done = run("simulate", "--trace", file, "--jobs", 50, "--slot", slot, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["nodes"] == nodes
    assert result["equivalent_nodes"] * result["hours"] == pytest.approx(idle_node_hours)


@pytest.mark.parametrize("slot", ["0", "x", "-1"])
def test_another_size_is_refused(run, tmp_path, slot):
    file = tmp_path / "gpus.csv"
    file.write_text(TRACE)
    done = run("simulate", "--trace", file, "--slot", slot)
    assert done.exit_code == 1
    assert f"--slot {slot}: give [KIND=]N or [KIND=]node" in done.output
    assert "N is a number of units from 1" in done.output


def test_a_slot_larger_than_every_node_is_refused(run, tmp_path):
    file = tmp_path / "gpus.csv"
    file.write_text(TRACE)
    done = run("simulate", "--trace", file, "--slot", "8")
    assert done.exit_code == 1
    assert "No host has the 8 units of a slot" in done.output
