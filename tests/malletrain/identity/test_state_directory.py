import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.identity import state_directory
from malletrain.identity.keys import new_pair, write_key
from malletrain.identity.state_directory import (
    DaemonInfo,
    StateDirError,
    announced,
    default_state_dir,
    lock_state_dir,
    read_daemon_info,
    remove_daemon_info,
    start_hint,
    write_atomically,
    write_daemon_info,
)
from malletrain.store.database import StoreError
from malletrain.store.ownership import own
from tests.disks import fill, small_disk

HOLDER = """
import pathlib, sys
from malletrain.identity.state_directory import lock_state_dir
lock = lock_state_dir(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
FILE = state_directory.INFO
INFO = DaemonInfo("tcp://127.0.0.1:4711", "k" * 40, os.getpid(), socket.gethostname(), "0.1.0", 1.5)


def hold(path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_daemon_is_refused_by_name_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = hold(tmp_path / "state")
    try:
        with pytest.raises(
            StateDirError,
            match=rf"Another daemon \(pid {holder.pid} on .*\) uses the state directory",
        ):
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
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
    )
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


def test_a_full_disk_is_told_as_that(tmp_path):
    with small_disk(tmp_path):
        fill(tmp_path)
        with pytest.raises(StateDirError, match=r"No space left on device. Make room there\.$"):
            lock_state_dir(tmp_path / "state")
        for writes in (
            lambda: write_daemon_info(tmp_path / FILE, INFO),
            lambda: write_key(tmp_path / "key", new_pair()),
        ):
            with pytest.raises(StateDirError, match=r"on device\. Make room on its file system\.$"):
                writes()


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
    with pytest.raises(
        StateDirError, match=r"No daemon is running in .*malletrain daemon --config FILE"
    ):
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
    with pytest.raises(StateDirError, match=r"damaged \(.*\); restart the daemon"):
        read_daemon_info(tmp_path / FILE)
    with pytest.raises(StateDirError, match=r"damaged \(.*\); ask them\."):
        read_daemon_info(tmp_path / FILE, "Ask them.", site=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("endpoint", v)
            for v in (
                1,
                None,
                "",
                "tcp://",
                "tcp://h",
                "tcp://h:x",
                "ipc:///tmp/x",
                "tcp://h:1 ",
                "tcp://e0:0;h:1",
                ["tcp://h:1"],
            )
        ),
        *(
            ("server_key", v)
            for v in (1, None, "", "k" * 39, "k" * 41, "k" * 39 + "\n", "é" * 40, "k" * 39 + '"')
        ),
        *(("pid", v) for v in ("1", None, 0, -1, 1.0, True, 2**31, 10**30)),
        *(("host", v) for v in (1, None)),
        ("version", {}),
        *(("started", v) for v in ("now", None, True)),
    ],
)
def test_fields_that_cannot_be_right_are_told(tmp_path, field, value):
    (tmp_path / FILE).write_text(json.dumps({**asdict(INFO), field: value}))
    for site in (False, True):
        with pytest.raises(StateDirError, match=f"damaged .its {field} is not valid"):
            read_daemon_info(tmp_path / FILE, site=site)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    )
)
def test_whatever_stands_in_the_file_the_answer_is_a_sentence(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    for content in (
        value,
        {**asdict(INFO), "endpoint": value},
        {**asdict(INFO), "server_key": value},
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(StateDirError, match="damaged"):
            read_daemon_info(path)


def test_a_file_nested_too_deeply_is_told(tmp_path):
    (tmp_path / FILE).write_text("[" * 100_000)
    with pytest.raises(StateDirError, match="damaged"):
        read_daemon_info(tmp_path / FILE)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x", "old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_directory.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The site's file, this user's state directory, and nothing in the environment that names
    another daemon.
    """
    for variable in ("MALLETRAIN_STATE_DIR", "MALLETRAIN_DAEMON"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(state_directory, "SITE_INFO", tmp_path / "etc.json")
    own = tmp_path / ".local/state/malletrain"
    own.mkdir(parents=True)
    return tmp_path / "etc.json", own / FILE


def test_the_daemon_of_the_site_is_used_unless_there_may_be_one_of_ones_own(
    site, tmp_path, monkeypatch
):
    everybodys, own = site
    assert announced() is None
    assert start_hint() == state_directory.START_HINT
    write_daemon_info(everybodys, INFO)
    assert announced() == everybodys
    for theirs in (INFO, replace(INFO, pid=gone_pid(), host="another-host")):
        write_daemon_info(own, theirs)
        assert announced() is None, "it may run"
    own.write_text("damaged")
    assert announced() is None, "it may run"
    assert (
        "Start one with: malletrain daemon --config FILE - or use the site's daemon: export "
        f"MALLETRAIN_DAEMON={everybodys}" == start_hint()
    )
    write_daemon_info(own, replace(INFO, pid=gone_pid()))
    assert announced() == everybodys, "it was killed"
    remove_daemon_info(own)
    monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(tmp_path))
    assert announced() is None
    monkeypatch.setenv("MALLETRAIN_DAEMON", "~/other.json")
    assert announced() == tmp_path / "other.json"


def test_a_file_of_the_site_is_not_judged_by_the_process_number(site):
    """It may be a copy, older than the daemon's last start, and be read on the daemon's own
    host.
    """
    everybodys, _ = site
    write_daemon_info(everybodys, stale := replace(INFO, pid=gone_pid()))
    assert read_daemon_info(everybodys, site=True) == stale
    everybodys.unlink()
    with pytest.raises(StateDirError, match=r"of the site's daemon is not there\. Ask them\."):
        read_daemon_info(everybodys, "Ask them.", site=True)


HOMELESS = """
import os, pwd, sys
from pathlib import Path
from malletrain import client
from malletrain.identity import keys, state_directory
os.setuid(54321)
for name in ("HOME", "XDG_CONFIG_HOME", "MALLETRAIN_STATE_DIR", "MALLETRAIN_DAEMON"):
    os.environ.pop(name, None)
state_directory.SITE_INFO = Path(sys.argv[1])
for call in (state_directory.default_state_dir, keys.own_key, client.Connection.of):
    try:
        call()
    except (state_directory.StateDirError, client.Unreachable) as error:
        print(error)
os.environ["MALLETRAIN_DAEMON"] = "~/x"
try:
    client.Connection.of()
except client.Unreachable as error:
    print(error)
"""


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be somebody who has no entry in passwd"
)
@pytest.mark.parametrize("there", [False, True])
def test_who_has_no_home_directory_is_told_what_to_set(there):
    root = Path(state_directory.__file__).parents[2]
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is closed to others
    try:
        place.chmod(0o755)
        if there:
            write_daemon_info(place / FILE, INFO)
        done = subprocess.run(
            [sys.executable, "-c", HOMELESS, str(place / FILE)],
            cwd=root,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(place)
    lines = done.stdout.splitlines()
    assert [
        bool(
            re.search(
                r"needs a home directory, .*\(id 54321\); set HOME, or "
                r"(MALLETRAIN_[A-Z_]+|XDG_CONFIG_HOME) to",
                s,
            )
        )
        for s in lines
    ] == [True] * 4, done
    assert ("XDG_CONFIG_HOME" in lines[2]) is there, (
        "with a key of their own to the site's daemon, else to theirs"
    )


def test_without_locks_of_files_no_daemon_starts_and_a_sentence_says_why(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(state_directory.fcntl, "flock", refuse)
    sentence = r" cannot be locked: Function not implemented\. Put it on .* -o flock\."
    with pytest.raises(StateDirError, match=f"The state directory {tmp_path}{sentence}"):
        lock_state_dir(tmp_path)
    with pytest.raises(StoreError, match=f"The database {tmp_path}/m.db{sentence}"):
        own(f"sqlite:///{tmp_path}/m.db", "the first", pytest.fail)
