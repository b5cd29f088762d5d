"""malletrain export: the weights of a job's snapshot in one file. Sharded ones: see
``tests/malletrain/training/test_sharded_snapshot``.
"""

import os
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from malletrain import Snapshot
from tests.malletrain.cli.fake_daemon import Refuse, detail, status_view


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.out.weight = self.into.weight


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_by_its_name(run, daemon, folder):
    model = Tied()
    own = folder / "malletrain-snapshots" / "j1-train-00" / "snapshot.pt"
    Snapshot(own, model=model, optimizer=torch.optim.SGD(model.parameters())).save()
    job = detail()
    daemon.answers["job"] = lambda params: detail(spec={**job.spec, "workdir": str(folder)})
    result = run("export", "train")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Wrote 3 tensors of 'model', 0.0 MB, saved 20")
    tensors = load_file(folder / "train.safetensors")
    assert {k: v.tolist() for k, v in tensors.items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }


def test_without_a_daemon_and_with_two_models(run, folder):
    big, small = nn.Linear(2, 2), nn.Linear(1, 1)
    Snapshot(folder / "x.pt", teacher=big, student=small).save()
    result = run("export", "x.pt")
    assert result.exit_code == 1
    assert "has 2 models (teacher, student). Say which one with --object." in result.stderr
    assert run("export", "x.pt", "--object", "student", "-o", "s.safetensors").exit_code == 0
    assert load_file("s.safetensors")["weight"].tolist() == small.weight.tolist()
    wrong = run("export", "x.pt", "--object", "tutor")
    assert "has no model 'tutor'; it has teacher, student" in wrong.stderr


def test_what_is_not_there(run, daemon, folder):
    def unknown(_):
        raise Refuse("There is no job nobody.")

    daemon.answers["job"] = unknown
    result = run("export", "nobody")
    assert (result.exit_code, result.stderr) == (1, "There is no job nobody.\n")
    missing = run("export", "./absent.pt")
    assert missing.exit_code == 1
    assert "There is no snapshot ./absent.pt" in missing.stderr
    (folder / "bad.pt").write_bytes(b"nothing")
    assert "bad.pt is damaged" in run("export", "bad.pt").stderr
    Snapshot(folder / "x.pt", model=nn.Linear(1, 1)).save()
    result = run("export", "x.pt", "--out", "no/such/folder.safetensors")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


@pytest.mark.parametrize("command", ["export", "cp"])
def test_another_jobs_snapshot_is_not_this_ones(run, daemon, folder, monkeypatch, command):
    """Two jobs with one path, and a job of the same id of another daemon."""
    job = detail()
    (folder / "train.py").write_text("Snapshot('run.pt')")
    spec = {**job.spec, "workdir": str(folder), "script": str(folder / "train.py")}
    daemon.answers["job"] = lambda params: detail(spec=spec)
    daemon.answers["status"] = lambda params: status_view(boot="d1-4")
    words = [command, "train", *(("results", "--snapshot") if command == "cp" else ())]
    for name, whose in (("j2", "d1"), ("j1", "d2")):
        monkeypatch.setenv("MALLETRAIN_JOB", name)
        monkeypatch.setenv("MALLETRAIN_DAEMON_ID", whose)
        Snapshot(folder / "run.pt", model=nn.Linear(1, 1)).save()
        Snapshot(model=nn.Linear(1, 1)).save()
        result = run(*words)
        assert result.exit_code == 1
        assert f"belongs to job {name}" in result.stderr
        os.unlink(folder / "run.pt")
    assert re.search(r"no snapshot of job j1.*\. Name one by its path\.", run(*words).stderr)
    monkeypatch.setenv("MALLETRAIN_DAEMON_ID", "d1")
    Snapshot(model=nn.Linear(1, 1)).save()
    assert run(*words).exit_code == 0
