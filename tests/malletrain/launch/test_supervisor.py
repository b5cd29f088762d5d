"""No process outlives the one it is tied to, however that dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.launch import supervisor
from tests.malletrain.agent.node_side import alive, eventually, processes_with
from tests.waiting import NEVER_S, PATIENCE_S

SUPERVISOR = [sys.executable, "-I", "-S", supervisor.__file__]
SLEEP = "import time; time.sleep(600)"
# A script that starts a helper by double fork: no parent, no session of ours, deaf to SIGTERM.
FAMILY = """
import os, signal, sys, time
from tests.waiting import PATIENCE_S
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""


@pytest.fixture
def mark(tmp_path):
    """A mark in the environment of everything a test starts; a process that remains at its end is a
    failure of the test.
    """
    mark = f"SUPERVISOR_TEST={tmp_path}"
    yield mark
    for pid in processes_with(mark):
        os.kill(pid, signal.SIGKILL)


def start(mark, *command, **options):
    name, _, value = mark.partition("=")
    return subprocess.Popen(command, env={**os.environ, name: value}, **options)


def middle_man(mark, tmp_path, *options_and_command, supervisor=SUPERVISOR):
    """A process that starts a tied one, as an agent does; return it and the tied pid."""
    note = tmp_path / "child"
    code = (
        "import os, subprocess, sys, time\n"
        "argv = [a.replace('PARENT', str(os.getpid())) for a in sys.argv[2:]]\n"
        "child = subprocess.Popen(argv)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    parent = start(
        mark,
        sys.executable,
        "-c",
        code,
        str(note),
        *supervisor,
        "--parent",
        "PARENT",
        *options_and_command,
    )
    eventually(lambda: note.exists() and note.read_text(), "the tied process starts")
    return parent, int(note.read_text())


def test_a_tied_process_dies_with_its_parent(mark, tmp_path):
    parent, child = middle_man(mark, tmp_path, "--", sys.executable, "-c", SLEEP)
    eventually(
        lambda: SLEEP in Path(f"/proc/{child}/cmdline").read_text(),
        "the command runs in place of the supervisor",
    )
    parent.kill()
    parent.wait()
    eventually(lambda: not alive(child), "the tied process is gone")


def test_nothing_starts_when_the_parent_is_gone_already(tmp_path):
    result = subprocess.run(
        [*SUPERVISOR, "--parent", "1", "--", "touch", str(tmp_path / "started")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "is gone; nothing is started" in result.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("keep", [(), ("--keep",)])
def test_a_command_ignores_no_signal(keep):
    """A process that ignores SIGPIPE writes errors where its pipeline ends early."""
    options = [*keep, "--parent", str(os.getpid()), "--"]
    command = ["grep", "SigIgn", "/proc/self/status"]
    output = subprocess.run(
        [*SUPERVISOR, *options, *command], capture_output=True, text=True, check=True
    ).stdout
    ignored = int(output.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


@pytest.mark.parametrize("leads", [False, True])
def test_a_command_runs_at_a_lower_priority_and_its_session_too(leads):
    group = Path("/proc/self/autogroup")
    code = f"import os; print(os.nice(0)); print(open({str(group)!r}).read())"
    if not group.exists():
        code = "import os; print(os.nice(0)); print()"
    output = subprocess.run(
        [*SUPERVISOR, "--keep", "--nice", "3", "--", sys.executable, "-c", code],
        start_new_session=leads,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    niceness, autogroup = output.split("\n", 1)
    assert int(niceness) == min(19, os.nice(0) + 3)
    if not leads:  # the session of this process, which may be in no group (an empty file)
        assert autogroup.strip() == (group.read_text().strip() if group.exists() else "")
    elif "nice" in autogroup:
        assert int(autogroup.split()[-1]) == int(niceness)


def test_a_command_that_cannot_be_run_is_named(tmp_path):
    result = subprocess.run(
        [*SUPERVISOR, "--", "/no/such/program"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (
        127,
        "The command cannot be run: /no/such/program: No such file or directory.\n",
    )


@pytest.mark.parametrize("argv", [[], ["--parent", "1"], ["--wrong", "x", "--", "true"]])
def test_wrong_options_are_refused(argv):
    assert subprocess.run([*SUPERVISOR, *argv], capture_output=True, check=False).returncode == 2


def test_output_is_appended_to_a_file_per_rank_and_round(tmp_path):
    environment = {**os.environ, "MALLETRAIN_GENERATION": "7", "RANK": "3"}
    (tmp_path / supervisor.rank_log_name(7, 3)).write_text("before\n")
    command = [
        *SUPERVISOR,
        "--per-rank-log",
        str(tmp_path),
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2",
    ]
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "g7-rank3.log").read_text() == "before\nout\nerr\n"


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_keeper_ends_as_its_command_did(code, expected):
    assert (
        subprocess.run(
            [*SUPERVISOR, "--keep", "--", sys.executable, "-c", code], check=False
        ).returncode
        == expected
    )


def test_a_keeper_passes_sigterm_on(mark):
    watcher = start(mark, *SUPERVISOR, "--keep", "--", sys.executable, "-c", SLEEP)
    eventually(lambda: len(processes_with(mark)) == 2, "supervisor and command run")
    watcher.terminate()
    assert watcher.wait(PATIENCE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("victim", ["command", "parent"])
def test_a_keeper_leaves_no_double_forked_process_behind(mark, tmp_path, victim):
    note = tmp_path / "helper"
    parent, watcher = middle_man(
        mark, tmp_path, "--keep", "--", sys.executable, "-c", FAMILY, str(note)
    )
    eventually(lambda: note.exists() and note.read_text(), "the helper runs")
    helper = int(note.read_text())
    assert helper in supervisor.descendants(watcher)
    if victim == "command":
        [command] = [
            pid
            for pid, (above, _) in supervisor.process_table().items()
            if above == watcher and pid != helper
        ]
        os.kill(command, signal.SIGKILL)
        eventually(lambda: processes_with(mark) == [parent.pid], "only the parent is left")
    parent.kill()
    parent.wait()
    eventually(lambda: not processes_with(mark), "nobody is left")


def test_descendants_pass_through_zombies():
    table = {1: (0, "S"), 5: (1, "S"), 6: (5, "Z"), 7: (6, "S"), 8: (1, "S")}
    assert sorted(supervisor.descendants(5, table)) == [7]
    assert sorted(supervisor.descendants(1, table)) == [5, 7, 8]


def test_the_supervisor_is_quick_to_start():
    """Not a limit in time: it must not import what is not needed (each worker of each round pays
    for it).
    """
    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", supervisor.__file__, "--", "true"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    modules = {line.rpartition("|")[2].strip() for line in shown.splitlines()}
    assert not modules & {
        "subprocess",
        "argparse",
        "re",
        "logging",
        "asyncio",
        "malletrain",
        "zmq",
        "pathlib",
        "typing",
    }


def test_a_keeper_whose_parent_is_suspended_leaves_the_node(mark, tmp_path):
    helper = tmp_path / "helper"
    parent, watcher = middle_man(
        mark, tmp_path, "--keep", "--", sys.executable, "-c", FAMILY, str(helper)
    )
    eventually(lambda: helper.exists() and helper.read_text(), "the helper runs")
    os.kill(parent.pid, signal.SIGSTOP)
    try:
        eventually(
            lambda: not alive(int(helper.read_text())),
            "the family is gone while the parent stands still",
        )
        assert supervisor.is_stopped(parent.pid)
    finally:
        os.kill(parent.pid, signal.SIGCONT)
    parent.kill()
    parent.wait()
    eventually(lambda: not alive(watcher), "the supervisor has ended")


def with_long_patience(tmp_path):
    """The supervisor, for which every stop of this test is short."""
    room = tmp_path / "malletrain" / "launch"
    room.mkdir(parents=True)
    source = Path(supervisor.__file__)
    (room.parent / "protocol").symlink_to(source.parents[1] / "protocol")
    limit = f"SUSPENDED_S = {supervisor.SUSPENDED_S}\n"
    assert limit in source.read_text()
    copy = room / "supervisor.py"
    copy.write_text(source.read_text().replace(limit, f"SUSPENDED_S = {NEVER_S}\n"))
    return [*SUPERVISOR[:-1], str(copy)]


def test_a_short_stop_is_no_suspension(mark, tmp_path):
    helper = tmp_path / "helper"
    parent, _ = middle_man(
        *(mark, tmp_path, "--keep", "--", sys.executable, "-c", FAMILY, str(helper)),
        supervisor=with_long_patience(tmp_path),
    )
    eventually(lambda: helper.exists() and helper.read_text(), "the helper runs")
    os.kill(parent.pid, signal.SIGSTOP)
    eventually(lambda: supervisor.is_stopped(parent.pid), "it stands still")
    os.kill(parent.pid, signal.SIGCONT)
    eventually(lambda: not supervisor.is_stopped(parent.pid), "it goes on")
    assert alive(int(helper.read_text()))
    parent.kill()
    parent.wait()
    eventually(lambda: not alive(int(helper.read_text())), "all are gone")


@pytest.mark.parametrize("ends", ["command", "parent"])
def test_state_in_memory_goes_with_the_agent_and_stays_after_a_launcher(mark, tmp_path, ends):
    state = tmp_path / "state"
    (state / "label").mkdir(parents=True)
    (state / "label" / "x.pt").write_bytes(b"weights")
    code = "pass" if ends == "command" else SLEEP
    parent = start(mark, sys.executable, "-c", WITH_PID, *SUPERVISOR, str(state), code)
    if ends == "parent":
        eventually(lambda: len(processes_with(mark)) == 3, "all three run")
        parent.kill()
        eventually(lambda: not state.exists(), "it is gone")
    else:
        assert parent.wait(PATIENCE_S) == 0
        assert (state / "label" / "x.pt").exists()
    parent.wait()


WITH_PID = """
import os, subprocess, sys
*supervisor, state, code = sys.argv[1:]
options = ["--keep", "--parent", str(os.getpid()), "--remove", state]
sys.exit(subprocess.call([*supervisor, *options, "--", sys.executable, "-c", code]))
"""


WITHOUT_RIGHTS = """
import os, signal, subprocess, sys
from malletrain.launch import supervisor

kill = os.kill
others = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]

def kill_unless_it_is_anothers(pid, signum):
    if pid == others[0].pid:
        raise PermissionError(1, "Operation not permitted")
    kill(pid, signum)

os.kill = kill_unless_it_is_anothers
# Returned is what was there at the last look.
assert sorted(supervisor.kill_descendants(0.0)) == sorted(p.pid for p in others)
assert others[1].wait() == -signal.SIGKILL
kill(others[0].pid, signal.SIGKILL)
"""


def test_a_process_that_is_another_users_does_not_keep_the_others_alive():
    """As a child of sudo is."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_RIGHTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
