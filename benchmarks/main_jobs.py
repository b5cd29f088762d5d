"""Traces of main jobs for measurements on a real Slurm: drawn from a seed, played while MalleTrain
or a contender works, and recorded by the jobs themselves.

The jobs of :func:`workload` never wait for each other: together they never request more nodes than
``at_most``, even if each starts ``SLACK_S`` late. So the wait of a main job is due to the
contender, besides the time that Slurm takes to start any job.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.hostlist import expand
from tests.slurm.cluster import SlurmCluster

SLACK_S = 20.0
"""Maximum delay of a main job at which main jobs do not wait for each other, seconds."""
SHORTEST_S, LONGEST_S = 20.0, 90.0
"""Range of the lengths of main jobs, seconds."""
PARTITION = "batch"
"""Partition of the main jobs."""
DRAWS = 2000
"""Maximum number of draws for each minute of a trace."""


@dataclass(frozen=True)
class MainJob:
    """A job of the main partition."""

    arrival: float
    """Time of its submission, seconds after the beginning of the trace."""
    nodes: int
    seconds: float
    options: tuple[str, ...] = ("--exclusive", "--time=5")
    """Options of sbatch besides the number of nodes."""
    gpus: int = 0
    """GPUs that it uses on its node; 0: it has whole nodes."""
    parts: tuple[int, ...] = ()
    """Nodes of each component of a heterogeneous job; empty: it is none. Their sum is ``nodes``."""

    @property
    def requested_s(self) -> float:
        """Node-seconds that it uses; GPU-seconds for a job with GPUs."""
        return (self.gpus or self.nodes) * self.seconds

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of sbatch: its nodes and options, for each component of a heterogeneous job."""
        if not self.parts:
            return (f"--nodes={self.nodes}", *self.options)
        first, *others = ((f"--nodes={nodes}", *self.options) for nodes in self.parts)
        more = (word for words in others for word in (":", f"--partition={PARTITION}", *words))
        return (*first, *more)

    @property
    def nodelist(self) -> str:
        """The names of its nodes, as its shell expands them."""
        groups = (f"$SLURM_JOB_NODELIST_HET_GROUP_{k}" for k in range(len(self.parts)))
        return ",".join(groups) or "$SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class MainRecord:
    """The record of a main job. Times in epoch seconds."""

    submitted: float
    started: float | None
    """None: it has not started."""
    ended: float | None
    """None: it has not ended by itself."""
    nodes: tuple[str, ...]


def peak(jobs: Sequence[MainJob], begin: float, end: float) -> int:
    """Return the largest number of nodes that jobs request at one moment of an interval, each for
    its length and SLACK_S.
    """
    spans = [(job.arrival, job.arrival + job.seconds + SLACK_S, job.nodes) for job in jobs]
    moments = [begin, *(first for first, _, _ in spans if begin < first < end)]
    return max(
        sum(nodes for first, last, nodes in spans if first <= moment < last) for moment in moments
    )


def workload(nodes: int, seconds: float, load: float, seed: int) -> list[MainJob]:
    """Return jobs that request about ``load`` of the machine, and never more than 7/8 of it.

    Args:
        nodes: number of nodes of the machine.
        seconds: length of the trace.
        load: share of the node-seconds that the jobs request; a high load may not be reached.
        seed: seed of the random draws.
    """
    rng = random.Random(seed)
    at_most, largest = max(1, 7 * nodes // 8), max(1, nodes // 4)
    jobs: list[MainJob] = []
    requested_s, wanted_s = 0.0, load * nodes * seconds
    for _ in range(max(1, int(DRAWS * seconds / 60))):
        if requested_s >= wanted_s:
            break
        job = MainJob(
            rng.uniform(0, seconds),
            max(1, round(2 ** rng.uniform(0, largest.bit_length() - 1))),
            rng.uniform(SHORTEST_S, LONGEST_S),
        )
        end = job.arrival + job.seconds + SLACK_S
        if peak([*jobs, job], job.arrival, end) <= at_most:
            jobs.append(job)
            requested_s += job.requested_s
    return sorted(jobs, key=lambda job: job.arrival)


def drawn(amount_s: float, draw: Callable[[random.Random], MainJob], seed: int) -> list[MainJob]:
    """Return jobs that request ``amount_s`` in total, by arrival. They may wait for each other.

    Args:
        amount_s: see :attr:`MainJob.requested_s`.
        draw: draws one job.
        seed: seed of the random draws.
    """
    rng, jobs, requested_s = random.Random(seed), list[MainJob](), 0.0
    while requested_s < amount_s:
        jobs.append(draw(rng))
        requested_s += jobs[-1].requested_s
    return sorted(jobs, key=lambda job: job.arrival)


class Player(threading.Thread):
    """Submits the jobs of a trace to the main partition until it is stopped.

    Args:
        slurm: the Slurm.
        jobs: the trace, by arrival.
        folder: an empty directory for the records that the jobs write.
    """

    def __init__(self, slurm: SlurmCluster, jobs: Sequence[MainJob], folder: Path) -> None:
        super().__init__(daemon=True)
        self._slurm, self._jobs, self._folder = slurm, jobs, folder
        self._over = threading.Event()
        self._submitted: list[float] = []
        self._ids: list[str] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        begin = time.time()
        try:
            for number, job in enumerate(self._jobs):
                if self._over.wait(max(0.0, begin + job.arrival - time.time())):
                    return
                self._submitted.append(time.time())
                record = self._folder / str(number)
                command = (
                    f"{{ date +%s.%N; echo {job.nodelist}; }} >{record}; "
                    f"sleep {job.seconds:.1f}; date +%s.%N >>{record}"
                )
                self._ids.append(
                    self._slurm.submit(command, f"--job-name=main-{number}", *job.words)
                )
        except BaseException as error:
            self._error = error

    def stop(self) -> list[MainRecord]:
        """Submit no more jobs, and cancel those that have not ended. Return the records.

        Raises:
            RuntimeError: Slurm refused a job.
        """
        self._over.set()
        if self.ident is not None:  # otherwise it was never started
            self.join()
        records = self.records()
        present = set(self._slurm.run("squeue", "-h", "-o", "%A").split()) if self._ids else set()
        if unfinished := [job for job in self._ids if job in present]:
            self._slurm.run("scancel", *unfinished)
        self.check()
        return records

    def check(self) -> None:
        """Raise RuntimeError if Slurm refused a job."""
        if self._error is not None:
            raise RuntimeError(f"A main job could not be submitted: {self._error}.")

    def records(self) -> list[MainRecord]:
        """Return the records so far of the submitted jobs."""
        return [self._record(number) for number in range(len(self._submitted))]

    @property
    def played(self) -> bool:
        """Whether all jobs of the trace were submitted."""
        return len(self._ids) == len(self._jobs)

    @property
    def submitted(self) -> int:
        """Number of submitted jobs."""
        return len(self._ids)

    def _record(self, number: int) -> MainRecord:
        path = self._folder / str(number)
        words = path.read_text().split() if path.exists() else []
        return MainRecord(
            self._submitted[number],
            float(words[0]) if len(words) > 1 else None,
            float(words[2]) if len(words) > 2 else None,
            tuple(expand(words[1])) if len(words) > 1 else (),
        )


def replay(
    slurm: SlurmCluster, jobs: Sequence[MainJob], folder: Path, seconds: float
) -> tuple[float, list[MainRecord]]:
    """Play a whole trace. Return its beginning, epoch seconds, and the records of its jobs, each of
    which has started. Jobs that have not ended then are cancelled.

    Args:
        slurm: the Slurm.
        jobs: the trace, by arrival.
        folder: a new directory for the records that the jobs write.
        seconds: length of the trace.

    Raises:
        RuntimeError: Slurm refused a job.
    """
    folder.mkdir()
    player, begin = Player(slurm, jobs, folder), time.time()

    def all_started() -> bool:
        player.check()
        return player.played and all(record.started is not None for record in player.records())

    player.start()
    try:
        time.sleep(max(0.0, begin + seconds - time.time()))
        slurm.until(all_started, "all main jobs have started")
    finally:
        records = player.stop()
    return begin, records
