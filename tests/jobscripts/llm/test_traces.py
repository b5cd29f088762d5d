"""Traces of requests: each known form, and sentences about broken files."""

from __future__ import annotations

import gzip
import itertools

import pytest
from llmserve.traces import TraceFileError, TraceRequest, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.509930+00:00,2399,6
"""
ARENA = """arrival_s,client_id,prompt_tokens,output_tokens
0.5,13,13,199
0.25,2,36,137
"""
SERVEGEN = """request_id,timestamp,input_tokens,output_tokens
0,10.5,100,7
1,12.0,90,0
"""
MOONCAKE = """{"timestamp": 2000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 3500, "input_length": 700, "output_length": 9, "hash_ids": [46, 48]}
"""
OFFLINE = """{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370}

{"request_id": 1, "input_length": 33, "output_length": 31, "hash_ids": [7, 8, 9]}
"""


def trace(tmp_path, text: str, name: str = "trace"):
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return read(path)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure(tmp_path, name):
    first, second = trace(tmp_path, AZURE, name)
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.time == pytest.approx(4.314579, abs=1e-5)
    assert trace(tmp_path, AZURE_2024)[1].time == pytest.approx(1.5)


def test_vtc_arena(tmp_path):
    expected = [TraceRequest(0.0, 36, 137, "2"), TraceRequest(0.25, 13, 199, "13")]
    assert trace(tmp_path, ARENA) == expected


def test_servegen(tmp_path):
    assert trace(tmp_path, SERVEGEN) == [TraceRequest(0.0, 100, 7), TraceRequest(1.5, 90, 1)]
    first, second = trace(tmp_path, OFFLINE)
    assert first == TraceRequest(0.0, 61, 2370)
    assert second == TraceRequest(0.0, 33, 31, "", (7, 8, 9), 16)


def test_mooncake(tmp_path):
    first, second = trace(tmp_path, MOONCAKE)
    assert second == TraceRequest(1.5, 700, 9, "", (46, 48), 512)
    prompts = [first.prompt(0), second.prompt(1)]
    assert [len(prompt) for prompt in prompts] == [600, 700]
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
    assert len(list(shared)) == 512
    assert first.prompt(0) == prompts[0]


def test_prompts_without_blocks_differ(tmp_path):
    first, second = trace(tmp_path, ARENA)
    assert not set(first.prompt(0)) & set(second.prompt(1))
    assert max(second.prompt(10**9)) < 1 << 32


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the columns"),
        ("a,b\n1,2\n", "columns a, b; .* one of timestamp"),
        ("timestamp,input_tokens\n1,2\n", "one of output_tokens"),
        ("timestamp,input_tokens,output_tokens\n", "no requests"),
        ("timestamp,input_tokens,output_tokens\n1,2,3\n1,x,3\n", "line 3: .*'x'"),
        ("timestamp,input_tokens,output_tokens\n1,2\n", "line 2"),
        ("timestamp,input_tokens,output_tokens\nlater,2,3\n", "line 2: .*later"),
        ("timestamp,input_tokens,output_tokens\n1,-2,3\n", "negative"),
        ('{"timestamp": 1, "input_length": 5}', "line 1: .* one of output_tokens"),
        ('{"timestamp": 1,\n', "line 1"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, sentence):
    with pytest.raises(TraceFileError, match=sentence):
        trace(tmp_path, text)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "trace.gz"
    path.write_bytes(b"no archive")
    with pytest.raises(TraceFileError, match="cannot be read"):
        read(path)
