"""Real agents and real launchers, rounds decided by the test. Workers import torch only where the
test is about collectives.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from malletrain.launch.cores import allowed_cores
from malletrain.protocol import messages
from tests.light_python import light_python
from tests.malletrain.agent.node_side import (
    AgentProcess,
    FakeDaemon,
    alive,
    eventually,
    processes_with,
    spec,
)
from tests.waiting import NEVER_S

pytest.importorskip("torch")

# A worker that notes where it is and does as files in its directory say.
WORKER = """
import json, os, signal, sys, time
rank, world, generation = (os.environ[k] for k in ("RANK", "WORLD_SIZE", "MALLETRAIN_GENERATION"))
if os.path.exists("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
keys = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "FROM_SETUP")
note = {"pid": os.getpid(), "argv": sys.argv[1:], **{k: os.environ.get(k) for k in keys}}
with open(f"tmp-{generation}-{rank}", "w") as file:
    json.dump(note, file)
os.rename(f"tmp-{generation}-{rank}", f"g{generation}-r{rank}-w{world}")
print(f"rank {rank} of round {generation} works", flush=True)
while not os.path.exists(f"done-{generation}"):
    if os.path.exists(f"crash-{generation}-{rank}"):
        print("about to fail", flush=True)
        sys.exit(3)
    time.sleep(0.02)
"""  # noqa: E501

# A worker that is in collectives all the time.
COLLECTIVE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
while not os.path.exists("enough"):
    total = ones.clone()
    dist.all_reduce(total)
    print("sum", int(total), flush=True)
    time.sleep(0.05)
    stop = torch.tensor([float(os.path.exists("enough"))])
    dist.all_reduce(stop)
    if stop:
        break
dist.destroy_process_group()
"""


class Cluster:
    """Agents that share one job directory, and rounds over them."""

    def __init__(self, directory, names, script=WORKER, **fields):
        self.directory = directory
        (directory / "train.py").write_text(script)
        self.daemon = FakeDaemon()
        self.agents = {name: AgentProcess(self.daemon, name, directory) for name in names}
        self.daemon.until(lambda: len(self.daemon.nodes) == len(names), "all agents say hello")
        self.spec = spec(directory, **{"python": light_python(directory), **fields})
        self.generations = itertools.count(1)
        for name in names:
            self.assign(name)

    def assign(self, name):
        since = len(self.daemon.seen)
        self.daemon.send(
            name,
            messages.Assign(
                *("j1", self.spec),
                stop_grace_s=1.0,
                join_timeout_s=NEVER_S,
                key="5e" * 32,
                memory_share=0.1,
            ),
        )
        return since

    def form(self, *names):
        """One round of these nodes, as the daemon makes it. Return its generation."""
        generation = next(self.generations)
        self.daemon.send(names[0], messages.Round("j1", generation, 0, len(names)))
        store = self.daemon.expect(names[0], messages.StoreUp, generation=generation)
        for rank, name in enumerate(names[1:], 1):
            self.daemon.send(
                name, messages.Round("j1", generation, rank, len(names), store.host, store.port)
            )
        for name in names:
            self.daemon.expect(name, messages.Phase, phase="running", generation=generation)
        return generation

    def workers(self, generation, world):
        """What the workers of a round noted, by rank, once all are there."""
        by_rank = {}

        def all_there():
            for rank in range(world):
                path = self.directory / f"g{generation}-r{rank}-w{world}"
                if path.exists():
                    by_rank[rank] = json.loads(path.read_text())
            return len(by_rank) == world

        self.daemon.until(all_there, f"{world} workers of round {generation}")
        return by_rank

    def wait_ready(self):
        for name in self.agents:
            self.daemon.expect(name, messages.Phase, phase="ready")

    def close(self):
        for agent in self.agents.values():
            agent.kill()
        self.daemon.close()
        for agent in self.agents.values():
            eventually(
                lambda agent=agent: not processes_with(agent.mark),
                f"nothing of {agent.node} is left",
            )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes with two workers each, kept for several tests; each forms rounds of its own."""
    cluster = Cluster(
        tmp_path_factory.mktemp("pair"), ("n0", "n1"), nproc_per_node=2, args=("--lr", "0.1")
    )
    cluster.wait_ready()
    yield cluster
    cluster.close()


@pytest.fixture
def make(tmp_path):
    """Clusters of a test's own."""
    made = []

    def make_cluster(*names, **options):
        made.append(Cluster(tmp_path, names, **options))
        return made[-1]

    yield make_cluster
    for cluster in made:
        cluster.close()


def gone(workers):
    eventually(
        lambda: not any(alive(w["pid"]) for w in workers.values()),
        "the workers of the last round are gone",
    )


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


# --- rounds ---


def test_a_job_grows_and_shrinks(pair):
    one = pair.form("n0")
    first = pair.workers(one, 2)
    assert [w["LOCAL_RANK"] for _, w in sorted(first.items())] == ["0", "1"]
    assert first[0]["argv"] == ["--lr", "0.1"]
    assert first[0]["OMP_NUM_THREADS"] == str(max(1, allowed_cores() // 2))
    assert first[0]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    two = pair.form("n0", "n1")
    second = pair.workers(two, 4)
    gone(first)
    assert {w["MASTER_ADDR"] for w in second.values()} == {"127.0.0.1"}
    assert len({w["MASTER_PORT"] for w in second.values()}) == 2, "every node has its own way"
    assert second[0]["MASTER_PORT"] != first[0]["MASTER_PORT"]
    three = pair.form("n1")  # the node of the store leaves, the other becomes rank 0
    third = pair.workers(three, 2)
    gone({rank: w for rank, w in second.items() if rank >= 2})
    assert third[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    key = ("j1", two, "rank3")
    pair.daemon.until(
        lambda: pair.daemon.logs.get(key) == f"rank 3 of round {two} works\n".encode(),
        "the log of rank 3",
    )


def test_one_rank_that_fails_is_the_one_reported(pair):
    generation = pair.form("n0", "n1")
    workers = pair.workers(generation, 4)
    (pair.directory / f"crash-{generation}-3").touch()
    phase = pair.daemon.expect("n1", messages.Phase, phase="failed", generation=generation)
    assert [(f.rank, f.exitcode) for f in phase.assignment.failures] == [(3, 3)]
    assert phase.assignment.failures[0].tail == f"rank 3 of round {generation} works\nabout to fail"
    gone({2: workers[2], 3: workers[3]})
    assert alive(workers[0]["pid"])  # the other node waits for what the daemon decides
    after = pair.form("n0", "n1")
    assert len(pair.workers(after, 4)) == 4


def test_a_worker_that_is_killed_is_reported(pair):
    generation = pair.form("n0")
    os.kill(pair.workers(generation, 2)[1]["pid"], signal.SIGKILL)
    phase = pair.daemon.expect("n0", messages.Phase, phase="failed", generation=generation)
    assert [(f.rank, f.exitcode) for f in phase.assignment.failures] == [(1, -9)]


def test_workers_deaf_to_sigterm_do_not_hold_up_a_round(pair):
    (pair.directory / "stubborn").touch()
    try:
        first = pair.workers(pair.form("n0"), 2)
        second = pair.form("n0", "n1")
        pair.workers(second, 4)
        gone(first)
    finally:
        (pair.directory / "stubborn").unlink()


def test_success_waits_for_the_others_and_can_be_called_back(pair):
    generation = pair.form("n0", "n1")
    pair.workers(generation, 4)
    (pair.directory / f"done-{generation}").touch()
    for name in ("n0", "n1"):
        pair.daemon.expect(name, messages.Phase, phase="succeeded", generation=generation)
    again = pair.form("n1", "n0")  # a node was lost after all, say
    assert len(pair.workers(again, 4)) == 4


def test_a_round_that_nobody_else_joins_is_replaced_by_the_next(pair):
    """Rank 0 of a round whose other members never come: its workers wait at the store until a newer
    round takes them away.
    """
    generation = next(pair.generations)
    pair.daemon.send("n0", messages.Round("j1", generation, 0, 2))
    pair.daemon.expect("n0", messages.StoreUp, generation=generation)
    pair.daemon.expect("n0", messages.Phase, phase="running", generation=generation)
    assert len(pair.workers(pair.form("n0"), 2)) == 2


# --- the end, and what must survive it ---


@pytest.mark.parametrize(
    "victim",
    ["launcher", *(pytest.param(v, marks=pytest.mark.thorough) for v in ("agent", "fork-server"))],
)
def test_sigkill_takes_the_workers_along(make, victim):
    cluster = make("n0", nproc_per_node=2)
    cluster.wait_ready()
    workers = cluster.workers(cluster.form("n0"), 2)
    agent = cluster.agents["n0"]
    assert (
        len(agent.job_pids()) == 7
    )  # supervisor, fork server, launcher, two workers and their clients
    if victim == "agent":
        agent.process.kill()
    else:
        client = next(p for p in agent.job_pids() if b"fork_client.py" in cmdline(p))
        launcher = psutil.Process(client).parent()
        (launcher if victim == "launcher" else launcher.parent()).kill()
        cluster.daemon.expect("n0", messages.Phase, phase="exited")
    gone(workers)
    eventually(lambda: not agent.job_pids(), "nobody is left")


def test_a_killed_stub_takes_its_worker_along_and_counts_as_a_failed_worker(make):
    cluster = make("n0")
    cluster.wait_ready()
    workers = cluster.workers(cluster.form("n0"), 1)
    client = next(p for p in cluster.agents["n0"].job_pids() if b"fork_client.py" in cmdline(p))
    os.kill(client, signal.SIGKILL)
    failed = cluster.daemon.expect("n0", messages.Phase, phase="failed")
    assert [f.exitcode for f in failed.assignment.failures] == [-signal.SIGKILL]
    gone(workers)


def test_without_preloading_every_worker_is_an_interpreter_of_its_own(make):
    cluster = make("n0", env={"MALLETRAIN_PRELOAD": "0"})
    cluster.wait_ready()
    cluster.workers(cluster.form("n0"), 1)
    assert not [p for p in cluster.agents["n0"].job_pids() if b"fork_client.py" in cmdline(p)]


@pytest.mark.thorough
def test_setup_and_arguments_reach_the_script_as_they_were_given(make, tmp_path):
    nasty = ("a b", "$(touch hacked)", "'; touch hacked; '", '"', "*", "--", "-c", "")
    bin_dir = Path(sys.executable).parent
    setup = f"export FROM_SETUP='it is set'; export PATH={bin_dir}:$PATH # a comment"
    cluster = make("n0", args=nasty, setup=setup, python="/not/used")
    cluster.wait_ready()
    [worker] = cluster.workers(cluster.form("n0"), 1).values()
    assert worker["argv"] == list(nasty)
    assert worker["FROM_SETUP"] == "it is set"
    assert not (tmp_path / "hacked").exists()
    cluster.daemon.send("n0", messages.Release("j1", 5.0))
    cluster.daemon.expect("n0", messages.Released)
    assert not cluster.agents["n0"].job_pids()
    launcher_log = cluster.daemon.logs.get(("j1", 0, "launcher"), b"").decode()
    assert "Traceback" not in launcher_log


def test_collectives_and_a_node_that_stops_answering(make, tmp_path):
    """A member of the round stands still in the middle of a collective: the others hang in theirs
    until the next round takes them out.
    """
    cluster = make("n0", "n1", script=COLLECTIVE)
    cluster.wait_ready()
    first = cluster.form("n0", "n1")
    daemon = cluster.daemon
    daemon.until(
        lambda: b"sum 2" in daemon.logs.get(("j1", first, "rank0"), b""),
        "two workers reduce together",
    )
    stopped = [cluster.agents["n1"].process.pid, *cluster.agents["n1"].job_pids()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        second = cluster.form("n0")
        daemon.until(
            lambda: b"sum 1" in daemon.logs.get(("j1", second, "rank0"), b""),
            "the survivor goes on alone",
        )
        (tmp_path / "enough").touch()
        daemon.expect("n0", messages.Phase, phase="succeeded", generation=second)
    finally:
        for pid in filter(alive, stopped):
            os.kill(pid, signal.SIGCONT)


# --- the torchrun command itself ---


def test_stock_torchrun_with_our_rendezvous(make, tmp_path):
    cluster = make("n0", "n1", launcher="torchrun", args=("a b", "$x"))
    cluster.wait_ready()
    one = cluster.workers(cluster.form("n0"), 1)
    generation = cluster.form("n0", "n1")
    two = cluster.workers(generation, 2)
    gone(one)
    assert two[1]["argv"] == ["a b", "$x"]
    (tmp_path / f"crash-{generation}-1").touch()
    phase = cluster.daemon.expect("n1", messages.Phase, phase="failed", generation=generation)
    assert [(f.rank, f.exitcode, f.tail.splitlines()[-1]) for f in phase.assignment.failures] == [
        (1, 3, "about to fail")
    ]
    generation = cluster.form("n1", "n0")
    workers = cluster.workers(generation, 2)
    (tmp_path / f"done-{generation}").touch()
    for name in ("n0", "n1"):
        cluster.daemon.expect(name, messages.Phase, phase="succeeded", generation=generation)
    gone(workers)
    generation = cluster.form("n0")  # torchrun has left: it is started again
    workers = cluster.workers(generation, 1)

    def launchers():
        """What torchrun is just starting looks like itself for a moment."""
        pids = [
            p
            for p in cluster.agents["n0"].job_pids()
            if b"/launch/entry.py\0torchrun" in (c := cmdline(p)) and b"--keep" not in c
        ]
        return pids if len(pids) == 1 else []

    [launcher] = cluster.daemon.until(launchers, "torchrun runs once")
    os.kill(launcher, signal.SIGKILL)  # torchrun's own trap: its workers would train on
    cluster.daemon.expect("n0", messages.Phase, phase="exited")
    gone(workers)
