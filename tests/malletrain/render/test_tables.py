"""What is idle on each host, in a sentence for each kind of slots."""

import io

import pytest
from rich.console import Console

from malletrain.protocol.views import NodeView
from malletrain.render.job_detail import job
from malletrain.render.tables import host_sentences, jobs, nodes
from tests.malletrain.cli.fake_daemon import detail, job_view

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


@pytest.mark.parametrize(
    ("counts", "row", "fact"),
    [
        ("", "1:16 ", "Nodes"),
        ("slots", "1:16 slots", "Slots"),
        ("gpus", "1:16 GPUs", "GPUs"),
    ],
)
def test_sizes_are_shown_as_the_owner_said_them(counts, row, fact):
    view = job_view(min_nodes=1, max_nodes=16, counts=counts)
    out = io.StringIO()
    Console(file=out, width=160).print(jobs([view], 1.0), job(detail(job=view)))
    table, facts = out.getvalue().split("Job  ", 1)
    assert row in table
    assert [line for line in facts.splitlines() if line.startswith(fact) and "1:16 wanted" in line]
