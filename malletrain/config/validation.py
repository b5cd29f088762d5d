"""Validation errors of a model as sentences, each at the line and under the full name of its key.

Decides how a wrong key or value is told to the person who wrote the file. It works on any pydantic
model of nested sections and knows no key by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from malletrain.config.tomlfile import Problem, TomlText
from malletrain.config.units import format_duration, format_size


class Quantity(NamedTuple):
    """Annotates a key that is written as text of a certain form. ``kind``: ``duration`` | ``size``
    | ``path``.
    """

    kind: str
    accepted: str


_SHOW_BOUND = {"duration": format_duration, "size": format_size}


def problems_of(error: ValidationError, toml: TomlText, model: type[BaseModel]) -> list[Problem]:
    """Everything in ``error``.

    A key that is missing from a file that could not be read to its end is no problem yet.
    """
    return [
        _problem(details, toml, model)
        for details in error.errors()
        if toml.complete or details["type"] != "missing"
    ]


def _problem(details: ErrorDetails, toml: TomlText, model: type[BaseModel]) -> Problem:
    """One of pydantic's errors as a sentence at a line."""
    loc = tuple(str(part) for part in details["loc"])
    kind, ctx = details["type"], details.get("ctx", {})
    quantity = _quantity_at(loc, model)
    value = _value_at(loc, toml.data, details["input"])
    shown = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )

    def bound(name: str) -> str:
        show = _SHOW_BOUND.get(quantity.kind) if quantity else None
        return show(ctx[name]) if show else str(ctx[name])

    key = ".".join(loc)
    sentences = {
        "extra_forbidden": lambda: _unknown(loc, model),
        "missing": lambda: _missing(loc, model),
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
            f"this is a section that may be there several times; write [[{key}]] above its keys."
            if isinstance(value, dict)
            else f'{shown} is not a list; accepted is a list of texts, such as ["a", "b"].'
        ),
        "string_pattern_mismatch": lambda: f"{shown} is not accepted; see its description.",
        "model_type": lambda: f"{shown} is not a section; write [{key}] and its keys below.",
        "greater_than": lambda: f"{shown} is too small; accepted is more than {bound('gt')}.",
        "greater_than_equal": lambda: f"{shown} is too small; accepted is {bound('ge')} or more.",
        "less_than_equal": lambda: f"{shown} is too large; accepted is {bound('le')} or less.",
    }
    message = sentences[kind]() if kind in sentences else details["msg"].rstrip(".") + "."
    return Problem(toml.line_of(loc), key, message)


def _inner(table: type[BaseModel] | None, part: str) -> type[BaseModel] | None:
    """The section that ``part`` of a key's full name leads to from ``table``; a number leads to one
    of several that are alike.
    """
    if table is None or part.isdecimal():
        return table
    return table_of(table.model_fields[part].annotation)


def _unknown(loc: tuple[str, ...], model: type[BaseModel]) -> str:
    """The sentence for a key that does not exist, with the nearest name that does."""
    table: type[BaseModel] | None = model
    for part in loc[:-1]:
        table = _inner(table, part)
    names = list(table.model_fields) if table is not None else []
    what = "section" if table is model else "key"
    if near := difflib.get_close_matches(loc[-1].lower().replace("-", "_"), names, n=1, cutoff=0.6):
        return f'there is no such {what}; did you mean "{near[0]}"?'
    if elsewhere := _homes_of(loc[-1], model):
        return f"there is no such {what} here; did you mean {either(elsewhere)}?"
    return f"there is no such {what}; accepted is {either(names)}."


def _missing(loc: tuple[str, ...], model: type[BaseModel]) -> str:
    table: type[BaseModel] | None = model
    for part in loc:
        table = _inner(table, part)
    if table is None:
        return f'this key is required and is not there; add a line {loc[-1]} = "...".'
    needs = [name for name, info in table.model_fields.items() if info.is_required()]
    return (
        f"this section is required and is not there; write [{'.'.join(loc)}] and below it "
        f"{either(needs)}."
    )


def _homes_of(name: str, table: type[BaseModel], prefix: str = "") -> list[str]:
    """Full names of every key called ``name``, for a key that was put into the wrong section."""
    homes = []
    for field, info in table.model_fields.items():
        inner = table_of(info.annotation)
        if inner is not None:
            homes += _homes_of(name, inner, f"{prefix}{field}.")
        elif field == name:
            homes.append(prefix + field)
    return homes


def _quantity_at(loc: tuple[str, ...], model: type[BaseModel]) -> Quantity | None:
    table: type[BaseModel] | None = model
    for part in loc:
        if part.isdecimal():
            continue
        info = table.model_fields.get(part) if table is not None else None
        if info is None:
            return None
        table = table_of(info.annotation)
        for mark in info.metadata:
            if isinstance(mark, Quantity):
                return mark
    return None


def _value_at(loc: tuple[str, ...], data: Any, otherwise: Any) -> Any:
    """What the file says at ``loc``; ``otherwise`` when it says nothing (a default was checked)."""
    for part in loc:
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return otherwise
    return data


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The section class behind a field's annotation (``Table`` or ``Table | None``); ``None`` when
    the field is a plain key.
    """
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def either(names: Sequence[str]) -> str:
    """``"a", "b" or "c"``."""
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
