"""A worker that stops reporting while it lives: its owner is told where it stands, and it is
started again where the owner wishes that.
"""

from __future__ import annotations

from tests.integration.embedded import Site

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


def test_a_worker_that_hangs_is_told_with_its_stack_and_started_again(tmp_path):
    embedded = Site(tmp_path, nodes=1)
    text = embedded.config.read_text()
    for before, after in (
        ("max_tries = 2", 'max_tries = 100\nstop_grace = "0.2 s"'),
        ('hang_after = "1 h"', 'hang_after = "1 s"'),
    ):
        assert before in text
        text = text.replace(before, after)
    embedded.config.write_text(text)
    try:
        embedded.start_daemon()
        script = embedded.script("hangs.py", HANGS)
        job = embedded.submit(script, on_hang="restart", nproc_per_node=1)

        def told():
            events = embedded.events("job-hung", job)
            return [e for e in events if "wait_for_a_file_system" in e.sentence]

        embedded.until(told, "the hang is told with where the worker stands")
        # On a machine that stood still it is told of the worker at other places, too.
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
