"""The agent as a process: driven over the wire by a small daemon, with a launcher that needs no torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain import wire
from tests.malletrain.node_side import AgentProcess, FakeDaemon, alive, eventually, fake_python, processes_with, spec

# A launcher whose workers are itself: joins rounds for ever, prints to the log of its rank and answers drains.
OBEDIENT = """
from malletrain import local_channel as local
out = local.Outbox(os.environ["MALLETRAIN_SOCKET"])
flags = local.FlagsReader(os.environ["MALLETRAIN_FLAGS"])
say("ready")
def who():
    return local.Sender(order.job, generation, round_.group_rank, os.getpid())
round_ = join()
open(os.path.join(order.spec.workdir, f"env-{generation}"), "w").write("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
print("launcher speaking", flush=True)
served = 0
while True:
    with open(log_path(round_.group_rank), "ab") as log:
        log.write(b"line of round %d\\n" % generation)
    out.send(local.encode(local.Capable(who())))
    out.send(local.encode(local.Metric(who(), "accuracy", 0.5)))
    for step in range(1, 10**9):
        out.send(local.encode(local.Progress(who(), step * 32.0, step, 32.0, 1.0, 1.0 + step)))
        number = flags.drain_request()
        if number and number != served:
            served = number
            out.send(local.encode(local.Drained(who(), number, True)))
        newer = [m for m in end.receive(0.02) if isinstance(m, wire.Round)]
        for name in ("succeed", "fail", "leave"):
            if os.path.exists(os.path.join(order.spec.workdir, name)):
                os.unlink(os.path.join(order.spec.workdir, name))
                if name == "leave":
                    sys.exit("left of its own accord")
                if name == "succeed":
                    say("succeeded")
                else:
                    say("failed", wire.Failure(round_.group_rank, 1, time.time()))
                newer = [next_message(wire.Round)]
        if newer:
            round_ = newer[-1]
            generation = round_.generation
            say("running")
            break
"""

# A launcher with a double-forked helper that is deaf to SIGTERM, as is the launcher itself.
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
say("ready")
while True:
    end.receive(1.0)
"""


@pytest.fixture
def daemon():
    daemon = FakeDaemon()
    yield daemon
    daemon.close()


@pytest.fixture
def start(daemon, tmp_path):
    """Start agents; at the end none of their processes may be left."""
    agents = []

    def start_agent(node="n0", **options):
        agents.append(AgentProcess(daemon, node, tmp_path, **options))
        daemon.until(lambda: node in daemon.nodes, "the agent says hello")
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.kill()
        eventually(lambda agent=agent: not processes_with(agent.mark), f"nothing of the agent on {agent.node} is left")


def assign(daemon, tmp_path, body, job="j1", node="n0", **fields):
    settings = {name: fields.pop(name) for name in ("stop_grace_s", "join_timeout_s") if name in fields}
    daemon.send(node, wire.Assign(job, spec(tmp_path, python=fake_python(tmp_path, body), **fields), **settings))


def running(daemon, tmp_path, body=OBEDIENT, job="j1", generation=1, node="n0"):
    """Bring a job into its first round."""
    assign(daemon, tmp_path, body, job, node)
    daemon.expect(node, wire.Phase, phase="ready", job=job)
    daemon.send(node, wire.Round(job, generation, 0, 1))
    daemon.expect(node, wire.Phase, phase="running", job=job, generation=generation)


def is_clean(agent):
    return not agent.left() and not list(agent.run_dir.iterdir())


# --- a job's life ---


def test_a_job_from_assign_to_goodbye(daemon, start, tmp_path):
    agent = start()
    hello = daemon.expect("n0", wire.Hello)
    assert (hello.host, hello.pid, hello.assignment, hello.leaving_in_s) == ("127.0.0.1", agent.process.pid, None, None)
    running(daemon, tmp_path)
    daemon.send("n0", wire.Round("j1", 2, 1, 2, "127.0.0.1", 1234))
    daemon.expect("n0", wire.Phase, phase="running", generation=2)
    (tmp_path / "succeed").touch()
    daemon.expect("n0", wire.Phase, phase="succeeded", generation=2)
    daemon.send("n0", wire.Release("j1", 5.0))
    daemon.expect("n0", wire.Released, job="j1")
    assert not agent.left()
    daemon.until(lambda: daemon.logs.get(("j1", 2, "rank1")) == b"line of round 2\n", "the log of the second round")
    daemon.until(lambda: b"launcher speaking" in daemon.logs.get(("j1", 0, "launcher"), b""), "the launcher's log")
    assert daemon.logs["j1", 1, "rank0"] == b"line of round 1\n"
    daemon.send("n0", wire.Goodbye("thanks"))
    assert agent.process.wait(20) == 0
    assert is_clean(agent)


def test_counts_are_coalesced_and_metrics_are_not(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.expect("n0", wire.Metric, name="accuracy", value=0.5)

    def counts():
        return [m for _, m in daemon.seen if isinstance(m, wire.Progress)]

    daemon.until(lambda: len(counts()) >= 4, "some counts")
    assert all(c.job == "j1" and c.generation == 1 and c.samples == c.steps * 32 for c in counts())
    steps = [c.steps for c in counts()]
    assert steps == sorted(set(steps))
    assert steps[-1] > 2 * len(steps)  # a report every 20 ms goes in, 5 a second at most come out


def test_the_jobs_environment(daemon, start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("WORLD_SIZE", "9")
    agent = start()
    python = fake_python(tmp_path, OBEDIENT)
    daemon.send("n0", wire.Assign("j1", spec(tmp_path, python=python, max_nodes=4, nproc_per_node=2, env={"MINE": "a b"})))
    daemon.expect("n0", wire.Phase, phase="ready")
    daemon.send("n0", wire.Round("j1", 1, 0, 1))
    text = eventually(lambda: (tmp_path / "env-1").exists() and (tmp_path / "env-1").read_text(), "the environment")
    environment = dict(line.partition("=")[::2] for line in text.splitlines())
    wanted = {
        "MALLETRAIN_JOB": "j1", "MALLETRAIN_GENERATION": "1", "MALLETRAIN_NODE": "n0", "MALLETRAIN_MAX_WORLD_SIZE": "8",
        "MINE": "a b", "SLURM_JOB_ID": "77", "PYTHONUNBUFFERED": "1", "MALLETRAIN_LEASE": agent.mark.partition("=")[2],
    }  # fmt: skip
    assert wanted.items() <= environment.items()
    assert not {"SLURM_PROCID", "WORLD_SIZE", "MALLETRAIN_KEY_FILE"} & environment.keys()


@pytest.mark.parametrize(("gpus", "processes"), [("3", 3), ("0", 1)])
def test_the_gpus_of_the_lease_decide_the_processes_unless_the_job_does(daemon, start, tmp_path, gpus, processes):
    start(gpus=gpus)
    daemon.send("n0", wire.Assign("j1", spec(tmp_path, python=fake_python(tmp_path, OBEDIENT), max_nodes=4, nproc_per_node=0)))
    daemon.expect("n0", wire.Phase, phase="ready")
    daemon.send("n0", wire.Round("j1", 1, 0, 1))
    text = eventually(lambda: (tmp_path / "env-1").exists() and (tmp_path / "env-1").read_text(), "the environment")
    assert f"MALLETRAIN_MAX_WORLD_SIZE={4 * processes}" in text.splitlines()


def test_a_failed_worker_is_reported_with_the_end_of_its_log(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    (tmp_path / "fail").touch()
    said = daemon.expect("n0", wire.Phase, phase="failed", generation=1)
    assert [(f.rank, f.exitcode, f.tail) for f in said.assignment.failures] == [(0, 1, "line of round 1")]
    daemon.send("n0", wire.Round("j1", 2, 0, 1))
    again = daemon.expect("n0", wire.Phase, phase="running", generation=2)
    assert again.assignment.failures == ()


def test_a_launcher_that_ends_is_reported_and_can_be_started_again(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    (tmp_path / "leave").touch()
    said = daemon.expect("n0", wire.Phase, phase="exited")
    assert "left of its own accord" in said.tail
    assert not agent.left()
    since = len(daemon.seen)
    assign(daemon, tmp_path, OBEDIENT)
    daemon.expect("n0", wire.Phase, phase="ready", since=since)
    daemon.send("n0", wire.Round("j1", 2, 0, 1))
    daemon.expect("n0", wire.Phase, phase="running", generation=2)


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
    values = {"name": "x", "owner": "me", "script": "train.py", "workdir": str(tmp_path), "python": sys.executable, **fields}
    daemon.send("n0", wire.Assign("j1", wire.JobSpec(**values)))
    assert words in daemon.expect("n0", wire.Phase, phase="exited").tail


def test_assigning_twice_starts_one_launcher(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    assign(daemon, tmp_path, OBEDIENT)
    daemon.until(lambda: sum(isinstance(m, wire.Phase) and m.assignment.phase == "running" for _, m in daemon.seen) == 2, "an answer")
    assert sum(isinstance(m, wire.Phase) and m.assignment.phase == "ready" for _, m in daemon.seen) == 1


def test_another_job_starts_when_the_first_has_left(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.send("n0", wire.Release("j1", 5.0))
    assign(daemon, tmp_path, OBEDIENT, job="j2")
    daemon.expect("n0", wire.Phase, job="j2", phase="ready")
    released = daemon.seen.index(("n0", wire.Released("j1")))
    second = [i for i, (_, m) in enumerate(daemon.seen) if isinstance(m, wire.Phase) and m.assignment.job == "j2"]
    assert released < second[0]


def test_another_job_is_refused_while_one_is_here(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    since = len(daemon.seen)
    assign(daemon, tmp_path, OBEDIENT, job="j2")
    assert daemon.expect("n0", wire.Phase, since=since).assignment == wire.Assignment("j1", "running", 1)


def test_releasing_what_is_not_here_is_answered(daemon, start):
    start()
    daemon.send("n0", wire.Release("j9", 1.0))
    daemon.expect("n0", wire.Released, job="j9")


# --- rounds ---


def test_old_rounds_are_dropped_and_the_newest_waits_for_the_launcher(daemon, start, tmp_path):
    start()
    assign(daemon, tmp_path, OBEDIENT)
    for generation in (5, 3, 6, 4):  # before the launcher is up
        daemon.send("n0", wire.Round("j1", generation, 0, 1))
    daemon.expect("n0", wire.Phase, phase="running", generation=6)
    daemon.send("n0", wire.Round("j1", 6, 1, 2))
    daemon.send("n0", wire.Round("j1", 2, 1, 2))
    daemon.send("n0", wire.Round("j1", 7, 0, 1))
    daemon.expect("n0", wire.Phase, phase="running", generation=7)
    taken = [m.assignment.generation for _, m in daemon.seen if isinstance(m, wire.Phase) and m.assignment.phase == "running"]
    assert taken == [6, 7]


def test_the_address_of_the_store_is_said_again_when_asked_again(daemon, start, tmp_path):
    start()
    body = """
    say("ready")
    message = join()
    end.send(wire.StoreUp(order.job, generation, "127.0.0.1", 4321))
    next_message(wire.Round)
    """
    assign(daemon, tmp_path, body)
    daemon.send("n0", wire.Round("j1", 1, 0, 2))
    daemon.expect("n0", wire.StoreUp, generation=1, port=4321)
    since = len(daemon.seen)
    daemon.send("n0", wire.Round("j1", 1, 0, 2))
    daemon.expect("n0", wire.StoreUp, generation=1, port=4321, since=since)


def test_a_launcher_that_nobody_gives_a_round_ends_with_a_sentence(daemon, start, tmp_path):
    start()
    assign(daemon, tmp_path, 'say("ready")\njoin()\n', join_timeout_s=0.1)
    assert "formed no round of job j1 with this node within 0.3 s" in daemon.expect("n0", wire.Phase, phase="exited").tail


# --- drains ---


def test_a_drain_is_served_by_the_worker(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.expect("n0", wire.Metric)  # sent after Capable
    daemon.send("n0", wire.Drain("j1", 1, 1, 20.0))
    assert daemon.expect("n0", wire.Drained, generation=1).saved


def test_a_drain_without_a_worker_that_can_is_answered_at_once(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, 'say("ready")\njoin()\nnext_message(wire.Round)\n')
    daemon.send("n0", wire.Drain("j1", 1, 1, 3600.0))
    answer = daemon.expect("n0", wire.Drained, generation=1)
    assert (answer.saved, answer.sentence) == (False, "No worker here takes snapshots on request.")
    since = len(daemon.seen)
    daemon.send("n0", wire.Drain("j1", 7, 2, 3600.0))  # a round that is not here
    assert not daemon.expect("n0", wire.Drained, since=since).saved


def test_a_drain_ends_with_its_time_limit(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, OBEDIENT.replace("if number and", "if False and"))
    daemon.expect("n0", wire.Metric)
    daemon.send("n0", wire.Drain("j1", 1, 1, 0.3))
    answer = daemon.expect("n0", wire.Drained)
    assert (answer.saved, answer.sentence) == (False, "No snapshot within 0.3 s.")


# --- the end, in all its ways ---


def test_a_release_leaves_nobody_behind(daemon, start, tmp_path):
    agent = start()
    assign(daemon, tmp_path, STUBBORN)
    daemon.expect("n0", wire.Phase, phase="ready")
    assert len(agent.left()) == 3  # keeper, launcher, the helper that forked twice
    daemon.send("n0", wire.Release("j1", 0.3))
    daemon.expect("n0", wire.Released)
    assert not agent.left()


@pytest.mark.parametrize("victim", ["agent", "keeper", "launcher"])
def test_sigkill_leaves_nobody_behind(daemon, start, tmp_path, victim):
    agent = start()
    assign(daemon, tmp_path, STUBBORN)
    daemon.expect("n0", wire.Phase, phase="ready")
    keeper = next(pid for pid in agent.left() if b"--keep" in Path(f"/proc/{pid}/cmdline").read_bytes())
    launcher = next(pid for pid in agent.left() if b"fake_python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"--keep")[0])
    os.kill({"agent": agent.process.pid, "keeper": keeper, "launcher": launcher}[victim], signal.SIGKILL)
    if victim != "agent":
        daemon.expect("n0", wire.Phase, phase="exited")
    eventually(lambda: not agent.left(), "nobody is left")


def test_what_a_killed_agent_left_on_disk_is_removed_by_the_next(daemon, start, tmp_path):
    first = start()
    running(daemon, tmp_path)
    assert list(first.run_dir.iterdir())
    first.kill()
    daemon.nodes.clear()
    second = start()
    daemon.send("n0", wire.Goodbye())
    assert second.process.wait(20) == 0
    assert is_clean(second)


def test_an_idle_agent_leaves_at_once_on_sigterm(daemon, start):
    agent = start(**{"grace-s": "600"})
    daemon.until(lambda: daemon.beats, "it knows that it is welcome")
    agent.signal(signal.SIGTERM)
    assert daemon.expect("n0", wire.Leaving).in_s == 600
    assert agent.process.wait(20) == 0


def test_an_agent_that_is_not_yet_known_says_hello_and_goodbye_in_one(daemon, tmp_path):
    agent = AgentProcess(daemon, "n0", tmp_path, **{"grace-s": "600"})
    eventually(lambda: daemon.socket.poll(0), "the agent speaks, and nobody answers")
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(20) == 0
    assert daemon.expect("n0", wire.Hello, leaving_in_s=None)
    daemon.until(lambda: any(isinstance(m, wire.Hello) and m.leaving_in_s for _, m in daemon.seen), "the news")


def test_a_preempted_agent_goes_on_until_the_daemon_has_moved_the_job(daemon, start, tmp_path):
    agent = start(**{"grace-s": "60"})
    running(daemon, tmp_path)
    daemon.expect("n0", wire.Metric)
    agent.signal(signal.SIGTERM)
    daemon.expect("n0", wire.Leaving)
    agent.signal(signal.SIGTERM)  # again, as some schedulers do
    daemon.send("n0", wire.Drain("j1", 1, 1, 20.0))
    assert daemon.expect("n0", wire.Drained).saved
    assert agent.left()
    daemon.send("n0", wire.Release("j1", 5.0))
    daemon.expect("n0", wire.Released)
    assert agent.process.wait(20) == 0
    assert is_clean(agent)


@pytest.mark.parametrize("answers", [True, False])
def test_a_preempted_agent_stops_in_time_by_itself(daemon, start, tmp_path, answers):
    agent = start(**{"grace-s": "2"})
    running(daemon, tmp_path)
    daemon.expect("n0", wire.Metric)
    if not answers:
        daemon.close()
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(20) == 0
    assert is_clean(agent)


# --- the daemon comes and goes ---


def test_training_goes_on_without_the_daemon_and_the_next_one_learns_everything(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    daemon.expect("n0", wire.Metric)
    before = agent.left()
    daemon.close()
    eventually(lambda: "is silent; training goes on" in agent.log.read_text(), "the agent notices")
    assert agent.left() == before
    (tmp_path / "succeed").touch()
    eventually(lambda: not (tmp_path / "succeed").exists(), "the workers end meanwhile")
    second = FakeDaemon(daemon.port, "boot-2", (daemon.public, daemon.secret))
    try:
        hello = second.expect("n0", wire.Hello)
        assert hello.assignment == wire.Assignment("j1", "succeeded", 1)
        second.expect("n0", wire.Metric, name="accuracy")
        second.expect("n0", wire.Progress)
        second.until(lambda: second.nodes and not second.socket.poll(0), "settled")
        second.send("n0", wire.Release("j1", 5.0))
        second.expect("n0", wire.Released)
        second.send("n0", wire.Goodbye())
        assert agent.process.wait(20) == 0
    finally:
        second.close()


def test_after_a_break_of_the_connection_the_agent_says_unasked_how_things_stand(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.close()
    (tmp_path / "succeed").touch()
    same = FakeDaemon(daemon.port, daemon.boot, (daemon.public, daemon.secret), heartbeat_s=60.0)
    same.asks = False
    try:
        same.until(lambda: [m for _, m in same.seen if assigned(m) == wire.Assignment("j1", "succeeded", 1)], "the news of the meantime")
    finally:
        same.close()


def assigned(message):
    return message.assignment if isinstance(message, wire.Hello | wire.Phase) else None


def test_a_daemon_that_forgot_the_agent_is_told_again(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    agent.signal(signal.SIGSTOP)  # as a suspended lease
    daemon.pump(0.2)
    daemon.names.clear()
    daemon.boot = "boot-2"
    since = len(daemon.seen)
    agent.signal(signal.SIGCONT)
    hello = daemon.expect("n0", wire.Hello, since=since)
    assert hello.assignment == wire.Assignment("j1", "running", 1)


def test_a_suspended_agent_leaves_the_node_and_registers_again_when_it_goes_on(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    daemon.asks = False  # the agent must notice by itself
    since = len(daemon.seen)
    agent.signal(signal.SIGSTOP)  # the main scheduler suspends the lease: only this process, which leads its session
    eventually(lambda: not agent.left(), "its job is gone while it stands still")
    agent.signal(signal.SIGCONT)
    hello = daemon.expect("n0", wire.Hello, since=since)
    assert hello.leaving_in_s is None
    daemon.until(lambda: any(isinstance(m, wire.Hello | wire.Phase) and assigned(m) and assigned(m).phase == "exited"
                             for _, m in daemon.seen[since:]), "the daemon hears that the job is not there any more")  # fmt: skip
    daemon.send("n0", wire.Release("j1", 0.0))
    daemon.expect("n0", wire.Released, job="j1")


def test_logs_are_sent_again_until_they_are_acknowledged(daemon, start, tmp_path):
    start()
    daemon.acknowledges = False
    running(daemon, tmp_path)
    daemon.until(lambda: any(isinstance(m, wire.Progress) for _, m in daemon.seen), "the job runs")
    daemon.acknowledges = True
    daemon.names.clear()  # a connection that is new again
    daemon.until(lambda: daemon.logs.get(("j1", 1, "rank0")) == b"line of round 1\n", "the log arrives after all")


def test_messages_that_do_not_fit_are_ignored(daemon, start):
    agent = start()
    identity = daemon.nodes["n0"]
    for frames in ([b"junk"], [b"MT9", b"\x80"], [b"MT1", b"\xc1"], [b"MT1", b"\x81\xa4type\xa4nope"], []):
        daemon.socket.send_multipart([identity, *frames])
    daemon.send("n0", wire.Round("nobody", 1, 0, 1))
    daemon.send("n0", wire.Request("1", "status"))
    daemon.send("n0", wire.Release("j9", 1.0))
    daemon.expect("n0", wire.Released, job="j9")
    assert agent.process.poll() is None


def test_the_agent_is_small(daemon, start):
    agent = start()
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    resident_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_kb < 60 * 1024
    mapped = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert not [name for name in ("libtorch", "numpy", "pydantic") if name in mapped]


def test_everything_wrong_with_the_options_is_said_at_once(tmp_path):
    options = ["--node", "n0", "--key-file", str(tmp_path / "no"), "--server-key", "short", "--grace-s", "x"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLETRAIN")}
    command = [sys.executable, "-m", "malletrain.agent", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2
    missing = ("--endpoint is missing", "--lease is missing")
    for words in (*missing, "no cannot be read", "--server-key is not", "--grace-s"):
        assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_options_may_come_from_the_environment(daemon, start, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_NODE_CLASS", "gpu")
    monkeypatch.setenv("MALLETRAIN_GPUS", "4")
    start()
    hello = daemon.expect("n0", wire.Hello)
    assert (hello.node_class, hello.gpus) == ("gpu", 4)
    assert alive(hello.pid)
