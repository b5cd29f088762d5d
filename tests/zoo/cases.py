"""The cases of the zoo: which scripts there are, at which boundaries each is changed, and how a
case ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.zoo import live, restart
from tests.zoo.compare import Run, differences, in_the_hands_of, samples_of_step_at
from tests.zoo.quiet import groups
from tests.zoo.rounds import Change, RunFailed

FOLDER = "tests.zoo.scripts"
WORLDS = (1, 2, 3)
CHANGES: dict[str, dict[str, Change]] = {"restart": restart.CHANGES, "live": live.CHANGES}
"""The changes by mode and name."""


@dataclass(frozen=True)
class Script:
    """A script of the zoo."""

    name: str
    mode: str
    """restart or live."""
    main: str
    """module:function below :data:`FOLDER`."""
    needs: str = ""
    """Packages that may be absent, separated by spaces."""
    by_rank_0: bool = False
    """Rank 0 alone does something after a step, or after an epoch that the script counts itself, in
    live mode: that is lost with rank 0 (docs/live-mode.md).
    """
    refusal: str = ""
    """Part of the sentence with which it is to be refused before it trains."""

    @property
    def target(self) -> str:
        """module:function."""
        return f"{FOLDER}.{self.main}"

    @property
    def module(self) -> str:
        """The module of :attr:`target`."""
        return self.target.partition(":")[0]

    @property
    def missing(self) -> bool:
        """Whether a package that it needs is absent."""
        return any(importlib.util.find_spec(package) is None for package in self.needs.split())


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    script: str
    change: str
    """Name of the change; empty for an undisturbed run."""
    boundary: str
    point: int
    problems: tuple[str, ...] = ()
    """How it differs; none: it passed."""
    refusal: str = ""
    """The sentence with which the script was refused before it trained; a problem, too, where it
    is not the expected one.
    """
    boundaries: int = 1
    """Boundaries of which it is the case: those after the named one that are one with it."""


def boundary_names(run: Run, actor: int) -> list[str]:
    """The names of the boundaries of a rank, in their order; each only once."""
    names: list[str] = []
    for record in run.trace:
        if record.rank == actor and record.number >= 0:
            same = sum(name.partition(" #")[0] == record.name for name in names)
            names.append(f"{record.name} #{same + 1}" if same else record.name)
    return names


def failed(script: Script, change: str, boundary: str, point: int, error: RunFailed) -> Outcome:
    """The outcome of a run that ended with an error. A refusal passes where it is expected."""
    if error.trained:
        return Outcome(script.name, change, boundary, point, (str(error),))
    expected = bool(script.refusal) and script.refusal in str(error)
    problems = () if expected else (f"is refused: {error}",)
    return Outcome(script.name, change, boundary, point, problems, str(error))


class Zoo:
    """Runs cases in folders below ``root``."""

    def __init__(self, root: Path) -> None:
        self._drivers = {
            "restart": restart.RestartDriver(root / "restart"),
            "live": live.LiveDriver(root / "live"),
        }
        self._undisturbed: dict[tuple[str, int], Run] = {}
        self._watched: dict[tuple[str, int, int], Run | None] = {}

    def undisturbed(self, script: Script, worlds: Collection[int] = WORLDS) -> dict[int, Run]:
        """Runs of the script without a change, by world size.

        Raises:
            RunFailed: when one ends with an error.
        """
        return {world: self._undisturbed_on(script, world) for world in sorted(worlds)}

    def _undisturbed_on(self, script: Script, world: int) -> Run:
        key = (script.name, world)
        if key not in self._undisturbed:
            driver = self._drivers[script.mode]
            self._undisturbed[key] = driver.undisturbed(script.target, world)
        return self._undisturbed[key]

    def compare_worlds(self, script: Script, runs: dict[int, Run]) -> Outcome:
        """Whether the script does the same on any number of ranks."""
        problems: list[str] = []
        for world in (1, 3):
            sentences = differences(runs[2], runs[world])
            problems += [f"on {world} ranks: {problem}" for problem in sentences]
        return Outcome(script.name, "", "", -1, tuple(problems))

    def outcomes(
        self,
        script: Script,
        change: str,
        boundary: str = "",
        every: int = 1,
        first: int = 0,
        each: bool = False,
    ) -> Iterator[Outcome]:
        """A run of the script for each boundary at which ``change`` may be made.

        Args:
            script: of :data:`tests.zoo.catalogue.SCRIPTS`.
            change: a name of :meth:`changes`, or empty for the undisturbed runs alone.
            boundary: only those whose name contains it.
            every: only each so-many-th.
            first: number of the first one of these.
            each: also boundaries that are one with the boundary before (:mod:`tests.zoo.quiet`).
                They are left out only if ``boundary`` is empty.
        """
        try:
            runs = self.undisturbed(script)
        except RunFailed as error:
            yield failed(script, change, "undisturbed", -1, error)
            return
        if script.refusal:
            problem = f"trains, and is to be refused: {script.refusal}"
            yield Outcome(script.name, change, "undisturbed", -1, (problem,))
            return
        same = self.compare_worlds(script, runs)
        if not change or same.problems:
            yield same
        if not change:
            return
        made = CHANGES[script.mode][change]
        names = boundary_names(runs[made.before], made.actor)
        quiet = frozenset() if boundary or each else self._quiet(script, made, names)
        for number, together in enumerate(groups(names, quiet)):
            point = together[0]
            if boundary in names[point] and number % every == first % every:
                outcome = self.outcome(script, runs, made, point, names[point])
                yield replace(outcome, boundaries=len(together))

    def _quiet(self, script: Script, change: Change, names: list[str]) -> frozenset[int]:
        """Numbers of the boundaries that are one with the boundary before. None, where a run that
        is watched does not have the boundaries ``names``.
        """
        key = (script.name, change.before, change.actor)
        if key not in self._watched:
            driver = self._drivers[script.mode]
            try:
                run = driver.undisturbed(script.target, change.before, change.actor)
            except RunFailed:
                run = None
            self._watched[key] = run
        watched = self._watched[key]
        if watched is None or boundary_names(watched, change.actor) != names:
            return frozenset()
        return watched.quiet

    def one(self, script: Script, change: str, boundary: str) -> Outcome:
        """The case at one boundary, by its whole name.

        Raises:
            RunFailed: when an undisturbed run ends with an error.
        """
        made = CHANGES[script.mode][change]
        runs = self.undisturbed(script, {2, made.before})
        point = boundary_names(runs[made.before], made.actor).index(boundary)
        return self.outcome(script, runs, made, point, boundary)

    def outcome(
        self, script: Script, runs: dict[int, Run], change: Change, point: int, name: str
    ) -> Outcome:
        """One case."""
        driver = self._drivers[script.mode]
        lost = []
        if script.by_rank_0 and change.name == "loss-first":
            others = {(r.kind, r.key) for r in runs[2].trace if r.rank > 0}
            leader = [r for r in runs[2].trace if r.rank == 0]
            lost = [r for r in in_the_hands_of(leader, point) if (r.kind, r.key) not in others]
        if script.mode == "restart" and change.is_loss and change.actor:
            own = [r for r in runs[change.before].trace if r.rank == change.actor]
            lost = samples_of_step_at(own, point)
        try:
            run = driver.disturbed(script.target, change, point)
        except RunFailed as error:
            return failed(script, change.name, name, point, error)
        problems = tuple(differences(runs[2], run, change.is_loss, lost))
        return Outcome(script.name, change.name, name, point, problems)
