"""Answers of PBS's commands that stop anywhere, although the command ends well: an error, or the
whole truth.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.interface import SchedulerError
from scavenger.pbs.parse import read_ended, read_jobs, read_nodes, read_reservations
from scavenger.pbs.site import read_site
from tests.scavenger.pbs.test_parse import RECORDED, recorded

RESERVATIONS = (
    "Resv ID: R7.pbs0\n    Reserve_Name = class\n    reserve_state = RESV_CONFIRMED\n"
    "    reserve_start = Fri Nov 20 18:07:53 2026\n    reserve_end = Fri Nov 20 19:07:53 2026\n\n"
)
ENDED = "".join(
    f"Job Id: {number}.pbs0\x1fJob_Name=mt-l{number}\x1fjob_state=F\x1fcomment=terminated by me\n\n"
    for number in (5, 12)
)
SERVER = '{"pbs_version": "23.06.06", "Server": {"pbs0": {}}}\n'
QUEUES = '{"timestamp": 1, "Queue": {}}\n'
SCHEDULER = "#\n# Create sched\n#\ncreate sched default\nset sched preempt_order = SCR\n"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (RESERVATIONS * 2, read_reservations),
        (ENDED, lambda text: read_ended(text, "mt-")),
        (SCHEDULER, lambda text: read_site(SERVER, QUEUES, text)),
    ],
    ids=["pbs_rstat", "qstat -x", "qmgr"],
)
def test_a_line_that_was_cut_is_no_line(text, read):
    for at in range(1, len(text)):
        if text[at - 1] != "\n":
            with pytest.raises(SchedulerError, match=r"cannot be understood|has no times"):
                read(text[:at])


@pytest.mark.parametrize(
    ("text", "read"),
    [(SERVER, lambda text: read_site(text, QUEUES)), (QUEUES, lambda t: read_site(SERVER, t))],
)
def test_json_without_its_end_is_none(text, read):
    whole = read(text)
    for at in range(len(text)):
        unless_refused(lambda at=at: read(text[:at]), whole)


def unless_refused(read, whole):
    try:
        assert read() == whole
    except SchedulerError:
        pass


@recorded
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("pbsnodes_a.json", read_nodes),
        ("pbsnodes_aSj.json", read_nodes),
        ("qstat_f.json", lambda text: read_jobs(text, "malletrain")),
        ("qstat_tf.json", lambda text: read_jobs(text, "malletrain")),
    ],
)
def test_of_what_a_real_pbs_said_no_part_passes_for_the_whole(name, read):
    text = (Path(RECORDED) / name).read_text()
    whole = read(text)
    for at in range(0, len(text), max(1, len(text) // 1000)):
        unless_refused(lambda at=at: read(text[:at]), whole)
