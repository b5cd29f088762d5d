"""Whose snapshot a file is: another job's is neither restored nor overwritten, unless asked for."""

import sys
from types import SimpleNamespace

import pytest
import torch

from malletrain import Snapshot, SnapshotError
from malletrain.protocol import env
from malletrain.protocol.worker_channel import SnapshotTaken
from malletrain.submission.resuming import file_of
from malletrain.training import owner, snapshot_file
from tests.malletrain import forked_programs
from tests.malletrain.training.worker_side import as_plain_script, as_worker


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/home/ann/train.py", "--lr", "0.1"])
    monkeypatch.delenv("MALLETRAIN_RESUME_FROM", raising=False)


def be(monkeypatch, job, *arguments):
    monkeypatch.setenv("MALLETRAIN_JOB", job)
    monkeypatch.setattr(sys, "argv", ["/home/ann/train.py", *arguments])


def test_two_jobs_with_one_path_do_not_swap_weights(tmp_path, monkeypatch):
    """The classic mistake of a sweep: begun together, each restarted by a rescale."""
    path = tmp_path / "run.pt"
    with as_worker(monkeypatch) as agent:
        be(monkeypatch, "j1", "--lr", "0.1")
        one = Snapshot(path, facts={"who": "one"})
        assert not one.restore()
        be(monkeypatch, "j2", "--lr", "0.2")
        two = Snapshot(path, facts={"who": "two"})
        assert not two.restore()
        assert one.save()
        with pytest.raises(SnapshotError, match="is that of job j1, and is not overwritten"):
            two.save()
        with pytest.raises(SnapshotError, match="not overwritten"):
            Snapshot(path, every_s=0, facts={"who": "two"}).step()
        assert [m.saved for m in agent.received(SnapshotTaken)] == [True]
        assert snapshot_file.read(str(path))["objects"]["facts"] == {"who": "one"}
        facts = {"who": "two, restarted"}
        with pytest.raises(SnapshotError, match="belongs to job j1, and this is job j2") as caught:
            Snapshot(path, facts=facts).restore()
        assert "malletrain submit --resume-from j1" in str(caught.value)
        assert facts == {"who": "two, restarted"}
        be(monkeypatch, "j1", "--lr", "0.1")
        assert Snapshot(path, facts=facts).restore()
        assert facts == {"who": "one"}


class SaysWhenSaved:
    """Does something at the moment at which its state is taken."""

    def __init__(self, then):
        self.then = then

    def state_dict(self):
        self.then()
        return {}

    def load_state_dict(self, state):
        pass


def test_of_two_first_snapshots_at_one_moment_one_is_kept_and_the_other_job_ends(
    tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    with as_worker(monkeypatch):
        be(monkeypatch, "j1")
        one = Snapshot(path, facts={"who": "one"})
        be(monkeypatch, "j2")
        # both have looked and found nothing when the first one writes
        two = Snapshot(path, facts={"who": "two"}, moment=SaysWhenSaved(one.save))
        with pytest.raises(SnapshotError, match="is that of job j1"):
            two.save()
        assert snapshot_file.read(str(path))["objects"]["facts"] == {"who": "one"}
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("how", ["option", "job", "path"])
def test_another_jobs_snapshot_is_used_when_asked_for(tmp_path, monkeypatch, how):
    path = tmp_path / "run.pt"
    with as_worker(monkeypatch):
        be(monkeypatch, "j1")
        Snapshot(path, facts={"n": 1}).save()
        be(monkeypatch, "j2")
        if how != "option":
            monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j1" if how == "job" else str(path))
        facts = {"n": 2}
        snapshot = Snapshot(path, facts=facts)
        assert snapshot.restore(resume_from="j1" if how == "option" else None)
        assert facts == {"n": 1}
        assert snapshot.save()
        monkeypatch.delenv("MALLETRAIN_RESUME_FROM", raising=False)
        assert Snapshot(path, facts=facts).restore(), "from here on it is its own"


def test_without_a_path_each_job_has_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    with as_worker(monkeypatch):
        paths = []
        for job, rate in (("j1", "0.1"), ("j2", "0.1"), ("j1", "0.2")):
            be(monkeypatch, job, "--lr", rate)
            snapshot = Snapshot(facts={"rate": rate})
            assert not snapshot.restore()
            assert snapshot.save()
            paths.append(snapshot.path)
            facts = {}
            assert Snapshot(facts=facts).restore()
            assert facts == {"rate": rate}
        assert len(set(paths)) == 3
        assert paths[1].startswith(str(tmp_path / "malletrain-snapshots" / "j2-train-"))
        assert f"Snapshots of this run go to {paths[0]}." in capsys.readouterr().err
        be(monkeypatch, "j3", "--lr", "0.3")
        monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j2")
        assert Snapshot(facts=facts).restore()
        monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j1")
        with pytest.raises(SnapshotError, match="several snapshots of j1"):
            Snapshot(facts=facts).restore()
        monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j9")
        with pytest.raises(SnapshotError, match="no snapshot of job j9"):
            Snapshot(facts=facts).restore()


def test_it_works_outside_malletrain_too(tmp_path, monkeypatch, capsys):
    with as_plain_script(monkeypatch):
        first = Snapshot(facts={"n": 1})
        assert first.save()
        assert first.path.startswith(str(tmp_path / "malletrain-snapshots" / "local-train-"))
        assert Snapshot(facts={}).restore()
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.2"])
        assert not Snapshot(facts={}).restore(), "other arguments, another run"
        with_path = Snapshot(first.path, facts={})
        assert with_path.restore(), "a path that is named outside any job is the user's word"
        assert "other arguments" in capsys.readouterr().err
        assert with_path.save()


def test_a_job_of_the_same_name_from_another_daemon_is_another_job(tmp_path, monkeypatch):
    with as_worker(monkeypatch):
        be(monkeypatch, "j1", "--lr", "0.1")
        Snapshot(tmp_path / "run.pt", facts={}).save()
        be(monkeypatch, "j1", "--lr", "0.2")
        with pytest.raises(SnapshotError, match=r"an earlier job j1 \(train.py"):
            Snapshot(tmp_path / "run.pt", facts={}).restore()


def test_a_snapshot_of_the_release_before_names_nobody_and_is_restored(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    with as_worker(monkeypatch):
        Snapshot(path, facts={"n": 1}).save()
        payload = torch.load(path, weights_only=True)
        del payload["owner"]
        torch.save(payload, path)
        be(monkeypatch, "j2")
        facts = {}
        snapshot = Snapshot(path, facts=facts)
        assert snapshot.restore()
        assert facts == {"n": 1}
        assert snapshot.save()
        assert owner.owner_of(snapshot_file.read(str(path))).job == "j2"


# --- several daemons: ids of jobs begin at j1 with each ---


def test_a_job_of_another_daemon_is_another_although_all_else_is_alike(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    with as_worker(monkeypatch):
        be(monkeypatch, "j1")
        monkeypatch.setenv("MALLETRAIN_DAEMON_ID", "d1")
        first = Snapshot(facts={"who": "d1"})
        assert first.save()
        assert Snapshot(path, facts={"who": "d1"}).save()
        monkeypatch.setenv("MALLETRAIN_DAEMON_ID", "d2")
        facts = {}
        own = Snapshot(facts=facts)
        assert not own.restore()
        assert own.path != first.path
        of_another = "belongs to job j1 of another daemon .d1., and this is job j1"
        with pytest.raises(SnapshotError, match=of_another) as caught:
            Snapshot(path, facts=facts).restore()
        assert f"--resume-from {path}" in str(caught.value)
        with pytest.raises(SnapshotError, match="not overwritten"):
            Snapshot(path, facts=facts).save()
        assert facts == {}


def test_to_go_on_from_a_job_is_to_go_on_from_that_of_the_own_daemon(tmp_path, monkeypatch):
    with as_worker(monkeypatch):
        for daemon in ("d1", "d2", ""):
            monkeypatch.setenv("MALLETRAIN_DAEMON_ID", daemon)
            be(monkeypatch, "j1", daemon)
            assert Snapshot(facts={"who": daemon}).save()
        be(monkeypatch, "j2")
        monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j1")
        facts = {}
        monkeypatch.setenv("MALLETRAIN_DAEMON_ID", "d2")
        assert Snapshot(facts=facts).restore()
        assert facts == {"who": "d2"}
        monkeypatch.setenv("MALLETRAIN_DAEMON_ID", "d3")
        with pytest.raises(SnapshotError, match=r"no snapshot of job j1 .*another daemon, or"):
            Snapshot(facts=facts).restore()
        path = owner.path_of("j1", daemon="d1")
        monkeypatch.setenv("MALLETRAIN_RESUME_FROM", path)
        assert Snapshot(facts=facts).restore()
        assert facts == {"who": "d1"}


def test_a_folder_with_a_jobs_id_as_its_name_is_not_what_is_gone_on_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "j1").mkdir()
    own = tmp_path / "malletrain-snapshots" / "j1-train-00000000" / "snapshot.pt"
    own.parent.mkdir(parents=True)
    own.touch()
    assert owner.path_of("j1") == str(own)
    assert file_of("j1") is None
    (tmp_path / "checkpoint-500").mkdir()
    assert owner.path_of("checkpoint-500") == file_of("checkpoint-500")


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
    program = (
        "import runpy, sys; sys.argv[0] = 'train.py'; runpy.run_path('train.py', None, '__main__')"
    )
    environment = {env.JOB: "j1", env.GENERATION: str(number), "RANK": "0"}
    arguments = [*arguments, "hydra.job.chdir=true"]
    ran = forked_programs.run(program, *arguments, folder=folder, environment=environment)
    assert not ran.code, ran.errors
    lines = [line.split("=") for line in ran.output.splitlines() if "snapshot.pt=" in line]
    return lines, ran.errors


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
