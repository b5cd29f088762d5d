"""The search space of a sweep: the values of each parameter, and how a trial's values are passed to
its script. Pure.

Decides the forms of a parameter in a sweep file. The sampler decides what is tried next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = float | int | str | bool

SPACE_HELP = (
    "a range such as { low = 1e-4, high = 0.1, log = true }, or a list of what may be chosen, "
    'such as ["relu", "tanh"]'
)
_KEYS = {"low", "high", "step", "log", "choices"}
_PLACE = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_-]*)\}\}|\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_OPTION = re.compile(r"--[^=\s]+")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
TRIAL = "trial"
"""Placeholder of the trial's number in arguments."""


MAX_WHOLE = 2**53
"""Largest whole number of a range: the study stores the value as a floating-point number."""


class SpaceError(ValueError):
    """A parameter is not valid; the message says what is accepted."""


@dataclass(frozen=True)
class Parameter:
    """The values of one parameter: a range, or one of ``choices``."""

    low: float | int = 0
    high: float | int = 0
    step: float | int | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        numbers = (self.low, self.high, self.step if self.step is not None else 1)
        return not self.choices and all(isinstance(n, int) for n in numbers)

    def grid(self) -> list[Value]:
        """Return all its values. Raises SpaceError if they cannot be listed."""
        if self.choices:
            return list(self.choices)
        step = self.step if self.step is not None else 1 if self.whole else None
        if step is None or self.log:
            raise SpaceError("a grid needs lists of values, or ranges with a step and without log")
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self.low + k * step for k in range(count)]


def parameter(entry: Any) -> Parameter:
    """Return the parameter in an entry of a sweep file, or in a distribution of Optuna.

    Raises:
        SpaceError: the entry is not valid.
    """
    if hasattr(entry, "single") and hasattr(entry, "to_internal_repr"):  # a distribution of Optuna
        names = [name for name in _KEYS if getattr(entry, name, None) is not None]
        entry = {name: getattr(entry, name) for name in names}
        if "choices" not in entry and entry.get("step") is not None and entry.get("log"):
            del entry["step"]  # whole numbers on a log scale have a step of 1
    if isinstance(entry, list | tuple):
        entry = {"choices": list(entry)}
    if not isinstance(entry, Mapping):
        raise SpaceError(f"{entry!r} is no search space; accepted is {SPACE_HELP}")
    if unknown := sorted(set(entry) - _KEYS):
        raise SpaceError(f'"{unknown[0]}" is not known here; accepted is {SPACE_HELP}')
    if "choices" in entry:
        return _choices(entry)
    return _range(entry)


def _choices(entry: Mapping[str, Any]) -> Parameter:
    choices = entry["choices"]
    if set(entry) - {"choices", "log"} or entry.get("log"):
        raise SpaceError("choices go with nothing else")
    if not isinstance(choices, list | tuple) or not choices:
        raise SpaceError(f"{choices!r} is no list of choices; name one at least")
    for value in choices:
        if not isinstance(value, float | int | str | bool):
            raise SpaceError(f"{value!r} is no choice; accepted are texts, numbers, true and false")
        if isinstance(value, float) and not math.isfinite(value):
            raise SpaceError(
                f"{value} is no finite number, and the study cannot store it; write it as a text, "
                f'"{value}", which the script gets in the same form'
            )
    if len({(type(v), v) for v in choices}) < len(choices):
        raise SpaceError("a choice is listed twice")
    return Parameter(choices=tuple(choices))


def check_choices(p: Parameter) -> None:
    """Check that the choices are distinct in a study, where 1, true and 1.0 are one value.

    Raises:
        SpaceError: two of them are equal there.
    """
    for number, value in enumerate(p.choices):
        for other in p.choices[:number]:
            if value == other:
                raise SpaceError(
                    f"{written(other)} and {written(value)} are one value in the study, so that a "
                    "trial would be recorded with the other one; write them as texts, such as "
                    f'"{written(other)}" and "{written(value)}"'
                )


def check_range(p: Parameter) -> None:
    """Check that the study can store each whole number of a range.

    Raises:
        SpaceError: some are too large.
    """
    if not p.choices and p.whole and max(abs(p.low), abs(p.high)) > MAX_WHOLE:
        raise SpaceError(
            f"whole numbers above {MAX_WHOLE:,} are stored as others in the study; choose a "
            "smaller range, or list the numbers as texts"
        )


def _range(entry: Mapping[str, Any]) -> Parameter:
    if missing := {"low", "high"} - set(entry):
        raise SpaceError(f'"{min(missing)}" is missing; accepted is {SPACE_HELP}')
    step, log = entry.get("step"), entry.get("log", False)
    for value in (entry["low"], entry["high"], *(() if step is None else (step,))):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpaceError(f"{value!r} is no number")
        if not math.isfinite(value):
            raise SpaceError(f"{value!r} is not a finite number")
    if not isinstance(log, bool):
        raise SpaceError(f"log is {log!r}; accepted is true or false")
    low, high = entry["low"], entry["high"]
    if low > high:
        raise SpaceError(f"low = {low} is above high = {high}")
    if step is not None and not step > 0:
        raise SpaceError(f"step = {step} is not above 0")
    if log and step is not None:
        raise SpaceError("log and step exclude each other")
    if log and not low > 0:
        raise SpaceError(f"low = {low}, but a range with log begins above 0")
    parameter = Parameter(low, high, step, log)
    if not parameter.whole:
        parameter = Parameter(float(low), float(high), None if step is None else float(step), log)
    return parameter


def unknown_places(args: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Return the names in braces in ``args`` that are not parameters."""
    valid_names = {*parameters, TRIAL}
    names = [match[2] for arg in args for match in _PLACE.finditer(arg) if match[2]]
    return [name for name in dict.fromkeys(names) if name not in valid_names]


def trial_arguments(
    args: Sequence[str], values: Mapping[str, Value], number: int
) -> tuple[str, ...]:
    """Return the arguments of a trial's script: ``{NAME}`` in ``args`` is replaced by a
    parameter's value, ``{trial}`` by the trial's number, ``{{NAME}}`` by the text ``{NAME}``.
    Parameters that no argument names follow as ``--NAME VALUE``. A value that begins with a dash is
    joined to its option, ``--NAME=VALUE``, because the script would take it for another option.
    """
    named: set[str] = set()

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name is None:
            return f"{{{match[1]}}}"
        named.add(name)
        if name == TRIAL:
            return str(number)
        return written(values[name]) if name in values else match[0]

    arguments: list[str] = []
    for arg in args:
        value = _PLACE.sub(replacement, arg)
        option = arguments[-1] if arguments else ""
        if value != arg and value.startswith("-") and _is_place(arg) and _OPTION.fullmatch(option):
            arguments[-1] = f"{option}={value}"
        else:
            arguments.append(value)
    for name, value in ((n, written(v)) for n, v in values.items() if n not in named):
        arguments += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
    return tuple(arguments)


def _is_place(arg: str) -> bool:
    """Return whether the argument begins with a placeholder."""
    match = _PLACE.match(arg)
    return match is not None and match[2] is not None


def written(value: Value) -> str:
    """Return the value as an argument."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
