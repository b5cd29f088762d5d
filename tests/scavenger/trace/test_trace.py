"""Traces: reading and refusing files, cutting, counting. A small trace is checked against a table,
random ones against a plain model.
"""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.trace import files
from scavenger.trace import trace as traces
from scavenger.trace.__main__ import main
from scavenger.trace.trace import MAX_PROBLEMS, Trace, TraceError
from tests.draws import cases

HEADER = "time_s,node,event\n"
SMALL = HEADER + "0,a,idle\n0,c,idle\n10,a,busy\n10,b,idle\n25.5,a,idle\n30,b,busy\n"
SUMMIT = Path(__file__).resolve().parents[4] / "shared/data/summit_idle_week1.csv.gz"


@st.composite
def random_traces(draw):
    """Any valid trace: per node some disjoint idle intervals on an integer grid."""
    count = draw(st.integers(1, 5))
    duration = 40
    node, start, end = [], [], []
    for k in range(count):
        points = sorted(draw(st.sets(st.integers(0, duration), max_size=10)))
        for a, b in zip(points[::2], points[1::2], strict=False):
            node.append(k)
            start.append(a)
            end.append(b)
    return Trace.from_gaps(node, start, end, [f"m{k}" for k in range(count)], duration)


def model(trace):
    """state[t][node] for integer times, by applying the events one after the other."""
    state = np.zeros((int(trace.duration_s), len(trace.names)), dtype=bool)
    for t, n, i in zip(trace.time, trace.node, trace.idle, strict=True):
        state[int(t) :, n] = i
    return state


def test_a_small_trace_is_read_as_written():
    trace = files.parse(SMALL)
    assert trace.names == ("a", "c", "b")
    assert trace.time.tolist() == [0, 0, 10, 10, 25.5, 30]
    assert trace.idle.tolist() == [True, True, False, True, True, False]
    assert trace.duration_s == 30
    batches = [
        (b.time, [trace.names[k] for k in b.idle], [trace.names[k] for k in b.busy])
        for b in trace.batches()
    ]
    assert batches == [(0, ["a", "c"], []), (10, ["b"], ["a"]), (25.5, ["a"], []), (30, [], ["b"])]
    times, counts = trace.idle_count()
    assert (times.tolist(), counts.tolist()) == ([0, 10, 25.5, 30], [2, 2, 3, 2])
    gaps = trace.gaps()
    assert [
        (trace.names[n], s, e, c)
        for n, s, e, c in zip(gaps.node, gaps.start, gaps.end, gaps.complete, strict=True)
    ] == [
        ("a", 0, 10, False),
        ("a", 25.5, 30, False),
        ("c", 0, 30, False),
        ("b", 10, 30, True),
    ]


def test_statistics_of_a_small_trace():
    s = files.parse(SMALL, duration_s=40.0).statistics()
    assert s.idle_mean == pytest.approx((10 * 2 + 15.5 * 2 + 4.5 * 3 + 10 * 2) / 40)
    assert (s.idle_min, s.idle_max, s.gaps, s.gap_median_s, s.gap_mean_s, s.gap_short_fraction) == (
        2,
        3,
        1,
        20,
        20,
        1,
    )
    assert s.idle_fraction == pytest.approx(s.idle_mean / 3)
    assert sum(n for _, _, n in s.histogram) == 1
    assert s.histogram[0] == (0.0, 60.0, 1)
    assert json.loads(json.dumps(s.to_dict(), allow_nan=False))["histogram"][-1] == {
        "from_s": 28800.0,
        "to_s": None,
        "gaps": 0,
    }


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", ["The file is empty."]),
        ("\n\n", ["The file is empty."]),
        (HEADER, ["no event below"]),
        ("time,node\n1,a\n", ["line 1: The header must be 'time_s,node,event'"]),
        (HEADER + "5,a,idle\n3,b,idle\n", ["line 3: Time goes back from 5 s to 3 s"]),
        (
            HEADER + "5,a,idle\n6,a,idle\n",
            ["line 3: Node a becomes idle at 6 s but is idle since 5 s."],
        ),
        (HEADER + "5,a,busy\n", ["line 2: Node a becomes busy at 5 s but is busy from the start."]),
        (
            HEADER + "5,a,idle\n5,a,busy\n",
            ["line 3: Node a becomes idle and busy at the same time, 5 s."],
        ),
        (
            HEADER + "5,a,idle\n5,a,idle\n",
            ["line 3: Node a becomes idle at 5 s but is idle since 5 s."],
        ),
        (HEADER + "x,a,idle\n5,b,idle\n", ["line 2: The time is not a number of seconds: 'x'."]),
        (HEADER + "nan,a,idle\n", ["line 2: The time must be 0 or more and finite; got nan."]),
        (HEADER + "-1,a,idle\n", ["line 2: The time must be 0 or more and finite; got -1."]),
        (HEADER + "inf,a,idle\n", ["line 2: The time must be 0 or more and finite; got inf."]),
        (HEADER + "1,a,up\n", ["line 2: The event must be idle or busy; got 'up'."]),
        (HEADER + "1,a\n", ["line 2: A row has 3 columns"]),
        (HEADER + "1,,idle\n", ["line 2: The node name is missing."]),
        (HEADER + "1,a,up\n2,b\ny,c,idle\n", ["3 problems.", "line 2:", "line 3:", "line 4:"]),
    ],
)
def test_a_bad_trace_is_refused_with_line_numbers(text, sentences):
    with pytest.raises(TraceError) as caught:
        files.parse(text)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_many_problems_are_listed_up_to_a_limit():
    text = HEADER + "".join(f"{k},a,idle\n" for k in range(1, 101))
    with pytest.raises(TraceError, match=r"99 problems(.|\n)*and 79 more") as caught:
        files.parse(text)
    assert (len(caught.value.problems), caught.value.total) == (MAX_PROBLEMS, 99)


def test_a_node_outside_the_given_list_is_refused_and_silent_nodes_count():
    with pytest.raises(TraceError, match="line 2: Node a is not in the node list of 1 nodes"):
        files.parse(HEADER + "1,a,idle\n", names=["b"])
    assert files.parse(HEADER + "1,a,idle\n2,a,busy\n", names=["a", "b"]).statistics().nodes == 2


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@given(trace=random_traces())
@settings(max_examples=cases(25), deadline=None)
def test_writing_and_reading_is_the_identity(tmp_path_factory, name, trace):
    path = tmp_path_factory.mktemp("t") / name
    files.write(trace, path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert list(path.parent.iterdir()) == [path]
    if not len(trace):
        with pytest.raises(TraceError, match="no event"):
            files.read(path)
        return
    again = files.read(path, names=trace.names, duration_s=trace.duration_s)
    assert again.names == trace.names
    for column in ("time", "node", "idle"):
        assert getattr(again, column).tolist() == getattr(trace, column).tolist()


def test_files_that_are_no_trace_are_told_apart(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        files.read(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        files.read(tmp_path)
    damaged = tmp_path / "damaged.csv.gz"
    damaged.write_bytes(gzip.compress(SMALL.encode() * 100)[:40])
    with pytest.raises(TraceError, match="gzip file is damaged"):
        files.read(damaged)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="Not a text file"):
        files.read(tmp_path / "binary.csv")
    misnamed = tmp_path / "plain.csv.gz"
    misnamed.write_text("\ufeff" + SMALL.replace("\n", "\r\n"))
    assert len(files.read(misnamed)) == 6
    (tmp_path / "nodes.txt").write_text("\n")
    with pytest.raises(TraceError, match="node list is empty"):
        files.read_names(tmp_path / "nodes.txt")


@given(trace=random_traces())
@settings(max_examples=cases(60), deadline=None)
def test_states_counts_and_gaps_agree_with_applying_the_events(trace):
    state = model(trace)
    for t in range(0, 40, 7):
        assert trace.idle_at(t).tolist() == state[t].tolist()
    times, counts = trace.idle_count()
    at = np.arange(40)
    assert (
        counts[np.searchsorted(times, at, side="right") - 1].tolist() == state.sum(axis=1).tolist()
    )
    assert trace.gaps().length.sum() == state.sum()
    if len(trace):
        s = trace.statistics()
        assert s.idle_mean == pytest.approx(state.sum() / 40)
        assert (s.idle_min, s.idle_max) == (state.sum(axis=1).min(), state.sum(axis=1).max())
    replayed = np.zeros(len(trace.names), dtype=bool)
    last = -1.0
    for batch in trace.batches():
        assert batch.time > last
        last = batch.time
        replayed[batch.idle] = True
        replayed[batch.busy] = False
    if len(trace) and last < 40:
        assert replayed.tolist() == state[-1].tolist()


@given(trace=random_traces(), a=st.integers(0, 38), b=st.integers(1, 40))
@settings(max_examples=cases(60), deadline=None)
def test_a_window_holds_the_states_of_its_time(trace, a, b):
    a, b = min(a, b - 1), max(a + 1, b)
    cut = trace.window(a, b)
    assert cut.duration_s == b - a
    assert model(cut).tolist() == model(trace)[a:b].tolist()


@given(trace=random_traces(), data=st.data())
@settings(max_examples=cases(40), deadline=None)
def test_selecting_and_merging_nodes(trace, data):
    chosen = data.draw(st.permutations(range(len(trace.names))))
    cut = data.draw(st.integers(1, len(chosen)))
    first = trace.select(chosen[:cut])
    assert model(first).tolist() == model(trace)[:, chosen[:cut]].tolist()
    if cut < len(chosen):
        both = traces.merge([first, trace.select(chosen[cut:])])
        assert both.names == tuple(f"m{k}" for k in chosen)
        assert model(both).tolist() == model(trace)[:, chosen].tolist()
    with pytest.raises(TraceError, match="more than one"):
        traces.merge([trace, trace])


@given(
    intervals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-5, 45), st.integers(-5, 45)), max_size=20
    )
)
@settings(max_examples=cases(80), deadline=None)
def test_overlapping_intervals_are_joined(intervals):
    trace = Trace.from_gaps(
        [n for n, _, _ in intervals],
        [a for _, a, _ in intervals],
        [b for _, _, b in intervals],
        "xyz",
        40.0,
    )
    expected = np.zeros((40, 3), dtype=bool)
    for n, a, b in intervals:
        expected[max(a, 0) : max(b, 0), n] = True
    assert model(trace).tolist() == expected.tolist()


def test_sampling_is_by_seed_and_bounded():
    trace = Trace.from_gaps(range(20), [1.0] * 20, [2.0] * 20, [f"m{k}" for k in range(20)], 5.0)
    assert trace.sample(7, 1).names == trace.sample(7, 1).names != trace.sample(7, 2).names
    assert len(set(trace.sample(20, 3).names)) == 20
    for bad in (0, 21):
        with pytest.raises(TraceError, match=f"Cannot draw {bad} nodes"):
            trace.sample(bad)


def test_speed_divides_times():
    fast = files.parse(SMALL).sped_up(10)
    assert (fast.time.tolist(), fast.duration_s) == ([0, 0, 1, 1, 2.55, 3], 3)
    for bad in (0.0, -1.0, math.inf):
        with pytest.raises(TraceError, match="positive number"):
            files.parse(SMALL).sped_up(bad)


def test_arrays_that_are_no_trace_are_refused():
    with pytest.raises(TraceError, match="differ in length"):
        Trace.validated([1.0], [0, 0], [True], ["a"])
    with pytest.raises(TraceError, match="names a more than once"):
        Trace.validated([1.0], [0], [True], ["a", "a"])
    with pytest.raises(TraceError, match="there are 1 nodes"):
        Trace.validated([1.0], [1], [True], ["a"])
    with pytest.raises(TraceError, match="The duration is 1 s but the last event is at 2 s"):
        Trace.validated([2.0], [0], [True], ["a"], 1.0)
    with pytest.raises(TraceError, match="window"):
        files.parse(SMALL).window(10, 10)


def test_the_commands_print_statistics_and_refuse_in_sentences(tmp_path, capsys):
    (tmp_path / "t.csv").write_text(SMALL)
    assert main(["stats", str(tmp_path / "t.csv")]) == 0
    assert "idle nodes   2.1" in capsys.readouterr().out
    assert main(["stats", str(tmp_path / "t.csv"), "--json", "--duration", "40"]) == 0
    assert json.loads(capsys.readouterr().out)["gaps"] == 1
    assert main(["stats", str(tmp_path / "none.csv")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'none.csv'}: There is no such file.\n"
    out = tmp_path / "s.csv.gz"
    assert (
        main(
            [
                "synth",
                "-o",
                str(out),
                "--nodes",
                "50",
                "--days",
                "0.5",
                "--mean-idle",
                "10",
                "--json",
            ]
        )
        == 0
    )
    statistics = json.loads(capsys.readouterr().out)
    assert files.read(out, names=None).statistics().events == statistics["events"] > 0
    result = subprocess.run(
        [sys.executable, "-m", "scavenger.trace", "stats", str(out)],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not SUMMIT.exists(), reason=f"{SUMMIT} is not present")
def test_the_summit_week_is_a_valid_trace():
    s = files.read(SUMMIT).statistics()
    assert (s.events, s.gaps, s.idle_max) == (418380, 209184, 4083)
    assert (s.gap_median_s, round(s.gap_mean_s)) == (386, 997)
