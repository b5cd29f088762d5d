from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView
from malletrain.render.lease_trace import HEADER, lease_trace
from scavenger.trace import files
from tests.draws import cases

JOINED, LOST = EventKind.NODE_JOINED.value, EventKind.NODE_LOST.value


def event(time: float, kind: str, node: str) -> EventView:
    return EventView(0, time, kind, "", node, "", "")


def test_the_audit_log_becomes_a_trace():
    events = [
        event(100.0, LOST, "a"),  # never held: no row
        event(100.5, JOINED, "a"),
        event(100.5, JOINED, "b"),
        event(103.0, "job-started", "a"),
        event(104.25, JOINED, "a"),  # adopted again after a restart
        event(105.0, LOST, "a"),
        event(105.0, JOINED, "a"),  # back within a millisecond
        event(90.0, LOST, "b"),  # the clock was set back
    ]
    assert list(lease_trace(events, 106.5)) == [
        "time_s,node,event",
        "0.000,a,idle",
        "0.000,b,idle",
        "4.500,a,busy",
        "4.501,a,idle",
        "4.501,b,busy",
        "6.000,a,busy",  # held until it was asked for
    ]


def test_no_event_no_row():
    assert list(lease_trace([], 5.0)) == [HEADER]


@settings(max_examples=cases(40), deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([JOINED, LOST]), st.sampled_from("abc")),
        max_size=15,
    )
)
def test_every_exported_trace_is_a_valid_one(changes):
    now, events = 1e9, []
    for step, kind, node in changes:
        now += step
        events.append(event(now, kind, node))
    lines = list(lease_trace(events, now))
    if len(lines) > 1:
        read = files.parse("\n".join(lines) + "\n")
        assert read.duration_s > 0
        assert not read.idle_at(read.duration_s).any()
        assert len(read.names) == len({line.split(",")[1] for line in lines[1:]})
