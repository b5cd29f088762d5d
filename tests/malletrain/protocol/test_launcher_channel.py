"""Between agent and launcher: which round counts, where sockets lie, and that the agent's death is
noticed.
"""

import shutil
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from malletrain.protocol import messages, wire
from malletrain.protocol.launcher_channel import (
    LauncherEnd,
    LaunchOrder,
    RoundInbox,
    read_order,
    socket_directory,
    write_order,
)
from tests.malletrain.agent.node_side import eventually


@given(st.lists(st.one_of(st.integers(1, 9), st.none()), max_size=30))
def test_rounds_only_go_forward(script):
    """A number: a round of that generation arrives; None: the launcher takes what is pending."""
    inbox, taken, heard = RoundInbox(), [], 0
    for generation in script:
        if generation is not None:
            assert inbox.add(messages.Round("j", generation, 0, 1)) == (generation > heard)
            heard = max(heard, generation)
        elif inbox.pending() is not None:
            taken.append(inbox.take().generation)
            assert taken[-1] == heard == inbox.generation
    assert taken == sorted(set(taken))


def order(tmp_path):
    spec = messages.JobSpec(
        "digits", "me", "train it.py", str(tmp_path), "python", ("--a", "$(b)", "'\""), {"K": "v w"}
    )
    return LaunchOrder("j1", spec, "ipc:///x", "node-1", str(tmp_path), 5.0, 60.0)


def test_an_order_survives_its_file(tmp_path):
    path = tmp_path / "order.json"
    write_order(path, order(tmp_path))
    assert read_order(str(path)) == order(tmp_path)


def test_an_order_that_is_not_one_is_refused(tmp_path):
    path = tmp_path / "order.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(order(tmp_path)), "surprise": 1}))
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        read_order(str(path))


def test_sockets_move_when_their_address_would_be_too_long(tmp_path):
    assert socket_directory(Path("/tmp")) == Path("/tmp")
    elsewhere = socket_directory(tmp_path / ("x" * 100))
    try:
        assert len(str(elsewhere)) + 25 <= 107
        assert elsewhere.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(elsewhere)


def test_messages_pass_and_the_end_of_the_agent_is_noticed(tmp_path):
    directory = socket_directory(tmp_path)
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory}/launcher.sock")
    end = LauncherEnd(f"ipc://{directory}/launcher.sock")
    try:
        end.send(messages.StoreUp("j1", 3, "host", 99))
        identity, *frames = router.recv_multipart()
        assert wire.decode(frames) == messages.StoreUp("j1", 3, "host", 99)
        for message in (messages.Round("j1", 4, 0, 1), messages.Release("j1", 1.0)):
            router.send_multipart([identity, *wire.encode(message)])
        router.send_multipart([identity, b"MT9", b"from another version"])
        received = []
        eventually(lambda: received.extend(end.receive(0.1)) or len(received) == 2, "both messages")
        assert received == [messages.Round("j1", 4, 0, 1), messages.Release("j1", 1.0)]
        assert not end.agent_gone
        router.close(0)
        eventually(lambda: end.receive(0.1) == [] and end.agent_gone, "the agent's end is closed")
    finally:
        end.close()
        router.close(0)


def test_an_end_that_is_closed_twice(tmp_path):
    end = LauncherEnd(f"ipc://{tmp_path}/none.sock")
    end.close()
    end.close()
