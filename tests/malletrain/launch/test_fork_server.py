"""A worker forked from the fork server."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import malletrain
from malletrain.launch.fork_server import _EndMark
from malletrain.protocol import env
from malletrain.protocol.worker_channel import StartupMark, decode_datagram

_RUN_IN_FORK = """
import os, sys
from malletrain.launch import fork_server
fork_server.PRELOADED = ("malletrain.training.snapshot",)  # without torch
fork_server.preload()
exec(sys.argv[1])
if (pid := os.fork()) == 0:
    fork_server.script.leave(fork_server._run_script(sys.argv[2:]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
_IMPORT = """
import sys
early = "malletrain.training.report" in sys.modules
import malletrain
print(malletrain.__file__, early, "malletrain.training.report" in sys.modules, flush=True)
from malletrain.training.report import tell
assert malletrain.training.report.tell is tell and malletrain.Snapshot
assert malletrain.__spec__.loader is malletrain.__loader__
"""


def test_modules_a_job_asks_for_are_there_and_others_are_told():
    code = (
        "from malletrain.launch import fork_server; import sys; "
        "fork_server.PRELOADED = (); fork_server.preload(); print('colorsys' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, env.PRELOAD: "colorsys, no_such_module,,"},
    )
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


def run_in_fork(folder, script, after_preload="", path=()):
    """Run a script in a fork of a fork server, with its exit handlers.

    Args:
        folder: directory for the script.
        script: the source of the script.
        after_preload: Python code that the fork server runs before it forks.
        path: directories at the beginning of the fork server's import path.
    """
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    command = [sys.executable, "-c", _RUN_IN_FORK, after_preload, str(folder / "train.py")]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder.parent
    )


def output_of_fork(folder, script, after_preload="", path=()):
    """Return the output of a script that succeeds, see :func:`run_in_fork`."""
    result = run_in_fork(folder, script, after_preload, path)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def test_a_script_takes_over_the_modules_of_malletrain_when_it_imports_it(tmp_path):
    assert output_of_fork(tmp_path, _IMPORT) == f"{malletrain.__file__} False True\n"


_LOOK = """
import importlib.util, sys
for _ in range(2):
    spec = importlib.util.find_spec("malletrain")
    assert "MalleTrain" in spec.loader.get_source("malletrain")
    assert not any(name.startswith("malletrain") for name in sys.modules)
"""


def test_a_script_may_look_for_malletrain_before_it_imports_it(tmp_path):
    """The usual guard of an optional library. What was found may also be loaded later."""
    output = f"{malletrain.__file__} False True\n"
    assert output_of_fork(tmp_path, _LOOK + _IMPORT) == output
    load = (
        "other = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(other)\n"
        "assert other is not malletrain and other.Snapshot is malletrain.Snapshot\n"
    )
    assert output_of_fork(tmp_path, _LOOK + _IMPORT + load) == output


def test_a_script_keeps_a_module_of_malletrain_that_it_has_made(tmp_path):
    script = (
        "import sys, types\n"
        "stub = sys.modules['malletrain.training.report'] = types.ModuleType('stub')\n"
        "stub.report = 'stub'\n"
        "import malletrain\n"
        "print(malletrain.report, flush=True)\n"
    )
    assert output_of_fork(tmp_path, script) == "stub\n"


def test_a_script_that_has_ended_writes_no_snapshot(tmp_path):
    """Its exit handler frees an iterator. A loop that is left does the work of its last step."""
    path = tmp_path / "snapshot.pt"
    script = (
        "import atexit, os\n"
        "iterators = []\n"
        "atexit.register(lambda: print('snapshot:', os.path.exists(path), flush=True))\n"
        "atexit.register(iterators.clear)\n"
        "import torch, malletrain\n"
        f"path = {str(path)!r}\n"
        "data = torch.utils.data.TensorDataset(torch.arange(8))\n"
        "sampler = malletrain.ElasticSampler(8, global_batch_size=2)\n"
        "loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)\n"
        "snapshot = malletrain.Snapshot(path, sampler=sampler, every_s=1e-9)\n"
        "snapshot.restore()\n"
        "iterators.append(iter(loader))\n"
        "next(iterators[0])\n"
        "sampler.advance()\n"
        "snapshot.step()\n"
    )
    assert output_of_fork(tmp_path, script) == "snapshot: False\n"


@pytest.fixture
def library(tmp_path):
    """A directory with the parts of malletrain that a worker imports."""
    installed, copy = Path(malletrain.__file__).parent, tmp_path / "library" / "malletrain"
    copy.mkdir(parents=True)
    shutil.copy(installed / "__init__.py", copy)
    for name in ("launch", "protocol", "training"):
        shutil.copytree(installed / name, copy / name)
    return copy.parent


def test_a_script_imports_a_malletrain_that_was_installed_since(tmp_path, library):
    changed = str(library / "malletrain" / "training" / "report.py")
    script = tmp_path / "script"
    script.mkdir()
    package = library / "malletrain" / "__init__.py"
    assert output_of_fork(script, _IMPORT, "", [library]) == f"{package} False True\n"
    append = f"open({changed!r}, 'a').write('pass')"
    # of the same size and time of modification
    replace = f"import shutil; os.replace(shutil.copy2({changed!r}, 'new'), {changed!r})"
    for install in (append, replace):
        assert output_of_fork(script, _IMPORT, install, [library]) == f"{package} False False\n"


def test_a_script_imports_a_malletrain_that_was_installed_while_the_fork_server_began(
    tmp_path, library, monkeypatch
):
    changed = str(library / "malletrain" / "training" / "report.py")
    (library / "installation.py").write_text(f"open({changed!r}, 'a').write('pass')\n")
    monkeypatch.setenv(env.PRELOAD, "installation")
    package = library / "malletrain" / "__init__.py"
    assert output_of_fork(tmp_path, _IMPORT, "", [library]) == f"{package} False False\n"


def test_a_fork_server_outlives_a_malletrain_that_is_installed_in_part(tmp_path, library):
    broken = library / "malletrain" / "training" / "snapshot.py"
    broken.write_text("raise ImportError('no such part')\n")
    sentence = (
        "malletrain: the fork server preloads 'malletrain.training.snapshot', which cannot be "
        "imported: no such part\n"
    )
    result = run_in_fork(tmp_path, "import malletrain; malletrain.report", "", [library])
    assert (result.returncode, result.stderr) == (0, sentence)
    result = run_in_fork(tmp_path, "import malletrain; malletrain.Snapshot", "", [library])
    assert result.returncode == 1
    assert result.stderr.startswith(sentence + "Traceback")
    assert result.stderr.endswith("ImportError: no such part\n")


@pytest.mark.parametrize("where", ["beside the script", "on a path that the script adds"])
def test_a_script_imports_its_own_malletrain(tmp_path, library, where):
    if where == "beside the script":
        folder, script = library, _IMPORT
    else:
        folder, script = tmp_path, f"import sys; sys.path.insert(0, {str(library)!r})\n{_IMPORT}"
    expected = f"{library / 'malletrain' / '__init__.py'} False False\n"
    assert output_of_fork(folder, script) == expected


def test_a_worker_reports_its_import_of_malletrain(tmp_path):
    path = str(tmp_path / "agent")
    environment = {env.SOCKET: path, env.JOB: "j1", env.GENERATION: "3", "RANK": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(path)
        output_of_fork(tmp_path, "import malletrain", f"os.environ.update({environment})")
        marks = [decode_datagram(agent.recv(65536, socket.MSG_DONTWAIT)) for _ in range(2)]
    assert all(isinstance(mark, StartupMark) for mark in marks)
    assert [(mark.sender.generation, mark.sender.rank, mark.name) for mark in marks] == [
        (3, 1, "start"),
        (3, 1, "import"),
    ]


def test_a_worker_has_the_fault_points_of_its_own_environment(tmp_path):
    faults = tmp_path / "faults"
    faults.mkdir(0o700)
    (faults / "WORKER_KEPT").write_text("raise")
    script = (
        "import malletrain\n"
        "from malletrain.protocol.fault_points import FaultPoint, FaultRaised, reached\n"
        "try:\n"
        "    reached(FaultPoint.WORKER_KEPT)\n"
        "except FaultRaised:\n"
        "    print('raised', flush=True)\n"
    )
    arm = f"os.environ[{env.FAULTS!r}] = {str(faults)!r}"
    assert output_of_fork(tmp_path, script, arm) == "raised\n"
    assert output_of_fork(tmp_path, script) == ""
