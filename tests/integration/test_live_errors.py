"""What a person reads whose script cannot work in live mode: the script's own first error."""

from __future__ import annotations

import subprocess
import sys

import pytest

WRONG_ARGUMENTS = """
import argparse
print("reading arguments", flush=True)
argparse.ArgumentParser().parse_args()
import malletrain.elastic
"""
ALONE = """
print("I train alone", flush=True)
"""


def output(made, job: str) -> str:
    """What ``malletrain logs JOB`` prints."""
    argv = [sys.executable, "-m", "malletrain", "logs", job, "--state-dir", str(made.state)]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


@pytest.mark.thorough
def test_the_reason_of_a_live_job_that_never_began(embedded):
    wrong = embedded.submit(
        embedded.script("wrong.py", WRONG_ARGUMENTS), "--epochz", mode="live", name="wrong",
        env={"MALLETRAIN_PRELOAD": "0"},
    )  # fmt: skip
    alone = embedded.submit(embedded.script("alone.py", ALONE), mode="live", name="alone")
    for job, words, printed in (
        (wrong, "wrong.py: error: unrecognized arguments: --epochz", "reading arguments\n"),
        (alone, "This script does not use malletrain.elastic", "I train alone\n"),
    ):
        ended = embedded.until_state(job, "failed", "completed")
        assert ended.state == "failed"
        assert words in ended.reason
        assert "launcher ended" not in ended.reason
        failure = embedded.show(job).failure
        sentence, _, lines = failure.partition("\n")
        assert words in sentence
        assert lines.startswith("[rank 0]\n" + printed.rstrip())
        assert output(embedded, job).startswith(printed)
