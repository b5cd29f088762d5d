"""A worker forked from the fork server."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys

from malletrain.launch.fork_server import _EndMark


def test_modules_a_job_asks_for_are_there_and_others_are_told():
    code = (
        "from malletrain.launch.fork_server import _preload_more; import sys; "
        "_preload_more('colorsys, no_such_module,,'); print('colorsys' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True\n"
    assert "MALLETRAIN_PRELOAD names 'no_such_module', which cannot be imported" in result.stderr


def test_scripts_without_a_seed_draw_different_numbers(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, numpy, torch\n"
        "for number in (random.random(), numpy.random.rand(), torch.rand(()).item()):\n"
        "    print(number, flush=True)\n"
    )
    code = (
        "import os, sys, numpy, torch\n"
        "from malletrain.launch.fork_server import _run_script\n"
        "for _ in range(2):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        os._exit(_run_script(sys.argv[1:]))\n"
        "    os.waitpid(pid, 0)\n"
    )
    command = [sys.executable, "-c", code, str(script)]
    result = subprocess.run(command, capture_output=True, text=True)
    numbers = result.stdout.split()
    assert len(numbers) == len(set(numbers)) == 6, result


def test_a_working_directory_that_is_gone_is_told(tmp_path):
    """It was deleted since the job began: the worker had ended without a word."""
    output, home = tmp_path / "rank0", tmp_path / "gone"
    request = {"argv": ["train.py"], "env": {}, "cwd": str(home)}
    code = (
        "import json, os, socket, sys\n"
        "from malletrain.launch.fork_server import ForkServer\n"
        "listener, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)\n"
        "worker = ForkServer(listener, 0)._fork(json.loads(sys.argv[1]), file, client)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(request), str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "1\n", result
    assert output.read_text() == (
        f"malletrain: The working directory {home} cannot be entered: No such file or directory.\n"
    )


def test_a_crash_after_the_end_of_a_script_does_not_count(capfd):
    for ends, killed_by, counts in (
        (0, signal.SIGABRT, 0),
        (3, signal.SIGSEGV, 3),
        (0, signal.SIGKILL, -signal.SIGKILL),
        (None, signal.SIGABRT, -signal.SIGABRT),
    ):
        mark = _EndMark()
        if (pid := os.fork()) == 0:
            faulthandler.disable()  # pytest's: a crash is meant here
            if ends is not None:
                mark.set(ends)
            os.kill(os.getpid(), killed_by)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert (status, mark.code(status)) == (-killed_by, counts)
    output = capfd.readouterr().out
    assert "killed by signal 6 after its script had ended with code 0" in output
    assert output.count("\n") == 2
