"""Traces with amounts: known answers, and what is refused."""

import pytest

from scavenger.trace import files
from scavenger.trace.amounts import HEADER, AmountTrace, has_amounts, parse
from scavenger.trace.checks import TraceError

TEXT = f"""{HEADER}
0,c1,idle,2
0,c1,busy,2
10,c1,busy,1
20,c2,idle,4
20,c1,idle,3
30,c2,busy,1
40,c1,busy,4
"""
"""c1 has 4 units, of which 2, 1, 4 and 0 are idle; c2 has 4, idle from 20 s, and 3 from 30 s."""


def gaps(trace):
    """Slot → its idle intervals."""
    gaps_of_trace = trace.gaps()
    intervals = {}
    begins, ends = gaps_of_trace.start.tolist(), gaps_of_trace.end.tolist()
    for slot, begin, end in zip(gaps_of_trace.node, begins, ends, strict=True):
        intervals.setdefault(trace.names[slot], []).append((begin, end))
    return intervals


def test_the_slots_of_one_unit_are_idle_as_the_amounts_say():
    trace = parse(TEXT, duration_s=50.0)
    assert (trace.names, trace.sizes) == (("c1", "c2"), (4, 4))
    assert gaps(trace.slots(kind="gpu")) == {
        "c1/gpu.0": [(0.0, 40.0)],
        "c1/gpu.1": [(0.0, 10.0), (20.0, 40.0)],
        "c1/gpu.2": [(20.0, 40.0)],
        "c1/gpu.3": [(20.0, 40.0)],
        "c2/gpu.0": [(20.0, 50.0)],
        "c2/gpu.1": [(20.0, 50.0)],
        "c2/gpu.2": [(20.0, 50.0)],
        "c2/gpu.3": [(20.0, 30.0)],
    }


def test_a_slot_of_two_units_needs_both():
    trace = parse(TEXT, duration_s=50.0).slots(2)
    assert gaps(trace) == {
        "c1/unit.0": [(0.0, 10.0), (20.0, 40.0)],
        "c1/unit.1": [(20.0, 40.0)],
        "c2/unit.0": [(20.0, 50.0)],
        "c2/unit.1": [(20.0, 30.0)],
    }


def test_a_whole_node_is_idle_while_all_of_it_is():
    trace = parse(TEXT, duration_s=50.0).whole_nodes()
    assert gaps(trace) == {"c1": [(20.0, 40.0)], "c2": [(20.0, 30.0)]}


def test_changes_of_a_node_at_one_time_are_one_change():
    trace = parse(f"{HEADER}\n0,a,idle,1\n5,a,busy,1\n5,a,idle,1\n9,a,busy,1\n").slots()
    assert gaps(trace) == {"a/unit.0": [(0.0, 9.0)]}


def test_nodes_are_chosen_by_their_changes():
    trace = parse(TEXT, duration_s=50.0)
    assert trace.for_nodes(["n1"]).change.tolist() == [2, -1, 3, -4]
    assert trace.for_nodes(["c2"]).change.tolist() == [4, -1]
    with pytest.raises(TraceError, match="2 nodes, fewer than the 3 wanted"):
        trace.for_nodes(["n1", "n2", "n3"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,a,idle,2\n3,a,busy,3", "line 3: 3 units of node a become busy at 3 s, but 2 are idle."),
        ("0,a,idle,0", "line 2: The amount must be 1 to 1000000; got '0'."),
        ("0,a,idle", "line 2: A row has 4 columns .*; this one has 3."),
        ("0,a,down,1", "line 2: The event must be idle or busy; got 'down'."),
        ("5,a,idle,1\n3,a,busy,1", "line 3: Time goes back from 5 s to 3 s"),
        ("x,a,idle,1", "line 2: The time is not a number of seconds: 'x'."),
        ("", "There is a header but no event below it"),
    ],
)
def test_wrong_rows_are_refused_with_their_line(rows, message):
    with pytest.raises(TraceError, match=message):
        parse(f"{HEADER}\n{rows}\n")


def test_no_slot_larger_than_every_node():
    with pytest.raises(TraceError, match="No node has the 8 units of a slot; the largest has 4"):
        parse(TEXT).slots(8)


def test_a_file_with_amounts_is_known_by_its_header():
    assert has_amounts(TEXT)
    assert not has_amounts(f"{files.HEADER}\n0,a,idle\n9,a,busy\n")


def test_a_trace_without_amounts_is_one_of_single_units():
    plain = files.parse(f"{files.HEADER}\n0,a,idle\n5,b,idle\n9,a,busy\n")
    trace = AmountTrace.of(plain)
    assert (trace.names, trace.sizes) == (("a", "b"), (1, 1))
    assert gaps(trace.whole_nodes()) == {"a": [(0.0, 9.0)], "b": [(5.0, 9.0)]} == gaps(plain)
