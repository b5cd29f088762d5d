"""Who is let in, asked as ZeroMQ asks (ZAP)."""

import time

import pytest
import zmq
from zmq.utils import z85

from malletrain.daemon.server.transport import ENDPOINT, ZapAuthenticator
from malletrain.identity.keys import new_pair
from tests.waiting import PATIENCE_S

KNOWN = new_pair().public
KEY = z85.decode(KNOWN)


@pytest.fixture
def answer_to():
    """A function that sends frames to the authenticator and returns its answer."""
    with zmq.Context() as context, context.socket(zmq.REQ) as io_thread:
        authenticator = ZapAuthenticator(context, {KNOWN: "client:ann"}.get)
        io_thread.linger = 0
        io_thread.connect(ENDPOINT)

        def ask(frames):
            io_thread.send_multipart(frames)
            until = time.monotonic() + PATIENCE_S
            while not io_thread.poll(0) and time.monotonic() < until:
                authenticator.admit(0.01)
            return io_thread.recv_multipart(zmq.DONTWAIT)

        yield ask
        authenticator.close()


def question(key=KEY, version=b"1.0", mechanism=b"CURVE"):
    return [version, b"7", b"", b"127.0.0.1", b"", mechanism, key]


def test_who_has_a_known_key_is_let_in_and_named_by_it(answer_to):
    assert answer_to(question()) == [b"1.0", b"7", b"200", b"OK", KNOWN.encode(), b""]


@pytest.mark.parametrize(
    "frames",
    [
        question(z85.decode(new_pair().public)),
        question(KEY[:31]),
        question(KEY + b"abcd"),
        question(b""),
        question(version=b"2.0"),
        question(mechanism=b"NULL"),
        question()[:6],
        [*question(), b"more"],
    ],
    ids=["stranger", "short", "long", "empty", "version", "mechanism", "no key", "two keys"],
)
def test_nobody_else_is(answer_to, frames):
    assert answer_to(frames) == [b"1.0", b"7", b"400", b"Unknown key", b"", b""]


def test_a_question_that_is_none_is_answered_too(answer_to):
    assert answer_to([b"1.0"]) == [b"1.0", b"", b"400", b"Unknown key", b"", b""]


def test_who_knocks_next_waits_when_the_time_is_over():
    with zmq.Context() as context, context.socket(zmq.REQ) as io_thread:
        authenticator = ZapAuthenticator(context, {}.get)
        io_thread.linger = 0
        io_thread.connect(ENDPOINT)
        io_thread.send_multipart(question())
        assert authenticator.socket.poll(1000 * PATIENCE_S)
        assert authenticator.admit(0.0), "there may be more"
        assert not io_thread.poll(0)
        assert not authenticator.admit(PATIENCE_S)
        assert io_thread.poll(1000 * PATIENCE_S)
        authenticator.close()
