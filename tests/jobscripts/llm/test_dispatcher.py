"""The dispatcher: its tables, and known cases of losses and notices."""

from __future__ import annotations

from collections import Counter

import pytest
from llmserve.dispatcher import Dispatcher
from llmserve.generation import FinishReason, GenerationRequest
from llmserve.oversize import LARGER_REPLICA_S, RETURNING_REPLICA_S
from llmserve.policies import Fcfs
from llmserve.replicas import Capacity
from llmserve.simulated_model import HALF_CHARACTER, digest_of, generate
from llmserve.states import (
    ENDED,
    REPLICA_TRANSITIONS,
    REQUEST_TRANSITIONS,
    ReplicaEvent,
    ReplicaState,
    RequestEvent,
    RequestState,
)
from llmserve.tracked_request import MAX_FAILURES

from tests.jobscripts.llm.engines import World, answer

SMALL = Capacity(slots=2, kv_tokens=100, token_s=1.0)


def request(name: str = "r", tokens: int = 10, **more) -> GenerationRequest:
    more.setdefault("prompt", (1, 2, 3))
    return GenerationRequest(name, more.pop("user", "alice"), max_tokens=tokens, **more)


def world(policy=None, **replicas: Capacity) -> World:
    world = World(Dispatcher(policy or Fcfs()))
    for name, capacity in replicas.items():
        world.add(name, capacity)
    return world


def test_no_event_leaves_an_end():
    assert ENDED.isdisjoint(state for state, _ in REQUEST_TRANSITIONS)
    assert set(REQUEST_TRANSITIONS.values()) >= ENDED
    assert {event for _, event in REQUEST_TRANSITIONS} == set(RequestEvent)
    ends = {ReplicaState.GONE, ReplicaState.FAILED}
    assert ends.isdisjoint(state for state, _ in REPLICA_TRANSITIONS)
    assert ends <= set(REPLICA_TRANSITIONS.values())
    assert {event for _, event in REPLICA_TRANSITIONS} == set(ReplicaEvent)


def test_a_lost_answer_continues_where_it_was():
    w = world(a=SMALL)
    w.submit(request(stream=True))
    w.generate("a", 1, 4)
    w.lose("a")
    assert w.dispatcher.state("r") is RequestState.QUEUED
    w.add("b", SMALL)
    post = w.posts[-1]
    assert (post.replica, post.attempt, post.max_tokens) == ("b", 2, 6)
    assert tuple(post.ids) == (1, 2, 3, *answer(request())[:4])
    w.run_to_the_end()
    assert tuple(w.streams["r"]) == w.ends["r"].ids == answer(request())
    assert w.ends["r"].reason is FinishReason.LENGTH


def within_a_character() -> tuple[GenerationRequest, int]:
    """A request, and a number of ids after which its text is not complete."""
    for seed in range(1000):
        candidate = request(prompt=(seed,), stream=True)
        ids = answer(candidate)
        if ids[3] % HALF_CHARACTER == HALF_CHARACTER - 1 and all(
            token % HALF_CHARACTER != HALF_CHARACTER - 1 for token in ids[:3]
        ):
            return candidate, 4
    raise AssertionError("no answer has half a character at its fourth id")


def test_an_answer_is_continued_from_a_whole_character():
    cut, ids = within_a_character()
    w = world(a=SMALL)
    w.submit(cut)
    w.generate("a", 1, ids)
    assert len(w.streams["r"]) == ids - 1
    w.lose("a")
    w.add("b", SMALL)
    assert w.posts[-1].max_tokens == cut.max_tokens - ids + 1
    assert w.dispatcher.repeated_tokens == 1
    w.run_to_the_end()
    assert tuple(w.streams["r"]) == answer(cut)


def test_reports_of_an_old_attempt_have_no_effect():
    w = world(a=SMALL)
    w.submit(request(stream=True))
    w.lose("a")
    w.add("b", SMALL)
    d = w.dispatcher
    assert d.tokens("r", 1, [9, 9]) == []
    assert d.finished("r", 1, FinishReason.STOP, 0.0) == []
    assert d.stopped("r", 1, 0.0) == []
    assert d.attempt_failed("r", 1, "late", 0.0, may_repeat=False) == []
    w.run_to_the_end()
    assert tuple(w.streams["r"]) == answer(request())


def test_an_answer_of_which_only_the_end_was_not_heard_is_done():
    w = world(a=SMALL)
    w.submit(request())
    w.carry_out(w.dispatcher.tokens("r", 1, answer(request())))
    w.lose("a")
    assert w.ends["r"].state is RequestState.DONE
    assert w.ends["r"].ids == answer(request())


def test_a_notice_moves_what_does_not_end_in_time():
    w = world(a=Capacity(4, 1_000, token_s=1.0))
    w.submit(request("long", 50, stream=True))
    w.submit(request("short", 5))
    w.add("b", SMALL)
    w.notice("a", 10.0)
    assert [stop.request for stop in w.stops] == ["long"]
    assert w.dispatcher.state("long") is RequestState.MOVING
    w.generate("a", 1, 3)  # what comes before it is stopped counts
    w.report_stops()
    assert (w.posts[-1].replica, w.posts[-1].max_tokens) == ("b", 47)
    assert w.dispatcher.repeated_tokens == 0
    w.run_to_the_end()
    assert tuple(w.streams["long"]) == answer(request("long", 50))


def test_a_measured_engine_keeps_what_it_can_end():
    w = world(a=Capacity(4, 1_000), b=SMALL)
    w.submit(request("first", 50))
    [post] = w.posts
    w.dispatcher.measure(post.replica, 0.1)
    w.notice(post.replica, 10.0)
    assert w.stops == []  # 50 tokens in 5 s
    w.dispatcher.measure(post.replica, 1.0)
    w.notice(post.replica, 10.0)
    assert [stop.request for stop in w.stops] == ["first"]


def test_an_answer_stays_on_a_leaving_replica_until_there_is_room():
    w = world(a=SMALL, b=Capacity(1, 100))
    w.submit(request("first", 30))
    w.submit(request("second", 30))
    w.submit(request("third", 30))
    assert Counter(post.replica for post in w.posts) == {"a": 2, "b": 1}
    on_b = next(post for post in w.posts if post.replica == "b")
    w.notice("a", 5.0)
    assert w.stops == []
    w.generate("b", on_b.attempt, 30)
    assert len(w.stops) == 1


def test_room_of_a_moving_request_is_not_given_away():
    w = world(a=Capacity(1, 1_000, token_s=1.0))
    w.submit(request("moving", 50))
    w.add("b", Capacity(1, 100))
    w.notice("a", 5.0)
    assert [stop.request for stop in w.stops] == ["moving"]
    w.submit(request("new", 10))
    assert w.dispatcher.state("new") is RequestState.QUEUED
    w.report_stops()
    assert w.posts[-1].request.name == "moving"


def test_what_cannot_be_continued_starts_again():
    w = world(a=SMALL)
    w.submit(request(continuable=False))
    w.generate("a", 1, 4)
    w.lose("a")
    w.add("b", SMALL)
    assert w.posts[-1].max_tokens == 10
    assert w.dispatcher.repeated_tokens == 4
    w.run_to_the_end()
    assert w.ends["r"].ids == answer(request())


def test_a_stream_that_cannot_be_continued_fails_with_a_sentence():
    w = world(a=SMALL, b=SMALL)
    w.submit(request(continuable=False, stream=True))
    [post] = w.posts
    w.generate(post.replica, post.attempt, 4)
    w.notice(post.replica, 1.0)
    assert w.stops == []  # it may still end there
    w.lose(post.replica)
    assert w.ends["r"].state is RequestState.FAILED
    assert "cannot be continued" in w.ends["r"].sentence


def test_a_request_that_ends_three_engines_fails_and_the_others_go_on():
    w = world()
    for name in ("good", "bad", "fine"):
        w.submit(request(name, 5))
    for number in range(MAX_FAILURES):
        replica = f"n{number}"
        w.add(replica, Capacity(2, 100))
        while "bad" not in {a.request.name for a in w.engines[replica].values()}:
            attempt = next(iter(w.engines[replica]))
            w.generate(replica, attempt, 100)
        w.crash(replica)
    assert w.ends["bad"].state is RequestState.FAILED
    assert "out of memory" in w.ends["bad"].sentence
    w.add("last", SMALL)
    w.run_to_the_end()
    assert {name: end.state for name, end in w.ends.items()} == {
        "good": RequestState.DONE,
        "fine": RequestState.DONE,
        "bad": RequestState.FAILED,
    }


def test_the_last_attempt_of_a_suspect_runs_alone():
    w = world()
    w.submit(request("suspect", 5))
    for number in range(MAX_FAILURES - 1):
        w.add(f"n{number}", Capacity(2, 100))
        w.crash(f"n{number}")
    w.submit(request("other", 5))
    w.add("a", Capacity(2, 100))
    assert [a.request.name for a in w.engines["a"].values()] == ["suspect"]
    w.run_to_the_end()
    assert {end.state for end in w.ends.values()} == {RequestState.DONE}


def test_losses_of_nodes_are_no_failures():
    w = world()
    w.submit(request())
    for number in range(5):
        w.add(f"n{number}", SMALL)
        w.lose(f"n{number}")
    w.add("last", SMALL)
    w.run_to_the_end()
    assert w.ends["r"].state is RequestState.DONE


def test_an_engine_that_refuses_a_request_fails_it_at_once():
    w = world(a=SMALL)
    w.submit(request())
    w.carry_out(
        w.dispatcher.attempt_failed("r", 1, "The prompt is no text.", 0.0, may_repeat=False)
    )
    assert w.ends["r"].sentence == "The prompt is no text."


def test_an_answer_may_stop_before_max_tokens_and_within_a_character():
    cut, ids = within_a_character()
    w = world(a=SMALL)
    w.submit(cut)
    w.carry_out(w.dispatcher.tokens("r", 1, answer(cut)[:ids], ids - 1))
    assert len(w.streams["r"]) == ids - 1
    w.carry_out(w.dispatcher.finished("r", 1, FinishReason.STOP, 0.0))
    assert (w.ends["r"].state, w.ends["r"].reason) == (RequestState.DONE, FinishReason.STOP)
    assert tuple(w.streams["r"]) == w.ends["r"].ids == answer(cut)[:ids]


def test_an_attempt_that_an_engine_breaks_off_is_repeated():
    w = world(a=SMALL)
    w.submit(request(stream=True))
    w.generate("a", 1, 4)
    w.engines["a"].clear()
    w.carry_out(w.dispatcher.attempt_failed("r", 1, "status 500", 0.0, may_repeat=True))
    assert (w.posts[-1].attempt, w.posts[-1].max_tokens) == (2, 6)
    w.run_to_the_end()
    assert tuple(w.streams["r"]) == answer(request())


def test_only_what_fits_is_dispatched():
    w = world(a=Capacity(slots=4, kv_tokens=40))
    for name in ("first", "second", "third", "fourth"):
        w.submit(request(name))  # 13 tokens each
    assert [post.request.name for post in w.posts] == ["first", "second", "third"]
    w.run_to_the_end()
    assert len(w.ends) == 4


def test_a_request_for_which_no_replica_is_large_enough_does_not_block_others():
    w = world(a=Capacity(2, 50))
    w.submit(request("huge", 200))
    w.submit(request("small"))
    assert [post.request.name for post in w.posts] == ["small"]
    w.add("b", Capacity(2, 500))
    assert (w.posts[-1].request.name, w.posts[-1].replica) == ("huge", "b")


def oversize_world() -> World:
    """A request of 203 tokens waits beside a replica of 50."""
    w = world(a=Capacity(2, 50))
    w.submit(request("huge", 200))
    w.refuse_oversize(at=0.0)
    return w


def test_a_request_that_no_replica_could_hold_is_refused_after_a_while():
    w = oversize_world()
    w.refuse_oversize(at=LARGER_REPLICA_S - 1)
    assert w.dispatcher.state("huge") is RequestState.QUEUED
    w.refuse_oversize(at=LARGER_REPLICA_S)
    end = w.ends["huge"]
    assert (end.state, end.refusal.limit) == (RequestState.REFUSED, "context_length_exceeded")
    assert "both together is 50" in end.sentence
    w.submit(request("as long", 200))  # need not wait any more
    assert w.ends["as long"].state is RequestState.REFUSED
    w.submit(request("shorter", 100))
    assert w.dispatcher.state("shorter") is RequestState.QUEUED
    w.add("b", Capacity(2, 400))
    assert (w.posts[-1].request.name, w.posts[-1].replica) == ("shorter", "b")
    w.submit(request("once more", 200))
    assert w.posts[-1].request.name == "once more"


def test_a_request_waits_longer_while_a_replica_loads_or_if_one_was_large_enough():
    w = oversize_world()
    w.refuse_oversize(at=RETURNING_REPLICA_S - 1, is_loading=True)
    w.add("b", Capacity(2, 300))
    assert w.posts[-1].request.name == "huge"
    w.lose("b")
    for at in (700.0, 700.0 + RETURNING_REPLICA_S - 1):
        w.refuse_oversize(at=at)
    assert w.dispatcher.state("huge") is RequestState.QUEUED
    w.refuse_oversize(at=700.0 + RETURNING_REPLICA_S)
    assert w.ends["huge"].state is RequestState.REFUSED


def test_a_request_that_waits_for_a_larger_replica_is_no_load():
    w = oversize_world()
    assert (w.dispatcher.load.queued, w.dispatcher.queued) == (0, 1)
    for name in ("first", "second", "third"):
        w.submit(request(name))
    assert (w.dispatcher.load.queued, w.dispatcher.queued) == (1, 2)


def test_a_request_waits_for_a_larger_replica_from_when_there_is_one():
    w = oversize_world()
    w.lose("a")
    w.add("b", Capacity(2, 60))  # much later
    for at in (700.0, 700.0 + LARGER_REPLICA_S - 1):
        w.refuse_oversize(at=at)
    assert w.dispatcher.state("huge") is RequestState.QUEUED
    w.refuse_oversize(at=700.0 + LARGER_REPLICA_S)
    assert w.ends["huge"].state is RequestState.REFUSED


def test_a_resumed_request_that_is_complete_is_done_whatever_its_size():
    w = oversize_world()
    w.refuse_oversize(at=LARGER_REPLICA_S)
    complete = request("complete", 200)
    w.submit(complete, answer(complete))
    assert w.ends["complete"].state is RequestState.DONE


def test_choices_take_memory_and_no_time():
    """Each of 8 choices has 10 tokens of a second each, all at once."""
    w = world(a=Capacity(2, 100, token_s=1.0), b=Capacity(2, 100, token_s=1.0))
    w.submit(request(continuable=False, choices=8))
    w.notice("a", 12.0)
    assert not w.stops
    w.submit(request("other", continuable=False, choices=8))
    w.submit(request("third", continuable=False, choices=8))  # 83 of 100 tokens are reserved
    assert [post.request.name for post in w.posts] == ["r", "other"]


def test_without_a_ready_replica_requests_of_any_size_wait():
    w = oversize_world()
    w.lose("a")
    for at in (10.0, 10_000.0):
        w.refuse_oversize(at=at)
    w.add("b", Capacity(2, 60))
    w.refuse_oversize(at=10_001.0)
    assert w.dispatcher.state("huge") is RequestState.QUEUED


def test_what_the_model_cannot_hold_is_refused():
    w = World(Dispatcher(Fcfs(), max_request_tokens=12))
    w.submit(request())
    end = w.ends["r"]
    assert (end.state, end.refusal.limit) == (RequestState.REFUSED, "context_length_exceeded")
    assert "13" not in end.sentence
    assert "3 tokens" in end.sentence
    assert end.refusal.retry_after_s is None


def test_long_answers_go_where_nodes_last():
    w = world()
    capacity = Capacity(4, 1_000, token_s=1.0)
    for name, lasts in (("short", 300.0), ("lasting", 3_000.0), ("ending", 20.0)):
        w.dispatcher.add_replica(name, capacity)
        w.capacities[name], w.engines[name] = capacity, {}
        w.dispatcher.expect_end(name, lasts)
    for name in ("short", "lasting", "ending"):
        w.load(name)
    w.submit(request("long", 100))
    w.submit(request("brief", 10))
    w.submit(request("brief too", 10))
    assert w.posts[0].replica == "lasting"
    assert {post.replica for post in w.posts[1:]} == {"short", "ending"}


def test_a_prompt_goes_where_its_beginning_is_cached():
    w = world(a=Capacity(4, 10_000), b=Capacity(4, 10_000))
    shared = tuple(range(256))
    w.submit(request("one", prompt=(*shared, 1)))
    w.submit(request("other", prompt=tuple(range(500, 756))))
    w.submit(request("two", prompt=(*shared, 2)))
    replicas = {post.request.name: post.replica for post in w.posts}
    assert replicas["one"] == replicas["two"] != replicas["other"]


def test_a_cancelled_request_frees_its_room():
    w = world(a=Capacity(1, 100))
    w.submit(request("first"))
    w.submit(request("second"))
    w.submit(request("third"))
    w.carry_out(w.dispatcher.cancel("second", 0.0))
    w.engines["a"].clear()  # the stop is carried out at once
    w.carry_out(w.dispatcher.cancel("first", 0.0))
    assert [stop.request for stop in w.stops] == ["first"]
    assert w.posts[-1].request.name == "third"
    assert w.dispatcher.cancel("first", 0.0) == []
    assert {w.ends[name].state for name in ("first", "second")} == {RequestState.CANCELLED}


def test_an_answer_resumes_from_saved_ids():
    whole = answer(request())
    w = world(a=SMALL)
    w.streams["r"] = list(whole[:4])
    w.submit(request(stream=True), generated=whole[:4])
    assert w.posts[0].max_tokens == 6
    w.run_to_the_end()
    assert w.ends["r"].ids == whole
    w.submit(request("complete"), generated=whole)
    assert w.ends["complete"].state is RequestState.DONE
    with pytest.raises(ValueError, match="cannot be continued"):
        w.submit(request("tools", continuable=False), generated=whole[:4])


def test_names_are_unique():
    w = world(a=SMALL)
    w.submit(request())
    with pytest.raises(ValueError, match="another name"):
        w.submit(request())
    with pytest.raises(ValueError, match="has to end first"):
        w.add("a", SMALL)


@pytest.mark.parametrize(("prompt", "tokens"), [((), 1), ((1,), 0)])
def test_a_request_needs_a_prompt_and_an_answer(prompt, tokens):
    with pytest.raises(ValueError, match="Request r"):
        request(prompt=prompt, tokens=tokens)


def test_the_model_depends_on_all_ids():
    whole, _ = generate(digest_of((1, 2, 3)), 20)
    rest, _ = generate(digest_of((1, 2, 3, *whole[:7])), 13)
    assert whole == whole[:7] + rest
    other, _ = generate(digest_of((1, 2, 4)), 20)
    assert sum(a == b for a, b in zip(whole, other, strict=True)) <= 2
