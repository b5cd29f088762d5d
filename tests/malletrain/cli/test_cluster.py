"""The embedded cluster from the command line, and a daemon whose cluster still runs as before."""

import json

import pytest

from scavenger.embedded.cluster_process import ClusterProcess, start_cluster


@pytest.fixture
def config(tmp_path):
    """Write a configuration with these lines of [scheduler.local]; return its path."""

    def write(local=""):
        path = tmp_path / "site.toml"
        path.write_text(
            f'[daemon]\nstate_dir = "state"\nmetrics_listen = ""\n[scheduler]\nkind = "local"\n'
            f"[scheduler.local]\n{local}\n"
        )
        return path

    return write


@pytest.fixture
def cluster(tmp_path):
    """A running cluster of three nodes in the place of the configuration's."""
    (tmp_path / "state").mkdir(mode=0o700)
    made = start_cluster(tmp_path / "state" / "cluster", 3, grace_s=2.0, seed=4)
    yield made
    made.stop()


def words(result):
    """What a command printed, on one line."""
    return " ".join((result.stdout + result.stderr).split())


def test_status_and_stop(run, config, cluster):
    path = config()
    result = run("cluster", "status", "--config", path)
    assert result.exit_code == 0, result.stderr
    assert f"(process {cluster.pid}): 0 leased, 3 idle, 0 busy." in words(result)
    assert "grace = 2.0" in result.stdout
    data = json.loads(run("cluster", "status", "--config", path, "--json").stdout)
    assert data["options"] == {
        "nodes": 3, "trace": None, "speedup": 1.0, "grace": 2.0, "notice_fraction": 1.0, "seed": 4,
    }  # fmt: skip
    stopped = run("cluster", "stop", "--config", path)
    assert stopped.exit_code == 0, stopped.stderr
    assert "has stopped" in stopped.stdout
    assert not cluster.alive()
    again = run("cluster", "stop", "--config", path)
    assert again.exit_code == 1
    assert "was stopped" in again.stderr


def test_only_an_embedded_cluster_can_be_stopped(run, tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('[scheduler]\nkind = "slurm"\n')
    result = run("cluster", "stop", "--config", path)
    assert result.exit_code == 1
    assert "is slurm" in result.stderr


def test_changed_settings_are_not_ignored_while_the_old_cluster_lives(
    run, config, cluster, tmp_path
):
    (tmp_path / "week.csv").write_text("time_s,node,event\n0,a,idle\n100,a,busy\n200,b,idle\n")
    same = 'nodes = 3\ngrace = "2 s"\nseed = 4'
    assert run("check", "--config", config(same)).exit_code == 0
    path = config(f'nodes = 5\ngrace = "2 s"\nseed = 4\ntrace = "{tmp_path}/week.csv"')
    checked, started = run("check", "--config", path), run("daemon", "--config", path)
    for result in (checked, started):
        assert result.exit_code == 1
        assert "nodes is 3 there and 5 in the configuration" in words(result)
        assert f"trace is not given there and {tmp_path}/week.csv in the" in words(result)
        assert "grace is" not in words(result)
        assert "malletrain cluster stop" in words(result)
    assert ClusterProcess.attach(cluster.directory).pid == cluster.pid
