"""Building blocks of the sections of a configuration: the kinds of keys, and the conversion of
quantities and paths.

Knows no key by name; those are defined in the other modules of :mod:`malletrain.config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo
from pydantic_core import PydanticCustomError

from malletrain.config.units import (
    DURATION_HELP,
    SIZE_HELP,
    UnitError,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from malletrain.config.validation import CanBeOff, Quantity


def _duration(value: object) -> float:
    try:
        return parse_duration(value)
    except UnitError as error:
        raise PydanticCustomError("unit", "{sentence}", {"sentence": str(error)}) from None


def _maybe_duration(value: object) -> float | None:
    return None if value is None else _duration(value)


def _show_duration(value: float | None) -> str | None:
    return None if value is None else format_duration(value)


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except UnitError as error:
        raise PydanticCustomError("unit", "{sentence}", {"sentence": str(error)}) from None


def _location(value: object, info: ValidationInfo) -> object:
    """Return the path with ``~`` expanded, relative to the file that names it."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise PydanticCustomError("path", "it must be the path of a file or directory, in quotes")
    base = (info.context or {}).get("directory")
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise PydanticCustomError(
            "path",
            '"{value}" begins with a home directory that is not known',
            {"value": str(value)},
        ) from None
    return path if base is None else Path(base, path)


def _maybe_location(value: object, info: ValidationInfo) -> object:
    return None if value is None else _location(value, info)


def _off(value: object) -> BeforeValidator:
    """Return a validator that replaces ``"off"`` by the other value that means it."""
    return BeforeValidator(lambda raw: value if raw == OFF else raw)


def _show_or_off(value: float | str) -> float | str:
    return value or OFF


def _show_duration_or_off(value: float) -> str:
    return format_duration(value) if value else OFF


OFF = "off"
"""The value that switches off what a key is for."""
_DURATION = Quantity("duration", DURATION_HELP)
_PATH = Quantity("path", 'a path; "~" is the home directory')
Duration = Annotated[
    float, BeforeValidator(_duration), PlainSerializer(format_duration, when_used="json"), _DURATION
]
# The validators of optional keys are outside the union, so that a wrong value is reported once and
# not once for each member of the union.
MaybeDuration = Annotated[
    float | None,
    BeforeValidator(_maybe_duration),
    PlainSerializer(_show_duration, when_used="json"),
    _DURATION,
]
Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(format_size, when_used="json"),
    Quantity("size", SIZE_HELP),
]
# Pydantic calls the validator that stands last first.
DurationOrOff = Annotated[
    Duration, _off("0 s"), PlainSerializer(_show_duration_or_off, when_used="json"), CanBeOff()
]
CountOrOff = Annotated[int, _off(0), PlainSerializer(_show_or_off, when_used="json"), CanBeOff()]
FractionOrOff = Annotated[
    float, _off(0.0), PlainSerializer(_show_or_off, when_used="json"), CanBeOff()
]
TextOrOff = Annotated[str, _off(""), PlainSerializer(_show_or_off, when_used="json"), CanBeOff()]
Location = Annotated[Path, BeforeValidator(_location), _PATH]
MaybeLocation = Annotated[Path | None, BeforeValidator(_maybe_location), _PATH]
Words = list[str]
"""A list of texts."""


class Section(BaseModel):
    """Base of all sections: refuses unknown keys, is immutable, and checks defaults like given
    values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)


def key(default: Any = ..., *, description: str, **limits: Any) -> Any:
    """Return a key of a section.

    Defaults are written as in the file ("5 s") and pass the same checks as given values.
    """
    return Field(default, description=description, **limits)


def section(kind: type[Section]) -> Any:
    """Return a section that may be left out of the file."""
    return Field(default_factory=kind)
