"""Tasks of a farm are added in groups, over a daemon that goes and comes back."""

from __future__ import annotations

import pytest

from malletrain.client import connection
from malletrain.client.errors import ClientError, Unreachable


class Daemon:
    """Keeps the tasks; its answers to some requests are lost."""

    def __init__(self, lost):
        self.rows = []
        self.lost = set(lost)
        self.requests = 0

    def do(self, operation):
        first, rows = operation.params["first"], operation.params["rows"]
        self.requests += 1
        if first > len(self.rows):
            raise ClientError("The next one is another.")
        self.rows += rows[len(self.rows) - first :]
        if self.requests in self.lost:
            raise Unreachable("It went away.")
        return len(self.rows)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(connection, "UPLOAD_RETRY_S", 0.0)


def test_a_group_whose_answer_is_lost_is_sent_again(no_pause):
    daemon, counts = Daemon({1, 3, 4}), []
    groups = [(0, [("a",), ("b",)]), (2, [("c",)]), (3, [("d",)])]
    connection.upload(daemon.do, "j1", groups, counts.append)
    assert daemon.rows == [["a"], ["b"], ["c"], ["d"]]
    assert counts == [2, 3, 4]
    assert daemon.requests == 6


def test_a_group_for_which_the_daemon_is_busy_is_sent_again(no_pause):
    daemon, refusals = Daemon({2}), [ClientError("Too many wait.", "busy")] * 2

    def do(operation):
        if refusals:
            raise refusals.pop()
        return daemon.do(operation)

    connection.upload(do, "j1", [(0, [("a",)]), (1, [("b",)])], lambda n: None)
    assert daemon.rows == [["a"], ["b"]]


def test_a_daemon_that_stays_away_ends_it(no_pause, monkeypatch):
    monkeypatch.setattr(connection, "UPLOAD_PATIENCE_S", 0.0)
    with pytest.raises(Unreachable):
        connection.upload(Daemon(range(1, 10**6)).do, "j1", [(0, [("a",)])], lambda n: None)


def test_a_refusal_is_not_repeated(no_pause):
    daemon = Daemon(())
    with pytest.raises(ClientError, match="another"):
        connection.upload(daemon.do, "j1", [(5, [("a",)])], lambda n: None)
    assert daemon.requests == 1
