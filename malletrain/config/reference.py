"""Generates the configuration's reference and example file from the descriptions of its keys, so
that they cannot diverge from the code.

Decides form only; the texts come from :mod:`malletrain.config`. ``python -m
malletrain.config.reference`` prints ``docs/configuration.md``, ``python -m
malletrain.config.reference --example`` a file with every key at its default.
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from malletrain.config.model import Config, scheduler_kinds
from malletrain.config.schedulers import BatchScheduler
from malletrain.config.units import format_duration, format_size
from malletrain.config.validation import CanBeOff, Quantity, either, table_of

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m malletrain.config.reference`; edit the keys' descriptions instead. -->

The daemon reads one [TOML](https://toml.io) file: `malletrain daemon --config FILE`.
`malletrain check --config FILE` lists all problems of a file, with line numbers, and checks
whether the site can work with it. It starts nothing.

Quantities are text with a unit: durations `"30 s"`, `"5 min"`, `"1.5 h"` (ms, s, min, h, d),
sizes `"2 GiB"`, `"500 MB"`. A plain number is refused if a unit is needed. Relative paths are
relative to the file, `~` is the home directory. A key that is not given has its default. Only
`scheduler.kind` is required.

`"off"` switches a key's function off; for a maximum it means no limit. The keys that can be
switched off list `"off"` among the accepted values. In its place a number may be `0`, a duration
`"0 s"`, `daemon.metrics_listen` `""` and `shares.by` `"none"`. Keys of `true` or `false` are
switched off by `false`.
"""


def sections(
    model: type[BaseModel] = Config, name: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (full name, model) of every section, each before its subsections."""
    if name:
        yield name, model
    for field, info in model.model_fields.items():
        inner = table_of(info.annotation)
        if inner is not None:
            yield from sections(inner, f"{name}.{field}" if name else field)


def is_repeatable(name: str) -> bool:
    """Return whether the section of this name can be repeated."""
    *path, last = name.split(".")
    model: type[BaseModel] | None = Config
    for part in path:
        model = table_of(model.model_fields[part].annotation) if model is not None else None
    info = model.model_fields.get(last) if model is not None else None
    return info is not None and typing.get_origin(info.annotation) is list


def keys(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Return (name, field) of every key of a section, without its subsections."""
    return (
        (name, info)
        for name, info in model.model_fields.items()
        if table_of(info.annotation) is None
    )


def reference_markdown() -> str:
    """Return every key with its default, valid values and description, as Markdown."""
    return "\n".join([_INTRODUCTION, section_tables()])


def section_tables(of: type[BaseModel] = Config, heading: str = "##") -> str:
    """Return a heading and a table for each section of a model. Keys that the tables of all batch
    schedulers have are in a table of their own, after the last of them.
    """
    parts = []
    batch = [name for name, model in sections(of) if issubclass(model, BatchScheduler)]
    for name, model in sections(of):
        title = f"[[{name}]]" if is_repeatable(name) else f"[{name}]"
        summary, shared = _summary(model), frozenset[str]()
        if name in batch:
            summary += (
                " The section also has the [keys of batch schedulers](#keys-of-batch-schedulers)."
            )
            shared = frozenset(BatchScheduler.model_fields)
        parts.append(_table(f"{heading} {title}", summary, name, model, shared))
        if name in batch[-1:]:
            summary = f"These keys are in {' and in '.join(f'`[{each}]`' for each in batch)}."
            parts.append(
                _table(f"{heading} Keys of batch schedulers", summary, name, BatchScheduler)
            )
    return "\n".join(parts)


def _table(
    title: str,
    summary: str,
    name: str,
    model: type[BaseModel],
    without: frozenset[str] = frozenset(),
) -> str:
    rows = [
        f"| `{key}` | {_default(info, markdown=True)} | {_accepted(f'{name}.{key}', info)} "
        f"| {info.description} |"
        for key, info in keys(model)
        if key not in without
    ]
    head = ["| key | default | accepted | what it is for |", "|---|---|---|---|"]
    return "\n".join([title, "", summary, "", *head, *rows, ""])


def example_toml() -> str:
    """Return a configuration file with every key commented out at its default, below its
    description.
    """
    lines = [
        "# Every key of the configuration at its default. Remove the # of the keys that you change."
    ]
    for name, model in sections():
        lines += [
            "",
            *textwrap.wrap(_summary(model), 100, initial_indent="# ", subsequent_indent="# "),
            f"# [[{name}]]" if is_repeatable(name) else f"[{name}]",
        ]
        for key, info in keys(model):
            note = f"{info.description} Accepted: {_accepted(f'{name}.{key}', info)}."
            lines += textwrap.wrap(
                note.replace("`", ""), 100, initial_indent="# ", subsequent_indent="# "
            )
            optional = is_repeatable(name) or not info.is_required()
            value = either(scheduler_kinds()[:1]) if not optional else _default(info)
            lines.append(f"{'# ' if optional else ''}{key} = {value}")
    return "\n".join(lines) + "\n"


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _default(info: FieldInfo, markdown: bool = False) -> str:
    """Return the default as it is written in a file."""
    if info.is_required():
        is_size = any(isinstance(m, Quantity) and m.kind == "size" for m in info.metadata)
        return "required" if markdown else '"1 GiB"' if is_size else '"..."'
    value = info.default
    if value is None:
        duration = any(
            isinstance(mark, Quantity) and mark.kind == "duration" for mark in info.metadata
        )
        return "not given" if markdown else '"30 s"' if duration else '"..."'
    text = (
        str(value).lower()
        if isinstance(value, bool)
        else json.dumps(value)
        if isinstance(value, (str, list))
        else f"{value}"
    )
    return f"`{text}`" if markdown else text


def _accepted(name: str, info: FieldInfo) -> str:
    """Return the description of valid values, with their bounds."""
    if name == "scheduler.kind":
        return f"`{either(scheduler_kinds())}`"
    quantity = next((mark for mark in info.metadata if isinstance(mark, Quantity)), None)
    if quantity is not None and quantity.kind == "path":
        return "a path"
    kind_name = f"a {quantity.kind}" if quantity else _kind(info.annotation)
    off = '`"off"` or ' * any(isinstance(mark, CanBeOff) for mark in info.metadata)
    return off + kind_name + "".join(_bound(mark, quantity) for mark in info.metadata)


def _kind(annotation: Any) -> str:
    """Return the name of values of this type."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is types.UnionType or (
        typing.get_origin(annotation) is typing.Union
    ):
        members = (each for each in typing.get_args(annotation) if each is not types.NoneType)
        return " or ".join(_kind(each) for each in members)
    if typing.get_origin(annotation) is typing.Annotated:
        whole, field = typing.get_args(annotation)
        return _kind(whole) + "".join(_bound(mark, None) for mark in field.metadata)
    if typing.get_origin(annotation) is dict:
        return "a table"
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "`true` or `false`",
        list[str]: "a list of texts",
    }
    return words[annotation]


def _bound(mark: Any, quantity: Quantity | None) -> str:
    show = (
        {"duration": format_duration, "size": format_size}[quantity.kind]
        if quantity
        else "{:g}".format
    )
    for kind, word, value in (
        (Gt, "more than", "gt"),
        (Ge, "at least", "ge"),
        (Le, "at most", "le"),
    ):
        if isinstance(mark, kind):
            return f", {word} {show(getattr(mark, value))}"
    return ""


if __name__ == "__main__":
    sys.stdout.write(example_toml() if "--example" in sys.argv[1:] else reference_markdown())
