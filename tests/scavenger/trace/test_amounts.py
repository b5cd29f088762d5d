"""Traces with amounts: known answers, and what is refused.

Kinds of slots of a trace: known answers, and what is refused.
"""

from __future__ import annotations

import pytest

from scavenger.trace import files
from scavenger.trace.amounts import (
    HEADER,
    AmountTrace,
    TraceKind,
    divide,
    has_amounts,
    parse,
    read_kinds,
)
from scavenger.trace.trace import TraceError

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


KINDS_TEXT = f"""{HEADER}
0,g1,idle,2
0,g1,busy,2
0,c1,idle,32
0,c2,busy,64
10,g1,busy,1
20,g2,idle,4
30,c1,busy,8
40,c2,idle,64
50,g2,busy,4
"""
"""g1 and g2 have 4 GPUs: 2, then 1 of g1's are idle, and g2's from 20 to 50 s. c1 (32 cores) is
idle as a whole until 30 s, c2 (64 cores) from 40 s.
"""
GPU, CPU = TraceKind.parse("gpu=1@g[1-2]"), TraceKind.parse("cpu=node@c[1-2]")


def kinds_gaps(trace):
    """Slot → its idle intervals."""
    gaps_of_trace = trace.gaps()
    intervals = {}
    begins, ends = gaps_of_trace.start.tolist(), gaps_of_trace.end.tolist()
    for slot, begin, end in zip(gaps_of_trace.node.tolist(), begins, ends, strict=True):
        intervals.setdefault(trace.names[slot], []).append((begin, end))
    return intervals


def test_single_gpus_and_whole_nodes_in_one_trace():
    divided = divide(parse(KINDS_TEXT, duration_s=60.0), [GPU, CPU])
    assert kinds_gaps(divided.trace) == {
        "g1/gpu.0": [(0.0, 60.0)],
        "g1/gpu.1": [(0.0, 10.0)],
        **{f"g2/gpu.{k}": [(20.0, 50.0)] for k in range(4)},
        "c1": [(0.0, 30.0)],
        "c2": [(40.0, 60.0)],
    }
    assert divided.kind_of["g1/gpu.3"] == "gpu"
    assert divided.kind_of["c2"] == "cpu"
    assert divided.parts == {"gpu": 0.25, "cpu": 1.0}


def test_a_host_that_no_kind_covers_is_a_whole_node():
    divided = divide(parse(KINDS_TEXT, duration_s=60.0), [TraceKind.parse("gpu=2@g2")])
    assert kinds_gaps(divided.trace) == {
        "g2/gpu.0": [(20.0, 50.0)],
        "g2/gpu.1": [(20.0, 50.0)],
        "c1": [(0.0, 30.0)],
        "c2": [(40.0, 60.0)],
    }
    assert divided.kind_of == {
        "g1": "node",
        "g2/gpu.0": "gpu",
        "g2/gpu.1": "gpu",
        "c1": "node",
        "c2": "node",
    }


def test_the_first_kind_that_fits_counts():
    """Slots of 8 units do not fit on hosts of 4 GPUs, which the next kind covers."""
    divided = divide(parse(KINDS_TEXT), [TraceKind("large", 8), TraceKind("small", 2)])
    kinds = {name.partition("/")[0]: kind for name, kind in divided.kind_of.items()}
    assert kinds == {"g1": "small", "g2": "small", "c1": "large", "c2": "large"}
    assert divided.parts == {"large": 1 / 8, "small": 1 / 2}, "c2 holds 8 large slots, c1 4"


def test_a_host_that_is_too_small_for_its_kinds_has_no_slot():
    divided = divide(parse(KINDS_TEXT), [TraceKind("large", 8)])
    assert {name.partition("/")[0] for name in divided.trace.names} == {"c1", "c2"}


def test_a_trace_without_amounts_has_kinds_by_host(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time_s,node,event\n0,a1,idle\n5,b1,idle\n9,a1,busy\n")
    divided = read_kinds(path, [TraceKind.parse("fast=1@a[1-4]")], names=["a1", "a2", "b1"])
    assert divided.trace.names == ("a1", "a2", "b1")
    assert divided.kind_of == {"a1": "fast", "a2": "fast", "b1": "node"}
    assert kinds_gaps(divided.trace) == {"a1": [(0.0, 9.0)], "b1": [(5.0, 9.0)]}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1", TraceKind("unit", 1)),
        ("node", TraceKind("node", None)),
        ("gpu=2", TraceKind("gpu", 2)),
        ("a100-half=4@g[1-2],h7", TraceKind("a100-half", 4, frozenset({"g1", "g2", "h7"}))),
        ("cpu=node@c1", TraceKind("cpu", None, frozenset({"c1"}))),
    ],
)
def test_kinds_as_text(text, kind):
    assert TraceKind.parse(text) == kind


@pytest.mark.parametrize("text", ["", "0", "gpu", "gpu=", "gpu=0", "1gpu=1", "gpu=1@", "gpu=-1"])
def test_text_that_is_no_kind(text):
    with pytest.raises(ValueError, match=r"give \[KIND=\]N or \[KIND=\]node"):
        TraceKind.parse(text)


def test_a_list_of_hosts_that_is_none():
    with pytest.raises(ValueError, match=r"gpu=1@g\[3-1\]: "):
        TraceKind.parse("gpu=1@g[3-1]")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["gpu=1", "gpu=2"], "Two kinds of slots are named gpu."),
        (["gpu=1", "large=8@g1"], "No host has the 8 units of a slot of kind large"),
        (["gpu=1@x[1-9]"], "No host of kind gpu is in the trace."),
        (["gpu=8@g[1-2]"], "No host has the 8 units of a slot of kind gpu; the largest .* has 4."),
        (["a=1", "b=1@c1"], "No host is left for kind b: kinds before it have them all."),
    ],
)
def test_kinds_that_no_host_has(kinds, message):
    with pytest.raises(TraceError, match=message):
        divide(parse(KINDS_TEXT), list(map(TraceKind.parse, kinds)))
