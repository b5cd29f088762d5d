"""Measures what one poll of PBS costs MalleTrain: reading the answers and finding the gaps, for
machines of up to 10,000 nodes.

    python -m benchmarks.pbs_poll [--nodes 10000] [--jobs 5000] [--json]

The answers are synthetic, with the format and attributes of PBS (one vnode per host, a third of
them idle; waiting jobs, of which two hundred have an expected start; running jobs; a lease on each
tenth node). ``repaired``: the same with one environment variable that PBS prints as invalid JSON,
so that the answer of qstat is repaired first. The duration of the commands themselves is not
measured.
"""

from __future__ import annotations

import json
import random

from benchmarks import poll
from benchmarks.poll import NOW, Row
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.lease_script import PLACE
from scavenger.batch.rules import GapRules
from scavenger.batch.settings import BatchSettings
from scavenger.pbs.job import PbsLeaseOptions
from scavenger.pbs.parse import PbsJobTable, RawNode, read_jobs, read_nodes
from scavenger.pbs.scavenger import PbsScavenger
from scavenger.pbs.site import PbsQueue, PbsSite

DATE = "Fri Jan 15 08:00:00 2027"


def printed(kind: str, what: dict[str, object]) -> str:
    """In the format that cJSON prints for PBS."""
    whole = {"timestamp": int(NOW), "pbs_version": "23.06.06", "pbs_server": "pbs0", kind: what}
    return json.dumps(whole, indent="\t", separators=(",", ":\t"))


class Recorded:
    """PBS's two answers, parsed anew at every poll."""

    name = "recorded"

    def __init__(self, nodes: int, jobs: int, seed: int = 1, bad: bool = False) -> None:
        rng = random.Random(seed)
        names = [f"x{i:05d}" for i in range(1, nodes + 1)]
        states = (
            "free",
            "job-exclusive",
            "job-exclusive",
            "offline",
            "down",
            "free",
            "resv-exclusive",
            "job-busy",
            "free",
        )
        made: dict[str, object] = {}
        for i, name in enumerate(names):
            state = "job-exclusive" if i % 10 == 0 else rng.choice(states)
            node: dict[str, object] = {
                "Mom": f"{name}.hsn",
                "ntype": "PBS",
                "state": state,
                "pcpus": 64,
            }
            if state == "job-exclusive":
                node["jobs"] = [f"{i}.pbs0"]
            resources = {
                "arch": "linux",
                "host": name,
                "mem": "527672488kb",
                "ncpus": 64,
                "ngpus": 4,
                "gputype": "A100",
                "system": "site",
                "tier0": f"x{i // 14}",
                "tier1": f"g{i // 500}",
                "vnode": name,
            }
            assigned = {
                "accelerator_memory": "0kb",
                "mem": "0kb",
                "naccelerators": 0,
                "ncpus": 0,
                "ngpus": 0,
            }
            node |= {
                "resources_available": resources,
                "resources_assigned": assigned,
                "resv_enable": "True",
                "license": "l",
                "sharing": "default_shared",
                "last_state_change_time": int(NOW),
                "last_used_time": int(NOW),
            }
            made[name] = node
        self.pbsnodes = printed("nodes", made)
        queue: dict[str, object] = {}
        for number in range(jobs):
            where = "+".join(
                f"({name}:ncpus=64)" for name in names[rng.randrange(nodes) :][: rng.randint(1, 40)]
            )
            expected: dict[str, object] = (
                {"estimated": {"exec_vnode": where, "start_time": DATE}} if number < 200 else {}
            )
            queue[f"{number}.pbs0"] = self._job(f"job {number}", number, "Q", "prod", expected)
        for number in range(jobs):
            queue[f"{10**6 + number}.pbs0"] = self._job(
                "other", number, "R", "prod", {"exec_vnode": "(x1:ncpus=64)", "run_count": 1}
            )
        for i in range(0, nodes, 10):
            one = self._job(
                f"malletrain-t-l{i}",
                1,
                "R",
                "preemptable",
                {"exec_vnode": f"({names[i]}:ncpus=64)", "run_count": 1},
            )
            one["Resource_List"] = {"select": f"1:host={names[i]}:ncpus=64"}
            queue[f"{i}.lease"] = one | {"Job_Owner": "me@login"}
        self.qstat = printed("Jobs", queue)
        if bad:
            self.qstat = self.qstat.replace('"OMP_NUM_THREADS":\t"8"', '"OMP_NUM_THREADS":\t008', 1)

    @staticmethod
    def _job(
        name: str, number: int, state: str, queue: str, more: dict[str, object]
    ) -> dict[str, object]:
        keys = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "WORKDIR", "SYSTEM", "QUEUE", "HOST")
        variables = dict.fromkeys((f"PBS_O_{key}" for key in keys), "/some/where")
        made: dict[str, object] = {
            "Job_Name": name,
            "Job_Owner": f"user{number % 97}@login",
            "job_state": state,
            "queue": queue,
        }
        texts = (
            "server",
            "Checkpoint",
            "Error_Path",
            "Hold_Types",
            "Join_Path",
            "Keep_Files",
            "Mail_Points",
            "Output_Path",
            "schedselect",
            "euser",
            "egroup",
            "project",
            "Submit_Host",
            "comment",
            "Submit_arguments",
        )
        made |= dict.fromkeys(texts, "pbs0:/home/user/job.o17 and the like")
        made |= dict.fromkeys(("ctime", "mtime", "qtime", "etime"), DATE)
        made |= {
            "Resource_List": {
                "ncpus": 64,
                "nodect": 1,
                "place": "scatter",
                "select": "1:system=site",
                "walltime": "01:00:00",
            }
        }
        return (
            made | {"substate": 42, "Variable_List": {**variables, "OMP_NUM_THREADS": "8"}} | more
        )

    def read(
        self, prefix: str, with_running: bool = False
    ) -> tuple[dict[str, RawNode], PbsJobTable]:
        """As scavenger.pbs.source.PbsSource."""
        return read_nodes(self.pbsnodes), read_jobs(self.qstat, prefix, with_running)


def measure(nodes: int, jobs: int) -> Row:
    """Return the times of reading the nodes, the jobs, and the jobs with a repair, and of the
    conclusions.
    """
    source, bad = Recorded(nodes, jobs), Recorded(nodes, jobs, bad=True)
    lease, rules = PbsLeaseOptions(queue="preemptable"), GapRules(use_planned=True)
    settings = BatchSettings("t", f"#!/bin/sh\n{PLACE}\n", lease, rules, user="me", idle_for_s=0.0)
    scavenger = PbsScavenger(settings, source=source, memory=GapMemory(), clock=lambda: NOW)
    queues = {
        name: PbsQueue(name, True, True, True, priority)
        for name, priority in (("prod", 150), ("preemptable", 10))
    }
    site = PbsSite((23, 6), "23.06.06", "pbs0", queues=queues)
    reads = {
        "nodes": lambda: read_nodes(source.pbsnodes),
        "jobs": lambda: read_jobs(source.qstat, settings.prefix),
        "repaired": lambda: read_jobs(bad.qstat, settings.prefix),
    }
    return {
        "mb": (len(source.pbsnodes) + len(source.qstat)) / 1e6,
        **poll.measure(scavenger, site, reads),
    }


if __name__ == "__main__":
    poll.main(__doc__, measure)
