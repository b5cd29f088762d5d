"""The ledger of a sweep: its Optuna study, with the records of each trial and its job.

The study holds the whole state of a sweep, so that after any crash the next process can continue
from it. Decides what is written and in which order; the engine decides when. It is an ordinary
study: optuna-dashboard and Optuna's plots can read it. :func:`results` has the trials as rows, the
best first, for ``malletrain sweep show``.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.pool
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from malletrain.protocol.database_url import without_password
from malletrain.sweep.search import pruner_of, sampler_of, suggest
from malletrain.sweep.space import Value
from malletrain.sweep.spec import STORED, Sweep, SweepError

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEC, TOKEN, CANCELLED, TRIALS, HIGHEST, BEGAN, END, ENGINE, TEXTS, CHANGED = (
    f"malletrain:{name}"
    for name in (
        *("sweep", "token", "cancelled", "trials", "highest", "began", "end", "engine"),
        *("texts", "changed"),
    )
)
"""Attributes of a study: the sweep's description; the prefix of its jobs' keys; whether its owner
has cancelled it; the target number of trials, and the weight of the most promising one, if they
differ from the description; its start, seconds since the epoch; why it ended; the process that runs
it; the digests of its script and configuration files at its start; those that differed later, each
with the first trial at whose beginning it did."""
JOB, DAEMON, ENDING, WHY, WEIGHT, NODE_S, GONE = (
    f"malletrain:{name}" for name in ("job", "daemon", "ending", "why", "weight", "node_s", "gone")
)
"""Attributes of a trial: its job; the job's daemon; the state that is reported to Optuna when its
job has ended; why it failed; its job's weight; its node-seconds. Of a study: the trials whose
snapshots are deleted."""
FIXED = "fixed_params"
"""Attribute of a trial that another program has queued (Optuna's enqueue_trial): its values."""
FILE = "sweeps.db"
MAX_STEP = 2**31 - 1
"""Largest step that Optuna's tables store on a database server."""


class StoredValueError(ValueError):
    """Another program has stored a value for a trial that is not of the sweep's space."""


class UnreadableSweepError(SweepError):
    """The description of a sweep in its study is not valid; the message says what to do."""


@dataclass(frozen=True)
class Summary:
    """Summary of a sweep."""

    name: str
    trials: Mapping[str, int]
    """State → number of trials."""
    target_trials: int
    """Target number of trials."""
    best: float | None
    """The best value; None with several objectives, or if no trial has completed."""
    end: str
    """Why it ended; empty if it has not."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Record of the process that runs it; empty: none."""
    change: str = ""
    """Which of its files have differed since it began, as a sentence; empty: none."""


def storage_url(url: str, state_dir: Path) -> str:
    """Return the database's URL: ``url``, or SQLite in the state directory, which is created."""
    if url:
        return url
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{state_dir / FILE}"


@contextlib.contextmanager
def open_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Yield Optuna's database and close its connections at the end, which Optuna does not do
    reliably. Studies opened in it can still be used; that opens new connections.

    Raises:
        SweepError: the database cannot be opened, or refuses a query in the block.
    """
    storage = _connected(url)
    try:
        yield storage
    except optuna.exceptions.StorageInternalError as error:
        raise SweepError(
            f"{refusal(error)} It is {without_password(url)}. What is stored is kept; try again "
            "when it works."
        ) from error
    finally:
        storage.remove_session()
        storage.engine.dispose()


def refusal(error: optuna.exceptions.StorageInternalError) -> str:
    """Return the sentence that reports an error of the database, in its own words. Optuna's words
    blame the values ("invalid data in the commit") also if the server is gone or the disk is
    full."""
    cause = error.__cause__
    cause = getattr(cause, "orig", None) or cause or error
    why = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
    return f"The database of sweeps refuses: {why}."


def refuses_values(error: optuna.exceptions.StorageInternalError) -> bool:
    """Return whether the database works but refuses these values, so that a second attempt would
    fail, too."""
    return isinstance(error.__cause__, sqlalchemy.exc.DataError)


def _connected(url: str) -> optuna.storages.RDBStorage:
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        # Files, unlike servers, are opened quickly: no connection stays open between two queries.
        options = {"connect_args": {"timeout": 60}, "poolclass": sqlalchemy.pool.NullPool}
    try:
        engine = sqlalchemy.create_engine(url)  # raises ValueError if its port is no number
        with _folder_lock(engine.url):
            return _opened(engine, url, options)
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError, ValueError) as error:
        if isinstance(error, SweepError):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, ValueError):
            why = "its port is not a number. In a password, write @ / : as %40 %2F %3A."
        raise SweepError(
            f"The database of sweeps {without_password(url)} cannot be opened: {why}"
        ) from None


@contextlib.contextmanager
def _folder_lock(url: sqlalchemy.URL) -> Iterator[None]:
    """Prevent other processes from opening a database in this folder meanwhile, because two
    processes that create the tables of a new file at the same time fail. No lock is taken if the
    folder cannot be locked or the database is on a server.
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
            f"The database {without_password(url)} is another program's. Optuna's tables "
            "do not go with those of others: give sweeps a database of their own, or on PostgreSQL "
            "a schema (CREATE SCHEMA sweeps): "
            "postgresql+psycopg://HOST/NAME?options=-csearch_path%3Dsweeps"
        )
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def summaries(storage: optuna.storages.BaseStorage) -> list[Summary]:
    """Return all sweeps in this database, sorted by name; studies of other programs are omitted.
    The summary of a sweep whose description cannot be read says so instead of how it ended."""
    sweeps = []
    for summary in optuna.get_all_study_summaries(storage):
        if SPEC in summary.user_attrs:
            try:
                sweeps.append(Ledger.open(storage, summary.study_name).summary())
            except UnreadableSweepError as error:
                sweeps.append(Summary(summary.study_name, {}, 0, None, str(error)))
    return sorted(sweeps, key=lambda each: each.name)


def _unreadable(
    storage: optuna.storages.BaseStorage, study: optuna.Study, error: ValidationError
) -> UnreadableSweepError:
    """Return the error about a study whose description is not valid."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    jobs = [str(trial.user_attrs[JOB]) for trial in running if JOB in trial.user_attrs]
    cancel = f"cancel its jobs with malletrain cancel {' '.join(jobs)}; then " if jobs else ""
    url = "URL"
    if isinstance(storage, optuna.storages.RDBStorage):
        url = without_password(storage.url)
    return UnreadableSweepError(
        f"The description of the sweep {study.study_name} in the database is not valid "
        f"({where}: {first['msg']}). If an earlier or later malletrain wrote it, use that one. "
        f"Else {cancel}delete it with optuna delete-study --study-name {study.study_name} "
        f"--storage '{url}'."
    )


class Ledger:
    """The study of one sweep. Create one with :meth:`create` or :meth:`open`."""

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
        self._is_only_writer = False
        self._cached_trials: list[FrozenTrial] | None = None
        """Cached trials; None if they may have changed since they were read."""

    @classmethod
    def create(cls, storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
        """Create a sweep. Raises SweepError if there is one of that name."""
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
            # The process that created it was killed before it had written the description.
        study.set_user_attr(TOKEN, secrets.token_hex(4))
        study.set_user_attr(BEGAN, time.time())
        study.set_user_attr(SPEC, sweep.model_dump(mode="json"))
        return cls.open(storage, sweep.sweep.name)

    @classmethod
    def open(cls, storage: optuna.storages.BaseStorage, name: str) -> Ledger:
        """Open a sweep. Raises SweepError if there is none of that name, and UnreadableSweepError
        if its description is not valid."""
        names = optuna.get_all_study_names(storage)
        if name not in names:
            existing = ", ".join(sorted(names)[:10]) or "there is none"
            raise SweepError(f"There is no sweep {name}; known: {existing}.")
        study = optuna.load_study(storage=storage, study_name=name)
        if SPEC not in study.user_attrs:
            raise SweepError(f"The study {name} was not made by malletrain sweep.")
        try:
            return cls(storage, study)
        except ValidationError as error:
            raise _unreadable(storage, study, error) from None

    def ready(self) -> None:
        """Create the sampler and the pruner; needed to start trials, not to read them. Raises
        SweepError.
        """
        trials = self.trials()
        drawn = sum(len(trial.params) for trial in trials)
        self.study.sampler = sampler_of(self.sweep, len(trials) + drawn)
        self.study.pruner = pruner_of(self.sweep)

    # --- reading ---

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, or all, in order."""
        seen = self._cached_trials
        if seen is None:
            seen = self.study.get_trials(deepcopy=False)
            self._cached_trials = seen if self._is_only_writer else None
        return [trial for trial in seen if not states or trial.state in states]

    def alone(self) -> None:
        """Declare that no other process writes trials until the next call. Trials are read again
        now, and then only after a write here.
        """
        self._is_only_writer, self._cached_trials = True, None

    def running(self) -> list[FrozenTrial]:
        """Return the trials that have not ended."""
        return self.trials(TrialState.RUNNING)

    def best(self, count: int = 1) -> list[FrozenTrial]:
        """Return the best completed trials, the best first; with several objectives the Pareto
        front.
        """
        if len(self.study.directions) > 1:
            return self.study.best_trials
        sign = -1 if self.study.directions[0].name == "MAXIMIZE" else 1
        done = [t for t in self.trials(TrialState.COMPLETE) if t.values]
        return sorted(done, key=lambda t: (sign * t.values[0], t.number))[:count]

    @property
    def own_target(self) -> int:
        """Target number of trials as ``sweep.trials`` counts them: no more than a whole grid."""
        count = int(self.study.user_attrs.get(TRIALS, self.sweep.sweep.trials))
        return int(min(count, self.sweep.most_trials))

    @property
    def target_trials(self) -> int:
        """Target number of trials. A whole grid has all of its own, besides those that another
        program has queued, for which Optuna's sampler takes no combination off the grid.
        """
        if self.own_target < self.sweep.most_trials:
            return self.own_target
        return self.own_target + sum(FIXED in trial.system_attrs for trial in self.trials())

    @property
    def highest(self) -> float:
        """Weight of the job of its most promising trial."""
        return float(self.study.user_attrs.get(HIGHEST, self.sweep.job.weight))

    @property
    def cancelled(self) -> bool:
        """Whether its owner has cancelled it."""
        return bool(self.study.user_attrs.get(CANCELLED))

    @property
    def end(self) -> str:
        """Why it ended; empty: it has not."""
        return str(self.study.user_attrs.get(END, ""))

    @property
    def engine(self) -> dict[str, Any]:
        """Record of the process that runs it; empty: none."""
        return dict(self.study.user_attrs.get(ENGINE) or {})

    @property
    def texts(self) -> dict[str, str]:
        """Path → digest of its script and configuration files at its start. Empty: not recorded."""
        return dict(self.study.user_attrs.get(TEXTS, {}))

    @property
    def changed_texts(self) -> dict[str, int]:
        """Path of a file that differed later → the first trial at whose beginning it did."""
        return dict(self.study.user_attrs.get(CHANGED, {}))

    @property
    def change(self) -> str:
        """Which of these files have differed since then, as a sentence; empty: none."""
        return " ".join(
            f"When trial {trial} began, {Path(path).name} was not as at the beginning of the "
            "sweep; other trials may have run other text."
            for path, trial in self.changed_texts.items()
        )

    @property
    def exists(self) -> bool:
        """Whether the study is still in the database."""
        return self.name in optuna.get_all_study_names(self._storage)

    def summary(self) -> Summary:
        """Return a summary of the sweep."""
        counts: dict[str, int] = {}
        for trial in self.trials():
            word = trial.state.name.lower()
            counts[word] = counts.get(word, 0) + 1
        best = self.best() if len(self.study.directions) == 1 else []
        value = best[0].values[0] if best else None
        return Summary(
            self.name, counts, self.target_trials, value, self.end, self.engine, self.change
        )

    def key(self, number: int) -> str:
        """Return the key with which the job of a trial is submitted, each time."""
        return f"{self.token}-{number}"

    @property
    def entry(self) -> str:
        """Name of its jobs' common entry in the queue."""
        return f"{self.name}/{self.token}"

    def job_name(self, number: int) -> str:
        """Return the name of a trial's job."""
        return f"{self.name}-{number}"

    # --- writing ---

    def cancel(self, yes: bool = True) -> None:
        """Record that its owner has cancelled it, or (``yes`` false) resumed it."""
        self.study.set_user_attr(CANCELLED, yes)

    def want(self, trials: int) -> None:
        """Set the target number of trials. A sweep that is over is open again."""
        self.study.set_user_attr(TRIALS, trials)
        self.ends("")

    def weigh(self, highest: float) -> None:
        """Set the weight of the job of its most promising trial, from the engine's next turn on."""
        self.study.set_user_attr(HIGHEST, highest)

    def note_engine(self, record: Mapping[str, Any]) -> None:
        """Record the process that runs it."""
        self.study.set_user_attr(ENGINE, dict(record))

    def note_texts(self, digests: Mapping[str, str]) -> None:
        """Record the digests of its script and configuration files at its start."""
        self.study.set_user_attr(TEXTS, dict(digests))

    def note_changed_texts(self, first_trials: Mapping[str, int]) -> None:
        """Record files that differ: path → the first trial at whose beginning they did."""
        self.study.set_user_attr(CHANGED, {**self.changed_texts, **first_trials})

    def ends(self, why: str) -> None:
        """Record why it is over, or (empty) that it continues."""
        if why != self.end:
            self.study.set_user_attr(END, why)

    def ask(self) -> FrozenTrial:
        """Create a trial. :meth:`values` chooses its values."""
        self._cached_trials = None
        trial = self.study.ask()
        self._open[trial.number] = trial
        return self._frozen(trial.number)

    def values(self, number: int) -> dict[str, Value]:
        """Return the values of a trial; chooses them if that has not been done before an
        interruption. Raises StoredValueError.
        """
        trial, self._cached_trials = self._trial(number), None
        frozen = self._frozen(number)
        stored = frozen.params.keys() | frozen.system_attrs.get(FIXED, {}).keys()
        is_incomplete = FIXED in frozen.system_attrs and self.sweep.sampler.kind == "grid"
        values: dict[str, Value] = {}
        for name, parameter in self.sweep.parameters.items():
            try:
                values[name] = suggest(trial, name, parameter)
            except ValueError as error:
                if name not in stored and not is_incomplete:  # an error of the sampler
                    raise
                raise StoredValueError(str(error)) from error
        return values

    def note(self, trial: FrozenTrial, name: str, value: Any) -> None:
        """Write an attribute of a trial that has not ended."""
        if trial.user_attrs.get(name) != value:
            self._cached_trials = None
            self._trial(trial.number).set_user_attr(name, value)

    def report(self, number: int, points: Sequence[tuple[int, float]], judge: bool) -> bool:
        """Store values of the metric by step, and ask the pruner if ``judge`` is true. Returns
        whether the trial is to be pruned. The value of a step that is already stored, because the
        job went back to its snapshot, is kept. A trial that has diverged (NaN, infinity) is pruned
        with every pruner. Raises SweepError if the database cannot store a step.
        """
        trial = self._trial(number)
        previous = self._frozen(number).intermediate_values
        news: dict[int, float] = {}
        for step, value in points:
            if step not in previous:
                news.setdefault(step, value)
        for step in sorted(news):
            self._cached_trials = None
            try:
                trial.report(news[step], step)
            except optuna.exceptions.StorageInternalError as error:
                if step <= MAX_STEP or not refuses_values(error):
                    raise
                raise SweepError(
                    f"Trial {number} reports step {step:,}, but this database stores steps up to "
                    f"{MAX_STEP:,}. Report a larger unit as the step of malletrain.metric, such "
                    "as thousands of tokens, and run the sweep under another name; or use SQLite, "
                    "which stores such steps."
                ) from error
            diverged = not math.isfinite(news[step]) and step >= self.sweep.pruner.min_steps
            if judge and (diverged or trial.should_prune()):
                return True
        return False

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """Report to Optuna that the trial has ended. A second call does nothing."""
        self._open.pop(number, None)
        self._cached_trials = None
        try:
            self.study.tell(number, values, state, skip_if_finished=True)
        except RuntimeError:
            # A sampler whose grid is exhausted stops the study, which only Optuna's own loop
            # allows.
            if not self._frozen(number).state.is_finished():
                raise

    def forget_snapshots(self, numbers: Iterable[int]) -> None:
        """Record that the snapshots of these trials are deleted. Optuna does not allow writes to
        ended trials, so it is stored in the study.
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


def results(ledger: Ledger) -> list[dict[str, Any]]:
    """Return a row for each trial: completed ones first, the best of them first; then the others,
    those with most steps first.
    """
    ranks = {t.number: n for n, t in enumerate(ledger.best(len(ledger.trials())))}
    best = {t.number for t in ledger.best()}

    def order(trial: FrozenTrial) -> tuple[float, ...]:
        if trial.number in ranks:
            return (0, ranks[trial.number])
        state = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED, TrialState.FAIL)
        place = state.index(trial.state) if trial.state in state else len(state)
        return (1, place, -(trial.last_step or 0), trial.number)

    return [_row(ledger, t, t.number in best) for t in sorted(ledger.trials(), key=order)]


def _row(ledger: Ledger, trial: FrozenTrial, best: bool) -> dict[str, Any]:
    metrics = ledger.sweep.sweep.metrics
    values = list(trial.values or ())
    if not values and trial.intermediate_values:
        values = [trial.intermediate_values[max(trial.intermediate_values)]]
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "job": trial.user_attrs.get(JOB, ""),
        "values": dict(zip(metrics, values, strict=False)),
        "step": trial.last_step,
        "parameters": dict(trial.params),
        "node_hours": trial.user_attrs.get(NODE_S, 0.0) / 3600,
        "best": best,
        "note": trial.user_attrs.get(WHY, ""),
    }
