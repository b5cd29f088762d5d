"""The message about snapshots in a folder that hydra names after the time of the start."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from malletrain import Snapshot
from malletrain.protocol import env
from tests.malletrain.training.worker_side import as_worker

RUN, SWEEP = "outputs/${now:%F}/${now:%H-%M-%S}", "multirun/${now:%F}"
MESSAGE = "hydra puts the time of the start into the name of the folder"


class Hydra:
    """As much of hydra's configuration as is read."""

    def __init__(self, folder):
        self.run = {"dir": RUN}
        self.sweep = {"dir": SWEEP, "subdir": "${hydra.job.num}"}
        self.mode = "RunMode.RUN"
        self.runtime = SimpleNamespace(output_dir=str(folder))
        self.is_initialized = True

    def __getitem__(self, section):
        return getattr(self, section)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    path = tmp_path / "outputs" / "2026-11-28" / "10-00-00"
    path.mkdir(parents=True)
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def hydra(monkeypatch, folder):
    config = Hydra(folder)
    of_process = SimpleNamespace(initialized=lambda: config.is_initialized, get=lambda: config)
    omegaconf = SimpleNamespace(to_container=lambda node, resolve: resolve or node)
    modules = {
        "omegaconf": SimpleNamespace(OmegaConf=omegaconf),
        "hydra.core.hydra_config": SimpleNamespace(HydraConfig=of_process),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(env.TASK, raising=False)
    return config


@pytest.fixture
def messages(monkeypatch, hydra, capsys):
    """Builds a Snapshot and returns what the log says about hydra, and the snapshot's path."""

    def build(path=None, rank=0):
        with as_worker(monkeypatch, rank):
            capsys.readouterr()
            snapshot = Snapshot(path, facts={})
            log = capsys.readouterr().err
        return [line for line in log.splitlines() if MESSAGE in line], snapshot.path

    return build


def test_the_message_names_the_remedy_and_the_path_stays(messages, folder):
    (message,), path = messages()
    assert path.startswith(f"{folder}/malletrain-snapshots/job-1-")
    assert f"does not find the snapshot {path} and begins anew" in message
    assert "hydra.run.dir='outputs/${oc.env:MALLETRAIN_JOB}'" in message
    (message,), path = messages("run.pt")
    assert path == f"{folder}/run.pt"
    assert path in message


def test_the_remedies_of_a_sweep(messages, hydra):
    hydra.run, hydra.mode = {"dir": "runs"}, "RunMode.MULTIRUN"
    (message,), _ = messages()
    assert "hydra.sweep.dir='multirun/${oc.env:MALLETRAIN_JOB}', or" in message
    hydra.sweep = {"dir": "sweep", "subdir": "${now:%H}"}
    (message,), _ = messages()
    assert "with hydra.sweep.subdir='${hydra.job.num}', or" in message


def test_the_message_comes_once_in_a_process_and_only_from_rank_0(
    messages, monkeypatch, hydra, capsys
):
    assert messages(rank=1)[0] == []
    with as_worker(monkeypatch):
        for name in ("a.pt", "b.pt"):
            Snapshot(name, facts={})
    assert capsys.readouterr().err.count(MESSAGE) == 1


def test_in_a_folder_below_hydras(messages, monkeypatch, folder):
    (folder / "fold1").mkdir()
    monkeypatch.chdir(folder / "fold1")
    assert messages("../run.pt")[0]
    assert not messages("../../run.pt")[0]


def test_no_message_about_a_path_elsewhere(messages, monkeypatch, folder, tmp_path):
    assert not messages(tmp_path / "run.pt")[0]
    (tmp_path / "shared").mkdir()
    (folder / "link").symlink_to(tmp_path / "shared")
    assert not messages("link/run.pt")[0]
    (tmp_path / "run").symlink_to(folder)
    assert messages(tmp_path / "run" / "run.pt")[0]
    monkeypatch.chdir(tmp_path)
    for path in (None, folder / "run.pt"):
        assert not messages(path)[0], "hydra has not changed the working folder"


def test_no_message_about_a_folder_of_the_users_choice(messages, hydra):
    hydra.run = {"dir": "outputs/2026-11-28/10-00-00"}
    assert not messages()[0]


@pytest.mark.parametrize("name", [env.JOB, env.GENERATION])
def test_no_message_outside_a_job(hydra, monkeypatch, capsys, name):
    with as_worker(monkeypatch):
        monkeypatch.delenv(name)
        Snapshot(facts={})
    assert MESSAGE not in capsys.readouterr().err


def test_no_message_in_a_task(messages, monkeypatch):
    monkeypatch.setenv(env.TASK, "7")
    assert not messages()[0]


def test_no_message_if_hydra_does_not_run_the_script(messages, monkeypatch, hydra):
    hydra.is_initialized = False
    assert not messages()[0]
    monkeypatch.delitem(sys.modules, "hydra.core.hydra_config")
    assert not messages()[0]


@pytest.mark.parametrize("attribute", ["run", "mode", "runtime"])
def test_no_message_about_another_release_of_hydra(messages, hydra, attribute):
    delattr(hydra, attribute)
    assert not messages()[0]


SCRIPT = """
import hydra, malletrain

@hydra.main(version_base="1.1", config_path=None)
def main(config):
    facts = {"rounds": 0}
    snapshot = malletrain.Snapshot(facts=facts)
    snapshot.restore()
    facts["rounds"] += 1
    snapshot.save()
    print(snapshot.path, facts["rounds"], sep="=")

main()
"""


def run_round(folder, number, *arguments):
    """Run the script with the real hydra; return its lines, a (path, rounds) each, and its log."""
    command = [sys.executable, "train.py", *arguments, "hydra.job.chdir=true"]
    environment = {**os.environ, env.JOB: "j1", env.GENERATION: str(number), "RANK": "0"}
    ran = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    lines = [line.split("=") for line in ran.stdout.splitlines() if "snapshot.pt=" in line]
    return lines, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [[], ["-m", "+fold=0,1"]], ids=["run", "sweep"])
def test_the_remedy_of_the_message_with_the_real_hydra(tmp_path, sweep):
    pytest.importorskip("hydra", reason="pip install malletrain[test]")
    (tmp_path / "train.py").write_text(SCRIPT)
    key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
    lines, log = run_round(tmp_path, 1, *sweep, f"{key}=runs/${{now:%H-%M-%S-%f}}")
    assert log.count(MESSAGE) == 1
    again, _ = run_round(tmp_path, 2, *sweep, f"{key}=runs/${{now:%H-%M-%S-%f}}")
    assert not {path for path, _ in lines} & {path for path, _ in again}
    assert {rounds for _, rounds in [*lines, *again]} == {"1"}
    remedy = log[log.index(f"{key}='") :].split("'")[1]
    assert remedy.endswith("/${oc.env:MALLETRAIN_JOB}")
    lines, log = run_round(tmp_path, 1, *sweep, f"{key}={remedy}")
    assert MESSAGE not in log
    again, _ = run_round(tmp_path, 2, *sweep, f"{key}={remedy}")
    assert again == [[path, "2"] for path, _ in lines]
    assert len(lines) == (2 if sweep else 1)
