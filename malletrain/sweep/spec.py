"""A sweep as its owner describes it: a TOML file, or the same in Python. Every key, its unit, its
default and what is accepted.

Decides what a valid sweep is. Whether its script can be a job is decided where jobs are submitted.
Relative paths are relative to the file.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator
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
from malletrain.sweep.space import NAME as PARAMETER
from malletrain.sweep.space import (
    TRIAL,
    Parameter,
    SpaceError,
    check_choices,
    parameter,
    unknown_places,
)

Direction = Literal["minimize", "maximize"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,47}")
"""Of a sweep; its trials' jobs have a number after it."""
STORED = "stored"
"""In the context of a validation: the sweep is that of a study, perhaps of a release before."""


class SweepError(RuntimeError):
    """A sweep that cannot be run, or is not there; the message is a sentence, or one a line."""


class SweepSection(Section):
    """What is looked for, and for how long."""

    name: str = key("", description="Of the sweep. Default: the file's name without its suffix.")
    metric: str | Words = key(
        description="What the script reports by malletrain.metric. A list: several objectives, for "
        'sampler "nsga2".'
    )
    direction: str | Words = key(
        "minimize", description='"minimize" or "maximize", one for each metric.'
    )
    value: Literal["last", "best"] = key(
        "last", description="Which of a trial's values counts in the end."
    )
    trials: int = key(100, ge=1, description="How many trials there are, failed ones included.")
    time: MaybeDuration = key(None, description="After so long no trial begins any more.")
    node_hours: float | None = key(
        None, gt=0, description="After so much use of nodes no trial begins any more."
    )
    at_once: int = key(
        4,
        ge=1,
        description="Trials whose jobs are in the queue at one time; one that is about to end "
        "does not count.",
    )
    keep: int = key(1, ge=0, description="Snapshots of so many of the best trials are kept.")
    storage: str = key(
        "", description="SQLAlchemy URL of Optuna's database. Default: SQLite beside your keys."
    )
    every: Duration = key(
        "2 s", description="Between two looks at the sweep while nothing comes from its trials."
    )
    most_failed: int = key(
        3, ge=1, description="The sweep stops when so many trials have failed, and no other ended."
    )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric of each objective."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each objective."""
        names = [self.direction] if isinstance(self.direction, str) else self.direction
        made: list[Direction] = ["maximize" if d == "maximize" else "minimize" for d in names]
        return tuple(made * len(self.metrics) if isinstance(self.direction, str) else made)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if value and not NAME.fullmatch(value):
            raise PydanticCustomError(
                "name",
                '"{value}" is no name; accepted are 1 to 48 letters, digits and . _ + -, a letter '
                "or digit first",
                {"value": value},
            )
        return value

    @model_validator(mode="after")
    def _objectives(self) -> SweepSection:
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
    """What each trial runs: the options of ``malletrain submit``."""

    script: MaybeLocation = key(description="The training script.")
    args: Words = key(
        [],
        description="Its arguments. {NAME} is a parameter's value, {trial} the trial's number; "
        "parameters that are not named follow as --NAME VALUE. Double braces stand for themselves.",
    )
    nodes: str = key("1", description="Nodes of one trial: N, or MIN:MAX.")
    nproc_per_node: int | None = key(None, ge=1, description="Worker processes on each node.")
    weight: float = key(
        1.0, gt=0, description="How much the most promising trial counts beside other jobs."
    )
    goal: Literal["throughput", "efficiency"] | None = key(
        None, description="What more nodes must bring."
    )
    live: bool = key(False, description="The script uses malletrain.elastic.")
    launcher: Literal["builtin", "torchrun"] = key("builtin", description="Starts the workers.")
    env: dict[str, str] = key({}, description="Environment variables of the script.")
    workdir: MaybeLocation = key(
        None, description="Directory that the script runs in. Default: that of the file."
    )
    setup: str | None = key(None, description="Shell command run before Python on each node.")
    module: Words = key([], description="Environment modules to load.")
    conda: str | None = key(None, description="The conda environment.")
    venv: str | None = key(None, description="The virtual environment.")
    container: str | None = key(None, description="The container image.")
    profile: Literal["auto", "shared", "off"] = key(
        "auto",
        description='How scaling is learnt. "auto": trials whose parameters change what is learnt '
        'and not how fast share one profile; "shared": all do; "off": no trial is profiled.',
    )
    model_size: str = key(
        "",
        description='"MODULE:FUNCTION" of your own: given a trial\'s parameters it returns how '
        "many parameters the model has and its FLOPs per sample (None: not known), so that the "
        "trial begins with what similar ones showed; modules are found in workdir too.",
    )


class SamplerSection(Section):
    """What is tried next: one of Optuna's samplers."""

    kind: Literal["tpe", "cmaes", "random", "grid", "nsga2", "python"] = key(
        "tpe", description='Of Optuna; "python": one of your own, named by class.'
    )
    seed: int | None = key(
        None,
        description="Of its choices. Without one they are those of seed 0: two sweeps of one space "
        "try the same values first.",
    )
    startup: int = key(10, ge=0, description="Random trials before tpe begins to learn.")
    population: int = key(20, ge=2, description="Of nsga2.")
    python: str = key(
        "", description='"MODULE:CLASS" of your own sampler; modules are found in workdir too.'
    )
    options: dict[str, Any] = key({}, description="Given to your own sampler.")


class PrunerSection(Section):
    """When a trial is given up: one of Optuna's pruners, or EarlyCurve."""

    kind: Literal["none", "asha", "hyperband", "median", "earlycurve"] = key(
        "none", description="Which."
    )
    min_steps: int = key(1, ge=1, description="No trial is given up before this step.")
    max_steps: int | None = key(
        None, ge=1, description="The last step of a trial. earlycurve needs it; hyperband guesses."
    )
    reduction: int = key(3, ge=2, description="One of so many trials survives a rung.")
    startup: int = key(5, ge=0, description="Ended trials before median and earlycurve begin.")
    theta: float = key(
        0.7, gt=0, le=1, description="Share of max_steps at which earlycurve predicts the rest."
    )
    keep: int = key(
        3, ge=1, description="earlycurve: a trial goes on if it may be among so many of the best."
    )


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
        made = {}
        for name, value in values.items():
            if not PARAMETER.fullmatch(name) or name == TRIAL:
                raise PydanticCustomError(
                    "space", '"{name}" is no name of a parameter', {"name": name}
                )
            try:
                p = parameter(value)
                if not (info.context or {}).get(STORED):
                    check_choices(p)
            except SpaceError as error:
                raise PydanticCustomError(
                    "space", "{name}: {why}", {"name": name, "why": str(error)}
                ) from None
            made[name] = _as_written(p)
        return made

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Sweep:
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
        """What each parameter may be."""
        return {name: parameter(value) for name, value in self.space.items()}

    def grid(self) -> dict[str, list[Any]]:
        """All values of all parameters. Raises SpaceError where they cannot be listed."""
        return {name: p.grid() for name, p in self.parameters.items()}

    @property
    def most_trials(self) -> float:
        """How many different trials there can be."""
        if self.sampler.kind != "grid":
            return math.inf
        return math.prod(len(values) for values in self.grid().values())


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
    """The sweep in the TOML file ``path``; its name and its working directory are set.

    Args:
        path: of the file.
        name: of the sweep, whatever the file says.

    Raises:
        SweepError: with everything that is wrong with it, each with its line.
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
    """The sweep in ``text``; as :func:`load_sweep`. ``default``: its name where none is given."""
    toml = read_toml(text)
    problems = list(toml.problems)
    data = {**toml.data}
    if isinstance(data.get("sweep"), dict):
        data["sweep"] = {"name": default, **data["sweep"], **({"name": name} if name else {})}
    if isinstance(data.get("job"), dict):
        data["job"] = {"workdir": ".", **data["job"]}
    try:
        made = Sweep.model_validate(data, context={"directory": directory})
    except ValidationError as error:
        problems += problems_of(error, toml, Sweep)
    if problems:
        ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.key))
        count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        lines = [f"{where}: {count}.", *(f"  {problem}" for problem in ordered)]
        raise SweepError("\n".join(lines))
    return made
