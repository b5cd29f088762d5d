"""The library of a service's process, against a launcher's end of the socket played by the test."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading

import pytest

from malletrain import membership
from malletrain.membership import Member, MembershipError, differences
from tests.waiting import NEVER_S, PATIENCE_S, until


@pytest.mark.parametrize(("visible", "count"), [("2,5", 2), ("", 0)])
def test_the_gpus_of_the_lease(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert membership.gpu_count() == count


def m(node, leaves=None, address=None, loading=False):
    return Member(node, "h", address or f"{node}:1", leaves, loading=loading)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((), (m("a"), m("b")), ["joined a", "joined b"]),
        ((m("a"), m("b")), (m("a"),), ["left b"]),
        ((m("a"),), (m("a", 9.0),), ["leaving a"]),
        ((m("a", 9.0),), (m("a", 8.0),), []),
        ((m("a", 9.0),), (m("a"),), ["staying a"]),
        ((), (m("a", 9.0),), ["joined a", "leaving a"]),
        ((m("a"),), (m("a", address="a:2"),), ["left a", "joined a"]),
        ((), (m("a", loading=True),), ["joined a"]),
        ((m("a", loading=True),), (m("a"),), ["ready a"]),
        ((m("a", loading=True),), (m("a", 9.0),), ["ready a", "leaving a"]),
    ],
)
def test_differences(old, new, expected):
    assert [f"{c.kind} {c.member.node}" for c in differences(old, new)] == expected


class Launcher:
    """The other end."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()

    def accept(self):
        self.connection, _ = self.listener.accept()
        self.lines = self.connection.makefile("rb")

    def hear(self):
        return json.loads(self.lines.readline())

    def say(self, **message):
        self.connection.sendall(json.dumps(message).encode() + b"\n")


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    launcher = Launcher(tmp_path / "s")
    monkeypatch.setenv("MALLETRAIN_SERVICE", str(tmp_path / "s"))
    monkeypatch.setenv("MALLETRAIN_NODE", "n1")
    monkeypatch.setenv("MALLETRAIN_HOST", "h")
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", "ab" * 32)
    yield launcher
    launcher.listener.close()


def test_a_process_joins_hears_and_drains(launcher):
    group = membership.join("n1:7")
    launcher.accept()
    assert launcher.hear() == {"say": "join", "address": "n1:7"}
    assert membership.job_key() == b"\xab" * 32
    launcher.say(view=4, members=[["n1", "h", "n1:7", None], ["n2", "h", "n2:7", None]])
    changes = group.changes()
    assert [(c.kind, c.member.node) for c in (next(changes), next(changes))] == [
        ("joined", "n1"),
        ("joined", "n2"),
    ]
    launcher.say(view=5, members=[["n1", "h", "n1:7", NEVER_S], ["n2", "h", "n2:7", None]])
    change = next(changes)
    assert (change.kind, change.member) == ("leaving", group.me)
    assert NEVER_S - PATIENCE_S < change.member.seconds_left <= NEVER_S
    assert group.view_number == 5
    group.report_drained()
    assert launcher.hear() == {"say": "drained"}
    launcher.connection.shutdown(socket.SHUT_RDWR)
    assert list(changes) == []


def test_without_a_daemon_the_process_alone_hears_that_it_leaves(launcher):
    group = membership.join()
    launcher.accept()
    launcher.say(view=1, members=[["n1", "h", "", None], ["n2", "h", "n2:7", None]])
    assert group.wait(PATIENCE_S)
    launcher.say(leave=5.0)
    changes = group.changes()
    while (change := next(changes)).kind != "leaving":
        pass
    assert change.member == group.me
    assert [c.leaving for c in group.members] == [True, False]
    launcher.connection.close()


def test_asyncio(launcher):
    async def work():
        group = membership.join()
        await asyncio.to_thread(launcher.accept)
        launcher.say(view=1, members=[["n1", "h", "", None]])
        heard = []
        async for change in group.watch():
            heard.append((change.kind, change.member.node))
            if heard[-1] == ("joined", "n1") and len(heard) == 1:
                launcher.say(view=2, members=[["n1", "h", "", None], ["n2", "h", "x", None]])
            if heard[-1] == ("joined", "n2"):
                launcher.connection.shutdown(socket.SHUT_RDWR)
        return heard

    assert asyncio.run(work()) == [("joined", "n1"), ("joined", "n2")]


def test_iterators_begun_after_the_end_yield_the_members_and_end(launcher):
    group = membership.join()
    launcher.accept()
    launcher.say(view=1, members=[["n1", "h", "", None]])
    running = group.changes()
    assert next(running).kind == "joined"
    launcher.connection.shutdown(socket.SHUT_RDWR)
    assert list(running) == []
    assert [change.kind for change in group.changes()] == ["joined"]

    async def watched():
        return [change.kind async for change in group.watch()]

    assert asyncio.run(watched()) == ["joined"]


def test_an_iterator_begun_after_close_ends(monkeypatch):
    monkeypatch.delenv("MALLETRAIN_SERVICE", raising=False)
    group = membership.join("x:1")
    group.close()
    assert [change.kind for change in group.changes()] == ["joined"]


def test_a_message_that_cannot_be_read_ends_the_iterators(launcher, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    group = membership.join()
    launcher.accept()
    changes = group.changes()
    assert next(changes).kind == "joined"
    launcher.connection.sendall(b"no JSON\n")
    assert list(changes) == []
    assert not group.wait()
    until(lambda: errors, "the thread that reads reports the error")
    assert errors == [json.JSONDecodeError]


def test_an_abandoned_iterator_is_no_listener_any_more(launcher):
    group = membership.join()
    launcher.accept()
    first, second = group.changes(), group.changes()
    assert next(first).kind == next(second).kind == "joined"
    assert len(vars(group)["_listeners"]) == 2
    first.close()
    del second
    assert vars(group)["_listeners"] == []

    async def one():
        async for change in group.watch():
            return change.kind, len(vars(group)["_listeners"])

    assert asyncio.run(one()) == ("joined", 1)
    assert vars(group)["_listeners"] == []
    launcher.connection.close()


def test_messages_of_several_threads_do_not_mix(launcher):
    """Each is larger than the socket's buffer, so that it is sent in several parts."""
    group = membership.join()
    launcher.accept()
    launcher.hear()
    values = {10**4000 + k: 1.0 for k in range(64)}
    sent = {"say": "worth", "nodes": {str(size): value for size, value in values.items()}}

    def send():
        for _ in range(5):
            group.set_values(values)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert launcher.hear() == sent
    for thread in threads:
        thread.join()
    launcher.connection.close()


def test_a_process_joins_before_it_is_ready(launcher):
    group = membership.join("n1:7", ready=False)
    launcher.accept()
    assert launcher.hear() == {"say": "join", "address": "n1:7", "loading": True}
    changes = group.changes()
    assert next(changes).member.loading
    launcher.say(view=1, members=[["n1", "h", "n1:7", None, None, True]])
    assert group.wait(PATIENCE_S)
    assert group.me.loading
    group.report_ready()
    assert launcher.hear() == {"say": "ready"}
    launcher.say(view=2, members=[["n1", "h", "n1:7", None, None, False]])
    change = next(changes)
    assert (change.kind, change.member.loading) == ("ready", False)
    launcher.connection.close()


def test_a_thread_waits_for_the_next_change(launcher):
    group = membership.join("n1:7")
    launcher.accept()
    launcher.hear()
    launcher.say(view=4, members=[["n1", "h", "n1:7", None]])
    assert group.wait_for_change(0) == 4
    assert group.wait_for_change(3) == 4, "there is one already"
    assert group.wait_for_change(4, timeout_s=0.0) == 4
    for say, number in (
        ({"view": 5, "members": [["n1", "h", "n1:7", None], ["n2", "h", "n2:7", None]]}, 5),
        ({"view": 6, "members": [["n1", "h", "n1:7", 9.0]]}, 6),
    ):
        numbers = []
        waiting = threading.Thread(
            target=lambda out, since: out.append(group.wait_for_change(since)),
            args=(numbers, number - 1),
        )
        waiting.start()
        launcher.say(**say)
        waiting.join(PATIENCE_S)
        assert numbers == [number]
    numbers = []
    waiting = threading.Thread(target=lambda: numbers.append(group.wait_for_change(6)))
    waiting.start()
    until(lambda: waiting.is_alive(), "it waits")
    group.close()
    waiting.join(PATIENCE_S)
    assert numbers == [6], "the end wakes it too"
    launcher.connection.close()


def test_outside_malletrain_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("MALLETRAIN_SERVICE", raising=False)
    monkeypatch.delenv("MALLETRAIN_JOB_KEY", raising=False)
    group = membership.join("x:1")
    assert group.members == (group.me,)
    assert membership.job_key() == b""
    group.report_drained()
    changes = group.changes()
    assert next(changes).kind == "joined"
    loading = membership.join("x:2", ready=False)
    assert loading.me.loading
    loading.report_ready()
    assert not loading.me.loading
    group.close()
    assert list(changes) == []


def test_what_cannot_be_is_said(monkeypatch, tmp_path):
    with pytest.raises(MembershipError, match="1001 characters"):
        membership.join("x" * 1001)
    monkeypatch.setenv("MALLETRAIN_SERVICE", str(tmp_path / "nobody"))
    with pytest.raises(MembershipError, match="does not answer"):
        membership.join()


def test_it_needs_the_standard_library_only():
    program = (
        "import sys; before = set(sys.modules); import malletrain.membership; "
        "print({m.partition('.')[0] for m in set(sys.modules) - before} - "
        "set(sys.stdlib_module_names))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "{'malletrain'}"


def test_a_process_hears_how_long_nodes_last_and_says_what_they_are_worth(launcher):
    group = membership.join("n1:7")
    launcher.accept()
    launcher.hear()
    view = [["n1", "h", "n1:7", None, 600.0], ["n2", "h", "n2:7", None, None]]
    launcher.say(view=1, members=[*view, ["n3", "h", "n3:7", None]])  # an older launcher's
    assert group.wait(PATIENCE_S)
    assert [m.expected_remaining_s for m in group.members] == [600.0, None, None]
    group.set_values({4: 10.0, 8: 12.5})
    assert launcher.hear() == {"say": "worth", "nodes": {"4": 10.0, "8": 12.5}}
    for wrong in ({}, {0: 1.0}, {1: -1.0}, {1: float("nan")}, dict.fromkeys(range(1, 66), 1.0)):
        with pytest.raises(ValueError, match="1 to 64 sizes"):
            group.set_values(wrong)
    group.set_values({1: 0.0}, expires_s=60.0)
    assert launcher.hear() == {"say": "worth", "nodes": {"1": 0.0}, "expires_s": 60.0}
    for seconds in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="a time above 0"):
            group.set_values({1: 0.0}, expires_s=seconds)
    launcher.connection.close()
