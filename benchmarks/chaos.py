"""Injects random faults into jobs of every kind on the embedded cluster, and checks that no job is
lost or runs twice, no lease leaks, no process is left, and each sample is counted exactly once.

    python -m benchmarks.chaos [--faults 1000] [--jobs 30] [--nodes 4] [--seed N] [--minutes 300]
        [--kinds restart,live,sharded,service] [--hasty 0.2] [--apart 1] [--silence 10]
        [--keep FOLDER] [--json]

The faults: SIGKILL and SIGSTOP of daemon, agent, supervisor, fork server, launcher and worker;
connections to the daemon cut, delayed and half-open; preemption with notice and (a killed agent)
without; a main scheduler that does not answer; a full disk; a worker that hangs in a step while the
job's owner requests a restart. A daemon that ended is started again, as by a service manager.

``--running`` jobs are in plans at a time. Each is told to end after its part of the faults, and the
next one begins. The site has recovered from a fault when no process is stopped, the daemon answers
and every running job has made progress. A fraction ``--hasty`` of the faults does not wait for
that, but comes at most ``--apart`` seconds after the previous one.

Exit status 1 if a guarantee was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks import end_in_order
from benchmarks.chaos_faults import Faults
from benchmarks.chaos_jobs import KINDS, ChaosJob, script
from benchmarks.chaos_site import ChaosSite
from malletrain.client import ClientError, Connection
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobView

HANG_S = 400.0
"""Time without recovery after which a job counts as lost, seconds."""
OVER = ("completed", "failed", "cancelled")


class ChaosError(RuntimeError):
    """A guarantee was broken: a job hangs, or has ended by itself."""


@dataclass(frozen=True)
class Campaign:
    """The number and the pace of the faults. Times in seconds."""

    faults: int
    jobs: int
    seed: int
    nodes: int = 4
    running: int = 3
    """Number of jobs in plans at a time."""
    kinds: Sequence[str] = KINDS
    hasty: float = 0.2
    """Fraction of the faults that come before the recovery from the previous one."""
    apart_s: float = 1.0
    """Maximum time between such a fault and the previous one."""
    silence_s: float = 10.0
    """Silence after which an agent is lost. Processes are stopped for up to a fifth longer."""
    limit_s: float = 18000.0


class Chaos:
    """One run."""

    def __init__(self, site: ChaosSite, campaign: Campaign) -> None:
        self.site, self._campaign = site, campaign
        self._dice = random.Random(campaign.seed)
        kinds = campaign.kinds
        self.faults = Faults(site, self._dice, any(kind != "service" for kind in kinds))
        self.struck: Counter[str] = Counter()
        self.recovered_s: list[float] = []
        self.jobs = [self._submit(n, kinds[n % len(kinds)]) for n in range(campaign.jobs)]
        self._connection: Connection | None = None

    def _submit(self, number: int, kind: str) -> ChaosJob:
        folder = self.site.work / f"{number}-{kind}"
        folder.mkdir()
        path = folder / "job.py"
        path.write_text(script(kind))
        spec = JobSpec(
            *(f"{kind}{number}", "", str(path), str(folder), sys.executable),
            max_nodes=2,
            nproc_per_node=1,
            profile=False,
            mode={"restart": "restart", "service": "service"}.get(kind, "live"),
            curve={"1": 1.0, "2": 1.1} if kind == "service" else None,
            on_hang="tell" if kind == "service" else "restart",
        )
        with self.site.client() as client:
            return ChaosJob(client.submit(spec).id, kind, folder)

    # --- looking ---

    @contextlib.contextmanager
    def _client(self) -> Iterator[Connection]:
        """Return the connection, the same one until it fails: a new one for each poll would be most
        of its cost.
        """
        if self._connection is None:
            self._connection = Connection.of(self.site.state, timeout_s=HANG_S / 4)
        try:
            yield self._connection
        except ClientError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def views(self) -> dict[str, JobView] | None:
        """Return all jobs; None while the daemon does not answer."""
        with contextlib.suppress(ClientError, OSError, ValueError), self._client() as client:
            return {view.id: view for view in client.jobs(ended=1000)}
        return None

    def _until(self, done: Callable[[dict[str, JobView]], bool], what: Callable[[], str]) -> None:
        """Wait until a condition on all jobs is true and no process is stopped."""
        began = time.monotonic()
        while True:
            views = None if self.site.has_lasting_fault() else self.views()
            if views is not None:
                self._none_ended_badly(views)
                if done(views):
                    return
            if time.monotonic() - began > HANG_S:
                reason = what() if views is not None else "the daemon does not answer"
                raise ChaosError(f"Not within {HANG_S:g} s: {reason}.")
            time.sleep(0.05)

    def recover(self, since: dict[str, float]) -> None:
        """Wait until each of these jobs has more samples than at the beginning."""
        began = time.monotonic()
        late: dict[str, object] = {}

        def whole(views: dict[str, JobView]) -> bool:
            late.clear()
            for job in self.jobs:
                view = views[job.id]
                if job.id not in since:
                    continue
                if job.hangs and view.state not in OVER:  # samples before this time do not count
                    since[job.id] = view.samples
                if not self._progressed(job, view, since[job.id]):
                    late[job.id] = (view.state, view.reason)
            return not late

        self._until(whole, lambda: f"all recover; {late}")
        self.recovered_s.append(time.monotonic() - began)

    def _none_ended_badly(self, views: dict[str, JobView]) -> None:
        lost = [job for job in self.jobs if job.id not in views]
        if lost or len(views) != len(self.jobs):
            raise ChaosError(f"{len(views)} of {len(self.jobs)} jobs are known; missing: {lost}.")
        for view in views.values():
            if view.state in ("failed", "cancelled"):
                raise ChaosError(f"Job {view.name} is {view.state}: {view.reason}")

    def _progressed(self, job: ChaosJob, view: JobView, samples: float) -> bool:
        """Return whether a job makes progress: it has ended, or has more than ``samples`` samples.
        For a service: whether its members are the running processes, one on each of its nodes.
        """
        if view.state in OVER:
            return True
        if view.state != "running" or not view.nodes:
            return False
        if job.kind != "service":
            return view.samples > samples
        with contextlib.suppress(ClientError, OSError, psutil.Error):
            members = self._members(job)
            if members.keys() == set(view.nodes):
                return sorted(members.values()) == self.site.worker_pids(job.folder)
        return False

    def _members(self, job: ChaosJob) -> dict[str, int]:
        with self._client() as client:
            return {m.node: int(m.address) for m in client.members(job.id).members}

    # --- doing ---

    def run(self, say: Callable[[str], None]) -> None:
        """Inject the requested number of faults. Hasty faults follow each other at once; then wait
        for the recovery.
        """
        begun, campaign = time.monotonic(), self._campaign
        each, ended = max(1.0, campaign.faults / len(self.jobs)), 0
        while self.struck.total() < campaign.faults and time.monotonic() - begun < campaign.limit_s:
            at = self._at_work()
            hasty = True
            while hasty:
                kind = self.faults.strike()
                if not kind:
                    continue
                self.struck[kind] += 1
                count = self.struck.total()
                say(f"{count} faults, {time.monotonic() - begun:.1f} s, last: {kind}")
                if count >= each * (ended + 1) and ended < len(self.jobs) - 1:
                    ended += self._end_one(at)
                hasty = count < campaign.faults and self._dice.random() < campaign.hasty
                if hasty:
                    time.sleep(self._dice.uniform(0.0, campaign.apart_s))
            self.recover(at)
        self.faults.end()

    def _at_work(self) -> dict[str, float]:
        """Return the samples of the running jobs as soon as any has samples."""
        recovery: dict[str, float] = {}

        def some(views: dict[str, JobView]) -> bool:
            running = [v for v in views.values() if v.state == "running" and v.nodes]
            recovery.update({view.id: view.samples for view in running})
            return bool(recovery)

        self._until(some, lambda: "a job runs")
        return recovery

    def _end_one(self, running: Collection[str]) -> int:
        """Tell one of these jobs to end. Return the number of jobs that were told."""
        unfinished = [job for job in self.jobs if job.id in running and not job.asked_to_end]
        for job in unfinished[:1]:
            job.end()
        return len(unfinished[:1])

    def finish(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Let all jobs end without further faults, and count."""
        for job in self.jobs:
            job.end()
        quiet, before, views = time.monotonic(), -1, self.views() or {}
        while before < len(self.jobs) and time.monotonic() - quiet < HANG_S:
            views = self.views() or views
            over = sum(v.state in OVER for v in views.values())
            if over != before:
                before, quiet = over, time.monotonic()
                say(f"{over} of {len(self.jobs)} jobs are over")
            time.sleep(0.1)
        states = Counter(views[job.id].state for job in self.jobs)
        done = [job for job in self.jobs if views[job.id].state == "completed"]
        accounts = [job.account() for job in done]
        return {
            "jobs": len(self.jobs),
            "jobs_lost": len(self.jobs) - len(done),
            "jobs_known": len(views),
            "states": dict(states),
            "samples": sum(a["samples"] for a in accounts),
            "samples_twice": sum(a["twice"] for a in accounts),
            "samples_never": sum(a["never"] for a in accounts),
            "steps_done_again": sum(a["replayed"] for a in accounts),
            "hangs_told": self._hangs_told(),
            "leases_leaked": self._leaked(),
        }

    def _hangs_told(self) -> int:
        """Return the number of hangs that were reported to owners, with the position of the
        worker.
        """
        with self._client() as client:
            events = [e for job in self.jobs for e in client.events(limit=1000, job=job.id)]
        return sum("in wait_for_ever" in e.sentence for e in events if e.kind == "job-hung")

    def _leaked(self) -> int:
        """Return the leases that still exist although nobody needs them."""
        began = time.monotonic()
        while time.monotonic() - began < HANG_S:
            with contextlib.suppress(ClientError, OSError):
                if not self.site.scheduler_leases() and not self.site.daemon_leases():
                    return 0
            time.sleep(0.1)
        return len(self.site.scheduler_leases())


def quantile(values: Sequence[float], q: float) -> float:
    """Return the mean of some values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def run(
    root: Path, campaign: Campaign, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Make one run in the folder ``root``. Return its settings and results. Raises ChaosError."""
    site = ChaosSite(root, campaign.nodes, campaign.running, campaign.silence_s)
    leftovers = 0
    begun = time.monotonic()
    try:
        site.start_daemon()
        site.begin_to_manage()
        chaos = Chaos(site, campaign)
        try:
            chaos.run(say)
            struck_s = time.monotonic() - begun
            result = chaos.finish(say)
        finally:
            chaos.close()
    finally:
        try:
            site.close()
        except AssertionError as error:
            print(error, file=sys.stderr)
            leftovers = 1
    times = chaos.recovered_s
    return {
        "seed": campaign.seed,
        "faults": chaos.struck.total(),
        "seconds": round(struck_s),
        "struck": dict(chaos.struck.most_common()),
        "daemon_started": site.starts + 1,
        **result,
        "processes_left": leftovers,
        "recovered": len(times),
        "recovered_median_s": round(statistics.median(times), 1) if times else 0.0,
        "recovered_p99_s": round(quantile(times, 0.99), 1),
        "recovered_worst_s": round(max(times, default=0.0), 1),
    }


BROKEN = (*("jobs_lost", "leases_leaked", "processes_left", "samples_twice", "samples_never"),)


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=Campaign.nodes)
    parser.add_argument("--running", type=int, default=Campaign.running)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--hasty", type=float, default=Campaign.hasty)
    parser.add_argument("--apart", type=float, dest="apart_s", default=Campaign.apart_s)
    parser.add_argument("--silence", type=float, dest="silence_s", default=Campaign.silence_s)
    parser.add_argument("--minutes", type=float, default=Campaign.limit_s / 60)
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.keep and args.keep.exists():
        parser.error(f"--keep needs a new folder, and {args.keep} exists; name another one.")
    settings = {field.name: getattr(args, field.name, None) for field in fields(Campaign)}
    campaign = Campaign(**{**settings, "limit_s": args.minutes * 60})
    print(f"seed {campaign.seed}", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        if args.keep:
            args.keep.mkdir(parents=True, mode=0o700)
        root = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mt-chaos-"))
        )
        try:
            row = run(root, campaign, lambda text: print(text, file=sys.stderr, flush=True))
        except ChaosError as error:
            words = (root / "daemon.log").read_text(errors="replace").splitlines()[-60:]
            print("\n".join(words), file=sys.stderr)
            print(f"seed {campaign.seed}: {error}", file=sys.stderr)
            return 1
    row["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(row) if args.json else row)
    return 1 if any(row[name] for name in BROKEN) else 0


if __name__ == "__main__":
    sys.exit(main())
