"""The samples of a job's nodes, with real agents and launchers: shared by the nodes of a round in
both modes, kept for the next job of the lease, and gone with the agent.
"""

import os
import shutil

import pytest

from malletrain.datacache.members import Members, members_file, write_members
from malletrain.launch.node_samples import NodeSamples, node_samples
from malletrain.memory.folder import SHARED_MEMORY
from malletrain.protocol import env, messages
from malletrain.protocol.launcher_channel import LaunchOrder
from tests.malletrain.launch.test_restart import Cluster, spec

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAIN = """
import os, time, torch, malletrain
from malletrain.datacache import reader
reader.ANSWER_S = 3600.0

class Data:
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.full((100,), index), index

cache = malletrain.DataCache(Data(), name="squares", memory="4M")
node = os.environ["MALLETRAIN_NODE"]

def read(samples):
    for sample in cache.__getitems__(samples):
        assert torch.equal(sample[0], torch.full((100,), sample[1]))
    counts = cache.counts()
    print(node, "counts", counts.node_hits, counts.peer_hits, counts.source_reads, flush=True)
    malletrain.report(len(samples))

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)
"""

RESTART = (
    TRAIN
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0 and dist.get_world_size() > 1:
    read(range(60))
    open("first", "w").close()
wait_for("first")
read(range(60))
wait_for("end")
"""
)


def stores(agent):
    """The stores of the agent's node."""
    return list(SHARED_MEMORY.glob(f"malletrain-mem-*-{agent.process.pid}-*/data/*.samples"))


def form(cluster, *names):
    """A round of these nodes whose members serve samples, as the daemon makes it."""
    ready = {n: cluster.daemon.expect(n, messages.Phase, phase="ready").assignment for n in names}
    members = tuple(messages.Peer(n, "", ready[n].data_address) for n in names)
    assert all(peer.address for peer in members)
    first, generation = names[0], next(cluster.generations)
    cluster.daemon.send(first, messages.Round("j1", generation, 0, len(names), members=members))
    store = cluster.daemon.expect(first, messages.StoreUp, generation=generation)
    for rank, name in enumerate(names[1:], 1):
        cluster.daemon.send(
            name,
            messages.Round(
                "j1", generation, rank, len(names), store.host, store.port, members=members
            ),
        )
    return generation


def counts(cluster, generation, rank, number):
    """The counts that a worker printed, once there are ``number`` lines of them."""
    log = ("j1", generation, f"rank{rank}")

    def lines():
        text = cluster.daemon.logs.get(log, b"").decode()
        return [line.split()[2:] for line in text.splitlines() if " counts " in line]

    cluster.daemon.until(lambda: len(lines()) >= number, f"rank {rank} has read {number} times")
    return [tuple(map(int, line)) for line in lines()]


def close(cluster):
    cluster.close()
    for agent in cluster.agents.values():  # killed: the next agent there would do it
        for leftover in SHARED_MEMORY.glob(f"malletrain-mem-*-{agent.process.pid}-*"):
            shutil.rmtree(leftover)


@pytest.mark.thorough
def test_nodes_of_a_round_share_their_samples_and_the_next_job_finds_them(tmp_path):
    cluster = Cluster(tmp_path, ("n0", "n1"), script=RESTART)
    try:
        daemon = cluster.daemon
        generation = form(cluster, "n0", "n1")
        (_, first), (second,) = counts(cluster, generation, 0, 2), counts(cluster, generation, 1, 1)
        assert first[2] == 60  # rank 0 has read each sample once
        assert second[2] == 0  # and rank 1 none
        assert second[0] + second[1] == 60
        assert second[0] == first[1]  # n1 has what n0 fetches from it
        assert first[0] == second[1]
        notices = [n for _, n in daemon.seen if isinstance(n, messages.Notice) and n.kind == "data"]
        assert notices == [] or notices[-1].data["name"] == "squares"
        (store,) = stores(cluster.agents["n0"])
        assert store.stat().st_mode & 0o077 == 0
        (tmp_path / "end").touch()
        daemon.expect("n0", messages.Phase, phase="succeeded")
        daemon.until(
            lambda: (
                {
                    n.data["node"]: n.data["source_reads"]
                    for _, n in daemon.seen
                    if isinstance(n, messages.Notice) and n.kind == "data"
                }
                == {"n0": 60, "n1": 0}
            ),
            "both report their counts at their end",
        )
        for name in ("n0", "n1"):
            daemon.send(name, messages.Release("j1", 5.0))
        for name in ("n0", "n1"):
            daemon.expect(name, messages.Released)
        assert stores(cluster.agents["n0"]) == [store]  # for the next job
        cluster.assign("n0")
        again = form(cluster, "n0")
        assert counts(cluster, again, 0, 1)[0][0] == first[0]
    finally:
        close(cluster)


def order(folder):
    return LaunchOrder("j1", spec(folder), "ipc:///nowhere", "127.0.0.1", str(folder), 1.0, 60.0)


def test_a_round_is_written_down_for_the_workers(tmp_path):
    samples = NodeSamples(tmp_path, b"secret", "j1", "127.0.0.1")
    members = Members(members_file(tmp_path, "j1"), "n0")
    try:
        peers = (messages.Peer("n0", "", "a:1"), messages.Peer("n1", "", "b:2"))
        samples.enter(messages.Round("j1", 1, 0, 2, members=peers))
        assert dict(members.addresses()) == {"n0": "a:1", "n1": "b:2"}
        samples.enter(messages.Round("j1", 2, 0, 1))  # of a daemon that knows no samples
        assert dict(members.addresses()) == {"n0": ""}
    finally:
        samples.close()
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_a_folder_or_a_secret_trains_without(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(env.DATA, raising=False)
    monkeypatch.delenv(env.JOB_KEY, raising=False)
    (tmp_path / "train.py").touch()
    assert node_samples(order(tmp_path)) is None
    monkeypatch.setenv(env.DATA, str(tmp_path))
    assert node_samples(order(tmp_path)) is None
    assert "serves no samples to other nodes" in capsys.readouterr().out
    monkeypatch.setenv(env.JOB_KEY, "5e" * 32)
    served = node_samples(order(tmp_path))
    assert served.address.startswith("127.0.0.1:")
    served.close()


def test_a_folder_that_is_gone_leaves_the_node_on_its_own(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    samples = NodeSamples(folder, b"secret", "j1", "127.0.0.1")
    write_members(members_file(folder, "j1"), {"n0": "a:1"})
    shutil.rmtree(folder)
    samples.enter(messages.Round("j1", 1, 0, 1, members=(messages.Peer("n0", "", "a:1"),)))
    samples.close()
    assert not os.path.exists(folder)
