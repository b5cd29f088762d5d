"""Turns pydantic's validation errors into sentences, each with the line and the full name of its
key.

Decides how an invalid key or value is reported to the author of the file. It works on any pydantic
model of nested sections and knows no key by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from malletrain.config.tomlfile import Problem, TomlText
from malletrain.config.units import format_duration, format_size
from malletrain.protocol.database_url import without_passwords


class Quantity(NamedTuple):
    """Marks a key whose value is text in a certain form. ``kind``: ``duration`` | ``size``
    | ``path``.
    """

    kind: str
    accepted: str


class CanBeOff:
    """Marks a key that accepts ``"off"`` besides its other values."""


_FORMATTERS = {"duration": format_duration, "size": format_size}
_WRONG_FORM = frozenset({"int_type", "float_type", "string_type", "unit", "address"})
"""Pydantic's types of errors whose sentences end with the accepted values."""
_Mark = TypeVar("_Mark", Quantity, CanBeOff)


def problems_of(error: ValidationError, toml: TomlText, model: type[BaseModel]) -> list[Problem]:
    """Return all errors in ``error`` as problems.

    If the parser did not reach the end of the file, missing keys are not reported.
    """
    return [
        _problem(details, toml, model)
        for details in error.errors()
        if toml.complete or details["type"] != "missing"
    ]


def _problem(details: ErrorDetails, toml: TomlText, model: type[BaseModel]) -> Problem:
    """Return one of pydantic's errors as a sentence with its line."""
    loc = tuple(str(part) for part in details["loc"])
    kind, ctx = details["type"], details.get("ctx", {})
    quantity = _mark_at(Quantity, loc, model)
    value = _value_at(loc, toml.data, details["input"])
    shown = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )

    def format_bound(name: str) -> str:
        show = _FORMATTERS.get(quantity.kind) if quantity else None
        return show(ctx[name]) if show else str(ctx[name])

    key = ".".join(loc)
    sentences = {
        "extra_forbidden": lambda: _unknown_key_message(loc, model),
        "missing": lambda: _missing_key_message(loc, model),
        "literal_error": lambda: (
            f"{shown} is not known; accepted is {ctx['expected'].replace(chr(39), chr(34))}."
        ),
        "string_type": lambda: f"{shown} is not text; accepted is text in quotes.",
        "int_type": lambda: (
            f"{shown} is not accepted; accepted is a whole number without quotes or unit."
        ),
        "float_type": lambda: (
            f"{shown} is not accepted; accepted is a number without quotes or unit."
        ),
        "finite_number": lambda: f"{shown} is not accepted; accepted is a finite number.",
        "bool_type": lambda: f"{shown} is not accepted; accepted is true or false, without quotes.",
        "list_type": lambda: (
            f"this section can be repeated; write [[{key}]] above its keys."
            if isinstance(value, dict)
            else f'{shown} is not a list; accepted is a list of texts, such as ["a", "b"].'
        ),
        "string_pattern_mismatch": lambda: (
            f"{shown} is not accepted; docs/configuration.md describes the key."
        ),
        "model_type": lambda: f"{shown} is not a section; write [{key}] and its keys below.",
        "greater_than": lambda: (
            f"{shown} is too small; accepted is more than {format_bound('gt')}."
        ),
        "greater_than_equal": lambda: (
            f"{shown} is too small; accepted is {format_bound('ge')} or more."
        ),
        "less_than_equal": lambda: (
            f"{shown} is too large; accepted is {format_bound('le')} or less."
        ),
    }
    message = sentences[kind]() if kind in sentences else details["msg"].rstrip(".") + "."
    if kind in _WRONG_FORM and _mark_at(CanBeOff, loc, model):
        message = f'{message.removesuffix(".")}, or "off".'
    return Problem(toml.line_of(loc), key, without_passwords(message))


def _section_at(table: type[BaseModel] | None, part: str) -> type[BaseModel] | None:
    """Return the section class that ``part`` of a key's full name selects in ``table``. A number
    selects an element of a repeated section.
    """
    if table is None or part.isdecimal():
        return table
    return table_of(table.model_fields[part].annotation)


def _unknown_key_message(loc: tuple[str, ...], model: type[BaseModel]) -> str:
    """Return the message for an unknown key. It suggests the most similar name."""
    table: type[BaseModel] | None = model
    for part in loc[:-1]:
        table = _section_at(table, part)
    names = list(table.model_fields) if table is not None else []
    noun = "section" if table is model else "key"
    if close_matches := difflib.get_close_matches(
        loc[-1].lower().replace("-", "_"), names, n=1, cutoff=0.6
    ):
        return f'there is no such {noun}; did you mean "{close_matches[0]}"?'
    if full_names := _full_names_of(loc[-1], model):
        return f"there is no such {noun} here; did you mean {either(full_names)}?"
    return f"there is no such {noun}; accepted is {either(names)}."


def _missing_key_message(loc: tuple[str, ...], model: type[BaseModel]) -> str:
    table: type[BaseModel] | None = model
    for part in loc:
        table = _section_at(table, part)
    if table is None:
        return f'this required key is missing; add a line {loc[-1]} = "...".'
    required_keys = [name for name, info in table.model_fields.items() if info.is_required()]
    return (
        f"this required section is missing; write [{'.'.join(loc)}] and below it "
        f"{either(required_keys)}."
    )


def _full_names_of(name: str, table: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the full names of all keys called ``name``, to suggest the right section."""
    names = []
    for field, info in table.model_fields.items():
        inner = table_of(info.annotation)
        if inner is not None:
            names += _full_names_of(name, inner, f"{prefix}{field}.")
        elif field == name:
            names.append(prefix + field)
    return names


def _mark_at(kind: type[_Mark], loc: tuple[str, ...], model: type[BaseModel]) -> _Mark | None:
    """Return the mark of this kind at a key, or ``None``."""
    table: type[BaseModel] | None = model
    for part in loc:
        if part.isdecimal():
            continue
        info = table.model_fields.get(part) if table is not None else None
        if info is None:
            return None
        table = table_of(info.annotation)
        for mark in info.metadata:
            if isinstance(mark, kind):
                return mark
    return None


def _value_at(loc: tuple[str, ...], data: Any, default: Any) -> Any:
    """Return the file's value at ``loc``, or ``default`` if the file has none (pydantic checked a
    default)."""
    for part in loc:
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return default
    return data


def table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation (``Table`` or ``Table | None``); ``None``
    if the field is a plain key.
    """
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def either(names: Sequence[str]) -> str:
    """Return the names as ``"a", "b" or "c"``."""
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
