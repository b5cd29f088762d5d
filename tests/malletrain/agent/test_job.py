"""A job's life on a node: the agent as a process, driven over the wire by a small daemon, with a
launcher that needs no torch.
"""

from __future__ import annotations

import sys

import pytest

from malletrain.agent.jobrun import LATE_FOLDER_STARTS, OWN_DRAIN
from malletrain.protocol import messages, wire
from tests.malletrain.agent.launchers import OBEDIENT, assign, is_clean, running
from tests.malletrain.agent.node_side import eventually, fake_python, spec
from tests.waiting import NEVER_S, PATIENCE_S

pytestmark = pytest.mark.slow

HURRIED = "end.receive(0.0 if 5 < step < 1000 else 0.02)"
"""In place of the obedient launcher's pause."""

LATE = """
while not os.path.exists(os.path.join(order.spec.workdir, "come")):
    time.sleep(0.02)
"""
"""Before a launcher that says nothing until the test lets it."""


def test_a_daemon_that_is_back_understands_the_answer_to_a_drain_of_the_agents_own():
    # A simulation showed it: the number was none that a message may hold.
    message = messages.Drained("j1", 1, True, "", OWN_DRAIN)
    assert wire.decode(wire.encode(message)) == message
    assert OWN_DRAIN > 1e11, "no time in seconds, by which daemons number theirs"


# --- a job's life ---


def test_a_job_from_assign_to_goodbye(daemon, start, tmp_path):
    agent = start()
    hello = daemon.expect("n0", messages.Hello)
    assert (hello.host, hello.pid, hello.assignment, hello.gone_in_s) == (
        "127.0.0.1",
        agent.process.pid,
        None,
        None,
    )
    running(daemon, tmp_path)
    daemon.send("n0", messages.Round("j1", 2, 1, 2, "127.0.0.1", 1234))
    daemon.expect("n0", messages.Phase, phase="running", generation=2)
    (tmp_path / "succeed").touch()
    daemon.expect("n0", messages.Phase, phase="succeeded", generation=2)
    daemon.send("n0", messages.Release("j1", 5.0))
    daemon.expect("n0", messages.Released, job="j1")
    assert not agent.job_pids()
    for generation, rank in ((1, 0), (2, 1)):
        daemon.until(
            lambda of=(generation, rank): (
                daemon.logs.get(("j1", of[0], f"rank{of[1]}")) == b"line of round %d\n" % of[0]
            ),
            f"the log of round {generation}",
        )
    daemon.until(
        lambda: b"launcher speaking" in daemon.logs.get(("j1", 0, "launcher"), b""),
        "the launcher's log",
    )
    daemon.send("n0", messages.Goodbye("thanks"))
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_counts_are_coalesced_and_metrics_are_not(daemon, start, tmp_path):
    """The script reports faster than the agent sends on, however slow both are: it makes five steps
    and then a thousand in one go.
    """
    start()
    running(daemon, tmp_path, OBEDIENT.replace("end.receive(0.02)", HURRIED))
    daemon.expect("n0", messages.Metric, name="accuracy", value=0.5)

    def counts():
        return [m for _, m in daemon.seen if isinstance(m, messages.Progress)]

    daemon.until(lambda: counts() and counts()[-1].steps >= 1000, "all that it has reported")
    assert all(c.job == "j1" and c.generation == 1 and c.samples == c.steps * 32 for c in counts())
    steps = [c.steps for c in counts()]
    assert steps == sorted(set(steps))
    assert len(steps) < 500


def test_the_jobs_environment(daemon, start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("WORLD_SIZE", "9")
    agent = start()
    python = fake_python(tmp_path, OBEDIENT)
    daemon.send(
        "n0",
        messages.Assign(
            "j1", spec(tmp_path, python=python, max_nodes=4, nproc_per_node=2, env={"MINE": "a b"})
        ),
    )
    daemon.expect("n0", messages.Phase, phase="ready")
    daemon.send("n0", messages.Round("j1", 1, 0, 1))
    text = eventually(
        lambda: (tmp_path / "env-1").exists() and (tmp_path / "env-1").read_text(),
        "the environment",
    )
    environment = dict(line.partition("=")[::2] for line in text.splitlines())
    expected = {
        "MALLETRAIN_JOB": "j1",
        "MALLETRAIN_GENERATION": "1",
        "MALLETRAIN_NODE": "n0",
        "MALLETRAIN_MAX_WORLD_SIZE": "8",
        "MINE": "a b",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "MALLETRAIN_LEASE": agent.mark.partition("=")[2],
    }
    assert expected.items() <= environment.items()
    assert (
        not {"SLURM_PROCID", "SLURM_JOB_ID", "WORLD_SIZE", "MALLETRAIN_LEASE_KEY"}
        & environment.keys()
    )


@pytest.mark.parametrize(("gpus", "processes"), [("3", 3), ("0", 1)])
def test_the_gpus_of_the_lease_decide_the_processes_unless_the_job_does(
    daemon, start, tmp_path, gpus, processes
):
    start(gpus=gpus)
    daemon.send(
        "n0",
        messages.Assign(
            "j1",
            spec(tmp_path, python=fake_python(tmp_path, OBEDIENT), max_nodes=4, nproc_per_node=0),
        ),
    )
    daemon.expect("n0", messages.Phase, phase="ready")
    daemon.send("n0", messages.Round("j1", 1, 0, 1))
    text = eventually(
        lambda: (tmp_path / "env-1").exists() and (tmp_path / "env-1").read_text(),
        "the environment",
    )
    assert f"MALLETRAIN_MAX_WORLD_SIZE={4 * processes}" in text.splitlines()


def test_a_failed_worker_is_reported_with_the_end_of_its_log(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    (tmp_path / "fail").touch()
    phase = daemon.expect("n0", messages.Phase, phase="failed", generation=1)
    assert [(f.rank, f.exitcode, f.tail) for f in phase.assignment.failures] == [
        (0, 1, "line of round 1")
    ]
    daemon.send("n0", messages.Round("j1", 2, 0, 1))
    again = daemon.expect("n0", messages.Phase, phase="running", generation=2)
    assert again.assignment.failures == ()


def test_a_launcher_that_ends_is_reported_and_can_be_started_again(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    (tmp_path / "leave").touch()
    phase = daemon.expect("n0", messages.Phase, phase="exited")
    assert "left of its own accord" in phase.tail
    assert not agent.job_pids()
    since = len(daemon.seen)
    assign(daemon, tmp_path, OBEDIENT)
    daemon.expect("n0", messages.Phase, phase="ready", since=since)
    daemon.send("n0", messages.Round("j1", 2, 0, 1))
    daemon.expect("n0", messages.Phase, phase="running", generation=2)


KILLED = OBEDIENT.replace('sys.exit("left of its own accord")', "os.kill(os.getpid(), 9)")
"""A launcher that is killed where the obedient one leaves."""
FAILS_AND_IS_KILLED = OBEDIENT.replace(
    "newer = [next_message(messages.Round)]",
    """while not os.path.exists(os.path.join(order.spec.workdir, "kill")):
                    end.receive(0.02)
                os.kill(os.getpid(), 9)""",
)
"""One that is killed after its worker has failed."""
IGNORES_RELEASE = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ready")
join()
while True:
    time.sleep(0.02)
"""


def test_a_launcher_that_is_killed_while_its_workers_run_is_a_failure(daemon, start, tmp_path):
    start()
    assign(daemon, tmp_path, KILLED, nproc_per_node=2)
    daemon.expect("n0", messages.Phase, phase="ready")
    daemon.send("n0", messages.Round("j1", 1, 3, 4))
    daemon.expect("n0", messages.Phase, phase="running")
    (tmp_path / "leave").touch()
    (failure,) = daemon.expect("n0", messages.Phase, phase="exited").assignment.failures
    assert (failure.rank, failure.exitcode, failure.tail) == (6, -9, "")
    assert failure.cause == "The launcher was killed; often the node ran out of memory."
    assert not failure.by_agent


def test_a_launcher_that_is_killed_after_its_worker_failed_keeps_that_failure(
    daemon, start, tmp_path
):
    start()
    running(daemon, tmp_path, FAILS_AND_IS_KILLED)
    (tmp_path / "fail").touch()
    failed = daemon.expect("n0", messages.Phase, phase="failed")
    (tmp_path / "kill").touch()
    exited = daemon.expect("n0", messages.Phase, phase="exited")
    assert exited.assignment.failures == failed.assignment.failures


def test_a_launcher_that_the_agent_kills_at_a_release_is_no_failure(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, IGNORES_RELEASE)
    since = len(daemon.seen)
    daemon.send("n0", messages.Release("j1", 0.0))
    daemon.expect("n0", messages.Released, job="j1")
    assert not [m for _, m in daemon.seen[since:] if isinstance(m, messages.Phase)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"python": "/no/such/python"}, "/no/such/python: No such file or directory"),
        ({"setup": "module load nothing_like_this"}, "not found"),
        ({"workdir": "/no/such/directory"}, "/no/such/directory"),
        ({"setup": "if"}, "syntax error"),
    ],
)
def test_a_launcher_that_cannot_start_says_why(daemon, start, tmp_path, fields, words):
    start()
    values = {
        "name": "x",
        "owner": "me",
        "script": "train.py",
        "workdir": str(tmp_path),
        "python": sys.executable,
        **fields,
    }
    daemon.send("n0", messages.Assign("j1", messages.JobSpec(**values)))
    phase = daemon.expect("n0", messages.Phase, phase="exited")
    assert words in phase.tail
    causes = [f.cause for f in phase.assignment.failures]
    assert causes == (
        ["There is no folder /no/such/directory on this node."] if "workdir" in fields else []
    )


def has_failed_to_start(agent):
    logs = agent.run_dir.rglob("launcher.log")
    return any("cannot be started" in log.read_text() for log in logs)


def test_a_working_directory_that_is_mounted_late_is_waited_for(daemon, start, tmp_path):
    agent, folder = start(), tmp_path / "mounted-late"
    python = fake_python(tmp_path, OBEDIENT)
    daemon.send("n0", messages.Assign("j1", spec(folder, python=python)))
    eventually(lambda: has_failed_to_start(agent), "a start that failed")
    folder.mkdir()
    daemon.expect("n0", messages.Phase, phase="ready")


def test_a_later_try_does_not_wait_for_the_working_directory_again(daemon, start, tmp_path):
    agent, missing = start(), tmp_path / "missing"
    daemon.send("n0", messages.Assign("j1", spec(missing)))
    daemon.expect("n0", messages.Phase, phase="exited")
    since = len(daemon.seen)
    daemon.send("n0", messages.Assign("j1", spec(missing)))
    daemon.expect("n0", messages.Phase, phase="exited", since=since)
    (log,) = agent.run_dir.rglob("launcher.log")
    assert log.read_text().count("cannot be started") == LATE_FOLDER_STARTS + 1


def test_a_job_that_waits_for_its_working_directory_can_be_released(daemon, start, tmp_path):
    agent = start()
    daemon.send("n0", messages.Assign("j1", spec(tmp_path / "missing")))
    eventually(lambda: has_failed_to_start(agent), "a start that failed")
    daemon.send("n0", messages.Release("j1", 5.0))
    daemon.expect("n0", messages.Released, job="j1")
    assert not agent.job_pids()


def test_assigning_twice_starts_one_launcher(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    assign(daemon, tmp_path, OBEDIENT)
    daemon.until(
        lambda: (
            sum(
                isinstance(m, messages.Phase) and m.assignment.phase == "running"
                for _, m in daemon.seen
            )
            == 2
        ),
        "an answer",
    )
    assert (
        sum(isinstance(m, messages.Phase) and m.assignment.phase == "ready" for _, m in daemon.seen)
        == 1
    )


def test_another_job_starts_when_the_first_has_left(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.send("n0", messages.Release("j1", 5.0))
    assign(daemon, tmp_path, OBEDIENT, job="j2")
    daemon.expect("n0", messages.Phase, job="j2", phase="ready")
    released = daemon.seen.index(("n0", messages.Released("j1")))
    second = [
        i
        for i, (_, m) in enumerate(daemon.seen)
        if isinstance(m, messages.Phase) and m.assignment.job == "j2"
    ]
    assert released < second[0]


def test_another_job_is_refused_while_one_is_here(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    since = len(daemon.seen)
    assign(daemon, tmp_path, OBEDIENT, job="j2")
    assert daemon.expect("n0", messages.Phase, since=since).assignment == messages.Assignment(
        "j1", "running", 1
    )


def test_releasing_what_is_not_here_is_answered(daemon, start):
    start()
    daemon.send("n0", messages.Release("j9", 1.0))
    daemon.expect("n0", messages.Released, job="j9")


# --- rounds ---


def test_old_rounds_are_dropped_and_the_newest_waits_for_the_launcher(daemon, start, tmp_path):
    start()
    assign(daemon, tmp_path, LATE + OBEDIENT)
    for generation in (5, 3, 6, 4):  # before the launcher is up
        daemon.send("n0", messages.Round("j1", generation, 0, 1))
    daemon.send("n0", messages.Release("j9", 0.0))
    daemon.expect("n0", messages.Released, job="j9")  # and with it all before
    (tmp_path / "come").touch()
    daemon.expect("n0", messages.Phase, phase="running", generation=6)
    daemon.send("n0", messages.Round("j1", 6, 1, 2))
    daemon.send("n0", messages.Round("j1", 2, 1, 2))
    daemon.send("n0", messages.Round("j1", 7, 0, 1))
    daemon.expect("n0", messages.Phase, phase="running", generation=7)
    taken = [
        m.assignment.generation
        for _, m in daemon.seen
        if isinstance(m, messages.Phase) and m.assignment.phase == "running"
    ]
    assert taken == [6, 7]


def test_the_address_of_the_store_is_said_again_when_asked_again_and_after_a_greeting(
    daemon, start, tmp_path
):
    start()
    body = """
    say("ready")
    message = join()
    end.send(messages.StoreUp(order.job, generation, "127.0.0.1", 4321))
    next_message(messages.Round)
    """
    assign(daemon, tmp_path, body)
    daemon.send("n0", messages.Round("j1", 1, 0, 2))
    daemon.expect("n0", messages.StoreUp, generation=1, port=4321)
    since = len(daemon.seen)
    daemon.send("n0", messages.Round("j1", 1, 0, 2))
    daemon.expect("n0", messages.StoreUp, generation=1, port=4321, since=since)
    since = len(daemon.seen)  # what was said while the connection broke is lost
    daemon.send("n0", messages.WhoAreYou(daemon.boot))
    daemon.expect("n0", messages.StoreUp, generation=1, port=4321, since=since)


def test_a_launcher_that_nobody_gives_a_round_ends_with_a_sentence(daemon, start, tmp_path):
    start()
    assign(daemon, tmp_path, 'say("ready")\njoin()\n', join_timeout_s=0.1)
    assert (
        "formed no round of job j1 with this node within 0.3 s"
        in daemon.expect("n0", messages.Phase, phase="exited").tail
    )


# --- drains ---


def test_a_drain_is_served_by_the_worker(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.expect("n0", messages.Metric)  # sent after Capable
    daemon.send("n0", messages.Drain("j1", 1, 1, NEVER_S))
    assert daemon.expect("n0", messages.Drained, generation=1).saved


GOES_BY_ITSELF = OBEDIENT.replace("served = 0", "served, pending = 0, []").replace(
    "        if newer:\n",
    "        pending = newer or pending\n"
    "        if pending and not flags.drain_request():\n"
    "            newer, pending = pending, []\n",
)
"""As live workers do, and not while they wait to be stopped."""


def test_a_round_of_live_workers_takes_back_the_drain_that_it_overtakes(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, GOES_BY_ITSELF, mode="live")
    daemon.expect("n0", messages.Metric)
    daemon.send("n0", messages.Drain("j1", 1, 1, NEVER_S))
    assert daemon.expect("n0", messages.Drained, generation=1).saved
    daemon.send("n0", messages.Round("j1", 2, 0, 1))
    daemon.expect("n0", messages.Phase, phase="running", generation=2)


def test_the_worker_hears_how_soon_a_loss_is_expected_and_which_batch_suits_it(
    daemon, start, tmp_path
):
    start()
    running(daemon, tmp_path)
    daemon.send("n0", messages.ExpectLoss("another", 1.0))
    daemon.send("n0", messages.ExpectLoss("j1", 450.0))
    assert daemon.expect("n0", messages.Metric, name="loss").value == 450e3
    daemon.send("n0", messages.AdviseBatch("another", 64))
    daemon.send("n0", messages.AdviseBatch("j1", 512))
    assert daemon.expect("n0", messages.Metric, name="batch").value == 512


def test_a_drain_without_a_worker_that_can_is_answered_at_once(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, 'say("ready")\njoin()\nnext_message(messages.Round)\n')
    daemon.send("n0", messages.Drain("j1", 1, 1, 3600.0))
    answer = daemon.expect("n0", messages.Drained, generation=1)
    assert (answer.saved, answer.sentence) == (False, "No worker here takes snapshots on request.")
    since = len(daemon.seen)
    daemon.send("n0", messages.Drain("j1", 7, 2, 3600.0))  # a round that is not here
    assert not daemon.expect("n0", messages.Drained, since=since).saved


def test_a_drain_ends_with_its_time_limit(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, OBEDIENT.replace("if number and", "if False and"))
    daemon.expect("n0", messages.Metric)
    daemon.send("n0", messages.Drain("j1", 1, 1, 0.3))
    answer = daemon.expect("n0", messages.Drained)
    assert (answer.saved, answer.sentence) == (False, "No snapshot within 0.3 s.")
