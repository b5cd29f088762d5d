"""The rendezvous handler against an agent played by the test: it joins exactly the agent's rounds
and never waits without end.
"""

import os
import socket
import threading

import pytest

from malletrain.protocol import messages
from tests.malletrain.agent.node_side import eventually
from tests.malletrain.launch.fake_agent import FakeAgent

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402
from torch.distributed.elastic.rendezvous import (  # noqa: E402
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler  # noqa: E402

from malletrain.launch.listeners import SignedListener, UserListener  # noqa: E402
from malletrain.launch.rendezvous import DaemonRendezvous  # noqa: E402
from malletrain.launch.round_store import (  # noqa: E402
    ReachedStore,
    RoundKeys,
    ServingRelay,
)
from tests.waiting import NEVER_S, PATIENCE_S  # noqa: E402

KEY = "5e" * 32


class Waiting(threading.Thread):
    """next_rendezvous in a thread of its own, as it blocks."""

    def __init__(self, handler):
        super().__init__(daemon=True)
        self.handler = handler
        self.info = self.error = None
        self.start()

    def run(self):
        try:
            self.info = self.handler.next_rendezvous()
        except Exception as error:
            self.error = error

    def result(self):
        self.join(PATIENCE_S)
        assert not self.is_alive(), "next_rendezvous hangs"
        if self.error is not None:
            raise self.error
        return self.info


@pytest.fixture
def agent(tmp_path_factory):
    agent = FakeAgent(tmp_path_factory.getbasetemp())
    yield agent
    agent.socket.close(0)


@pytest.fixture
def make(agent, monkeypatch):
    """Handlers of one job, closed at the end. The variables they set are put back."""
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "0")
    monkeypatch.setenv("MALLETRAIN_LAUNCHER_PID", "")
    monkeypatch.setenv("MALLETRAIN_GENERATION", "")
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", KEY)
    made = []

    def make_handler(timeout_s=NEVER_S):
        made.append(DaemonRendezvous("j1", agent.endpoint, "127.0.0.1", timeout_s))
        return made[-1]

    yield make_handler
    for handler in made:
        handler.shutdown()


def first_round(agent, handler, size=1, generation=1):
    """Bring ``handler`` into a round whose store it serves; the rendezvous and the store's port."""
    waiting = Waiting(handler)
    assert agent.hear_phase() == ("ready", 0)
    agent.say(messages.Round("j1", generation, 0, size))
    store = agent.hear()
    assert isinstance(store, messages.StoreUp)
    assert agent.hear_phase() == ("running", generation)
    return waiting.result(), store.port


NO_ENTRY_POINTS = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5),
    reason="torch before 2.5 looks for no entry points; malletrain.launch.torchrun registers ours",
)


@NO_ENTRY_POINTS
def test_torchrun_finds_the_handler_by_its_entry_point(agent, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", KEY)
    handler = get_rendezvous_handler(
        RendezvousParameters("malletrain", agent.endpoint, "j1", 1, 4, timeout="7")
    )
    try:
        assert isinstance(handler, DaemonRendezvous)
        assert isinstance(handler, RendezvousHandler)
        assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == (
            "malletrain",
            "j1",
            True,
        )
        assert not handler.is_closed()
    finally:
        handler.shutdown()
    assert handler.is_closed()


@NO_ENTRY_POINTS
def test_without_an_address_of_the_agent_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("MALLETRAIN_AGENT", raising=False)
    with pytest.raises(
        ValueError, match="MALLETRAIN_AGENT is not set and --rdzv-endpoint is empty"
    ):
        get_rendezvous_handler(RendezvousParameters("malletrain", "", "j1", 1, 4))


def test_rank_0_serves_a_store_and_the_others_find_it(agent, make):
    info, port = first_round(agent, make(), size=2)
    assert (info.rank, info.world_size) == (0, 2)
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert info.bootstrap_store_info.master_port != port, "the store itself is not announced"
    assert os.environ["MALLETRAIN_GENERATION"] == "1"
    assert os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] == "1"
    other = Waiting(make())
    assert agent.hear_phase() == ("ready", 0)
    agent.say(messages.Round("j1", 1, 1, 2, "127.0.0.1", port))
    assert agent.hear_phase() == ("running", 1)
    second = other.result()
    assert (second.rank, second.world_size) == (1, 2)
    info.store.set("k", "from rank 0")
    assert second.store.get("k") == b"from rank 0"


def test_a_new_round_gets_a_new_store_while_the_workers_still_run(agent, make):
    handler = make()
    first, port = first_round(agent, handler)
    assert handler.num_nodes_waiting() == 0
    agent.say(messages.Round("j1", 2, 0, 1))
    eventually(handler.num_nodes_waiting, "the round is noticed")
    store = agent.hear()
    assert (type(store), store.generation) == (messages.StoreUp, 2)
    assert store.port != port
    assert handler.num_nodes_waiting() == 1
    local = first.bootstrap_store_info.master_port
    TCPStore("127.0.0.1", local, is_master=False, wait_for_workers=False).set(
        "k", "old workers still find theirs"
    )
    info = handler.next_rendezvous()  # no message came before: this is no failure
    assert agent.hear_phase() == ("running", 2)
    assert info.bootstrap_store_info.master_port != local
    eventually(lambda: not listens(port), "the old store is closed once nobody needs it")


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_workers_that_failed_are_reported_and_the_next_round_is_joined(agent, make):
    handler = make()
    first_round(agent, handler)
    failure = messages.Failure(0, 1, 12.0)
    handler.note_failures((failure,))
    waiting = Waiting(handler)
    assignment = agent.hear().assignment
    assert (assignment.phase, assignment.generation, assignment.failures) == (
        "failed",
        1,
        (failure,),
    )
    agent.say(messages.Round("j1", 2, 0, 1))
    assert isinstance(agent.hear(), messages.StoreUp)
    assert agent.hear_phase() == ("running", 2)
    assert waiting.result().rank == 0


def test_stock_torchrun_restarting_by_itself_counts_as_a_failure(agent, make):
    handler = make()
    first_round(agent, handler)
    waiting = Waiting(handler)  # no note of failures, no round announced before
    assert agent.hear_phase() == ("failed", 1)
    agent.say(messages.Release("j1", 1.0))
    with pytest.raises(RendezvousClosedError, match="released from this node"):
        waiting.result()


def test_a_newer_round_makes_one_void_whose_store_does_not_answer(agent, make):
    waiting = Waiting(make())
    agent.hear()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # not listening
        agent.say(messages.Round("j1", 1, 1, 2, "127.0.0.1", nobody.getsockname()[1]))
        agent.say(messages.Round("j1", 3, 0, 1))
        agent.say(messages.Round("j1", 2, 1, 2, "127.0.0.1", nobody.getsockname()[1]))
        assert agent.hear().generation == 3
        assert agent.hear_phase() == ("running", 3)
        assert waiting.result().world_size == 1


@pytest.mark.parametrize("answers", ["nothing", "goodbye"])
def test_a_newer_round_makes_one_void_at_whose_store_somebody_else_listens(agent, make, answers):
    waiting = Waiting(make())
    agent.hear()
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen()
        agent.say(messages.Round("j1", 1, 1, 2, *store.getsockname()))
        half, _ = store.accept()
        assert half.recv(1)
        if answers == "goodbye":
            # it connects again and again from now on, as the listening socket is still there
            half.close()
        agent.say(messages.Round("j1", 2, 0, 1))
        assert agent.hear().generation == 2
        assert agent.hear_phase() == ("running", 2)
        assert waiting.result().world_size == 1
        half.close()


@pytest.mark.parametrize("answers", ["nothing", "goodbye"])
def test_a_newer_round_makes_one_void_whose_store_dies_while_it_is_connected_to(
    agent, make, answers
):
    waiting = Waiting(make())
    agent.hear()
    called = threading.Event()

    class NotifyingListener(SignedListener):
        def connect(self):
            called.set()  # TCPStore's client is there; nobody accepts it
            return super().connect()

    signed_listener = NotifyingListener()
    relay = ServingRelay(
        (UserListener(), signed_listener), RoundKeys(bytes.fromhex(KEY), "j1/1"), "127.0.0.1"
    )
    agent.say(messages.Round("j1", 1, 1, 2, "127.0.0.1", relay.port))
    assert called.wait(PATIENCE_S)
    if answers == "goodbye":
        relay.close()
    agent.say(messages.Round("j1", 2, 0, 1))
    assert agent.hear().generation == 2
    assert agent.hear_phase() == ("running", 2)
    assert waiting.result().world_size == 1
    relay.close()


class Clock:
    """The handler's clock, which the test moves."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_a_store_that_cannot_be_reached_ends_with_a_sentence(agent, make, monkeypatch):
    clock, tried = Clock(), []

    class Reached(ReachedStore):
        def __init__(self, *where):
            super().__init__(*where)
            tried.append(self)

    monkeypatch.setattr("malletrain.launch.rendezvous.time", clock)
    monkeypatch.setattr("malletrain.launch.rendezvous.ReachedStore", Reached)
    waiting = Waiting(make())
    agent.hear()
    agent.say(messages.Alive(""))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        agent.say(messages.Round("j1", 1, 1, 2, "127.0.0.1", nobody.getsockname()[1]))
        eventually(lambda: tried and tried[0].trouble, "it has been tried")
        clock.now_s = 2 * NEVER_S
        with pytest.raises(
            RendezvousTimeoutError,
            match=r"store of round 1 of job j1 at 127\.0\.0\.1:\d+ cannot be reached .* --host",
        ):
            waiting.result()


def test_rounds_of_other_jobs_and_old_ones_are_dropped(agent, make):
    handler = make()
    first_round(agent, handler, generation=5)
    for message in (
        messages.Round("j2", 9, 0, 1),
        messages.Round("j1", 4, 0, 1),
        messages.Round("j1", 5, 1, 2),
        messages.Alive(""),
    ):
        agent.say(message)
    handler.wait_for_news(5.0)
    assert handler.num_nodes_waiting() == 0


def test_no_agent_at_all(make, agent):
    handler = DaemonRendezvous("j1", agent.endpoint + "-nobody", "127.0.0.1", 0.2)
    try:
        with pytest.raises(
            RendezvousConnectionError, match=r"No agent answers at ipc://.*malletrain submit"
        ):
            handler.next_rendezvous()
    finally:
        handler.shutdown()


def test_the_agents_death_closes_the_rendezvous(agent, make):
    waiting = Waiting(make())
    agent.hear()
    agent.socket.close(0)
    with pytest.raises(RendezvousClosedError, match="The agent on this node is gone"):
        waiting.result()


def test_a_wait_that_takes_too_long_ends_with_the_agents_sentence(agent, make):
    waiting = Waiting(make())
    agent.hear()
    agent.say(messages.Error("The daemon formed no round."))
    with pytest.raises(RendezvousTimeoutError, match="formed no round"):
        waiting.result()


@pytest.mark.parametrize("goes_on", [True, False])
def test_after_success_it_waits_in_the_lobby_with_its_store(agent, make, goes_on):
    handler = make()
    info, port = first_round(agent, handler)
    result = []
    lobby = threading.Thread(target=lambda: result.append(handler.succeeded()), daemon=True)
    lobby.start()
    assert agent.hear_phase() == ("succeeded", 1)
    assert listens(port)
    agent.say(messages.Round("j1", 2, 0, 1) if goes_on else messages.Release("j1", 1.0))
    lobby.join(PATIENCE_S)
    assert result == [goes_on]
    assert info.rank == 0
