"""Objects with a ZeroMQ context of their own, in a reference cycle: a process that forgets them
goes on. It would wait for ever for sockets that the collector finds together with their context.
Nor does it keep file descriptors of them.
"""

import errno
import gc
import os
import subprocess
import sys
import threading

import pytest
import zmq

from malletrain.launch import round_store
from malletrain.memory.peers import RemoteKeeper
from malletrain.protocol.job_keys import RoundKeys
from tests.waiting import PATIENCE_S

KEYS = RoundKeys(b"s" * 32, "j1/1")


def no_descriptor(*_):
    raise zmq.ZMQError(errno.EMFILE)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def forgotten_keeper():
    keeper = RemoteKeeper("127.0.0.1:1", b"s" * 32, "j1")
    keeper.itself = keeper


def keeper_that_is_none():
    zmq.Socket.get_monitor_socket = no_descriptor
    RemoteKeeper("127.0.0.1:1", b"s" * 32, "j1")


def serving_relay_that_is_none():
    round_store.HostListener = no_descriptor
    round_store.ServingRelay(round_store.listener_pair(), KEYS, "127.0.0.1")


def calling_relay_that_is_none():
    zmq.Socket.get_monitor_socket = no_descriptor
    round_store.CallingRelay(KEYS, "127.0.0.1", 1)


def relay_without_a_thread():
    threading.Thread.start = no_thread
    round_store.CallingRelay(KEYS, "127.0.0.1", 1)


USES = {
    use.__name__: use
    for use in (
        forgotten_keeper,
        keeper_that_is_none,
        serving_relay_that_is_none,
        calling_relay_that_is_none,
        relay_without_a_thread,
    )
}


def open_sockets():
    return sum(issubclass(type(o), zmq.Socket) and not o.closed for o in gc.get_objects())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def forget(name):
    gc.disable()
    collect_forgotten(name)
    before = descriptors()  # with those that libraries open once
    collect_forgotten(name)
    assert descriptors() == before


def collect_forgotten(name):
    try:
        USES[name]()
    except (RuntimeError, zmq.ZMQError) as error:
        error.itself = error
    assert open_sockets() > 0
    gc.collect()
    assert open_sockets() == 0


FORKS = f"""
import gc, os, sys
from {__name__} import USES, forget
gc.collect()
gc.freeze()  # the objects of imports are not looked through in each fork
for name in USES:
    if not os.fork():
        forget(name)
        sys.exit()  # and then the interpreter ends as each does
    assert os.wait()[1] == 0, name
"""


@pytest.mark.slow
def test_what_nobody_closes_is_collected():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=PATIENCE_S)
