"""A folder is kept while its agent lives, also where that cannot be seen by its number."""

import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from malletrain.agent.run_dir import private_directory
from malletrain.memory import folder
from malletrain.memory.folder import private_folder

LIVING = """
import os, sys
from pathlib import Path
from malletrain.agent.run_dir import private_directory
from malletrain.memory import folder
from malletrain.memory.folder import private_folder
below = Path(sys.argv[1])
os.write(1, f"{private_directory(below / 'run', 'n1', {})} {private_folder('n1', below)}".encode())
sys.stdin.read()
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Folders of an agent in a container: this process does not see its number."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs PID namespaces (unshare --pid as root)")
    agent = subprocess.Popen(
        # The number of its own that it writes is a small one: here somebody else's, or nobody's.
        [*inside, sys.executable, "-c", LIVING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with agent:
        run, memory = os.read(agent.stdout.fileno(), 4096).decode().split()
        yield agent, [_of_nobody(run), _of_nobody(memory)]
        agent.kill()


def _of_nobody(folder):
    """The same under a number that no process of this namespace has."""
    head, pid, *rest = folder.rpartition("n1-")[0] + "n1", *folder.rpartition("n1-")[2].split("-")
    named = "-".join([head, str(int(pid) + 2**22), *rest])
    os.rename(folder, named)
    return named


def test_of_a_living_agent_in_a_container_nothing_is_removed(tmp_path, elsewhere):
    agent, folders = elsewhere
    private_directory(tmp_path / "run", "n1", {})
    private_folder("n1", tmp_path)
    assert all(map(os.path.isdir, folders))
    agent.stdin.close()
    agent.wait()
    private_directory(tmp_path / "run", "n1", {})
    private_folder("n1", tmp_path)
    assert not any(map(os.path.isdir, folders))


def test_a_folder_is_locked_although_somebody_looks_whether_it_is(tmp_path, monkeypatch):
    """The look takes the lock for a moment; a folder that stays unlocked would be removed."""
    looking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    folder.lock_folder(tmp_path)
    os.close(looking)
    assert folder.is_locked(tmp_path)
