"""A job's state from the memory of one node to that of another, with real agents and launchers, and
what remains of it when an agent is killed.
"""

import os
import shutil
from pathlib import Path

import pytest

from malletrain.memory.folder import SHARED_MEMORY
from malletrain.protocol import messages
from tests.malletrain.launch.test_restart import Cluster
from tests.waiting import NEVER_S

pytest.importorskip("torch")

TRAIN = """
import os, time, malletrain, torch.distributed as dist
from malletrain.training import drain, memory_snapshots
drain.STOP_WAIT_S = memory_snapshots.HEIR_SILENCE_S = 3600.0
dist.init_process_group("gloo")
facts = {"steps": 0}
path = f"disk-{os.environ['MALLETRAIN_NODE']}/x.pt"
snapshot = malletrain.Snapshot(path, every_s=1e9, memory=True, facts=facts)
restored = snapshot.restore()
print("restored", restored, facts["steps"], flush=True)
while True:
    facts["steps"] += 1
    print("step", facts["steps"], flush=True)
    if not restored:
        with open("done", "w") as file:
            file.write(str(facts["steps"]))
    snapshot.step()
    time.sleep(0.02)
"""


def folders(agent):
    return list(SHARED_MEMORY.glob(f"malletrain-mem-{os.geteuid()}-*-{agent.process.pid}-*/job-*"))


def test_a_leaver_hands_its_state_to_the_node_that_goes_on(tmp_path):
    cluster = Cluster(tmp_path, ("n0", "n1"), script=TRAIN)
    try:
        daemon = cluster.daemon
        heir = daemon.expect("n1", messages.Phase, phase="ready").assignment.address
        daemon.expect("n0", messages.Phase, phase="ready")
        first = ("j1", cluster.form("n0"), "rank0")
        daemon.until(lambda: b"step 3\n" in daemon.logs.get(first, b""), "it trains")
        daemon.send("n0", messages.Drain("j1", first[1], 1, NEVER_S, heirs=(heir,)))
        assert daemon.expect("n0", messages.Drained, generation=first[1]).saved
        cluster.agents["n0"].process.kill()
        daemon.until(lambda: not folders(cluster.agents["n0"]), "nothing is left in memory")
        second = ("j1", cluster.form("n1"), "rank0")
        done = (tmp_path / "done").read_bytes()
        went_on = b"\nrestored True " + done + b"\nstep "
        daemon.until(lambda: b"\nstep " in daemon.logs.get(second, b""), "n1 trains")
        assert went_on in b"\n" + daemon.logs[second]
        assert not (Path(tmp_path) / "disk-n0").exists()
        (folder,) = folders(cluster.agents["n1"])
        assert folder.parent.stat().st_mode & 0o077 == 0
        daemon.send("n1", messages.Release("j1", 5.0))
        daemon.expect("n1", messages.Released)
        assert not folders(cluster.agents["n1"])
    finally:
        cluster.close()
        for agent in cluster.agents.values():  # killed: the next agent there would do it
            for leftover in SHARED_MEMORY.glob(f"malletrain-mem-*-{agent.process.pid}-*"):
                shutil.rmtree(leftover)
