"""Reads traces of requests: times, users, and numbers of tokens.

A file is recognised by its columns. Times begin at 0.

| trace | form |
|---|---|
| Azure 2023 and 2024 | CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``, dates, no users |
| VTC-arena | CSV ``arrival_s,client_id,prompt_tokens,output_tokens`` |
| Mooncake | JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` |
| ServeGen, online | CSV ``timestamp`` (s), ``input_tokens``, ``output_tokens`` |
| ServeGen, offline | JSON lines as Mooncake's without ``timestamp``: all come at once |
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

TIME = ("timestamp", "arrival_s", "time_s")
USER = ("client_id", "user", "client")
PROMPT = ("prompt_tokens", "contexttokens", "input_length", "input_tokens")
OUTPUT = ("output_tokens", "generatedtokens", "output_length")
MOONCAKE_BLOCK, SERVEGEN_BLOCK = 512, 16
"""Tokens of a block of ``hash_ids``."""
MAX_ID = 1 << 31


class TraceFileError(ValueError):
    """A file is not a trace of requests; the message names the line."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    time: float
    """Seconds from the first request."""
    prompt_tokens: int
    output_tokens: int
    user: str = ""
    """Empty if the trace has no users."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks of its prompt: blocks with equal numbers have equal tokens. Empty: not
    known."""
    block_tokens: int = 0
    """Number of tokens of a block; 0: there are no blocks."""

    def prompt(self, number: int) -> list[int]:
        """Return made-up ids of a prompt with this length and these blocks.

        Args:
            number: number of the request; ids outside the blocks depend on it.
        """
        shared = itertools.chain.from_iterable(
            range(start, start + self.block_tokens)
            for start in (block * self.block_tokens % MAX_ID for block in self.blocks)
        )
        ids = list(itertools.islice(shared, self.prompt_tokens))
        first = MAX_ID + (number * 65_537) % (MAX_ID - 1_000_000)
        return ids + list(range(first, first + self.prompt_tokens - len(ids)))


def read(path: str | os.PathLike[str]) -> list[TraceRequest]:
    """Return the requests of a file, in the order of time.

    Args:
        path: CSV or JSON lines; ``.gz`` is unpacked.

    Raises:
        TraceFileError: the file has none of the known formats, or a line is invalid.
        OSError: it cannot be read.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        try:
            first = file.read(1)
            file.seek(0)
            rows = _json_rows(file, path) if first == "{" else _csv_rows(file, path)
            requests = sorted(rows, key=lambda request: request.time)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise TraceFileError(f"{path} cannot be read: {error}") from error
    if not requests:
        raise TraceFileError(f"{path} has no requests.")
    start = requests[0].time
    return [replace(request, time=request.time - start) for request in requests]


def _csv_rows(file: Any, path: Path) -> Iterator[TraceRequest]:
    reader = csv.reader(file)
    header = [name.strip().lower() for name in next(reader, [])]
    try:
        time, prompt, output = (_column(header, names) for names in (TIME, PROMPT, OUTPUT))
    except KeyError as error:
        raise TraceFileError(
            f"{path} has the columns {', '.join(header) or '(none)'}; a trace of requests needs "
            f"one of {error.args[0]}."
        ) from None
    user = next((header.index(name) for name in USER if name in header), None)
    for row in reader:
        if not row:
            continue
        line = reader.line_num
        try:
            yield _checked(
                TraceRequest(
                    _seconds(row[time]),
                    int(row[prompt]),
                    int(row[output]),
                    "" if user is None else row[user],
                )
            )
        except (ValueError, IndexError) as error:
            raise TraceFileError(f"{path}, line {line}: {error}") from None


def _json_rows(file: Any, path: Path) -> Iterator[TraceRequest]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            yield _checked(_json_request(json.loads(text)))
        except KeyError as error:
            raise TraceFileError(
                f"{path}, line {line}: a request needs one of {error.args[0]}."
            ) from None
        except (ValueError, TypeError) as error:
            raise TraceFileError(f"{path}, line {line}: {error}") from None


def _json_request(value: Mapping[str, Any]) -> TraceRequest:
    keys = list(value)
    prompt, output = (keys[_column(keys, names)] for names in (PROMPT, OUTPUT))
    timed = "timestamp" in value
    blocks = tuple(int(block) for block in value.get("hash_ids", ()))
    return TraceRequest(
        float(value["timestamp"]) / 1000 if timed else 0.0,
        int(value[prompt]),
        int(value[output]),
        str(next((value[name] for name in USER if name in value), "")),
        blocks,
        (MOONCAKE_BLOCK if timed else SERVEGEN_BLOCK) if blocks else 0,
    )


def _column(header: list[str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise KeyError(", ".join(names))


def _checked(request: TraceRequest) -> TraceRequest:
    """Return the request with at least one token each in prompt and answer, as engines need."""
    if request.prompt_tokens < 0 or request.output_tokens < 0:
        raise ValueError("a number of tokens is negative")
    return replace(
        request,
        prompt_tokens=max(1, request.prompt_tokens),
        output_tokens=max(1, request.output_tokens),
    )


def _seconds(text: str) -> float:
    """Seconds: a number, or a date as Azure writes it (seven digits of a second)."""
    try:
        return float(text)
    except ValueError:
        pass
    date = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return date.timestamp()
