"""Which node was in which state when."""

from __future__ import annotations

from malletrain.web.history import MAX_SPANS, NodeTimeline
from tests.malletrain.web.looks import event, node


def spans(timeline, since=0.0):
    return [(s.node, s.state, s.job, s.start, s.end) for s in timeline.view(since).spans]


def test_states_become_spans_and_a_node_that_is_not_told_of_is_busy():
    timeline = NodeTimeline()
    timeline.feed((), [node("n1", "idle"), node("n2")], 100.0)
    timeline.feed((), [node("n1"), node("n2")], 110.0)
    timeline.feed((), [node("n1")], 120.0)
    assert spans(timeline) == [
        ("n1", "idle", "", 100.0, 110.0),
        ("n1", "job", "j1", 110.0, None),
        ("n2", "job", "j1", 100.0, 120.0),
    ]


def test_what_was_before_the_first_look_follows_from_the_events():
    timeline = NodeTimeline()
    past = [
        event(1, "node-joined", 10.0, at="n1"),
        event(2, "node-joined", 11.0, at="n2"),
        event(3, "job-started", 12.0, on="j1", nodes=["n1", "n2"]),
        event(4, "job-rescaled", 20.0, on="j1", nodes=["n2"]),
        event(5, "node-vanished", 30.0, at="n1"),
        event(6, "node-lost", 30.0, at="n1"),
        event(7, "job-completed", 40.0, on="j1"),
    ]
    timeline.feed(past, [node("n2", "free")], 50.0)
    assert spans(timeline) == [
        ("n1", "free", "", 10.0, 12.0),
        ("n1", "job", "j1", 12.0, 20.0),
        ("n1", "free", "", 20.0, 30.0),
        ("n2", "free", "", 11.0, 12.0),
        ("n2", "job", "j1", 12.0, 40.0),
        ("n2", "free", "", 40.0, None),
    ]
    (mark,) = timeline.view().marks
    assert (mark.node, mark.time, mark.notice) == ("n1", 30.0, False)


def test_after_the_first_look_events_only_make_marks():
    timeline = NodeTimeline()
    timeline.feed((), [node("n1")], 100.0)
    late = [event(1, "node-lost", 101.0, at="n1"), event(2, "node-leaving", 100.5, at="n1")]
    timeline.feed(late, [node("n1")], 102.0)
    assert spans(timeline) == [("n1", "job", "j1", 100.0, None)]
    assert [mark.notice for mark in timeline.view().marks] == [True]


def test_what_is_older_than_the_window_is_forgotten():
    timeline = NodeTimeline(window_s=100.0)
    timeline.feed((), [node("n1", "idle")], 0.0)
    timeline.feed((), [], 10.0)
    timeline.feed((), [node("n2", "idle")], 200.0)
    assert spans(timeline) == [("n2", "idle", "", 200.0, None)]


def test_one_restless_node_takes_bounded_memory():
    timeline = NodeTimeline()
    for second in range(3000):
        timeline.feed((), [node("n1", "idle" if second % 2 else "free")], float(second))
    assert len(spans(timeline)) == MAX_SPANS + 1
