"""A daemon that stands still for longer than its agents may be silent: no agent is lost by it."""

import signal
import time

import pytest

from tests.integration.embedded import site

SILENT_S = 20.0
"""What an agent may be silent, seconds: less than the daemon stands still here, and more than a
busy machine keeps a healthy one from saying something.
"""

STEPS = """
import os, time
import malletrain
rank, world = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
for step in range(100000):
    time.sleep(0.05)
    malletrain.report(1)
    with open(f"count.{rank}.{os.getpid()}", "a") as file:
        file.write(f"{step}\\n")
    if os.path.exists("enough"):
        break
"""


@pytest.fixture
def embedded(tmp_path):
    with site(tmp_path, nodes=3, agent_timeout_s=SILENT_S) as made:
        yield made


def pids(embedded):
    return sorted(path.name for path in embedded.work.glob("count.*"))


@pytest.mark.thorough
def test_a_daemon_that_was_stopped_for_longer_than_agents_may_be_silent_adopts_them(embedded):
    script = embedded.script("steps.py", STEPS)
    job = embedded.submit(script, nodes=(3, 3), nproc_per_node=1)
    embedded.until_samples(job, 30)
    embedded.until(lambda: len(pids(embedded)) == 3, "all three workers train")
    before, workers = embedded.job(job), pids(embedded)
    rounds = len(embedded.events("round-formed", job))
    assert before.state == "running"
    embedded.daemon.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    embedded.until(
        lambda: time.monotonic() - stopped > 1.25 * SILENT_S, "the daemon stood still for long"
    )
    embedded.daemon.send_signal(signal.SIGCONT)
    embedded.until(
        lambda: [e for e in embedded.events("daemon-partitioned") if "stood still" in e.sentence],
        "the daemon knows that it stood still",
    )
    back = time.monotonic()
    # longer than it takes to find the agents lost
    embedded.until(lambda: time.monotonic() - back > 1.25 * SILENT_S, "all limits have passed")
    embedded.until_samples(job, before.samples + 3 * 20 * 15 * 0.5)
    after = embedded.job(job)
    assert not embedded.events("node-lost")
    assert after.nodes == before.nodes
    assert len(embedded.events("round-formed", job)) == rounds
    assert pids(embedded) == workers
    (embedded.work / "enough").touch()
    embedded.until_state(job, "completed")
    done = 0
    for path in embedded.work.glob("count.*"):
        steps = [int(line) for line in path.read_text().splitlines()]
        assert steps == list(range(len(steps))), "no step was repeated or left out"
        done += len(steps)
    assert embedded.job(job).samples == done
