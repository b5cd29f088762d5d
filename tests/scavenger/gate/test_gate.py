"""The lease gate as a process, as sudo starts it, on imitated commands."""

import os
import pwd

import pytest

from scavenger.gate.main import EXIT_REFUSED, check_jobs, environment_of, main
from scavenger.gate.rules import GateClosed, gated, read_rules
from scavenger.interface import LeaseRequest, LeaseState, SchedulerError
from scavenger.slurm.job import batch_script, sbatch
from tests.scavenger.gate.gate_world import TEMPLATES, GateWorld, lease_spec, settings
from tests.scavenger.pbs.fake_pbs import FakePbs
from tests.scavenger.slurm import slurm_world
from tests.scavenger.slurm.slurm_world import PREFIX

ME = pwd.getpwuid(os.getuid()).pw_name


def submission(**env):
    one = lease_spec(**env)
    return sbatch(settings(), one, False), batch_script(
        TEMPLATES["slurm"], one.argv, one.env, False
    )


def test_a_lease_is_submitted_with_an_environment_made_anew(tmp_path):
    world = GateWorld(tmp_path / "gate")
    world.tools.runs("sbatch", 'env >"$here/env"; pwd >"$here/pwd"; echo 7; exit 0')
    argv, script = submission()
    stained = {"SBATCH_PARTITION": "batch", "LD_LIBRARY_PATH": "/tmp", "HOME": "/tmp", "X": "1"}
    tried = world.run("--try", *argv, script=script, **stained)
    assert (tried.returncode, tried.stdout, tried.stderr) == (0, b"", b"")
    assert not world.tools.calls()
    made = world.run(*argv, script=script, **stained)
    assert (made.returncode, made.stdout, made.stderr) == (0, b"7\n", b"")
    assert world.tools.stdin("sbatch") == script
    [call] = world.tools.calls()
    assert call == " ".join(argv)
    variables = dict(
        line.split("=", 1) for line in (world.tools.root / "env").read_text().splitlines()
    )
    assert variables["SLURM_CONF"] == "/etc/slurm.conf"
    assert variables["PATH"] == "/usr/bin:/bin"
    assert variables["HOME"] == os.path.expanduser("~" + variables["USER"])
    assert not stained.keys() & variables.keys() - {"HOME"}
    assert "LC_ALL" not in variables, "it would be that of the lease, and of its jobs"
    assert (world.tools.root / "pwd").read_text() == "/\n"


def test_what_is_no_lease_is_not_submitted(tmp_path):
    world = GateWorld(tmp_path / "gate")
    argv, script = submission()
    other = script.replace(b"malletrain.agent", b"malletrain.other")
    refused = world.run(*argv, script=other)
    assert (refused.returncode, refused.stdout) == (EXIT_REFUSED, b"")
    assert refused.stderr.startswith(b"malletrain-lease: A lease runs /opt/malletrain/bin/python")
    assert refused.stderr.count(b"\n") == 1
    assert not world.tools.calls()


@pytest.mark.parametrize(
    ("kind", "asks", "output", "passes"),
    [
        ("slurm", "squeue", "ann|malletrain-0a1b2c3d-l7\n", True),
        ("slurm", "squeue", "ann|malletrain-0a1b2c3d-l7\nann|thesis\n", False),
        ("slurm", "squeue", f"{ME}|malletrain-0a1b2c3d-l7\nthesis\n", False),
        ("slurm", "squeue", f"{ME}|proj42_malletrain-0a1b2c3d-l7\n", True),
        ("slurm", "squeue", f"{ME}|[p] malletrain-0a1b2c3d-l1-3+5 (x)\n", True),
        ("slurm", "squeue", "ann|proj42_malletrain-0a1b2c3d-l7\n", False),
        ("slurm", "squeue", f"{ME}|post-malletrain-l7\n", False),
        ("slurm", "squeue", f"{ME}|my-malletrain-0a1b2c3d-thesis\n", False),
        ("slurm", "squeue", f"{ME}|thesis|malletrain-0a1b2c3d-l7x\n", False),
        ("slurm", "squeue", "", True),
        ("pbs", "qstat", "Job Id: 12.s\x1fJob_Name=malletrain-0a1b2c3d-l7\x1fqueue=q\n", True),
        ("pbs", "qstat", "Job Id: 12.s\x1fJob_Name=thesis\x1fqueue=q\n", False),
        ("pbs", "qstat", "Job Id: 12.s\x1fqueue=q\n", False),
        ("pbs", "qstat", "Job Id: 13.s\x1fJob_Name=malletrain-0a1b2c3d-l7\n", False),
        ("pbs", "qstat", "garbage", False),
        ("pbs", "qstat", "", False),
    ],
)
def test_only_jobs_with_the_name_of_a_lease_are_ended(kind, asks, output, passes, tmp_path):
    world = GateWorld(tmp_path / "gate", kind)
    world.tools.answers(asks, output)
    assert may_end(world) == passes
    assert len(world.tools.calls(asks)) == 1


def test_each_of_several_jobs_of_pbs_must_be_a_lease(tmp_path):
    """Its JSON shows the first of several only: who asked for it ended all others unseen."""
    pbs, gate = FakePbs(tmp_path / "pbs"), GateWorld(tmp_path / "gate", "pbs")
    try:
        for name in ("qstat", "qdel"):
            gate.tools.runs(name, f'exec {pbs.tools.root}/{name} "$@"')
        leases = [pbs.submit("sleep 600", "-N", f"malletrain-0a1b2c3d-l{i}") for i in (1, 2)]
        own = pbs.submit("sleep 600", "-N", "thesis")
        refused = gate.run("qdel", *leases, own, **pbs.environment)
        assert refused.returncode == EXIT_REFUSED
        assert b'"thesis" is the name of no lease: it is not ended.' in refused.stderr
        assert not gate.tools.calls("qdel")
        ended = gate.run("qdel", "99.pbs0", *leases, **pbs.environment)
        assert b"Unknown Job Id 99.pbs0" in ended.stderr
        pbs.until(lambda: not pbs.leases(), "both leases end")
        assert own in pbs.jobs("Q", "R")
        again = gate.run("qdel", leases[0], **pbs.environment)
        assert again.returncode != EXIT_REFUSED
    finally:
        pbs.stop()


def test_pbs_is_told_of_one_job_at_a_time(tmp_path):
    """Its server dies of one qdel that names an ended job behind one that runs."""
    pbs, gate = FakePbs(tmp_path / "pbs"), GateWorld(tmp_path / "gate", "pbs")
    try:
        for name in ("qstat", "qdel"):
            gate.tools.runs(name, f'exec {pbs.tools.root}/{name} "$@"')
        first, gone, last = (
            pbs.submit("sleep 600", "-N", f"malletrain-0a1b2c3d-l{i}") for i in (1, 2, 3)
        )
        assert gate.run("qdel", gone, **pbs.environment).returncode == 0
        pbs.until(lambda: gone not in pbs.leases(), "one has ended")
        done = gate.run("qdel", first, gone, last, **pbs.environment)
        assert done.returncode not in (0, EXIT_REFUSED), "the status of the one that had ended"
        assert done.stderr.count(b"Job has finished") == 1
        assert gate.tools.calls("qdel")[-3:] == [f"qdel {job}" for job in (first, gone, last)]
        pbs.until(lambda: not pbs.leases(), "the others end, and PBS lives")
    finally:
        pbs.stop()


@pytest.mark.parametrize(
    ("complaint", "passes"),
    [
        ("slurm_load_jobs error: Invalid job id specified", True),
        ("slurm_load_jobs error: Unable to contact slurm controller", False),
        ("", False),
    ],
)
def test_jobs_that_nobody_knows_may_be_ended_and_those_that_nobody_tells_of_not(
    complaint, passes, tmp_path
):
    world = GateWorld(tmp_path / "gate")
    world.tools.fails("squeue", complaint)
    assert may_end(world) == passes


def may_end(world):
    """Whether a job gets through that the scheduler is asked for."""
    rules = world.rules()
    verb, job = ("scancel", "12.3") if world.kind == "slurm" else ("qdel", "12.s")
    try:
        check_jobs(gated([verb, job], rules), rules, environment_of(rules))
    except (GateClosed, SchedulerError):
        return False
    return True


@pytest.mark.parametrize("before", ["", "proj42_"])
def test_the_scavenger_asks_and_ends_through_the_gate(before, tmp_path):
    """Nothing that it says of a lease of another user is refused, and nothing goes by it."""
    slurm = slurm_world.World(tmp_path)
    gate = GateWorld(tmp_path / "gate", options=["--exclusive", "--mem=0"])
    one = slurm.ready(submit_as=gate.prefix())
    gate.script.write_text(one.settings.template)
    if partition := one.settings.lease.partition:
        gate.write(options=["--exclusive", "--mem=0", f"--partition={partition}"])
    gate.tools.runs("sbatch", "echo 7; exit 0")
    gate.tools.answers("squeue", f"{ME}|{before}{PREFIX}l1\n")
    lease = lease_spec("l1", "n1")
    [taken] = one.take([LeaseRequest("l1", "n1", lease.argv, lease.env, owner="ann")])
    assert (taken.state, taken.reason) == (LeaseState.PENDING, "")
    slurm.queue(
        slurm_world.job(
            "RUNNING",
            7,
            f"{before}{PREFIX}l1",
            nodes="n1",
            user="ann",
            end=slurm.now + 999,
            partition="preemptable",
        )
    )
    one.poll()
    one.give_back([taken])
    assert gate.tools.calls("scancel") == ["scancel 7"]
    assert not slurm.tools.calls("sbatch") + slurm.tools.calls("scancel")


def closed(world, capfd, *words):
    """Why a command does not get through."""
    assert main(words or ("scancel", "1"), world.path, os.getuid()) == EXIT_REFUSED
    return capfd.readouterr().err.removeprefix("malletrain-lease: ").strip()


@pytest.mark.parametrize("which", ["path", "script", "command", "folder"])
def test_rules_that_others_can_write_are_none(which, tmp_path, capfd):
    world = GateWorld(tmp_path / "gate")
    world.rules()
    changed = {
        "path": world.path,
        "script": world.script,
        "command": world.tools.root / "scancel",
        "folder": world.root,
    }[which]
    changed.chmod(changed.stat().st_mode | 0o020)
    assert closed(world, capfd).startswith(f"Others than root can write {changed} (mode 0")
    changed.chmod(changed.stat().st_mode & ~0o022)
    world.rules()
    nobody = os.getuid() + 7
    if os.getuid() == 0:
        os.chown(changed, nobody, -1)
        sentence = f"{changed} belongs to user {nobody}; it must be root's."
        assert closed(world, capfd) == sentence
    else:
        with pytest.raises(GateClosed, match="it must be root's"):
            read_rules(world.path, nobody)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"kind": "lsf"}, "kind must be one of slurm, pbs."),
        ({"agent": ["python"]}, "agent must begin with the full path of a program."),
        ({"agent": []}, "agent must begin with the full path of a program."),
        ({"agent": "x"}, "agent is a str, which it cannot be."),
        ({"agent": [1]}, "agent must be a list of texts."),
        ({"prefix": ""}, "prefix must have four characters at least."),
        ({"script": "lease.sh"}, '"lease.sh" is no full path of a file.'),
        ({"least_uid": True}, "least_uid is a bool, which it cannot be."),
        ({"option": ["x"]}, "has a key option; there are kind, agent, script, prefix, options"),
        ({"least_uid": 2**31}, f"User {os.getuid()} has no leases; least_uid"),
    ],
)
def test_rules_that_make_no_sense_are_told(rules, why, tmp_path, capfd):
    world = GateWorld(tmp_path / "gate")
    world.write(**rules)
    assert why in closed(world, capfd)


def test_no_rules_no_command_and_a_file_that_is_none(tmp_path, capfd):
    world = GateWorld(tmp_path / "gate")
    assert closed(world, capfd, "--try") == "Say which command is to be run."
    assert "is not let through" in closed(world, capfd, "id")
    world.path.write_text("kind = slurm")
    assert "is no TOML" in closed(world, capfd)
    world.path.unlink()
    assert closed(world, capfd) == f"{world.path} cannot be read: No such file or directory."


def test_a_script_that_is_not_that_of_leases_is_told(tmp_path, capfd):
    world = GateWorld(tmp_path / "gate")
    world.script.write_text("#!/bin/sh\nexec true\n")
    sentence = f"{world.script} is no batch script of leases: it has no line #MALLETRAIN-LEASE."
    assert closed(world, capfd, "sbatch") == sentence
