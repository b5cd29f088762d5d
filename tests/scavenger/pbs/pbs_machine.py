"""An imitation of a small PBS: server, scheduler and MoMs in one process, which also answers the
commands (fake_pbs.py has them).

    python -I -S pbs_machine.py ROOT           until ROOT/stop exists

A command writes the path of its answer into the pipe ROOT/requests. PATH.request has its standard
input's file, two variables of its environment and its words; what it prints goes to PATH.out and
PATH.err, and its exit status into PATH itself, a pipe.

Jobs are real processes: a top shell in a session of its own reads the name of the script from its
standard input, as MoM starts it, and signals go to every process of that session (openpbs,
resmom/linux/mom_mach.c, kill_session). Preemption is by deleting, requeuing or suspending; who does
not leave within the queue's kill_delay is killed. What it prints has the form of the recordings of
OpenPBS 23.06. Whole hosts are given out, and parts of hosts with one vnode to jobs that share.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it runs as a script, without the repository

from pbs_commands import COMMANDS, died, qsub
from pbs_state import KILL_DELAY_S, SERVER, USER, has_room, size_kb, state_of

STEP_S = 0.03
"""Time between two looks at the jobs, seconds."""


class Machine:
    """The processes behind the state."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shells: dict[str, subprocess.Popen[bytes]] = {}
        self.sampled_at: dict[str, float] = {}
        self.jobs_with_leftovers: set[str] = set()
        """Jobs of which something was left when the leader of their session had ended."""

    def serve(self) -> None:
        requests = os.open(self.root / "requests", os.O_RDWR | os.O_CLOEXEC)
        next_step = 0.0
        while not (self.root / "stop").exists():
            if time.monotonic() >= next_step:
                with state_of(self.root) as state:
                    self.step(state, time.time())
                next_step = time.monotonic() + STEP_S
            self.answer(requests, max(0.0, next_step - time.monotonic()))
        (self.root / "requests").unlink()  # nobody else can ask
        self.answer(requests, 0.0)
        for shell in self.shells.values():
            signal_session(shell.pid, signal.SIGKILL)

    def answer(self, requests: int, wait_s: float) -> None:
        """Answer the commands that have asked, or that ask within ``wait_s`` seconds."""
        if select.select([requests], [], [], wait_s)[0]:
            for answer in os.read(requests, 1 << 16).decode().splitlines():
                answer_command(self.root, Path(answer))

    def step(self, state, now) -> None:
        for number, job in state["jobs"].items():
            if job["state"] == "E" and now >= job.get("copied_at", now + 1):
                job.update(state="F", substate=92)
            if job["state"] in "REPS" and number in self.shells:
                self.look_after(state, number, job, now)
        if state["server"]["scheduling"] == "True" and not state.get("asleep"):
            self.schedule(state, now)

    def look_after(self, state, number, job, now) -> None:
        shell = self.shells[number]
        status = shell.poll()
        over = job["began"] + job["walltime"] < now and job["state"] == "R"
        if job.pop("sigkill", None):
            signal_session(shell.pid, signal.SIGKILL)
        if job.pop("delete", None) or (over and not job.get("kill_at")):
            # At each delete the time to SIGKILL begins anew.
            self.terminate(state, job, shell, now)
        if job.get("kill_at") and now >= job["kill_at"] and job["state"] != "S":
            signal_session(shell.pid, signal.SIGKILL)
        if status is None:
            return
        # MoM knows at once that the leader of the session has ended. If it told the job to end, it
        # notices the end of the other processes when it looks the next time.
        sampled = self.sampled_at.setdefault(number, now + state["sample_s"])
        processes = session(shell.pid)
        if processes and job.get("kill_at"):
            self.jobs_with_leftovers.add(number)
        if number in self.jobs_with_leftovers and (processes or now < sampled):
            if now >= sampled:
                self.sampled_at[number] = now + state["sample_s"]
            return
        signal_session(shell.pid, signal.SIGKILL)
        del self.shells[number], self.sampled_at[number]
        self.jobs_with_leftovers.discard(number)
        exit_status = status if status >= 0 else 256 - status
        if job.pop("requeue", None):
            job.update(
                state="Q", substate=10, vnodes=[], kill_at=None, comment="Not Running: requeued"
            )
        elif state.get("copy_s") and "-R" not in job["args"]:
            # MoM copies what the job printed to where qsub ran, tries that again, and keeps the
            # node meanwhile (seen on a machine of several hosts).
            copied_at = now + state["copy_s"]
            job.update(state="E", substate=51, exit=exit_status, kill_at=None, copied_at=copied_at)
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
            free = [h for h in free_hosts(state, now, job) if fits(state, job, h)]
            if len(free) >= job["count"]:
                self.start(state, number, job, free[: job["count"]], now)
            elif not self.preempt(state, job, free, now) and state["strict_ordering"]:
                self.estimate(state, job, now)
                return
        if any(j["state"] == "Q" for j in state["jobs"].values()):
            return
        free = set(free_hosts(state, now))
        for job in state["jobs"].values():
            if job["state"] == "S" and set(job["hosts"]) <= free:
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
            [job["shell"]],
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
                and all(fits(state, job, h) for h in other["hosts"])
            ):
                if other.get("kill_at"):
                    on_their_way |= set(other["hosts"])
                else:
                    victims.append((number, other))
        chosen = []
        for number, other in victims:
            if len(on_their_way) >= job["count"]:
                break
            if any(host in on_their_way for host in other["hosts"]):
                continue
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
        vnodes = [v for v, node in state["nodes"].items() if fits(state, job, node["host"])]
        where = "+".join(f"({v}:ncpus=2)" for v in vnodes[: job["count"]])
        job["estimated"] = {"exec_vnode": where, "start_time": ends[-1] if ends else now}


def fits(state, job, host) -> bool:
    """Whether the host is the one that is asked for, and has the memory. The scheduler gives out
    whole megabytes of each vnode only (openpbs, scheduler/node_info.cpp).
    """
    has = [n["resources"] for n in state["nodes"].values() if n["host"] == host]
    whole = sum(size_kb(r.get("mem", "0kb")) // 1024 * 1024 for r in has)
    memory = next((w[4:] for w in job["select"].split(":") if w.startswith("mem=")), "0kb")
    return job["host"] in ("", host) and size_kb(memory) <= whole


def free_hosts(state, now, wanting=None) -> list[str]:
    """Hosts on which a job may start, in order: those without jobs, or, for the job ``wanting``,
    those with room for it.
    """
    taken = {
        host
        for job in state["jobs"].values()
        if job["state"] in "RE"
        for host in job.get("hosts", [])
        if wanting is None or not has_room(state, wanting, host)
    }
    bad = {n["host"] for n in state["nodes"].values() if n["state"] != "free"}
    for name, resv in state["resv"].items():
        if resv["start"] <= now < resv["end"]:
            bad |= {n["host"] for n in state["nodes"].values() if name in n["resv"]}
    hosts = dict.fromkeys(n["host"] for n in state["nodes"].values() if n["resources"].get("ncpus"))
    return [host for host in hosts if host not in taken and host not in bad]


def session(leader: int) -> list[int]:
    """Living processes of a session (proc_pid_stat(5))."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                pids.append(int(name))
    return pids


def signal_session(leader: int, number: int) -> None:
    for pid in session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def answer_command(root: Path, answer: Path) -> None:
    """Run a command for the process that waits at the pipe ``answer``."""
    request = answer.with_name(f"{answer.name}.request").read_bytes()
    words = request.decode("utf-8", "surrogateescape").split("\0")[:-1]
    stdin, zone, user, command, *args = words
    with (
        open(f"{answer}.out", "w", encoding="utf-8", errors="surrogateescape") as out,
        open(f"{answer}.err", "w", encoding="utf-8", errors="surrogateescape") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        # The commands read these two.
        os.environ.update(TZ=zone, FAKE_PBS_USER=user or USER)
        try:
            code = run(root, command, args, stdin)
        except Exception:
            traceback.print_exc()
            code = 1
    # Who was killed meanwhile does not listen.
    with contextlib.suppress(OSError):
        pipe = os.open(answer, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, f"{code}\n".encode())
        os.close(pipe)
    answer.unlink()


def run(root: Path, command: str, args: list[str], stdin: str) -> int:
    """Return the exit status of a command."""
    script = ""
    if command == "qsub":
        script = Path(stdin).read_bytes().decode("utf-8", "surrogateescape")
    with state_of(root) as state:
        if state.get("dead"):
            return died(command)
        return qsub(state, args, script) if command == "qsub" else COMMANDS[command](state, args)


if __name__ == "__main__":
    Machine(Path(sys.argv[1])).serve()
