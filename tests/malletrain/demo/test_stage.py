"""The processes of a demo: one folder, one demo; nothing is left."""

import os
import signal
import subprocess
import sys

import pytest

from malletrain.demo import stage as stage_module
from malletrain.demo.main import watch_limit_s
from malletrain.demo.stage import DAEMON_START_S, DemoError, DemoStage
from scavenger.embedded.cluster_process import ClusterProcess
from tests.waiting import PATIENCE_S, until


def gone(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_foreign_folder_is_not_emptied(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DemoError, match="not the folder of an earlier demo"):
        DemoStage(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_folder_of_an_earlier_demo_is_emptied(tmp_path):
    with DemoStage(tmp_path / "out") as stage:
        stage.folder.timeline.write_text("old")
    with DemoStage(tmp_path / "out") as stage:
        assert not stage.folder.timeline.exists()
        assert stage.folder.snapshots.is_dir()


def test_two_demos_in_one_folder(tmp_path):
    with DemoStage(tmp_path), pytest.raises(DemoError, match="Another demo runs"):
        DemoStage(tmp_path)


def test_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="cannot be used"):
        DemoStage(tmp_path / "file" / "x")


def test_undisturbed_run(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import os, sys\nassert 'MALLETRAIN_JOB' not in os.environ\nprint('test accuracy 0.9' + "
        "sys.argv[1])\n"
    )
    with DemoStage(tmp_path / "out") as stage:
        stage.run_undisturbed("a", script, ["5"])
        assert stage.wait_for_undisturbed(PATIENCE_S)
        assert stage.undisturbed_accuracy("a") == 0.95
        stage.run_undisturbed("b", tmp_path / "none.py", [])
        assert not stage.wait_for_undisturbed(PATIENCE_S)
        assert stage.undisturbed_accuracy("b") is None


def test_the_cluster_lives_for_as_long_as_its_jobs_are_watched(tmp_path, monkeypatch):
    lives = []
    monkeypatch.setattr(
        stage_module, "start_cluster", lambda folder, nodes, lifetime_s: lives.append(lifetime_s)
    )
    with DemoStage(tmp_path) as stage:
        for duration_s in (30.0, 3600.0):
            stage.start_cluster(2, watch_limit_s(duration_s))
            assert lives.pop() >= watch_limit_s(duration_s) + DAEMON_START_S
        stage.cluster = None


def test_the_daemon_that_does_not_come_up_has_the_last_word(tmp_path):
    with DemoStage(tmp_path) as stage:
        stage.folder.config.write_text("[scheduler]\nkind = 'nonsense'\n")
        stage.start_daemon()
        with pytest.raises(DemoError, match="nonsense"):
            stage.client()


KILLED = """
import sys, time
from pathlib import Path
from malletrain.demo.stage import DemoStage
stage = DemoStage(Path(sys.argv[1]))
script = Path(sys.argv[1]) / "sleep.py"
script.write_text("import time; time.sleep(600)")
stage.start_cluster(2, 60.0)
stage.run_undisturbed("a", script, [])
print(stage.cluster.pid, stage._undisturbed[0].pid, flush=True)
time.sleep(600)
"""


def test_killed_demo_leaves_nothing_to_the_next(tmp_path):
    """kill -9: the kernel ends the runs with it, and the next demo of the folder ends the
    cluster.
    """
    demo = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    cluster, run = map(int, demo.stdout.readline().split())
    try:
        demo.kill()
        demo.wait()
        until(lambda: gone(run), "the undisturbed run to die")
        assert not gone(cluster)
        with DemoStage(tmp_path / "out"):
            until(lambda: gone(cluster), "the cluster to end")
    finally:
        demo.stdout.close()
        for pid in (cluster, run):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_leaving_ends_the_cluster(tmp_path):
    with DemoStage(tmp_path) as stage:
        stage.start_cluster(2, 60.0)
        cluster = stage.cluster
        assert ClusterProcess.attach(stage.folder.cluster).pid == cluster.pid
    assert not cluster.alive()
