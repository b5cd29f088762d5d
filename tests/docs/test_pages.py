"""Every command of the pages that a new user or operator follows, run as it stands there in a
bare environment.

A reader's ``git clone`` gets a copy of this tree, and a virtual environment that a page makes sees
the packages that are installed here; everything else is as on the page.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bare import ROOT, link_packages, plain_variables, source_tree
from tests.docs.console import blocks, commands, session
from tests.slurm.cluster import SlurmCluster, missing, search_path

DOCS = ROOT / "docs"
SCIENTIST = {"quickstart": 14, "training-scripts": 2, "live-mode": 1, "sweeps": 5}
"""Pages that are run one after another in one shell, and the least number of commands in each."""
OPERATOR = {"slurm": 8, "first-job": 5, "several-users": 2}
REPOSITORY = "https://github.com/malletrain/malletrain"
PYTHON = """\
#!/bin/sh
# python3 as a reader has it; a virtual environment that it makes sees the packages of the tests.
# Setuptools is theirs as well, because an old one would come with Python 3.11.
"{python}" "$@" || exit
if [ "$1 $2" = "-m venv" ]; then
    for folder in "$3"/lib/python3*/site-packages; do
        rm -rf "$folder"/setuptools* "$folder"/pkg_resources
        echo "{packages}" > "$folder/shared.pth"
    done
    # torch's command, which installing torch there would have made.
    {{ echo "#!$(realpath -s "$3")/bin/python"
       echo "from torch.distributed.run import main; main()"; }} > "$3/bin/torchrun"
    chmod +x "$3/bin/torchrun"
fi
"""


@pytest.fixture
def home(tmp_path_factory):
    """A reader's home: a short path, because sockets lie in it, that Slurm's jobs see too.

    One reader at a time, in all processes of a test run: the pages use the default ports.
    """
    with open(tmp_path_factory.getbasetemp().parent / "docs.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = Path(tempfile.mkdtemp(prefix="mt-docs-", dir="/tmp"))
        path.chmod(0o755)
        yield path
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def reader(home):
    """Environment variables of a reader for whom the repository is a copy of this tree."""
    packages = link_packages(home / ".packages")
    tools = home / ".tools"
    tools.mkdir()
    python = tools / "python3"
    real = Path(sys.base_prefix) / "bin" / "python3"
    python.write_text(PYTHON.format(python=real, packages=packages))
    python.chmod(0o755)
    source = source_tree(home / ".repository")
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "-A"],
        ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "All"],
    ):
        subprocess.run(["git", *command], cwd=source, check=True)
    return {
        **plain_variables(home, tools),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{source}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
        "GIT_PROGRESS_DELAY": "1000",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("name", [*SCIENTIST, *OPERATOR])
def test_every_command_that_is_not_run_says_why(name):
    for block in blocks(page(name)):
        if (reason := block.note_after("not run:")) is not None:
            assert len(reason.split()) > 3, f"{name}: {reason!r} is no reason"
        elif block.kind == "console":
            assert commands(block)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_first_pages_of_a_scientist(reader, home):
    with session(reader, home) as shell:
        for name, least in SCIENTIST.items():
            assert shell.page(page(name)) >= least


@pytest.fixture
def machine(home) -> Iterator[list[str]]:
    """The command put before all others on a machine whose /etc and /opt are its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to have an /etc and an /opt of its own")
    if reason := missing():
        pytest.skip(reason)
    layers = home / ".layers"
    mounts = [f"mount -t tmpfs none {layers}"]
    for place in ("/etc", "/opt"):
        top = f"{layers}{place}"
        mounts += [
            f"mkdir -p {top}/upper {top}/work",
            f"mount -t overlay overlay -o lowerdir={place},upperdir={top}/upper,workdir={top}/work {place}",  # noqa: E501
        ]
    layers.mkdir()
    ready = " && ".join([*mounts, "echo ready", "exec sleep infinity"])
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", ready],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert holder.stdout is not None
        line = holder.stdout.readline()
        if line != "ready\n":
            pytest.skip(f"this machine allows no folders of one's own: {line}")
        yield ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt"]
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.thorough
@pytest.mark.slurm
@pytest.mark.timeout(1800)
def test_the_pages_of_an_operator_of_slurm(reader, home, machine):
    slurm = SlurmCluster(home / "c", 4, machine, grace=30).start()
    try:
        theirs = {"SLURM_CONF": str(slurm.conf), "PATH": search_path(reader["PATH"])}
        with session({**reader, **theirs}, home, machine) as shell:
            for name, least in OPERATOR.items():
                assert shell.page(page(name)) >= least
    finally:
        survivors = slurm.stop()
    assert not survivors, survivors
