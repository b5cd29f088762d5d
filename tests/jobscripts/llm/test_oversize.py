"""Requests that are too long: the order of the lines of a batch, and the one sentence."""

from __future__ import annotations

import pytest
from llmserve.client_bodies import COMPLETIONS, read_client_body
from llmserve.generation import GenerationRequest
from llmserve.openai_messages import ApiRefusal, read_order
from llmserve.oversize import BatchQueue, OversizeRequests, too_long
from llmserve.text import SimulatedTokenizer


@pytest.mark.parametrize(
    ("sizes", "largest", "order"),
    [
        ((1, 2, 3), 0, "012"),  # no replica has been ready: sizes do not matter
        ((1, 2, 3), 3, "012"),
        ((4, 1, 5, 3), 3, "1302"),  # each once: then it is submitted
        ((5, 4), 3, "01"),
        ((), 3, ""),
    ],
)
def test_lines_that_are_too_long_come_last_in_their_order(sizes, largest, order):
    queue, submitted = BatchQueue(range(len(sizes))), []
    while queue:
        line = queue.take()
        if not queue.defer(line, sizes[line], largest):
            submitted.append(line)
    assert "".join(map(str, submitted)) == order


def test_a_line_is_submitted_in_its_turn_if_a_larger_replica_has_come():
    queue = BatchQueue("ab")
    assert queue.defer(queue.take(), 5, 3)
    assert list(queue) == ["b", "a"]
    assert not queue.defer(queue.take(), 5, 8)
    assert len(queue) == 1


def test_a_request_that_is_too_long_is_refused_in_the_same_words_everywhere():
    body = b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 10}'
    expected = too_long(3, 10, 12)
    assert expected.sentence == (
        "The prompt has 3 tokens and the answer up to 10; the maximum of both together is 12. "
        "Shorten the prompt or lower max_tokens."
    )
    request = GenerationRequest("r", "alice", (1, 2, 3), 10)
    assert OversizeRequests(12).refusal(request, 0) == expected
    with pytest.raises(ApiRefusal) as gateway:
        read_client_body(
            body,
            COMPLETIONS,
            models=("m",),
            tokenizer=SimulatedTokenizer(),
            max_request_tokens=12,
        )
    with pytest.raises(ApiRefusal) as engine:
        read_order(body, is_chat=False, model="m", kv_tokens=12)
    for refusal in (gateway.value, engine.value):
        assert (refusal.sentence, refusal.code) == (expected.sentence, expected.limit)
