"""How long an agent waits at the door of a daemon that has many there."""

from malletrain.agent.link import FIRST_ANSWER_S, first_answer_s


def test_it_waits_longer_each_time_and_never_for_ever():
    waits = [first_answer_s(attempt) for attempt in range(2000)]
    assert waits[0] == FIRST_ANSWER_S[0]
    assert waits == sorted(waits)
    assert waits[2] == waits[-1] == FIRST_ANSWER_S[1]
