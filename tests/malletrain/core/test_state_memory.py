"""What is said of snapshots in memory."""

import pytest

from malletrain.core.state_memory import HandOverTime, in_memory, late

GB = 10**9
SAID = "Its snapshots take 1.5 GB on 2 nodes, 1 GB at most on one."
TAKEN = [GB, GB // 2]
TEN = HandOverTime(drain_s=10.0, grace_s=30.0)


def test_nothing_where_nothing_is():
    assert in_memory([], {"path": "memory", "bytes": GB, "seconds": 100.0}, TEN) == ""


@pytest.mark.parametrize(
    "newest",
    [
        {},
        {"path": "memory", "bytes": GB, "seconds": 4.0},
        {"path": "/home/x.pt", "bytes": GB, "seconds": 40.0},  # the disk's time is not the node's
        {"path": "memory", "bytes": GB, "seconds": 8.0, "replicated": True},
        {"path": "/home/x.pt", "bytes": 40 * GB, "replicated": True},
        {"path": "/home/x.pt", "bytes": 40 * GB, "nodes": 16},
        {"path": "memory", "bytes": "x", "seconds": None, "nodes": float("inf")},
        {"path": None, "bytes": float("nan"), "seconds": -1, "nodes": [3]},
    ],
)
def test_what_they_take(newest):
    assert in_memory(TAKEN, newest, TEN) == SAID


def test_a_hand_over_that_may_not_get_done_is_said():
    sentence = in_memory(TAKEN, {"path": "memory", "bytes": 2 * GB, "seconds": 8.0}, TEN)
    assert sentence.startswith(SAID)
    assert "of 2 GB took 8 s of the 10 s of drain_timeout" in sentence
    assert "replicate_every" in sentence


def test_one_that_cannot_get_done_is_said_before_it_is_tried():
    newest = {"path": "/home/x.pt", "bytes": 7 * GB, "nodes": 1}
    sentence = late(newest, TEN)
    assert "hands over 7 GB, which takes 20 s at 350 MB/s" in sentence
    assert "the 10 s of drain_timeout" in sentence
    assert late(newest, HandOverTime(60.0, 60.0)) == ""
    slow = HandOverTime(60.0, 20.0, mbit=1000.0)
    sentence = late({**newest, "nodes": 2}, slow)
    assert "hands over 3.5 GB, which takes 28 s at 125 MB/s" in sentence
    assert "the 20 s between the main scheduler's notice" in sentence
    assert "replicate_every" in sentence


def test_how_much_fits_is_said_before_there_is_a_job():
    assert "hand over 3.5 GB" in TEN.room()
    assert "which encryption allows" in TEN.room()
    assert "at 125 MB/s, as measured" in HandOverTime(10.0, 10.0, 1000.0).room()
