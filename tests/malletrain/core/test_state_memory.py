"""What is said of snapshots in memory."""

from malletrain.core.state_memory import in_memory


def test_nothing_where_nothing_is():
    assert in_memory([], {"path": "memory", "bytes": 10**9, "seconds": 100.0}, 10.0) == ""


def test_what_they_take():
    said = "Its snapshots take 1.5 GB on 2 nodes, 1 GB at most on one."
    assert in_memory([10**9, 5 * 10**8], {}, 10.0) == said
    quick = {"path": "memory", "bytes": 10**9, "seconds": 4.0}
    assert in_memory([10**9, 5 * 10**8], quick, 10.0) == said
    on_disk = {"path": "/home/x.pt", "bytes": 10**9, "seconds": 40.0}
    assert in_memory([10**9, 5 * 10**8], on_disk, 10.0) == said


def test_a_hand_over_that_may_not_get_done_is_said():
    slow = {"path": "memory", "bytes": 2 * 10**9, "seconds": 8.0}
    said = in_memory([10**9], slow, 10.0)
    assert "of 2 GB took 8 s of the 10 s that drain_timeout allows" in said
    assert "replicate_every" in said
