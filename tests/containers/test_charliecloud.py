"""Launchers and workers in a real container, the agent outside: what they see, how they are moved
and stopped, and the sentence about an image that is not fit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

import malletrain
from malletrain.protocol import messages
from malletrain.protocol.failures import describe
from tests.malletrain.agent.node_side import eventually
from tests.malletrain.launch.test_live import ALL_AT_ONCE, PRELUDE
from tests.malletrain.launch.test_restart import Cluster

pytest.importorskip("torch")

SEES = """
import json, os, sys, time
import malletrain
from malletrain import membership

note = {
    "image": os.environ.get("IMAGE_SAYS"),
    "names": sorted(os.environ),
    "mine": os.environ["MINE"],
    "path": os.environ["PATH"],
    "directory": os.getcwd(),
    "library": malletrain.__file__,
    "root": sorted(os.listdir("/")),
    "prefix": sys.prefix,
    "pid": os.getpid(),
}
with open("tmp", "w") as file:
    json.dump(note, file)
os.rename("tmp", "note")
print("printed inside", flush=True)
for change in membership.join("here").changes():
    pass
"""
RESTARTED = """
import json, os, time
import malletrain
rank, generation = os.environ["RANK"], os.environ["MALLETRAIN_GENERATION"]
note = {"image": os.environ.get("IMAGE_SAYS"), "parent": os.getppid(), "pid": os.getpid()}
with open("tmp", "w") as file:
    json.dump(note, file)
os.rename("tmp", f"g{generation}-r{rank}-w{os.environ['WORLD_SIZE']}")
while not os.path.exists(f"done-{generation}"):
    malletrain.report(8)
    time.sleep(0.02)
"""
READS = """
import json, os, time
from importlib.util import find_spec
import malletrain

names = [name for name in malletrain.__all__ if getattr(malletrain, name)]
cache = malletrain.DataCache([b"zero", b"one", b"two"], name="three")
note = {
    "names": names,
    "samples": [cache[i].decode() for i in range(3)],
    "library": malletrain.__file__,
    "siblings": [n for n in ("scavenger", "jpa", "allocator") if find_spec(n) is not None],
}
with open("tmp", "w") as file:
    json.dump(note, file)
os.rename("tmp", "note")
while not os.path.exists("done"):
    time.sleep(0.02)
"""


@pytest.fixture
def node(tmp_path):
    """Call it for an agent with a job in the directory ``a job's``."""
    made = []

    def start(script, **fields):
        directory = tmp_path / "a job's"
        directory.mkdir()
        made.append(Cluster(directory, ("n0",), script, **fields))
        return made[-1]

    yield start
    for cluster in made:
        cluster.close()
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "a job's" / "evil").exists()


def noted(cluster) -> dict:
    path = cluster.directory / "note"
    cluster.daemon.until(path.exists, "the process in the container has written its note")
    return json.loads(path.read_text())


def test_a_service_sees_its_image_and_nothing_outlives_agent_and_supervisor(
    node, software, monkeypatch
):
    monkeypatch.setenv("LD_OF_THE_HOST", "no")
    monkeypatch.setenv("MODULEPATH", "/host/modules")
    monkeypatch.setenv("OF_THE_LEASE", "yes")
    fields = {"mode": "service", "env": {"MINE": "a $b 'c'"}, "software": software()}
    cluster = node(SEES, **fields)
    seen = noted(cluster)
    assert (seen["image"], seen["mine"]) == ("so", "a $b 'c'")
    assert seen["path"].endswith("/bin_of_the_image")
    assert {"OF_THE_LEASE", "MALLETRAIN_NODE", "HOME"} <= set(seen["names"])
    assert not {"LD_OF_THE_HOST", "MODULEPATH"} & set(seen["names"])
    assert "ch" in seen["root"]
    assert seen["directory"] == str(cluster.directory)
    assert seen["library"] != malletrain.__file__
    assert "/lib/malletrain/" in seen["library"]
    agent = psutil.Process(cluster.agents["n0"].process.pid)
    [supervisor] = agent.children()
    os.kill(agent.pid, signal.SIGSTOP)  # so that it cannot sweep
    supervisor.kill()
    agent.kill()
    eventually(lambda: not cluster.agents["n0"].job_pids(), "the container has ended")


def test_rounds_of_restart_mode_in_one_container(node, software):
    cluster = node(RESTARTED, software=software())
    cluster.wait_ready()
    first = cluster.workers(cluster.form("n0"), 1)[0]
    cluster.daemon.expect("n0", messages.Progress, generation=1)
    generation = cluster.form("n0")
    second = cluster.workers(generation, 1)[0]
    assert first["image"] == second["image"] == "so"
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"]  # the fork server: it went on
    (cluster.directory / f"done-{generation}").touch()
    cluster.daemon.expect("n0", messages.Phase, phase="succeeded", generation=generation)


def test_the_library_in_an_image_without_malletrain(node, software, python_without_malletrain):
    """Only the package malletrain is bound, not those that it is installed with."""
    cluster = node(READS, software=software(python_without_malletrain))
    cluster.wait_ready()
    generation = cluster.form("n0")
    seen = noted(cluster)
    assert seen["names"] == malletrain.__all__
    assert seen["samples"] == ["zero", "one", "two"]
    assert "/lib/malletrain/" in seen["library"]
    assert seen["siblings"] == []
    (cluster.directory / "done").touch()
    cluster.daemon.expect("n0", messages.Phase, phase="succeeded", generation=generation)


def test_live_mode_in_a_container(node, software):
    cluster = node(PRELUDE + ALL_AT_ONCE, mode="live", software=software())
    cluster.wait_ready()
    cluster.form("n0")
    cluster.form("n0")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no python", "has no Python: neither python nor python3 is on its PATH."),
        ("no torch", "has no torch (Python "),
        ("no venv", "There is no virtual environment /no/venv in the container of "),
        ("no image", "no/image"),
        ("no bind", "/no/bind is to be bound into the container of"),
        ("link", "a symbolic link there leads out of the image"),
        ("link to something", "a symbolic link there leads out of the image"),
    ],
)
def test_an_image_that_is_not_fit_is_told_in_a_sentence(
    node, software, bare_python, tmp_path, kind, words
):
    environment = software(
        python={"no python": None, "no torch": bare_python}.get(kind, Path(sys.executable)),
        venv="/no/venv" if kind == "no venv" else "",
    )
    if kind == "no image":
        environment = messages.SoftwareEnvironment(container="/no/image", runtime="charliecloud")
    elif kind == "no bind":
        environment = messages.SoftwareEnvironment(
            **{**fields_of(environment), "binds": ("/no/bind",)}
        )
    elif kind.startswith("link"):
        if kind == "link to something":
            (tmp_path / "below").mkdir()
        (Path(environment.container) / "tmp").rmdir()
        (Path(environment.container) / "data").symlink_to(tmp_path)
        binds = (*environment.binds, f"{tmp_path}:/data/below")
        environment = messages.SoftwareEnvironment(**{**fields_of(environment), "binds": binds})
    cluster = node("raise SystemExit(9)", software=environment)
    phase = cluster.daemon.expect("n0", messages.Phase, phase="exited")
    sentence = describe(phase.assignment.failures) if phase.assignment.failures else phase.tail
    assert words in sentence
    assert "Traceback" not in phase.tail


def test_a_node_without_the_runtime_says_so(node):
    environment = messages.SoftwareEnvironment(container="/images/x.sif", runtime="enroot")
    cluster = node("raise SystemExit(9)", software=environment)
    phase = cluster.daemon.expect("n0", messages.Phase, phase="exited")
    assert describe(phase.assignment.failures) == (
        "This node has no enroot, which runs the container image /images/x.sif, on its PATH. If a "
        "module provides it, add --module NAME."
    )


def fields_of(software) -> dict:
    return {name: getattr(software, name) for name in software.__struct_fields__}
