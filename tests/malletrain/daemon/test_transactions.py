"""The transactions of one batch: saved together, told after that, each rolled back alone."""

import asyncio
import contextlib
import sqlite3
from types import SimpleNamespace

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon.compose import make_site_state
from malletrain.daemon.engine.transactions import EngineEnded, Transactions
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.database import StoreError
from malletrain.store.store import Store

ANSWER = messages.Alive("7")


class Turns:
    """Steps over a store in a file. What is told is kept with what a crash would leave then."""

    def __init__(self, folder):
        self.file = folder / "m.db"
        self.store = Store.open(f"sqlite:///{self.file}")
        config = parse_config(f'[daemon]\nstate_dir = "{folder}"\n[scheduler]\nkind = "local"\n')
        self.sent, self.reached, self.seen, self.decided = [], True, [], []
        state = make_site_state(config, self.store, Clock(), Metrics(), self.send, str)
        self.audit, self.outbox = state.audit, state.outbox
        decisions = SimpleNamespace(
            begin=self.seen.append,
            decide=self.decided.append,
            saved=self.seen.append,
            next_due_at=lambda: None,
        )
        self.transactions = Transactions(state, decisions)

    def send(self, peer, message):
        self.sent.append((peer, message, self.saved()))
        return self.reached

    def saved(self):
        """The nodes of the events that another process reads."""
        with contextlib.closing(sqlite3.connect(self.file)) as other:
            return [row[0] for row in other.execute("SELECT node FROM events ORDER BY seq")]

    def take(self, node):
        """A message that has a step write something and tell its sender."""
        with self.transactions.begin():
            self.audit.record(EventKind.NODE_JOINED, "It is ours.", node=node)
            self.outbox.post(node.encode(), ANSWER)


@pytest.fixture
def turns(tmp_path):
    """Made within a loop, as the daemon's are."""

    async def make():
        return Turns(tmp_path)

    loop = asyncio.new_event_loop()
    turns = loop.run_until_complete(make())
    yield turns
    loop.close()
    turns.store.close()


def fails(turns, node):
    """A step that does what a message asks for, and fails then."""
    with contextlib.suppress(ZeroDivisionError), turns.transactions.begin():
        turns.take(node)
        1 / 0  # noqa: B018


def test_whatever_is_told_in_a_turn_is_saved_whenever_it_ends(turns):
    with turns.transactions.batch():
        for node in ("n1", "n2", "n3"):
            turns.outbox.answer(b"who", ANSWER)
            turns.take(node)
        assert turns.saved() == [], "killed here, it has told nobody"
        assert turns.sent == []
    nodes = ["n1", "n2", "n3"]
    assert [peer for peer, _, _ in turns.sent] == [b"who", b"n1", b"who", b"n2", b"who", b"n3"]
    assert all(saved == nodes for _, _, saved in turns.sent)
    assert len(turns.decided) == 3, "each step decides for itself"


def test_a_step_outside_of_a_turn_is_one_of_its_own(turns):
    turns.take("n1")
    turns.take("n2")
    assert [saved for _, _, saved in turns.sent] == [["n1"], ["n1", "n2"]]
    fails(turns, "n3")
    assert turns.saved() == ["n1", "n2"]
    assert len(turns.sent) == 2
    assert turns.transactions.torn


def test_what_fails_in_a_turn_costs_itself(turns):
    with turns.transactions.batch():
        turns.take("n1")
        turns.outbox.answer(b"who", ANSWER)
        fails(turns, "n2")
        turns.transactions.fail(ZeroDivisionError())
        with pytest.raises(EngineEnded):
            turns.take("n3")
    assert isinstance(turns.transactions.failed.exception(), ZeroDivisionError)
    assert turns.saved() == ["n1"]
    assert [peer for peer, _, _ in turns.sent] == [b"n1", b"who"]
    assert turns.transactions.torn


def test_where_the_first_fails_nothing_is_left(turns):
    with turns.transactions.batch():
        fails(turns, "n1")
    assert turns.saved() == []
    assert turns.sent == []


def test_where_the_database_refuses_nothing_of_the_turn_is_told(turns):
    def turn():
        with turns.transactions.batch():
            turns.take("n1")
            with contextlib.suppress(StoreError), turns.transactions.begin():
                turns.take("n2")
                raise StoreError("The database is full.")

    with pytest.raises(StoreError, match="full"):
        turn()
    assert turns.saved() == []
    assert turns.sent == []


def test_a_turn_without_a_step_writes_nothing(turns):
    with (
        contextlib.closing(sqlite3.connect(turns.file, isolation_level=None)) as other,
        turns.transactions.batch(),
    ):
        other.execute("BEGIN IMMEDIATE")  # nobody else can write meanwhile
        turns.outbox.answer(b"who", ANSWER)
    assert len(turns.sent) == 1
    assert turns.seen == []


def test_who_is_not_reached_is_told_of_once_and_answers_may_be_lost(turns):
    turns.reached = False
    with turns.transactions.batch():
        turns.take("n1")
        turns.take("n2")
        turns.outbox.answer(b"who", ANSWER)
    assert turns.seen[-1] == {b"n1", b"n2"}
