"""A node behind a slow cable: named, swapped out, and left alone. The jobs are real: torch, gloo,
and gradients that all wait for.
"""

import pytest

pytest.importorskip("torch")

WAITS_FOR_ITS_GRADIENTS = """
import os, torch, torch.distributed as dist, malletrain
dist.init_process_group("gloo")
gradients, stop = torch.ones(1 << 17), torch.zeros(1)
while not stop.item():
    dist.all_reduce(gradients.fill_(1.0))
    stop.fill_(os.path.exists("enough"))
    dist.all_reduce(stop)
    malletrain.report(1)
dist.destroy_process_group()
"""
SLOW_MBIT = 10


@pytest.mark.sites
def test_a_node_with_a_slow_link_is_named_swapped_out_and_left_alone(boot):
    site = boot(4, fabric='slow_after = "3 s"\nlink_every = "1 s"')
    site.bed.throttle(site.bed.nodes[2], SLOW_MBIT)
    site.start()
    job = site.submit("train.py", WAITS_FOR_ITS_GRADIENTS, "1:4")
    site.until(
        lambda: [e for e in site.events("node-slow") if e["node"] == "n3"], "its link is named"
    )
    site.until(
        lambda: site.job(job)["nodes"] and "n3" not in site.job(job)["nodes"],
        "the job goes on without it",
    )
    first = next(e for e in site.events("node-slow") if "usual_mbit" in e["data"])
    assert first["node"] == "n3"
    assert first["data"]["mbit"] < 2 * SLOW_MBIT < first["data"]["usual_mbit"] / 2
    site.until(
        lambda: {n["node"]: n["state"] for n in site.ask("nodes")}.get("n3") == "slow",
        "its lease has ended, and it is left alone",
    )
    reclaimed = next(e for e in site.events("node-reclaimed") if e["node"] == "n3")
    assert reclaimed["sentence"].startswith("The link of n3 carries ")
    assert reclaimed["sentence"].endswith(" The job is faster without it.")
    (site.work / "enough").touch()
    site.until(lambda: site.job(job)["state"] == "completed", "the job completes")
