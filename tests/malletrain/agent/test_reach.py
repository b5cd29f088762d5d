"""What an agent says of a daemon that does not answer."""

import socket

import pytest

from malletrain.agent.link import why_no_answer


@pytest.fixture
def port():
    """A port of this machine on which nobody listens."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        yield placeholder.getsockname()[1]


def test_nobody_listens_there(port):
    sentence = why_no_answer(f"tcp://127.0.0.1:{port}")
    assert f"nothing listens on port {port} of 127.0.0.1" in sentence
    assert "which is this node itself" in sentence


def test_somebody_else_listens_there():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        sentence = why_no_answer(f"tcp://127.0.0.1:{other.getsockname()[1]}")
    assert "takes connections" in sentence


def test_a_port_that_a_firewall_keeps_shut():
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        # A client that comes when its queue is full gets no answer, as from a firewall.
        full.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        sentence = why_no_answer(f"tcp://127.0.0.1:{full.getsockname()[1]}", try_s=0.5)
    assert "does not answer on port" in sentence
    assert "firewall" in sentence


def test_a_name_that_the_node_does_not_know():
    assert "cannot look up head.invalid" in why_no_answer("tcp://head.invalid:7443")


def test_ipv6_and_an_endpoint_that_is_none(port):
    assert "::1" in why_no_answer(f"tcp://[::1]:{port}")
    assert "cannot look up" in why_no_answer("tcp://127.0.0.1:http-port")
