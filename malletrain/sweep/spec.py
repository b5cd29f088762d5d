"""The description of a sweep, in a TOML file or in Python: every key with its unit, default and
valid values.

Decides what a valid sweep is. :mod:`malletrain.submission` decides whether its script can be a job.
Relative paths are relative to the file.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import (
    Duration,
    MaybeDuration,
    MaybeLocation,
    Section,
    Words,
    key,
    section,
)
from malletrain.config.tomlfile import read_toml
from malletrain.config.validation import problems_of
from malletrain.protocol.bounds import MAX_PROCESSES
from malletrain.sweep.space import NAME as PARAMETER
from malletrain.sweep.space import (
    TRIAL,
    Parameter,
    SpaceError,
    check_choices,
    check_range,
    parameter,
    unknown_places,
)

Direction = Literal["minimize", "maximize"]
PositiveOrAuto = Annotated[int, Field(ge=1, le=MAX_PROCESSES)] | Literal["auto"]
CountOrAuto = Annotated[int, Field(ge=0, le=MAX_PROCESSES)] | Literal["auto"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,47}")
"""Form of a sweep's name; the names of its trials' jobs append a number."""
MAX_SEED = 2**32 - 1
"""Largest random seed that NumPy accepts."""
STORED = "stored"
"""Key of the validation context: the sweep was read from a study, perhaps of an earlier release."""


class SweepError(RuntimeError):
    """A sweep cannot be run, or does not exist; the message is one sentence per line."""


class SweepSection(Section):
    """Objective and extent of the search."""

    name: str = key(
        "", description="Name of the sweep. Default: the file's name without its suffix."
    )
    metric: str | Words = key(
        description="Metric that the script reports with malletrain.metric. A list: several "
        'objectives, for sampler "nsga2".'
    )
    direction: str | Words = key(
        "minimize", description='"minimize" or "maximize", one for each metric.'
    )
    value: Literal["last", "best"] = key(
        "last", description="Which of the values of the metric that a trial reports is its result."
    )
    trials: int = key(
        100,
        ge=1,
        description="Number of trials, including failed ones. A grid has all of its trials if it "
        "is not given.",
    )
    time: MaybeDuration = key(None, description="Time after which no more trials start.")
    node_hours: float | None = key(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Used node-hours after which no more trials start.",
    )
    at_once: int = key(
        4,
        ge=1,
        description="Maximum number of trials whose jobs are in the queue at the same time; a "
        "trial that is about to end does not count.",
    )
    keep: int = key(1, ge=0, description="Number of best trials whose snapshots are kept.")
    storage: str = key(
        "",
        description="SQLAlchemy URL of Optuna's database. Default: SQLite in the state directory.",
    )
    every: Duration = key(
        "2 s", description="Time between two checks of the sweep if its trials report nothing."
    )
    most_failed: int = key(
        3,
        ge=1,
        description="Number of failed trials after which the sweep stops if no other trial has "
        "completed or been pruned.",
    )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric of each objective."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each objective."""
        names = [self.direction] if isinstance(self.direction, str) else self.direction
        directions: list[Direction] = ["maximize" if d == "maximize" else "minimize" for d in names]
        return tuple(
            directions * len(self.metrics) if isinstance(self.direction, str) else directions
        )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not NAME.fullmatch(value):
            raise PydanticCustomError(
                "name",
                '"{value}" is no name; accepted are 1 to 48 letters, digits and . _ + -, a letter '
                "or digit first",
                {"value": value},
            )
        return value

    @model_validator(mode="after")
    def _check_objectives(self) -> SweepSection:
        if not self.metrics or len(self.directions) != len(self.metrics):
            raise PydanticCustomError(
                "objectives", "name one metric at least, and one direction for each or for all"
            )
        directions = [self.direction] if isinstance(self.direction, str) else self.direction
        for direction in directions:
            if direction not in ("minimize", "maximize"):
                raise PydanticCustomError(
                    "direction",
                    '"{direction}" is no direction; accepted is "minimize" or "maximize"',
                    {"direction": direction},
                )
        return self


class JobSection(Section):
    """The job of each trial: the options of ``malletrain submit``."""

    script: MaybeLocation = key(description="The training script.")
    args: Words = key(
        [],
        description="Arguments of the script. {NAME} is a parameter's value, {trial} the trial's "
        "number; parameters that are not named follow as --NAME VALUE. Double the "
        "braces to write them literally.",
    )
    nodes: str | None = key(
        None, description="Nodes of one trial, or slots of one kind: N, or MIN:MAX. Default: 1."
    )
    slots: str | None = key(None, description="Slots of one trial, in place of nodes.")
    gpus: str | None = key(
        None, description="GPUs of one trial, in place of nodes, where slots have one GPU."
    )
    kind: str | None = key(
        None, description="Kind of slots, or class of nodes, on which trials run; not given: any."
    )
    nproc_per_node: PositiveOrAuto | None = key(
        None, description='Worker processes on each node, or "auto": found by measuring.'
    )
    threads: PositiveOrAuto | None = key(None, description='Threads of each process, or "auto".')
    loader_workers: CountOrAuto | None = key(
        None,
        description="Loader workers of each process, for DataLoaders that name no number, or "
        '"auto".',
    )
    data_memory: str | None = key(
        None, description="Memory of each node for the script's DataCache, such as 25% or 8G."
    )
    weight: float = key(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Weight of the most promising trial relative to other jobs.",
    )
    goal: Literal["throughput", "efficiency"] | None = key(
        None, description="Benefit to maximise with more nodes. Default: the site's objective."
    )
    live: bool = key(False, description="The script uses malletrain.elastic.")
    launcher: Literal["builtin", "torchrun"] = key(
        "builtin", description="Launcher of the workers."
    )
    env: dict[str, str] = key({}, description="Environment variables of the script.")
    workdir: MaybeLocation = key(
        None, description="Directory that the script runs in. Default: the directory of the file."
    )
    setup: str | None = key(None, description="Shell command run before Python on each node.")
    module: Words = key([], description="Environment modules to load.")
    conda: str | None = key(None, description="The conda environment.")
    venv: str | None = key(None, description="The virtual environment.")
    container: str | None = key(None, description="The container image.")
    profile: Literal["auto", "shared", "off"] = key(
        "auto",
        description='How scaling is measured. "auto": trials whose parameters change what is '
        'learnt but not the speed share one profile; "shared": all trials do; "off": '
        "no trial is profiled.",
    )
    model_size: str = key(
        "",
        description='"MODULE:FUNCTION" of your own: from a trial\'s parameters it returns the '
        "number of the model's parameters and its FLOPs per sample (None: not "
        "known), so that the trial starts from the curves of similar ones; modules "
        "are found in workdir too.",
    )


class SamplerSection(Section):
    """The sampler of Optuna that decides what is tried next."""

    kind: Literal["tpe", "cmaes", "random", "grid", "nsga2", "python"] = key(
        "tpe", description='Sampler of Optuna; "python": a class of your own.'
    )
    seed: int | None = key(
        None,
        description="Random seed of the sampler, from 0 to 4294967295. Default: 0, so that two "
        "sweeps of one space try the same values first.",
    )
    startup: int = key(10, ge=0, description="Number of random trials before tpe begins to learn.")
    population: int = key(20, ge=2, description="Population size of nsga2.")
    python: str = key(
        "", description='"MODULE:CLASS" of your own sampler; modules are found in workdir too.'
    )
    options: dict[str, Any] = key({}, description="Options of your own sampler.")

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, value: int | None, info: ValidationInfo) -> int | None:
        stored = (info.context or {}).get(STORED)
        if value is not None and not 0 <= value <= MAX_SEED and not stored:
            raise PydanticCustomError(
                "seed",
                "{value} is no seed; accepted is a whole number from 0 to {most}",
                {"value": value, "most": MAX_SEED},
            )
        return value

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if (number := _infinite(value)) is not None:
                raise PydanticCustomError(
                    "options",
                    "{name}: {number} is no finite number, and the study cannot store it; pass it "
                    'as a text, "{number}", and convert it in your sampler',
                    {"name": name, "number": str(number)},
                )
        return options


class PrunerSection(Section):
    """The pruner that decides when a trial is stopped: one of Optuna's, or EarlyCurve."""

    kind: Literal["none", "asha", "hyperband", "median", "earlycurve"] = key(
        "none", description="Pruner."
    )
    min_steps: int = key(1, ge=1, description="No trial is pruned before this step.")
    max_steps: int | None = key(
        None,
        ge=1,
        description="The last step of a trial. earlycurve needs it; hyperband estimates it if it "
        "is not given.",
    )
    reduction: int = key(
        3, ge=2, description="Reduction factor: one of this many trials passes a rung."
    )
    startup: int = key(
        5, ge=0, description="Number of ended trials before median and earlycurve begin."
    )
    theta: float = key(
        0.7, gt=0, le=1, description="Fraction of max_steps at which earlycurve predicts the rest."
    )
    keep: int = key(
        3,
        ge=1,
        description="earlycurve: a trial continues if it may be among this many best trials.",
    )

    @model_validator(mode="after")
    def _check_steps(self, info: ValidationInfo) -> PrunerSection:
        stored = (info.context or {}).get(STORED)
        most = self.max_steps
        if self.kind == "hyperband" and most is not None and self.min_steps > most and not stored:
            raise PydanticCustomError(
                "pruner",
                "min_steps = {least} is above max_steps = {most}, so that hyperband would stop no "
                "trial",
                {"least": self.min_steps, "most": most},
            )
        return self


class Sweep(Section):
    """A whole sweep."""

    sweep: SweepSection
    job: JobSection
    space: dict[str, Any]
    sampler: SamplerSection = section(SamplerSection)
    pruner: PrunerSection = section(PrunerSection)

    @field_validator("space", mode="before")
    @classmethod
    def _read_space(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict) or not values:
            raise PydanticCustomError("space", "name one parameter at least")
        written = {}
        for name, value in values.items():
            if not PARAMETER.fullmatch(name) or name == TRIAL:
                raise PydanticCustomError(
                    "space", '"{name}" is no name of a parameter', {"name": name}
                )
            try:
                p = parameter(value)
                if not (info.context or {}).get(STORED):
                    check_choices(p)
                    check_range(p)
            except SpaceError as error:
                raise PydanticCustomError(
                    "space", "{name}: {why}", {"name": name, "why": str(error)}
                ) from None
            written[name] = _as_written(p)
        return written

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Sweep:
        if unknown := unknown_places(self.job.args, self.space):
            raise PydanticCustomError(
                "args",
                "job.args: {name} is no parameter of [space]; known are {known}. For the text "
                "itself double its braces",
                {
                    "name": f"{{{unknown[0]}}}",
                    "known": ", ".join(f"{{{name}}}" for name in (*self.space, TRIAL)),
                },
            )
        several = len(self.sweep.metrics) > 1
        if several and self.pruner.kind != "none":
            raise PydanticCustomError("pruner", "a sweep of several metrics has no pruner")
        if several and self.sampler.kind == "cmaes":
            raise PydanticCustomError("sampler", '"cmaes" looks for one metric only; use "nsga2"')
        if self.pruner.kind == "earlycurve" and self.pruner.max_steps is None:
            raise PydanticCustomError("pruner", "earlycurve needs max_steps in [pruner]")
        if self.sampler.kind == "python" and ":" not in self.sampler.python:
            raise PydanticCustomError(
                "sampler", 'name your sampler: python = "MODULE:CLASS" in [sampler]'
            )
        if self.sampler.kind == "grid":
            try:
                self.grid()
            except SpaceError as error:
                raise PydanticCustomError("sampler", "{why}", {"why": str(error)}) from None
        return self

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameter → its possible values."""
        return {name: parameter(value) for name, value in self.space.items()}

    def grid(self) -> dict[str, list[Any]]:
        """Return all values of all parameters. Raises SpaceError if they cannot be listed."""
        return {name: p.grid() for name, p in self.parameters.items()}

    @property
    def most_trials(self) -> float:
        """Maximum number of different trials."""
        if self.sampler.kind != "grid":
            return math.inf
        return math.prod(len(values) for values in self.grid().values())


def _infinite(value: Any) -> float | None:
    """Return the first number in the value, or in its lists and tables, that is not finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((n for n in map(_infinite, value) if n is not None), None)
    return None


def _as_written(p: Parameter) -> Any:
    if p.choices:
        return list(p.choices)
    fields: dict[str, Any] = {"low": p.low, "high": p.high}
    if p.step is not None:
        fields["step"] = p.step
    if p.log:
        fields["log"] = True
    return fields


def load_sweep(path: str | Path, name: str | None = None) -> Sweep:
    """Return the sweep in the TOML file ``path``, with its name and working directory set.

    Args:
        path: path of the file.
        name: name of the sweep; overrides the file's.

    Raises:
        SweepError: the file has problems; the message lists all, each with its line.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise SweepError(f"The sweep file {path} cannot be read: {why}.") from None
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).strip("-._+")[:48]
    return parse_sweep(text, str(path), path.resolve().parent, stem or "sweep", name)


def parse_sweep(
    text: str, where: str, directory: Path, default: str, name: str | None = None
) -> Sweep:
    """Return the sweep in ``text``; see :func:`load_sweep`. ``default``: its name if none is
    given."""
    toml = read_toml(text)
    problems = list(toml.problems)
    data = {**toml.data}
    if isinstance(data.get("sweep"), dict):
        data["sweep"] = {"name": default, **data["sweep"], **({"name": name} if name else {})}
    if isinstance(data.get("job"), dict):
        data["job"] = {"workdir": ".", **data["job"]}
    try:
        sweep = Sweep.model_validate(data, context={"directory": directory})
    except ValidationError as error:
        problems += problems_of(error, toml, Sweep)
    if problems:
        ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.key))
        count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        lines = [f"{where}: {count}.", *(f"  {problem}" for problem in ordered)]
        raise SweepError("\n".join(lines))
    if sweep.sampler.kind == "grid" and "trials" not in sweep.sweep.model_fields_set:
        whole = sweep.sweep.model_copy(update={"trials": int(sweep.most_trials)})
        return sweep.model_copy(update={"sweep": whole})
    return sweep
