"""An imitation of a small PBS: server, scheduler and MoMs in one process, and the commands that
speak to it through a directory.

    python -I -S pbs_machine.py ROOT serve           until ROOT/stop exists
    python -I -S pbs_machine.py ROOT qstat|pbsnodes|qsub|qdel|qmgr|pbs_rstat ARGUMENTS...

Jobs are real processes: a top shell in a session of its own reads the name of the script from its
standard input, as MoM starts it, and signals go to every process of that session (openpbs,
resmom/linux/mom_mach.c, kill_session). Preemption is by deleting, requeuing or suspending; who does
not leave within the queue's kill_delay is killed. What it prints has the form of the recordings of
OpenPBS 23.06. Only whole hosts are given out. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SERVER, USER = "pbs0", "pbsuser"
KILL_DELAY_S = 10


@contextlib.contextmanager
def state_of(root: Path):
    """The state, read and written under a lock."""
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = root / "state.json"
        state = json.loads(path.read_text())
        before = json.dumps(state)
        yield state
        if (after := json.dumps(state)) != before:
            (root / "state.new").write_text(after)
            os.replace(root / "state.new", path)


def new_state(hosts, queues, preempt_order="D", version="23.06.06"):
    """``hosts``: host → its vnodes (name → resources). ``queues``: name → attributes."""
    nodes = {
        vnode: {
            "host": host,
            "resources": {"arch": "linux", "host": host, "vnode": vnode, **resources},
            "state": "free",
            "resv": [],
        }
        for host, vnodes in hosts.items()
        for vnode, resources in vnodes.items()
    }
    return {
        "nodes": nodes,
        "queues": queues,
        "jobs": {},
        "next": 1,
        "resv": {},
        "version": version,
        "strict_ordering": False,
        "sched": {
            "preempt_queue_prio": 150,
            "preempt_order": preempt_order,
            "scheduler_iteration": 5,
        },
        "server": {"scheduling": "True", "query_other_jobs": "True", "backfill_depth": 5},
    }


# --- server, scheduler, MoM ---


class Machine:
    """The processes behind the state."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shells: dict[str, subprocess.Popen[bytes]] = {}
        self.killed_at: dict[str, float] = {}

    def serve(self) -> None:
        while not (self.root / "stop").exists():
            with state_of(self.root) as state:
                self.step(state, time.time())
            time.sleep(0.03)
        for shell in self.shells.values():
            signal_session(shell.pid, signal.SIGKILL)

    def step(self, state, now) -> None:
        for number, job in state["jobs"].items():
            if job["state"] in "REPS" and number in self.shells:
                self.look_after(state, number, job, now)
        if state["server"]["scheduling"] == "True" and not state.get("asleep"):
            self.schedule(state, now)

    def look_after(self, state, number, job, now) -> None:
        shell = self.shells[number]
        status = shell.poll()
        over = job["began"] + job["walltime"] < now and job["state"] == "R"
        if (job.pop("delete", None) or over) and not job.get("kill_at"):
            signal_session(shell.pid, signal.SIGCONT)
            self.terminate(state, job, shell, now)
        if job.get("kill_at") and now >= job["kill_at"]:
            signal_session(shell.pid, signal.SIGKILL)
        if status is None or (job.get("kill_at") and now < job["kill_at"] and session(shell.pid)):
            return  # MoM waits for what is left of a job that it has told to end
        signal_session(shell.pid, signal.SIGKILL)
        del self.shells[number]
        exit_status = status if status >= 0 else 256 - status
        if job.pop("requeue", None):
            job.update(
                state="Q", substate=10, vnodes=[], kill_at=None, comment="Not Running: requeued"
            )
        else:
            job.update(state="F", substate=92, exit=exit_status, kill_at=None)

    def terminate(self, state, job, shell, now) -> None:
        job["kill_at"] = now + state["queues"][job["queue"]].get("kill_delay", KILL_DELAY_S)
        signal_session(shell.pid, signal.SIGTERM)

    def schedule(self, state, now) -> None:
        waiting = [(n, j) for n, j in state["jobs"].items() if j["state"] == "Q"]
        waiting.sort(
            key=lambda item: (
                -state["queues"][item[1]["queue"]].get("Priority", 0),
                int(item[0].split(".")[0]),
            )
        )
        for number, job in waiting:
            job.pop("estimated", None)
            free = [h for h in free_hosts(state, now) if fits(job, h)]
            if len(free) >= job["count"]:
                self.start(state, number, job, free[: job["count"]], now)
            elif not self.preempt(state, job, free, now) and state["strict_ordering"]:
                self.estimate(state, job, now)
                return
        if any(j["state"] == "Q" for j in state["jobs"].values()):
            return
        free = set(free_hosts(state, now))
        for job in state["jobs"].values():
            if job["state"] == "S" and set(job["hosts"]) <= free and not job.get("kill_at"):
                job.update(state="R", substate=42)
                signal_session(self.shells[job["id"]].pid, signal.SIGCONT)

    def start(self, state, number, job, hosts, now) -> None:
        vnodes = [
            v
            for v, node in state["nodes"].items()
            if node["host"] in hosts and node["resources"].get("ncpus")
        ]
        script = self.root / f"{number}.SC"
        script.write_text(job["script"])
        script.chmod(0o700)
        environment = {
            "HOME": str(self.root),
            "LOGNAME": USER,
            "PATH": "/usr/bin:/bin",
            "PBS_JOBID": number,
            "PBS_JOBNAME": job["name"],
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_QUEUE": job["queue"],
            "PBS_O_WORKDIR": "/",
            "FAKE_PBS": str(self.root),
        }
        shell = subprocess.Popen(
            ["/bin/sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self.root,
            start_new_session=True,
        )
        assert shell.stdin is not None
        shell.stdin.write(f"{script}\n".encode())
        shell.stdin.close()
        self.shells[number] = shell
        where = "+".join(f"({v}:ncpus={state['nodes'][v]['resources']['ncpus']})" for v in vnodes)
        comment = time.strftime("Job run at %a %b %d at %H:%M on ", time.gmtime(now)) + where
        job.update(
            state="R",
            substate=42,
            hosts=hosts,
            vnodes=vnodes,
            began=now,
            runs=job["runs"] + 1,
            comment=comment,
        )

    def preempt(self, state, job, free, now) -> bool:
        """Preempt as many as are lacking; whether enough will come free."""
        queues, prio = state["queues"], state["sched"]["preempt_queue_prio"]
        if queues[job["queue"]].get("Priority", 0) < prio:
            return False
        on_their_way, victims = set(free), []
        for number, other in state["jobs"].items():
            if (
                other["state"] == "R"
                and queues[other["queue"]].get("Priority", 0) < prio
                and all(fits(job, h) for h in other["hosts"])
            ):
                if other.get("kill_at"):
                    on_their_way |= set(other["hosts"])
                else:
                    victims.append((number, other))
        chosen = []
        for number, other in victims:
            if len(on_their_way) >= job["count"]:
                break
            if way := next(
                (
                    w
                    for w in state["sched"]["preempt_order"]
                    if w in "DS" or (w == "R" and other["rerunnable"])
                ),
                "",
            ):
                chosen.append((way, number, other))
                on_their_way |= set(other["hosts"])
        if len(on_their_way) < job["count"]:
            return False
        for way, number, other in chosen:
            shell = self.shells[number]
            if way == "S":
                signal_session(shell.pid, signal.SIGSTOP)
                other.update(state="S", substate=45)
                continue
            other["requeue"] = way == "R"
            if way == "D":
                other["comment"] += f" and terminated by Scheduler@{SERVER}"
            self.terminate(state, other, shell, now)
        return True

    def estimate(self, state, job, now) -> None:
        running = [j for j in state["jobs"].values() if j["state"] == "R"]
        ends = sorted(j["began"] + j["walltime"] for j in running)
        vnodes = [v for v, node in state["nodes"].items() if fits(job, node["host"])]
        where = "+".join(f"({v}:ncpus=2)" for v in vnodes[: job["count"]])
        job["estimated"] = {"exec_vnode": where, "start_time": ends[-1] if ends else now}


def fits(job, host) -> bool:
    return not job["host"] or job["host"] == host


def free_hosts(state, now) -> list[str]:
    """Hosts on which a job may start, in order."""
    taken = {
        host
        for job in state["jobs"].values()
        if job["state"] in "RE"
        for host in job.get("hosts", [])
    }
    bad = {n["host"] for n in state["nodes"].values() if n["state"] != "free"}
    for name, resv in state["resv"].items():
        if resv["start"] <= now < resv["end"]:
            bad |= {n["host"] for n in state["nodes"].values() if name in n["resv"]}
    hosts = dict.fromkeys(n["host"] for n in state["nodes"].values() if n["resources"].get("ncpus"))
    return [host for host in hosts if host not in taken and host not in bad]


def session(leader: int) -> list[int]:
    """Living processes of a session (proc_pid_stat(5))."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(name))
    return found


def signal_session(leader: int, number: int) -> None:
    for pid in session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# --- commands ---


def show(what, kind, state) -> None:
    whole = {"timestamp": int(time.time()), "pbs_version": state["version"], "pbs_server": SERVER}
    if what or kind == "nodes":
        whole[kind] = what
    text = json.dumps(whole, indent="\t", separators=(",", ":\t"))
    text = re.sub(
        r"\[\s+([^\]]*?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text
    )
    # What a real PBS prints without regard to JSON: "RAW:005" stands for a bare 005.
    print(re.sub(r'"RAW:([^"]*)"', lambda m: m[1].replace("\\", ""), text))


def date(seconds: float) -> str:
    # ctime(3), in the time zone of who asks.
    time.tzset()
    return time.ctime(seconds)


def job_json(number, job):
    variables = {"PBS_O_LOGNAME": USER, "PBS_O_HOST": SERVER, **job.get("variables", {})}
    made = {"Job_Name": job["name"], "Job_Owner": f"{job['owner']}@{SERVER}"}
    if job["state"] in "RES":
        made["resources_used"] = {"cput": "00:00:00", "ncpus": 2, "walltime": "00:00:01"}
    made.update(
        {
            "job_state": job["state"],
            "queue": job["queue"],
            "server": SERVER,
            "ctime": date(job["submitted"]),
        }
    )
    if job["vnodes"]:
        made["exec_vnode"] = "+".join(f"({v}:ncpus=2)" for v in job["vnodes"])
    made["Rerunable"] = "True" if job["rerunnable"] else "False"
    made["Resource_List"] = {
        "select": job["select"],
        "place": job["place"],
        "walltime": job["wall_text"],
    }
    made.update({"substate": job["substate"], "Variable_List": variables, "euser": job["owner"]})
    if job["comment"]:
        made["comment"] = job["comment"]
    if job["runs"]:
        made["run_count"] = job["runs"]
    if job.get("exit") is not None:
        made["Exit_status"] = job["exit"]
    if "estimated" in job:
        made["estimated"] = {**job["estimated"], "start_time": date(job["estimated"]["start_time"])}
    return made


def qstat(state, args) -> int:
    if "-Bf" in args:
        show(
            {
                SERVER: {
                    "server_state": "Active",
                    **state["server"],
                    "pbs_version": state["version"],
                }
            },
            "Server",
            state,
        )
        return 0
    if "-Qf" in args:
        show(
            {
                name: {
                    "queue_type": "Execution",
                    **q,
                    "enabled": q.get("enabled", "True"),
                    "started": q.get("started", "True"),
                }
                for name, q in state["queues"].items()
            },
            "Queue",
            state,
        )
        return 0
    wanted = [word for word in args if word[:1].isdigit()]
    jobs = {
        n: j
        for n, j in state["jobs"].items()
        if (j["state"] != "F" or "-x" in args) and (not wanted or n in wanted)
    }
    unknown = [number for number in wanted if number not in jobs]
    for number in unknown:
        print(f"qstat: Unknown Job Id {number}", file=sys.stderr)
    show({number: job_json(number, job) for number, job in jobs.items()}, "Jobs", state)
    return 153 if unknown else 0


def pbsnodes(state, args) -> int:
    assert "-av" in args, "only vnodes are imitated"
    now, found = time.time(), {}
    for vnode, node in state["nodes"].items():
        jobs = [n for n, j in state["jobs"].items() if j["state"] in "RES" and vnode in j["vnodes"]]
        busy = any(state["jobs"][n]["state"] in "RE" for n in jobs)
        words = ([] if node["state"] == "free" else [node["state"]]) + (
            ["job-exclusive"] if busy else []
        )
        reserved = any(
            state["resv"][r]["start"] <= now < state["resv"][r]["end"] for r in node["resv"]
        )
        if reserved and not busy:
            words.append("resv-exclusive")
        made = {
            "Mom": SERVER,
            "Port": 15002,
            "ntype": "PBS",
            "state": ",".join(words) or "free",
            "pcpus": 2,
        }
        if jobs:
            made["jobs"] = jobs
        if node["resv"]:
            made["resv"] = ", ".join(node["resv"])
        made.update(
            resources_available=node["resources"],
            resources_assigned={},
            resv_enable="True",
            sharing="default_excl",
        )
        if node.get("comment"):
            made["comment"] = node["comment"]
        found[vnode] = made
    show(found, "nodes", state)
    return 0


def pbs_rstat(state, args) -> int:
    assert args == ["-f"]
    for name, resv in state["resv"].items():
        times = f"reserve_start = {date(resv['start'])}\nreserve_end = {date(resv['end'])}\n"
        print(f"Resv ID: {name}\nReserve_Name = maint\nreserve_state = RESV_CONFIRMED\n{times}")
    return 0


def qmgr(state, args) -> int:
    assert args[0] == "-c"
    if args[1] == "print sched":
        print("#\n# Create and define scheduler default\n#\ncreate sched default")
        print("\n".join(f"set sched {name} = {value}" for name, value in state["sched"].items()))
    return 0


def qsub(state, args, script: str) -> int:
    words, options, limits = iter(args), {}, {}
    for word in words:
        if word in ("-f", "-h", "-V"):
            options[word] = ""
        elif word == "-l":
            limits.update(part.split("=", 1) for part in [next(words)])
        else:
            options[word] = next(words)
    for line in script.split("\n"):
        if line.startswith("#PBS -q "):
            options["-q"] = line[8:].strip()
        if line.strip() and not line.startswith("#"):
            break
    queue = options.get("-q", "workq")
    owner = os.environ.get("FAKE_PBS_USER", USER)
    if "\r\n" in script:
        return complain("qsub: script contains cr, lf")
    if queue not in state["queues"]:
        return complain("qsub: Unknown queue")
    if state["queues"][queue].get("enabled") == "False":
        return complain("qsub: Queue is not enabled")
    if len(options.get("-N", "")) > 236 or not re.fullmatch(r"[\w+.-]+", options.get("-N", "x")):
        return complain("qsub: illegal -N value")
    most = state["queues"][queue].get("max_queued")
    if (
        most is not None
        and sum(j["queue"] == queue and j["state"] in "QRH" for j in state["jobs"].values()) >= most
    ):
        return complain(f"qsub: would exceed queue {queue}'s per-user limit of jobs in 'Q' state")
    select = limits.get("select", "1:ncpus=1")
    count, *rest = select.split(":")
    wall = limits.get("walltime") or limits.get("max_walltime") or "01:00:00"
    hours, minutes, seconds = (int(x) for x in wall.split(":"))
    number = f"{state['next']}.{SERVER}"
    state["next"] += 1
    state["jobs"][number] = {
        "id": number,
        "name": options.get("-N", "STDIN"),
        "owner": owner,
        "state": "H" if "-h" in options else "Q",
        "substate": 20 if "-h" in options else 10,
        "queue": queue,
        "submitted": int(time.time()),
        "select": select,
        "args": args,
        "place": limits.get("place", "free"),
        "wall_text": wall,
        "walltime": 3600 * hours + 60 * minutes + seconds,
        "script": script,
        "count": int(count),
        "host": next((w[5:] for w in rest if w.startswith("host=")), ""),
        "rerunnable": options.get("-r", "y") == "y",
        "vnodes": [],
        "comment": "",
        "runs": 0,
    }
    print(number)
    return 0


def qdel(state, args) -> int:
    status = 0
    owner = os.environ.get("FAKE_PBS_USER", USER)
    for number in args:
        job = state["jobs"].get(number)
        if job is None or job["state"] == "F":
            status = (
                complain(
                    f"qdel: {'Unknown Job Id' if job is None else 'Job has finished'} {number}"
                )
                and 153
            )
        elif job["owner"] != owner:
            status = complain(f"qdel: Unauthorized Request  {number}") and 159
        elif job["state"] in "QH":
            job.update(state="F", substate=92)
        else:
            job["delete"] = True
            job["comment"] += f" and terminated by {owner}@{SERVER}"
    return status


def complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


def main(argv: list[str]) -> int:
    root, command, args = Path(argv[0]), argv[1], argv[2:]
    if command == "serve":
        Machine(root).serve()
        return 0
    script = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if command == "qsub" else ""
    with state_of(root) as state:
        return qsub(state, args, script) if command == "qsub" else COMMANDS[command](state, args)


COMMANDS = {
    "qstat": qstat,
    "pbsnodes": pbsnodes,
    "pbs_rstat": pbs_rstat,
    "qmgr": qmgr,
    "qdel": qdel,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
