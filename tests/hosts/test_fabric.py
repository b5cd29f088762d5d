"""Networks of several hosts: names that mean the loopback, ways that are blocked, a second network.
The jobs are real: torch, gloo, steps that only count when all ranks made them.
"""

import sys

import pytest

from tests.hosts.bed import FAST
from tests.slurm.cluster import which

pytest.importorskip("torch")

from tests.hosts.exact import SAMPLES, Training

RESTART = """
import os, socket, time
import torch, torch.distributed as dist
import malletrain
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
one = torch.ones(1)
for step in range(10**6):
    time.sleep(0.05)
    total = one.clone()
    dist.all_reduce(total)
    assert total.item() == size
    malletrain.report(1)
    with open(f"steps.{rank}.{os.uname().nodename}.{os.getpid()}", "a") as file:
        file.write(f"{size}\\n")
    stop = torch.tensor([float(os.path.exists("enough"))])
    dist.all_reduce(stop)
    if stop.item():
        break
"""
LIVE = """
import os, time
import torch
from malletrain import elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
run = elastic.Run(model=model, optimizer=optimizer)
net = run.ddp(model)
for _ in run.steps(10**6):
    with run.step(samples=1):
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    time.sleep(0.05)
    with open(f"steps.{run.rank}.{os.uname().nodename}.{os.getpid()}", "a") as file:
        file.write(f"{run.world_size}\\n")
    if os.path.exists("enough"):
        run.request_stop()
"""
STRANGER = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
for port in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        signal.alarm(5)  # at a port that says nothing torch's client waits for ever
        options = dict(is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        try:
            TCPStore(sys.argv[1], int(port), **options).num_keys()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    print("nothing" if os.waitpid(pid, 0)[1] else f"{port} is a store", flush=True)
"""
MODES = pytest.mark.parametrize("mode", ["restart", "live"])
GRADIENTS = 2 * 4 * SAMPLES
"""Bytes of one step, by what each of two nodes sends and receives."""
LATE = 'warmup_timeout = "60 s"\njoin_timeout = "180 s"'


def begin(site, mode, nodes):
    live = ["--live"] if mode == "live" else []
    return site.submit("train.py", LIVE if mode == "live" else RESTART, nodes, *live)


def sizes(site):
    """Node → the sizes of the group in its steps, the newest of its workers last."""
    by_node = {}
    for path in sorted(site.work.glob("steps.*"), key=lambda path: path.stat().st_mtime):
        by_node.setdefault(path.name.split(".")[2], []).extend(map(int, path.read_text().split()))
    return by_node


def trains(site, *nodes):
    """Wait until the job makes steps on as many nodes as these, and on these."""

    def together():
        now = sizes(site)
        return all(now.get(node, [])[-3:] == [len(nodes)] * 3 for node in nodes)

    site.until(together, f"steps are made on {nodes}")


def finish(site, job):
    (site.work / "enough").touch()
    site.until(lambda: site.job(job)["state"] == "completed", "the job completes")


def remote_ends(host):
    """The addresses to which this host has connections, and those at which it has them."""
    lines = host.run("ss", "-Htn", "state", "established").splitlines()
    return {(f.split()[2].rpartition(":")[0], f.split()[3].rpartition(":")[0]) for f in lines}


@pytest.mark.sites
@MODES
def test_nodes_whose_names_mean_their_loopback_train_together(boot, mode):
    """Debian's /etc/hosts: gloo asks for the node's own name by itself."""
    site = boot(2, node_hosts="127.0.1.1 {name}").start()
    job = begin(site, mode, "2:2")
    trains(site, "n1", "n2")
    assert not site.events("workers-failed")
    finish(site, job)


@pytest.mark.sites
@MODES
def test_nodes_whose_names_nobody_knows_train_together(boot, mode):
    site = boot(2, named=False).start()
    job = begin(site, mode, "2:2")
    trains(site, "n1", "n2")
    assert not site.events("workers-failed")
    finish(site, job)


@pytest.mark.sites
@pytest.mark.parametrize(
    ("mode", "way"), [("restart", "lost"), ("live", "lost"), ("live", "refused")]
)
def test_nodes_that_do_not_reach_each_other_are_named_and_the_job_goes_on(boot, mode, way):
    if way == "refused" and which("nft") is None:
        pytest.skip("nft is not installed; run tests/slurm/install.sh as root")
    site = boot(3, jobs=LATE)
    _, n2, n3 = site.bed.nodes
    block = site.bed.drop if way == "lost" else site.bed.refuse
    block(n2, n3.address)
    block(n3, n2.address)
    site.start()
    job = begin(site, mode, "2:3")
    site.until(
        lambda: site.events("round-stuck", "node-rejected"), "somebody says what is the matter"
    )
    site.until(
        lambda: any(len(s) > 3 and s[-3:] == [2] * 3 for s in sizes(site).values()),
        "two nodes that reach each other train",
    )
    sentences = " ".join(e["sentence"] for e in site.events("round-stuck", "node-rejected"))
    assert "n2" in sentences
    assert "firewall" in sentences
    assert site.job(job)["state"] == "running"
    finish(site, job)


@pytest.mark.sites
@MODES
@pytest.mark.parametrize("interface", ["ib0", f"{FAST}.0/16", "auto"])
def test_a_job_goes_by_the_network_that_the_site_names(boot, interface, mode):
    """Told by the kernel's own count of bytes: a step sends and receives every gradient once."""
    site = boot(2, fabric=f'interface = "{interface}"').start()
    training = Training(site, mode, "2:2")
    training.trains(2)
    for chosen in site.events("network-chosen"):
        assert "ib0" in chosen["sentence"] or FAST in chosen["sentence"]
    n1, n2 = site.bed.nodes
    assert (n1.fast, n2.fast) in remote_ends(n1), "gloo's pairs are on ib0"
    assert not {ends for ends in remote_ends(n1) if ends[1] == n2.address}, "nothing is on eth0"
    before = {(n, i): n.traffic(i) for n in (n1, n2) for i in ("ib0", "eth0")}
    steps = len(training.trace())
    training.trains(2)
    made = len(training.trace()) - steps - 1  # the first may have been half done
    for node in (n1, n2):
        fast, slow = (node.traffic(i) - before[node, i] for i in ("ib0", "eth0"))
        assert fast > made * GRADIENTS, "gradients go by ib0"
        assert slow < fast / 20, "and not by eth0"
    [measured] = site.until(lambda: site.events("bandwidth-measured"), "it was measured")
    assert measured["data"]["reached"]
    assert measured["data"]["mbit"] > 100
    bandwidth = f"ib0 {measured['data']['mbit'] / 1000:.3g}"[:4]
    assert bandwidth in site.ask("show", training.id)["network"]
    training.finish()
    assert not training.back()


@pytest.mark.sites
def test_what_of_a_job_listens_beyond_its_node_knows_the_jobs_key(boot):
    """All ports of a node that strangers reach, tried as a client of a TCPStore."""
    site = boot(2).start()
    job = begin(site, "restart", "2:2")
    trains(site, "n1", "n2")
    n1, n2 = site.bed.nodes
    lines = n1.run("ss", "-Htln").splitlines()
    ports = {
        line.split()[3].rpartition(":")[2]
        for line in lines
        if not line.split()[3].startswith(("127.", "[::1]"))
    }
    assert ports
    output = n2.run(sys.executable, "-I", "-c", STRANGER, n1.address, *sorted(ports))
    assert output.splitlines() == ["nothing"] * len(ports)
    before = {node: len(s) for node, s in sizes(site).items()}
    site.until(
        lambda: all(len(s) > before[node] + 5 for node, s in sizes(site).items()),
        "the job trains on",
    )
    assert not site.events("workers-failed", "node-lost")
    finish(site, job)
