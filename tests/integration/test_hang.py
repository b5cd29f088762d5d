"""A worker that stops reporting while it lives: its owner gets its stack, and it is started again
if the owner asked for that.
"""

from __future__ import annotations

import pytest

from benchmarks.chaos_jobs import ChaosJob, script
from tests.integration.embedded import Site
from tests.torch_versions import trains_shards

HANGS = """
import os, time
import malletrain

def wait_for_a_file_system_that_is_stuck():
    os.open("stuck", os.O_RDONLY)

step = 0
while not os.path.exists("enough"):
    time.sleep(0.05)
    malletrain.report(1)
    step += 1
    if step == 40:
        if not os.path.exists("stuck"):
            os.mkfifo("stuck")
        wait_for_a_file_system_that_is_stuck()
"""


def impatient(root, nodes):
    """A site whose workers hang when they are silent for a second."""
    embedded = Site(root, nodes=nodes)
    text = embedded.config.read_text()
    for before, after in (
        ("max_tries = 2", 'max_tries = 100\nstop_grace = "0.2 s"'),
        ('hang_after = "1 h"', 'hang_after = "1 s"'),
    ):
        assert before in text
        text = text.replace(before, after)
    embedded.config.write_text(text)
    return embedded


def test_a_worker_that_hangs_is_told_with_its_stack_and_started_again(tmp_path):
    embedded = impatient(tmp_path, nodes=1)
    try:
        embedded.start_daemon()
        path = embedded.script("hangs.py", HANGS)
        job = embedded.submit(path, on_hang="restart", nproc_per_node=1)

        def hang_events():
            events = embedded.events("job-hung", job)
            return [e for e in events if "wait_for_a_file_system" in e.sentence]

        embedded.until(hang_events, "an event says where the worker hangs")
        # On a machine that stood still there may be events of other places, too.
        embedded.until(
            lambda: any(
                who.startswith("rank 0 on ") and "in wait_for_a_file_system_that_is_stuck" in stack
                for who, stack in embedded.show(job).stacks.items()
            ),
            "its owner is shown the stack",
        )
        embedded.until(lambda: embedded.job(job).tries >= 1, "it is started again")
        (embedded.work / "enough").touch()
        embedded.until_state(job, "completed")
    finally:
        embedded.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["live", pytest.param("sharded", marks=trains_shards)])
def test_a_deadlocked_collective_of_live_workers_costs_no_sample(tmp_path, kind):
    """One of two ranks waits for ever and the other for it: both are told to give the step up. The
    one that cannot is started again and gets the state from the other.
    """
    embedded = impatient(tmp_path, nodes=2)
    try:
        embedded.start_daemon()
        path = embedded.script("deadlock.py", script(kind))
        job = embedded.submit(
            path, nodes=(2, 2), mode="live", on_hang="restart", nproc_per_node=1, profile=False
        )
        embedded.until_samples(job, 400)
        (embedded.work / "hang").touch()

        def hang_events():
            events = embedded.events("job-hung", job)
            return [e for e in events if "in wait_for_ever" in e.sentence]

        embedded.until(hang_events, "an event says where the rank hangs that the other waits for")
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 200)
        done = ChaosJob(job, kind, embedded.work)
        done.end()
        embedded.until_state(job, "completed")
        account = done.account()
        assert (account["twice"], account["never"]) == (0, 0)
    finally:
        embedded.stop()
