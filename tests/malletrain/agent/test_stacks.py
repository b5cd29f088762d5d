"""Workers asked where they stand: real processes, stuck in several ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from malletrain.agent.stacks import StackReader, handles_signal, stack_file_holders, state_of
from malletrain.protocol import env
from malletrain.protocol.messages import ShowStacks
from tests.waiting import PATIENCE_S, until

WORKER = """
import os, signal, sys, threading, time
from malletrain.protocol.job_files import STACKS_SIGNAL
from malletrain.training.report import install_stack_signal, remove_stack_signal
if sys.argv[1] == "forked":  # by one that had offered, and withdrew
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
install_stack_signal()
def deep_in_the_step():
    print("here", flush=True)
    if sys.argv[1] in ("call", "forked"):
        os.open(sys.argv[2], os.O_RDONLY)
    if sys.argv[1] == "lock":
        lock = threading.Lock()
        with lock:
            lock.acquire()
if sys.argv[1] == "child":
    receiver, sender = os.pipe()
    if os.fork() == 0:
        remove_stack_signal()
        os.write(sender, b"x")
        time.sleep(3600)
    os.close(sender)
    assert os.read(receiver, 1), "the child has ended"
deep_in_the_step()
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def worker(how):
        fifo = tmp_path / f"fifo{len(started)}"
        os.mkfifo(fifo)
        environment = {**os.environ, env.FLAGS: str(tmp_path / "flags")}
        argv = [sys.executable, "-c", WORKER, how, str(fifo)]
        process = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout.readline() == b"here\n"
        return process

    yield worker
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # it had ended, and has been waited for
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def ask(directory, ranks):
    answers = []

    async def asking():
        complete = asyncio.Event()

        def send(message):
            answers.append(message)
            if len(answers) == len(ranks):
                complete.set()
            return True

        reader = StackReader(send)
        reader.read(ShowStacks("j1", 3), directory, ranks)
        await complete.wait()
        reader.close()

    asyncio.run(asyncio.wait_for(asking(), PATIENCE_S))
    return {message.rank: message for message in answers}


def test_workers_say_where_they_stand_whatever_holds_them(start, tmp_path, monkeypatch):
    monkeypatch.setattr("malletrain.agent.stacks.RESPONSE_TIMEOUT_S", PATIENCE_S)
    ranks = {start(how).pid: rank for rank, how in enumerate(("call", "lock"))}
    for _ in range(2):  # the second answer is not the first one again
        answers = ask(tmp_path, ranks)
        for rank in (0, 1):
            assert answers[rank].text.count("in deep_in_the_step") == 1
            assert (answers[rank].job, answers[rank].generation) == ("j1", 3)


def test_a_worker_that_is_stopped_is_told_by_what_the_kernel_says(start, tmp_path):
    worker = start("call")
    worker.send_signal(signal.SIGSTOP)
    until(lambda: state_of(worker.pid).startswith("stopped"), "it is stopped")
    [message] = ask(tmp_path, {worker.pid: 0}).values()
    assert message.text == ""
    assert message.state.startswith("stopped by a signal")


def test_only_who_offered_is_asked(start, tmp_path):
    worker = start("call")
    (tmp_path / f"stacks.{os.getpid()}").touch()  # no offer: the signal would end this process
    assert set(stack_file_holders(tmp_path).values()) == {worker.pid}
    assert handles_signal(worker.pid)
    assert not handles_signal(os.getpid())
    assert not handles_signal(2**22 + 1)


def test_a_child_of_a_worker_is_no_worker(start, tmp_path):
    worker = start("child")
    assert worker.wait() == 0
    assert not stack_file_holders(tmp_path), "the child has closed the file"
    os.killpg(worker.pid, 0)  # and goes on


def test_a_worker_whose_parent_was_one_offers_too(start, tmp_path):
    worker = start("forked")
    until(
        lambda: stack_file_holders(tmp_path) or worker.poll() is not None, "it has offered or ended"
    )
    assert handles_signal(worker.pid)


def test_what_is_no_file_of_stacks_holds_up_nobody(start, tmp_path):
    worker = start("call")
    os.mkfifo(tmp_path / "stacks.9")
    reader = os.open(tmp_path / "stacks.9", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "stacks.\u00b2").touch()
    (tmp_path / "stacks.8").symlink_to(tmp_path / "flags")
    try:
        assert set(stack_file_holders(tmp_path).values()) == {worker.pid}
    finally:
        os.close(reader)
