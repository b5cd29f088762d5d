"""Ports of the loopback that are not open to others: asked of the kernel, not of a model of it."""

import os
import resource
import socket
import struct

import pytest

from malletrain.launch.listeners import (
    SIGNED_ADDRESS,
    USER_ADDRESS,
    Callers,
    SignedListener,
    UserListener,
    listener_pair,
    owner_in_table,
)
from tests.strangers import SOMEBODY, as_somebody, only_root
from tests.waiting import PATIENCE_S, readable, until

CALLS = f"""
with socket.socket() as call:
    call.connect(({USER_ADDRESS!r}, int(sys.argv[1])))
    try:
        sys.exit(int(call.recv(10) != b""))
    except ConnectionResetError:
        pass
"""
"""Hears nothing at the listener: else it ends with 1."""
TAKES = """
listener_ = listeners.SignedListener()
listener = socket.socket(fileno=listener_.duplicate())
stranger = socket.socket()
stranger.setblocking(False)
stranger.connect_ex((listeners.SIGNED_ADDRESS, listener_.port))
let_in = listener_.connect()
connection, _ = listener.accept()
sys.exit(int(connection.getpeername() != let_in.getsockname() or not listener_.enforced))
"""


@pytest.fixture
def front():
    listener_ = UserListener()
    yield listener_
    listener_.close()


@pytest.fixture
def back():
    listener_ = SignedListener()
    yield listener_
    listener_.close()


def accepted(listener, patience_s=PATIENCE_S):
    """The connection that a signed listener has accepted, or None."""
    if not readable(listener, patience_s):
        return None
    listener.setblocking(False)
    return listener.accept()[0]


def owner_of(caller, called):
    """The owner of a connection, which both ways of asking agree on."""
    callers = Callers(called)
    assert callers.has_sock_diag, "the kernels of the tests have sock_diag"
    owner = callers.owner(caller, called)
    assert owner_in_table(caller, called) == owner
    callers.close()
    return owner


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_listener_accepts_a_process_of_this_user(front, family):
    with socket.socket(family) as call:
        call.connect(
            (USER_ADDRESS if family == socket.AF_INET else f"::ffff:{USER_ADDRESS}", front.port)
        )
        assert readable(front)
        own = front.accept()
        assert own is not None
        caller = own.getpeername()
        assert owner_of(caller, own.getsockname()) == os.geteuid()
        own.sendall(b"come in")
        assert call.recv(10) == b"come in"
        own.close()
    assert owner_of(caller, (USER_ADDRESS, front.port)) is None, "the caller has gone"


def test_the_user_listener_asks_the_kernel_who_connects(front, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    with socket.create_connection((USER_ADDRESS, front.port)) as call:
        assert readable(front)
        assert front.accept() is None
        assert call.recv(1) == b"", "hung up on"


def test_where_the_kernel_looks_nothing_up_its_table_is_read(monkeypatch):
    monkeypatch.setattr("malletrain.launch.listeners._NETLINK_SOCK_DIAG", 4711)
    listener_ = UserListener()
    with socket.create_connection((USER_ADDRESS, listener_.port)):
        assert readable(listener_)
        own = listener_.accept()
        assert own is not None
        own.close()
    listener_.close()


def fill(taken):
    """Take every descriptor that is left."""
    while True:
        taken.append(os.dup(0))


def test_a_caller_for_whom_there_is_no_descriptor_waits_and_comes_in_later(front):
    with socket.create_connection((USER_ADDRESS, front.port)) as call:
        assert readable(front)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (call.fileno() + 1, before[1]))
        taken = []
        try:
            with pytest.raises(OSError, match="open files"):
                fill(taken)
            with pytest.raises(OSError, match="open files"):
                front.accept()
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert readable(front)
        own = front.accept()
        assert own is not None
        own.sendall(b"come in")
        assert call.recv(10) == b"come in"
        own.close()


def test_a_listener_at_the_callers_port_is_no_caller(front):
    """It is what the kernel shows when the connection is gone."""
    with socket.socket() as listener:
        listener.bind((USER_ADDRESS, 0))
        listener.listen()
        assert owner_of(listener.getsockname(), (USER_ADDRESS, front.port)) is None


@only_root
def test_the_user_listener_closes_connections_of_others(front):
    with as_somebody("import socket, sys\n", CALLS, front.port) as caller:
        assert readable(front)
        assert front.accept() is None
    assert caller.returncode == 0


def test_the_signed_listener_accepts_its_own_connections_only(back):
    with socket.socket(fileno=back.duplicate()) as listener, socket.socket() as stranger:
        stranger.setblocking(False)
        stranger.connect_ex((SIGNED_ADDRESS, back.port))
        let_in = back.connect()
        connection = accepted(listener)
        assert connection.getpeername() == let_in.getsockname()
        let_in.sendall(b"ours")
        assert connection.recv(10) == b"ours"
        connection.sendall(b"answer")
        assert let_in.recv(10) == b"answer"
        # the stranger has called first and is still not there
        assert accepted(listener, 0.0) is None
        let_in.close()
        connection.close()


def at_a_port_that_was_let_in(back, listener):
    """A socket that has the port of a connection that is over. None: the kernel, or another test,
    has the port again.
    """
    let_in = back.connect()
    # reset, so that nothing of the connection waits in the kernel for its last segments
    let_in.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    port, there = let_in.getsockname()[1], accepted(listener)
    let_in.close()
    there.close()
    stranger = socket.socket()
    try:
        stranger.bind((USER_ADDRESS, port))
    except OSError:
        stranger.close()
        return None
    return stranger


def test_a_port_that_was_let_in_is_a_stranger_afterwards(back):
    with socket.socket(fileno=back.duplicate()) as listener:
        free = "a port that was let in is free"
        with until(lambda: at_a_port_that_was_let_in(back, listener), free) as stranger:
            stranger.setblocking(False)
            stranger.connect_ex((SIGNED_ADDRESS, back.port))
            following = back.connect()
            assert accepted(listener).getpeername() == following.getsockname()
            assert accepted(listener, 0.0) is None


def test_the_same_port_of_another_loopback_address_is_a_stranger(back):
    with socket.socket(fileno=back.duplicate()) as listener, socket.socket() as stranger:
        let_in = back.connect()
        accepted(listener).close()
        stranger.bind(("127.0.0.3", let_in.getsockname()[1]))
        stranger.setblocking(False)
        stranger.connect_ex((SIGNED_ADDRESS, back.port))
        following = back.connect()
        assert accepted(listener).getpeername() == following.getsockname()
        assert accepted(listener, 0.0) is None


@only_root
def test_the_signed_listener_needs_no_privilege():
    """What root may do in a test a user's job may not."""
    with as_somebody(
        "import socket, sys\nfrom malletrain.launch import listeners as listeners\n", TAKES
    ) as process:
        pass
    assert process.returncode == 0


def test_a_pair_of_listeners_has_one_port():
    front, back = listener_pair()
    assert front.port == back.port
    front.close()
    back.close()
