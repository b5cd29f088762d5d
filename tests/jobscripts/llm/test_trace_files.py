"""Traces that are written are read again."""

from __future__ import annotations

import io

import pytest
from llmserve.trace_files import FORMS, TraceWriter, block_hashes
from llmserve.traces import TraceRequest, read

REQUESTS = [
    TraceRequest(0.0, 600, 30, "alice", (7, 9), 512),
    TraceRequest(1.25, 20, 1, "bob", (11,), 512),
    TraceRequest(3600.5, 513, 400, "alice", (7, 12), 512),
]
NUMBERED = [(0, 1), (2,), (0, 3)]


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_is_read_again(tmp_path, form):
    path = tmp_path / "trace"
    with open(path, "w", newline="") as file:
        writer = TraceWriter(file, form)
        for request in REQUESTS:
            writer.write(request)
    requests = read(path)
    assert [(r.time, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (r.time, r.prompt_tokens, r.output_tokens) for r in REQUESTS
    ]
    users = [r.user for r in REQUESTS] if form == "vtc-arena" else ["", "", ""]
    assert [r.user for r in requests] == users
    blocks = NUMBERED if form == "mooncake" else [(), (), ()]
    assert [r.blocks for r in requests] == blocks


def test_columns_are_those_of_the_published_files():
    lines = {}
    for form in FORMS:
        file = io.StringIO()
        TraceWriter(file, form).write(REQUESTS[1])
        lines[form] = file.getvalue().splitlines()
    assert lines["azure"] == [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "1970-01-01 00:00:01.2500000,20,1",
    ]
    assert lines["vtc-arena"] == [
        "arrival_s,client_id,prompt_tokens,output_tokens",
        "1.250000,bob,20,1",
    ]
    assert lines["mooncake"] == [
        '{"timestamp": 1250, "input_length": 20, "output_length": 1, "hash_ids": [0]}'
    ]


def test_blocks_are_equal_as_long_as_prompts_are():
    first, second = list(range(1100)), [*range(1024), *range(5000, 5076)]
    a, b = block_hashes(first), block_hashes(second)
    assert len(a) == 3
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert block_hashes([]) == ()


def test_an_unknown_form_is_a_sentence():
    with pytest.raises(ValueError, match="There is no trace format 'csv'; the formats are azure, "):
        TraceWriter(io.StringIO(), "csv")
