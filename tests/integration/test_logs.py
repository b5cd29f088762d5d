"""The stored log is what the job printed, to the last byte; where bytes are missing, its end says
how many.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.integration.embedded import site

TALKATIVE = """
import os, time, malletrain
line = "rank " + os.environ["RANK"] + " " + "x" * 80 + " {:08d} \\u00e9\\n"
print("".join(line.format(i) for i in range(int(os.environ["LINES"]))), end="", flush=True)
open("printed-" + os.environ["RANK"], "w").close()
malletrain.report(8)
while os.path.exists("wait"):
    time.sleep(0.02)
"""
"""Prints as many lines as it is told to as fast as it can."""


def printed(rank: int, lines: int) -> str:
    """What TALKATIVE prints."""
    return "".join(f"rank {rank} {'x' * 80} {i:08d} \u00e9\n" for i in range(lines))


def command_line(made, job: str, *options: str) -> str:
    """What ``malletrain logs`` prints."""
    argv = [sys.executable, "-m", "malletrain", "logs", job, "--state-dir", str(made.state)]
    done = subprocess.run([*argv, *options], capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.thorough
def test_all_that_a_job_printed_is_kept_though_it_ends_at_once(tmp_path):
    lines = 130_000
    with site(tmp_path, nodes=2) as made:
        script = made.script("talkative.py", TALKATIVE)
        job = made.submit(script, nodes=(2, 2), env={"LINES": str(lines)}, profile=False)
        follower = subprocess.Popen(
            [*(sys.executable, "-m", "malletrain", "logs", job, "-f"), "--state-dir", made.state],
            stdout=subprocess.PIPE,
        )
        followed = follower.communicate()[0].decode()
        assert made.job(job).state == "completed"
        assert len(printed(0, lines)) > 12e6
        assert followed == printed(0, lines)
        for rank in (0, 1):
            assert command_line(made, job, "--rank", str(rank)) == printed(rank, lines)
            (stored,) = (made.state / "logs" / job).glob(f"g1-rank{rank}@*.log")
            assert stored.read_text() == printed(rank, lines)
        made.until(
            lambda: len(made.events("lease-ended")) == 2, "the leases are given back after all"
        )


@pytest.mark.thorough
def test_a_log_whose_end_was_lost_with_its_node_says_how_much_is_missing(tmp_path):
    lines = 400_000
    with site(tmp_path, nodes=1, grace_s=2.0) as made:
        script = made.script("talkative.py", TALKATIVE)
        (made.work / "wait").touch()
        job = made.submit(script, env={"LINES": str(lines)}, profile=False)
        made.until((made.root / "state" / "logs" / job).exists, "the first lines have arrived")
        assert made.daemon is not None
        made.daemon.send_signal(signal.SIGSTOP)  # takes nothing while the node is preempted
        made.until((made.work / "printed-0").exists, "the job has printed everything")
        (agent,) = made.agents().values()
        agent.send_signal(signal.SIGTERM)
        agent.wait()
        made.daemon.send_signal(signal.SIGCONT)
        made.until(lambda: made.events("node-lost"), "the loss is noticed")
        (stored,) = (made.state / "logs" / job).glob("g1-rank0@*.log")
        text = stored.read_bytes()
        marker = re.search(rb"\n?--- ([0-9,]+) bytes of this log are missing: .*---\n\Z", text)
        assert marker is not None, text[-300:]
        whole = printed(0, lines).encode()
        missing = int(marker[1].replace(b",", b""))
        length = len(whole) - missing
        assert text[:length] == whole[:length]
        assert text[length:] in (marker[0], marker[0].removeprefix(b"\n")), "nothing else is there"
