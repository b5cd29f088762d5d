"""The commands of an imitated PBS. What they print has the form of the recordings of OpenPBS 23.06.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

from pbs_state import SERVER, USER, assigned, shares


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
    # ctime(3), in the time zone of the caller.
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


def dsv(values):
    """``name=value`` and ``name.resource=value``."""
    for name, value in values.items():
        if not isinstance(value, dict):
            yield f"{name}={value}"
        elif name == "Variable_List":
            yield f"{name}={','.join(f'{k}={v}' for k, v in value.items())}"
        else:
            yield from (f"{name}.{resource}={part}" for resource, part in value.items())


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
    numbers = [word for word in args if word[:1].isdigit()]
    history = state["server"].get("job_history_enable", "True") == "True"
    if "-x" in args and not history:
        for number in numbers:
            sentence = f"qstat: PBS is not configured to maintain job history {number}"
            print(sentence, file=sys.stderr)
        return 0
    jobs = {
        n: j
        for n, j in state["jobs"].items()
        if (j["state"] != "F" or "-x" in args) and (not numbers or n in numbers)
    }
    unknown = [number for number in numbers if number not in jobs]
    for number in unknown:
        sentence = f"Unknown Job Id {number}"
        if history and number in state["jobs"]:
            sentence = (
                f"{number} Job has finished, use -x or -H to obtain historical job information"
            )
        print(f"qstat: {sentence}", file=sys.stderr)
    if "dsv" in args:
        mark = args[args.index("-D") + 1] if "-D" in args else "|"
        for number, job in jobs.items():
            print(mark.join([f"Job Id: {number}", *dsv(job_json(number, job))]))
    else:
        # Of several ids that are named the real one shows the first only.
        shown = list(jobs)[:1] if numbers else list(jobs)
        show({number: job_json(number, jobs[number]) for number in shown}, "Jobs", state)
    return 153 if unknown else 0


def pbsnodes(state, args) -> int:
    assert "-av" in args, "only vnodes are imitated"
    now, vnodes = time.time(), {}
    for vnode, node in state["nodes"].items():
        jobs = [n for n, j in state["jobs"].items() if j["state"] in "RES" and vnode in j["vnodes"]]
        used = assigned(state, vnode)
        busy = any(
            state["jobs"][n]["state"] in "RE" and not shares(state, state["jobs"][n]) for n in jobs
        )
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
            resources_assigned={n: f"{v}kb" if n == "mem" else v for n, v in used.items() if v},
            resv_enable="True",
            sharing=state["sharing"],
        )
        if node.get("comment"):
            made["comment"] = node["comment"]
        vnodes[vnode] = made
    show(vnodes, "nodes", state)
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
        "shell": options.get("-S", "/bin/sh"),
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
    active = [state["jobs"].get(number, {"state": "F"})["state"] != "F" for number in args]
    if True in active and not all(active[active.index(True) :]):
        # Seen on the real one without job history: the jobs before are deleted, and it dies.
        state["dead"] = True
        for number in args[: active.index(True) + 1]:
            state["jobs"].pop(number, None)
        return 0
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


def qsig(state, args) -> int:
    assert args[:2] == ["-s", "SIGKILL"], "no other signal is imitated"
    status = 0
    for number in args[2:]:
        job = state["jobs"].get(number)
        if job is None or job["state"] not in "RS":
            status = complain(f"qsig: Request invalid for state of job {number}")
        else:
            job["sigkill"] = True
    return status


def died(command) -> int:
    print("Connection refused", file=sys.stderr)
    print(f"{command}: cannot connect to server {SERVER} (errno=15010)", file=sys.stderr)
    return 255


def complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


COMMANDS = {
    "qstat": qstat,
    "pbsnodes": pbsnodes,
    "pbs_rstat": pbs_rstat,
    "qmgr": qmgr,
    "qdel": qdel,
    "qsig": qsig,
}
