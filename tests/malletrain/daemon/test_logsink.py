"""Logs on the daemon's disk: what comes is kept at its place, what does not come is told."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.daemon.jobs.logsink import LogSink


@pytest.fixture
def sink(tmp_path):
    return LogSink(tmp_path, 1000)


def whole(sink, stream="rank0", limit=1024):
    """Everything of a log as a reader gets it, piece by piece."""
    text, cursor = "", ""
    while True:
        piece = sink.read("j1", stream, cursor, limit, ended=True)
        text, cursor = text + piece.text, piece.cursor
        if not piece.more:
            return text


def test_what_did_not_come_is_told_at_the_end(sink):
    sink.write("j1", 1, "rank0", "n1", 0, b"one\ntw", 4006)
    sink.ended("j1", 1, "rank0", "n1", 4006)
    assert whole(sink) == (
        "one\ntw\n--- 4,000 bytes of this log are missing: n1 was given back before they were "
        "sent, and they are gone with it. ---\n"
    )


def test_what_comes_after_all_takes_the_place_of_the_marker(sink):
    sink.write("j1", 1, "rank0", "n1", 0, b"one\n", 8)
    sink.ended("j1", 1, "rank0", "n1", 8)
    assert sink.write("j1", 1, "rank0", "n1", 4, b"two\n", 8) == 8
    assert whole(sink) == "one\ntwo\n"


def test_a_node_that_is_lost_leaves_what_was_known_of_its_logs(sink):
    sink.write("j1", 1, "rank0", "n1", 0, b"one\n", 11)
    sink.write("j1", 1, "rank1", "n2", 0, b"two\n", 11)
    sink.write("j1", 1, "rank2", "n1", 0, b"all\n", 4)
    sink.gone("n1")
    sink.gone("n1")
    assert whole(sink) == (
        "one\n--- At least 7 bytes of this log are missing: n1 was lost before they were sent. "
        "---\n"
    )
    assert whole(sink, "rank1") == "two\n"
    assert whole(sink, "rank2") == "all\n"


def test_a_lost_node_whose_logs_cannot_be_closed_is_lost_all_the_same(sink, tmp_path):
    """An operator has deleted them, because the disk was full. The daemon began anew at each such
    node, and ended at the fourth within ten minutes.
    """
    for rank, node in enumerate(("n1", "n1", "n2")):
        sink.write("j1", 1, f"rank{rank}", node, 0, b"one\n", 11)
    (tmp_path / "j1" / "g1-rank0@n1.log").unlink()
    sink.gone("n1")
    assert "n1 was lost before they were sent" in whole(sink, "rank1")
    (tmp_path / "j1" / "g1-rank2@n2.end").mkdir()  # such as where the disk has no room for it
    sink.gone("n2")
    assert whole(sink, "rank2") == "one\n"


def test_a_log_goes_on_after_the_disk_was_full_at_its_end(sink, tmp_path):
    sink.write("j1", 1, "rank0", "n1", 0, b"one\n", 8)
    (tmp_path / "j1" / "g1-rank0@n1.end").touch()  # there was no room for what it says
    assert sink.write("j1", 1, "rank0", "n1", 4, b"two\n", 8) == 8
    assert whole(sink) == "one\ntwo\n"
    sink.ended("j1", 1, "rank0", "n1", 12)
    (tmp_path / "j1" / "g1-rank0@n1.log").unlink()  # by an operator, for room
    assert sink.write("j1", 1, "rank0", "n1", 0, b"one\n", 12) == 4


def test_a_log_over_its_limit_says_so_at_once_and_how_much_at_its_end(sink):
    sink.write("j1", 1, "rank0", "n1", 0, b"x" * 999 + b"\nyy", 5000)
    cut = "of each log the first 1 kB are kept ([jobs] log_limit). ---\n"
    assert whole(sink)[1000:] == f"--- At least 4,000 bytes of this log are missing: {cut}"
    sink.write("j1", 1, "rank0", "n1", 1002, b"more", 5000)
    sink.ended("j1", 1, "rank0", "n1", 6000)
    assert whole(sink)[1000:] == f"--- 5,000 bytes of this log are missing: {cut}"


def test_a_log_of_which_nothing_came_says_how_much_it_was(sink):
    sink.ended("j1", 1, "rank0", "n1", 12)
    assert whole(sink).startswith("--- 12 bytes of this log are missing: ")


@given(
    st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=4),
    st.integers(min_value=4, max_value=50),
)
@example(rounds=["0\u0800\x80", "0", "0", "\x80"], limit=5)
def test_pieces_put_together_are_the_log_whatever_their_size(rounds, limit):
    """No character is cut in half where a piece ends, in whichever round that is."""
    with tempfile.TemporaryDirectory() as folder:
        sink = LogSink(Path(folder), 10**6)
        for number, text in enumerate(rounds, 1):
            raw = text.encode("utf-8", "replace")
            sink.write("j1", number, "rank0", "n1", 0, raw, len(raw))
        head = "--- round {} on n1 ---\n" if len(rounds) > 1 else ""
        texts = [text.encode("utf-8", "replace").decode() for text in rounds]
        expected = "".join(head.format(number) + text for number, text in enumerate(texts, 1))
        assert whole(sink, limit=limit) == expected
