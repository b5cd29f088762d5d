import json
import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from malletrain import statedir
from malletrain.statedir import (
    DaemonInfo,
    StateDirError,
    default_state_dir,
    lock_state_dir,
    read_daemon_info,
    remove_daemon_info,
    write_atomically,
    write_daemon_info,
)

HOLDER = """
import pathlib, sys
from malletrain.statedir import lock_state_dir
lock = lock_state_dir(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
FILE = statedir.INFO
INFO = DaemonInfo("tcp://127.0.0.1:4711", "k" * 40, os.getpid(), socket.gethostname(), "0.1.0", 1.5)


def hold(path: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_daemon_is_refused_by_name_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = hold(tmp_path / "state")
    try:
        with pytest.raises(StateDirError, match=rf"Another daemon \(pid {holder.pid} on .*\) uses the state directory"):
            lock_state_dir(tmp_path / "state")
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with lock_state_dir(tmp_path / "state"):
        assert (tmp_path / "state" / "daemon.lock").read_text().split()[0] == str(os.getpid())


def test_a_lock_is_held_within_one_process_too_and_can_be_released(tmp_path):
    first = lock_state_dir(tmp_path)
    with pytest.raises(StateDirError, match=f"pid {os.getpid()}"):
        lock_state_dir(tmp_path)
    first.release()
    first.release()
    lock_state_dir(tmp_path).release()


def test_processes_started_later_do_not_hold_the_lock(tmp_path):
    lock = lock_state_dir(tmp_path)
    code = "print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    try:
        child.stdout.readline()
        lock.release()
        lock_state_dir(tmp_path).release()
    finally:
        child.kill()
        child.communicate()


def test_the_directory_is_private(tmp_path):
    lock_state_dir(tmp_path / "a" / "state").release()
    assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o700


def test_directories_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match="cannot be used: File exists"):
        lock_state_dir(tmp_path / "file")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StateDirError, match="belongs to another user"):
        lock_state_dir(tmp_path)


def test_where_the_default_is(monkeypatch):
    monkeypatch.delenv("MALLETRAIN_STATE_DIR", raising=False)
    assert default_state_dir() == Path.home() / ".local/state/malletrain"
    monkeypatch.setenv("MALLETRAIN_STATE_DIR", "~/x")
    assert default_state_dir() == Path.home() / "x"


def test_clients_find_the_daemon(tmp_path):
    write_daemon_info(tmp_path / FILE, INFO)
    write_daemon_info(tmp_path / FILE, replace(INFO, endpoint="tcp://127.0.0.1:4712"))
    assert read_daemon_info(tmp_path / FILE).endpoint == "tcp://127.0.0.1:4712"
    assert [file.name for file in tmp_path.iterdir()] == ["daemon.json"]
    remove_daemon_info(tmp_path / FILE)
    remove_daemon_info(tmp_path / FILE)
    with pytest.raises(StateDirError, match=r"No daemon is running in .*malletrain daemon --config FILE"):
        read_daemon_info(tmp_path / FILE)


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_daemon_that_was_killed_is_told_from_one_that_runs(tmp_path):
    write_daemon_info(tmp_path / FILE, replace(INFO, pid=gone_pid()))
    with pytest.raises(StateDirError, match=r"that ran in .* is gone"):
        read_daemon_info(tmp_path / FILE)
    write_daemon_info(tmp_path / FILE, replace(INFO, pid=gone_pid(), host="another-host"))
    assert read_daemon_info(tmp_path / FILE).host == "another-host"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"endpoint": 1}', json.dumps({"x": 1})])
def test_a_damaged_file_is_told(tmp_path, content):
    (tmp_path / "daemon.json").write_text(content)
    with pytest.raises(StateDirError, match="damaged; restart the daemon"):
        read_daemon_info(tmp_path / FILE)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x", "old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statedir.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
