"""The site's configuration: every key with its unit, default and valid values, and the differences
between two configurations.

Decides which keys exist and what a valid value is; :func:`load_config` reads a TOML file and lists
everything wrong with it at once, each with its line. It does not decide whether the site can work
with a valid file (that is ``malletrain check``) and starts nothing.

Quantities are written with their unit ("30 s", "2 GiB") and are held in seconds and bytes. Relative
paths are relative to the file.

:func:`changes` decides how a change of the site's configuration is reported, and
:func:`with_changes` builds the configuration in which only some changes are applied. The daemon
decides which.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Section, Words
from malletrain.config.base import section as _section
from malletrain.config.nodes import ContainersSection, NodesSection
from malletrain.config.profiling import ProfilingSection
from malletrain.config.schedulers import SchedulerSection, scheduler_kinds
from malletrain.config.sections import (
    AccountingSection,
    AllocationSection,
    DaemonSection,
    GapsSection,
    JobsSection,
    NotifySection,
)
from malletrain.config.shares import QuotasSection, SharesSection, TrainerSection
from malletrain.config.shares import checked as trainers_checked
from malletrain.config.tomlfile import Problem, read_toml
from malletrain.config.validation import problems_of
from malletrain.protocol import env

SECRET = "daemon.database"
"""Its URL may have a password in it."""


def changes(before: Config, after: Config) -> dict[str, str]:
    """Return the full name of each key whose value differs → its values, as ``OLD -> NEW``."""
    old, new = (_leaves(config.model_dump(mode="json")) for config in (before, after))
    return {
        name: "changed" if name == SECRET else f"{_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def with_changes(before: Config, after: Config, names: Collection[str]) -> Config:
    """Return ``before`` with the values of these keys (SECTION.KEY) from ``after``."""
    sections: dict[str, Any] = {}
    for name in names:
        section, _, key = name.partition(".")
        new_section = sections.get(section, getattr(before, section))
        value = getattr(getattr(after, section), key)
        sections[section] = new_section.model_copy(update={key: value})
    return before.model_copy(update=sections)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value).lower() if value is True else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


__all__ = ["Config", "ConfigError", "load_config", "parse_config", "scheduler_kinds"]

DATABASE_NAME = "malletrain.db"


class ConfigError(ValueError):
    """A configuration that cannot be used. ``problems`` are all problems found; the text lists
    them, one per line.
    """

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n".join([f"{where}: {count}.", *(f"  {problem}" for problem in problems)])
        )


class Config(Section):
    """A whole configuration."""

    daemon: DaemonSection = _section(DaemonSection)
    scheduler: SchedulerSection
    gaps: GapsSection = _section(GapsSection)
    nodes: NodesSection = _section(NodesSection)
    jobs: JobsSection = _section(JobsSection)
    containers: ContainersSection = _section(ContainersSection)
    allocation: AllocationSection = _section(AllocationSection)
    profiling: ProfilingSection = _section(ProfilingSection)
    accounting: AccountingSection = _section(AccountingSection)
    notify: NotifySection = _section(NotifySection)
    shares: SharesSection = _section(SharesSection)
    quotas: QuotasSection = _section(QuotasSection)
    trainer: list[TrainerSection] = Field(default_factory=list)

    @property
    def node_classes(self) -> tuple[str, ...]:
        """Classes of nodes that the configuration names: kinds of slots, and features that
        distinguish nodes. Nodes with none of these features are of class ``default``.
        """
        slots = self.scheduler.table.slot_sections
        return (*(kind.name for kind in slots), *self.gaps.classes)

    @field_validator("trainer")
    @classmethod
    def _check_disjoint(cls, value: list[TrainerSection]) -> list[TrainerSection]:
        trainers_checked(value)
        return value

    @field_validator("scheduler")
    @classmethod
    def _check_submit_as(cls, value: SchedulerSection, info: ValidationInfo) -> SchedulerSection:
        daemon = info.data.get("daemon")
        if daemon is not None and daemon.several_users and not _submit_as(value):
            hint = (
                "the embedded cluster serves one user only"
                if value.kind == "local"
                else f"set submit_as in [scheduler.{value.kind}]"
            )
            raise PydanticCustomError(
                "owners",
                "with users or munge in [daemon] leases must be submitted as the owners of the "
                "jobs, so that nobody's code runs as "
                "somebody else; {hint}",
                {"hint": hint},
            )
        return value

    @field_validator("profiling")
    @classmethod
    def _disable_for_freetrain(
        cls, value: ProfilingSection, info: ValidationInfo
    ) -> ProfilingSection:
        allocation = info.data.get("allocation")
        if allocation is not None and allocation.policy == "freetrain":
            return value.model_copy(update={"enabled": False})
        return value

    @field_validator("shares")
    @classmethod
    def _check_weights_from(cls, value: SharesSection, info: ValidationInfo) -> SharesSection:
        scheduler = info.data.get("scheduler")
        if value.weights_from == "slurm" and scheduler is not None and scheduler.kind != "slurm":
            raise PydanticCustomError(
                "weights_from",
                'weights_from is "slurm", and the main scheduler is not Slurm; write the weights '
                'here, and weights_from = "here"',
            )
        return value

    @property
    def submit_as(self) -> tuple[str, ...]:
        """Command prefix for submitting and cancelling leases of other users; empty if there are no
        other users.
        """
        return tuple(_submit_as(self.scheduler))

    @property
    def logs_dir(self) -> Path:
        """Folder of the logs of jobs."""
        return self.daemon.state_dir / "logs"

    @property
    def state_dir(self) -> Path:
        """The daemon's state directory."""
        return self.daemon.state_dir

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the database: as configured, else SQLite under the state directory."""
        return self.daemon.database or f"sqlite:///{self.daemon.state_dir / DATABASE_NAME}"

    @property
    def cluster_dir(self) -> Path:
        """Directory of the embedded cluster."""
        return self.scheduler.local.directory or self.daemon.state_dir / "cluster"


def load_config(path: str | Path) -> Config:
    """Return the configuration in the TOML file ``path``. Raises ConfigError with all problems of
    the file.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            str(path), [Problem(None, "", f"The file cannot be read: {error.strerror}.")]
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            str(path), [Problem(line, "", "The file is not UTF-8 text; save it as UTF-8.")]
        ) from None
    return parse_config(text, str(path), path.resolve().parent, os.environ.get(env.STATE_DIR))


def parse_config(
    text: str,
    where: str = "configuration",
    directory: Path | None = None,
    state_dir: str | None = None,
) -> Config:
    """Return the configuration in ``text``.

    Args:
        text: the content of a TOML file.
        where: name of the text in the error message.
        directory: base of relative paths in the text.
        state_dir: state directory if the text names none; relative to the current directory, as
            on the command line.

    Raises:
        ConfigError: the text has problems; the error holds all of them.
    """
    toml = read_toml(text)
    problems = list(toml.problems)
    data = {**toml.data}
    daemon = data.get("daemon", {})
    if state_dir and isinstance(daemon, dict):
        absolute_dir = os.path.abspath(os.path.expanduser(state_dir))
        data["daemon"] = {"state_dir": absolute_dir, **daemon}
    try:
        config = Config.model_validate(data, context={"directory": directory})
    except ValidationError as error:
        problems += problems_of(error, toml, Config)
    if problems:
        raise ConfigError(
            where, sorted(problems, key=lambda problem: (problem.line or 0, problem.key))
        )
    return config


def _submit_as(scheduler: SchedulerSection) -> Words:
    return getattr(getattr(scheduler, scheduler.kind), "submit_as", [])
