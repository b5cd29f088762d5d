"""Trials of the way between nodes, over real connections."""

import asyncio
import itertools
import socket
from types import SimpleNamespace

import pytest

from malletrain.agent import networks
from malletrain.agent.networks import Prober
from malletrain.protocol.messages import Probed, ProbeOpen, ProbeTo, ProbeUp
from malletrain.protocol.payloads import ProbeTarget
from tests.waiting import PATIENCE_S

TOKEN, OTHER = "ab" * 16, "cd" * 16


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Connections may take long."""
    monkeypatch.setattr(networks, "CONNECT_S", PATIENCE_S)


def set_clock(monkeypatch, interval_s):
    """Have trials measure time by a clock that goes on by ``interval_s`` each time it is read."""
    clock = itertools.count()
    clock_of_trials = SimpleNamespace(monotonic=lambda: interval_s * next(clock))
    monkeypatch.setattr(networks, "time", clock_of_trials)


class Ends:
    """Two agents' probers, and what they tell the daemon."""

    def __init__(self):
        self.messages = asyncio.Queue()
        self.listener = Prober(self.tell)
        self.caller = Prober(self.tell)

    def tell(self, message):
        self.messages.put_nowait(message)
        return True

    async def hear(self):
        return await asyncio.wait_for(self.messages.get(), PATIENCE_S)

    async def listening(self):
        self.listener.begin(ProbeOpen(1, "127.0.0.1", TOKEN))
        up = await self.hear()
        assert isinstance(up, ProbeUp)
        return up.port

    async def tried(self, *targets, token=TOKEN, seconds=0.0):
        self.caller.begin(ProbeTo(1, token, targets, seconds))
        probed = await self.hear()
        assert isinstance(probed, Probed)
        return {r.node: r for r in probed.results}

    def close(self):
        self.listener.close()
        self.caller.close()


@pytest.mark.parametrize("seconds", [0.0, 2.0], ids=["connect", "measure"])
def test_a_way_that_is_open(monkeypatch, seconds):
    set_clock(monkeypatch, 1.0)

    async def play():
        ends = Ends()
        target = ProbeTarget("n1", "127.0.0.1", await ends.listening())
        result = (await ends.tried(target, seconds=seconds))["n1"]
        ends.close()
        return result

    result = asyncio.run(play())
    assert result.reached
    # what went through in the time, counted by the other end: at least the first mebibyte
    assert (result.mbit > 0) == (seconds > 0)


def test_ways_that_are_not():
    async def play():
        ends = Ends()
        port = await ends.listening()
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # not listening
            shut = ProbeTarget("n2", "127.0.0.1", nobody.getsockname()[1])
            first = await ends.tried(ProbeTarget("n1", "127.0.0.1", port), shut)
        second = await ends.tried(ProbeTarget("n1", "127.0.0.1", port), token=OTHER)
        ends.close()
        return first, second

    first, second = asyncio.run(play())
    assert first["n1"].reached
    assert (first["n2"].reached, first["n2"].trouble) == (False, "Connection refused")
    assert not second["n1"].reached, "who does not know the token is hung up on"


def test_who_connects_and_says_nothing_is_hung_up_on(monkeypatch):
    async def play():
        ends = Ends()
        port = await ends.listening()
        monkeypatch.setattr(networks, "OPEN_S", 0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        heard = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        ends.close()
        return heard

    assert asyncio.run(play()) == b""


def test_a_way_too_slow_to_be_waited_for_is_measured_by_what_it_has_carried(monkeypatch):
    """The other end takes what its kernel takes, and never says how much it was."""
    connect = socket.create_connection

    def patient_connect(address, _):
        return connect(address, PATIENCE_S)

    monkeypatch.setattr(socket, "create_connection", patient_connect)
    monkeypatch.setattr(networks, "CONNECT_S", 0.05)
    set_clock(monkeypatch, 0.0)  # it sends until nothing more is taken

    async def play():
        ends = Ends()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            target = ProbeTarget("n1", "127.0.0.1", silent.getsockname()[1])
            measured = (await ends.tried(target, seconds=0.05))["n1"]
            tried = (await ends.tried(target))["n1"]
        ends.close()
        return measured, tried

    measured, tried = asyncio.run(play())
    assert measured.reached
    assert measured.mbit > 0
    assert (tried.reached, tried.trouble) == (False, "timed out")
