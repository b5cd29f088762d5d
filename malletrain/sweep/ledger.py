"""The book of a sweep: its Optuna study, and what is written there of each trial and its job.

All that a sweep must not forget is in the study, so that whatever dies, whoever opens it next goes
on from there. Decides what is written and in which order; when, is the engine's decision. The
study is an ordinary one: optuna-dashboard and Optuna's plots read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.pool
from optuna.trial import FrozenTrial, TrialState

from malletrain.sweep.search import pruner_of, sampler_of, suggest
from malletrain.sweep.space import Value
from malletrain.sweep.spec import STORED, Sweep, SweepError

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEC, TOKEN, CANCELLED, TRIALS, HIGHEST, BEGAN, END = (
    f"malletrain:{name}"
    for name in ("sweep", "token", "cancelled", "trials", "highest", "began", "end")
)
"""Of a study: the sweep as described; what its jobs' keys begin with; whether its owner has
cancelled it; how many trials there are to be, and what the most promising counts, if not as
described; seconds since the epoch; why it ended."""
JOB, DAEMON, ENDING, WHY, WEIGHT, NODE_S, GONE = (
    f"malletrain:{name}" for name in ("job", "daemon", "ending", "why", "weight", "node_s", "gone")
)
"""Of a trial: its job; the daemon that has it; what it will be told as, once its job has ended;
why it failed; its job's weight; node-seconds trained. Of a study: the trials whose snapshots are
deleted."""
FILE = "sweeps.db"


@dataclass(frozen=True)
class Summary:
    """A sweep at a glance."""

    name: str
    trials: Mapping[str, int]
    """State → trials."""
    target_trials: int
    """How many there are to be."""
    best: float | None
    """Of one objective: the best value."""
    end: str
    """Why it ended; empty: it has not."""


def storage_url(url: str, state_dir: Path) -> str:
    """The database's URL, as given or SQLite in the state directory, which is made."""
    if url:
        return url
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{state_dir / FILE}"


@contextlib.contextmanager
def open_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Optuna's database, for as long as the context lasts: then its connections are closed, which
    Optuna leaves to chance. What was opened in it may still be asked; that opens them anew.

    Raises:
        SweepError: it cannot be opened.
    """
    storage = _connected(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _connected(url: str) -> optuna.storages.RDBStorage:
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        # Files, unlike servers, are opened in no time: none is kept open between two questions.
        options = {"connect_args": {"timeout": 60}, "poolclass": sqlalchemy.pool.NullPool}
    try:
        engine = sqlalchemy.create_engine(url)
        with _one_at_a_time(engine.url):
            return _opened(engine, url, options)
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError) as error:
        if isinstance(error, SweepError):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SweepError(f"The database of sweeps cannot be opened: {why}") from None


@contextlib.contextmanager
def _one_at_a_time(url: sqlalchemy.URL) -> Iterator[None]:
    """Let no other process open a database in this folder meanwhile: two that make the tables of a
    new file at one time fail. Where the folder cannot be locked, or a server has the database,
    nothing is kept apart.
    """
    handle = None
    if url.get_backend_name() == "sqlite" and url.database:
        with contextlib.suppress(OSError):
            handle = os.open(Path(url.database).resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _opened(
    engine: sqlalchemy.Engine, url: str, options: dict[str, Any]
) -> optuna.storages.RDBStorage:
    try:
        tables = set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()
    if tables and "studies" not in tables:
        raise SweepError(
            f"The database {engine.url} is another program's. Optuna's tables do not go with "
            "those of others: give sweeps a database of their own, or on PostgreSQL a schema "
            "(CREATE SCHEMA sweeps): "
            "postgresql+psycopg://HOST/NAME?options=-csearch_path%3Dsweeps"
        )
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def summaries(storage: optuna.storages.BaseStorage) -> list[Summary]:
    """All sweeps in this database, by name; studies of others are left out."""
    sweeps = []
    for summary in optuna.get_all_study_summaries(storage):
        if SPEC in summary.user_attrs:
            sweeps.append(Ledger.open(storage, summary.study_name).summary())
    return sorted(sweeps, key=lambda each: each.name)


class Ledger:
    """One sweep's study. Make one with :meth:`create` or :meth:`open`."""

    def __init__(self, storage: optuna.storages.BaseStorage, study: optuna.Study) -> None:
        self._storage = storage
        self.study = study
        self.name = study.study_name
        attrs = study.user_attrs
        self.sweep = Sweep.model_validate(attrs[SPEC], context={STORED: True})
        self.token: str = attrs[TOKEN]
        self.began: float = attrs[BEGAN]
        self._study_id = storage.get_study_id_from_name(self.name)
        self._open: dict[int, optuna.Trial] = {}
        self._alone = False
        self._seen: list[FrozenTrial] | None = None
        """The trials, while nobody has written of them since they were read."""

    @classmethod
    def create(cls, storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
        """A new sweep. Raises SweepError where there is one of that name."""
        try:
            study = optuna.create_study(
                storage=storage, study_name=sweep.sweep.name, directions=sweep.sweep.directions
            )
        except optuna.exceptions.DuplicatedStudyError:
            study = optuna.load_study(storage=storage, study_name=sweep.sweep.name)
            if SPEC in study.user_attrs or study.get_trials(deepcopy=False):
                raise SweepError(
                    f"There is a sweep {sweep.sweep.name} already. Go on with it: malletrain sweep "
                    f"resume {sweep.sweep.name}; or give the new one another name."
                ) from None
            # Whoever made it died before it had written what it is.
        study.set_user_attr(TOKEN, secrets.token_hex(4))
        study.set_user_attr(BEGAN, time.time())
        study.set_user_attr(SPEC, sweep.model_dump(mode="json"))
        return cls.open(storage, sweep.sweep.name)

    @classmethod
    def open(cls, storage: optuna.storages.BaseStorage, name: str) -> Ledger:
        """A sweep that there is. Raises SweepError where there is none."""
        names = optuna.get_all_study_names(storage)
        if name not in names:
            existing = ", ".join(sorted(names)[:10]) or "there is none"
            raise SweepError(f"There is no sweep {name}; known: {existing}.")
        study = optuna.load_study(storage=storage, study_name=name)
        if SPEC not in study.user_attrs:
            raise SweepError(f"The study {name} was not made by malletrain sweep.")
        return cls(storage, study)

    def ready(self) -> None:
        """Make sampler and pruner: needed before trials begin, not to look at them. Raises
        SweepError.
        """
        tried = len(self.trials())
        self.study.sampler = sampler_of(self.sweep, tried)
        self.study.pruner = pruner_of(self.sweep)

    # --- reading ---

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials of these states, or all, in order."""
        seen = self._seen
        if seen is None:
            seen = self.study.get_trials(deepcopy=False)
            self._seen = seen if self._alone else None
        return [trial for trial in seen if not states or trial.state in states]

    def alone(self) -> None:
        """Nobody else writes of trials until this is said again: they are read anew now, and then
        whenever something was written here.
        """
        self._alone, self._seen = True, None

    def running(self) -> list[FrozenTrial]:
        """The trials that have not ended."""
        return self.trials(TrialState.RUNNING)

    def best(self, count: int = 1) -> list[FrozenTrial]:
        """The best completed trials, the best first; with several objectives those that no other
        is better than in all.
        """
        if len(self.study.directions) > 1:
            return self.study.best_trials
        sign = -1 if self.study.directions[0].name == "MAXIMIZE" else 1
        done = [t for t in self.trials(TrialState.COMPLETE) if t.values]
        return sorted(done, key=lambda t: (sign * t.values[0], t.number))[:count]

    @property
    def target_trials(self) -> int:
        """How many trials there are to be."""
        count = int(self.study.user_attrs.get(TRIALS, self.sweep.sweep.trials))
        return int(min(count, self.sweep.most_trials))

    @property
    def highest(self) -> float:
        """How much the job of its most promising trial counts."""
        return float(self.study.user_attrs.get(HIGHEST, self.sweep.job.weight))

    @property
    def cancelled(self) -> bool:
        """Whether its owner has cancelled it."""
        return bool(self.study.user_attrs.get(CANCELLED))

    @property
    def end(self) -> str:
        """Why it ended; empty: it has not."""
        return str(self.study.user_attrs.get(END, ""))

    def summary(self) -> Summary:
        """The sweep at a glance."""
        counts: dict[str, int] = {}
        for trial in self.trials():
            word = trial.state.name.lower()
            counts[word] = counts.get(word, 0) + 1
        best = self.best() if len(self.study.directions) == 1 else []
        value = best[0].values[0] if best else None
        return Summary(self.name, counts, self.target_trials, value, self.end)

    def key(self, number: int) -> str:
        """Under which the job of a trial is submitted, once or again."""
        return f"{self.token}-{number}"

    @property
    def entry(self) -> str:
        """What its jobs are called together in the queue."""
        return f"{self.name}/{self.token}"

    def job_name(self, number: int) -> str:
        """The name of a trial's job."""
        return f"{self.name}-{number}"

    # --- writing ---

    def cancel(self, yes: bool = True) -> None:
        """Its owner wants no more of it, or does again."""
        self.study.set_user_attr(CANCELLED, yes)

    def want(self, trials: int) -> None:
        """So many trials there are to be; one that is over is not any more."""
        self.study.set_user_attr(TRIALS, trials)
        self.ends("")

    def weigh(self, highest: float) -> None:
        """The job of its most promising trial counts so much from the engine's next turn on."""
        self.study.set_user_attr(HIGHEST, highest)

    def ends(self, why: str) -> None:
        """It is over, or (empty) goes on."""
        if why != self.end:
            self.study.set_user_attr(END, why)

    def ask(self) -> FrozenTrial:
        """A new trial. Its values are chosen by :meth:`values`."""
        self._seen = None
        trial = self.study.ask()
        self._open[trial.number] = trial
        return self._frozen(trial.number)

    def values(self, number: int) -> dict[str, Value]:
        """What the trial tries: chosen now, where that was not done before it was interrupted."""
        trial, self._seen = self._trial(number), None
        return {n: suggest(trial, n, p) for n, p in self.sweep.parameters.items()}

    def note(self, trial: FrozenTrial, name: str, value: Any) -> None:
        """Write something of a trial that has not ended."""
        if trial.user_attrs.get(name) != value:
            self._seen = None
            self._trial(trial.number).set_user_attr(name, value)

    def report(self, number: int, points: Sequence[tuple[int, float]], judge: bool) -> bool:
        """Take in values of the metric by step, and let the pruner ``judge``; whether it gives the
        trial up. A step that is there already, because the job went back to its snapshot, stays as
        it was. A trial that has diverged (NaN, infinity) is given up by every pruner.
        """
        trial = self._trial(number)
        previous = self._frozen(number).intermediate_values
        news: dict[int, float] = {}
        for step, value in points:
            if step not in previous:
                news.setdefault(step, value)
        for step in sorted(news):
            self._seen = None
            trial.report(news[step], step)
            diverged = not math.isfinite(news[step]) and step >= self.sweep.pruner.min_steps
            if judge and (diverged or trial.should_prune()):
                return True
        return False

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """The trial has ended. Telling it again does nothing."""
        self._open.pop(number, None)
        self._seen = None
        try:
            self.study.tell(number, values, state, skip_if_finished=True)
        except RuntimeError:
            # A sampler whose grid is done stops the study, which only Optuna's own loop allows.
            if not self._frozen(number).state.is_finished():
                raise

    def forget_snapshots(self, numbers: Iterable[int]) -> None:
        """These trials' snapshots are deleted. Optuna lets nobody write to trials that have ended,
        so it is noted in the study.
        """
        self.study.set_user_attr(GONE, sorted({*self.gone, *numbers}))

    @property
    def gone(self) -> list[int]:
        """The trials whose snapshots are deleted."""
        return list(self.study.user_attrs.get(GONE, []))

    # --- Optuna's objects ---

    def _trial(self, number: int) -> optuna.Trial:
        if number not in self._open:
            self._open[number] = optuna.Trial(self.study, self._id(number))
        return self._open[number]

    def _frozen(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._id(number))

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
