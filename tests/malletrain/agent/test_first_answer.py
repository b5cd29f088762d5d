"""How long an agent waits for the first answer of a daemon to which many connect at once."""

from malletrain.agent.link import FIRST_ANSWER_S, HELLO_AGAIN_S, first_answer_s, hello_again_s


def test_it_waits_longer_each_time_and_never_for_ever():
    waits = [first_answer_s(attempt) for attempt in range(2000)]
    assert waits[0] == FIRST_ANSWER_S[0]
    assert waits == sorted(waits)
    assert waits[2] == waits[-1] == FIRST_ANSWER_S[1]


def test_it_says_its_name_again_ever_more_rarely():
    waits = [hello_again_s(hellos) for hellos in range(1, 2000)]
    assert waits[:3] == [HELLO_AGAIN_S[0], 2 * HELLO_AGAIN_S[0], 4 * HELLO_AGAIN_S[0]]
    assert waits[5] == waits[-1] == HELLO_AGAIN_S[1]
