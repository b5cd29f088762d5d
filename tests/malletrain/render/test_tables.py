"""What is idle on each host, in a sentence for each kind of slots."""

import io

from rich.console import Console

from malletrain.protocol.views import NodeView
from malletrain.render.tables import host_sentences, nodes

BUSY = "it is mixed, with 1 of 4 gpu idle"
ROWS = [
    NodeView("c1/gpu.0", "job", "l1", "j1", 0.0, rules=(("idle", True, "it is idle"),)),
    NodeView("c1/gpu.1", "idle", "", "", 0.0, rules=(("idle", True, "it is idle"),)),
    NodeView("c1/gpu.2", "other", "", "", 0.0, rules=(("idle", False, BUSY),)),
    NodeView("c1/gpu.3", "other", "", "", 0.0, rules=(("idle", False, BUSY), ("x", False, "y"))),
    NodeView("c1/cpu.0", "idle", "", "", 0.0),
    NodeView("c2", "idle", "", "", 0.0),
]


def test_each_host_has_a_sentence_for_each_of_its_kinds():
    assert host_sentences(ROWS) == [
        ("c1", f"4 gpu slots, 1 leased; 1 can be leased; 2 left alone: {BUSY}"),
        ("c1", "1 cpu slot, 1 can be leased"),
    ]


def printed(rows):
    out = io.StringIO()
    Console(file=out, width=120).print(nodes(rows, 1.0, explain=True))
    return out.getvalue()


def test_they_are_shown_where_there_are_slots_only():
    assert f"2 left alone: {BUSY}" in printed(ROWS)
    assert "What is idle on each host" not in printed(ROWS[-1:])
