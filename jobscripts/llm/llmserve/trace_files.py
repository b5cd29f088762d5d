"""Writes requests as trace files, which :func:`llmserve.traces.read` and other tools read.

| form | columns | what is lost |
|---|---|---|
| azure | CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` | users |
| mooncake | JSON lines ``timestamp``, ``input_length``, ``output_length``, ``hash_ids`` | users |
| vtc-arena | CSV ``arrival_s,client_id,prompt_tokens,output_tokens`` | prefixes |

No trace has the prompts. Equal ``hash_ids`` of Mooncake mean equal blocks of 512 tokens.
"""

from __future__ import annotations

import csv
import json
import zlib
from array import array
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TextIO

from llmserve.traces import MOONCAKE_BLOCK, TraceRequest

FORMS = ("azure", "mooncake", "vtc-arena")
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
VTC_HEADER = ("arrival_s", "client_id", "prompt_tokens", "output_tokens")


class TraceWriter:
    """Writes one file, a request at a time.

    Args:
        file: text; a CSV file is opened with ``newline=""``.
        form: one of :data:`FORMS`.
        begin: time of second 0, for dates.

    Raises:
        ValueError: there is no such form.
    """

    def __init__(
        self, file: TextIO, form: str, begin: datetime = datetime(1970, 1, 1, tzinfo=timezone.utc)
    ) -> None:
        if form not in FORMS:
            raise ValueError(
                f"There is no trace format {form!r}; the formats are {', '.join(FORMS)}."
            )
        self._file, self._form, self._begin = file, form, begin
        self._csv = csv.writer(file, lineterminator="\n")
        self._numbers: dict[int, int] = {}
        """Hash of a block and all before it → its number in the file."""
        if form == "azure":
            self._csv.writerow(AZURE_HEADER)
        elif form == "vtc-arena":
            self._csv.writerow(VTC_HEADER)

    def write(self, request: TraceRequest) -> None:
        """Append a request."""
        if self._form == "azure":
            date = self._begin + timedelta(seconds=request.time)
            text = date.strftime("%Y-%m-%d %H:%M:%S.%f") + "0"  # Azure's have seven digits
            self._csv.writerow((text, request.prompt_tokens, request.output_tokens))
        elif self._form == "vtc-arena":
            self._csv.writerow(
                (
                    f"{request.time:.6f}",
                    request.user,
                    request.prompt_tokens,
                    request.output_tokens,
                )
            )
        else:
            row: dict[str, Any] = {
                "timestamp": round(request.time * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
            }
            if request.blocks and request.block_tokens == MOONCAKE_BLOCK:
                row["hash_ids"] = [self._number(block) for block in request.blocks]
            self._file.write(json.dumps(row) + "\n")

    def _number(self, block: int) -> int:
        return self._numbers.setdefault(block, len(self._numbers))


def block_hashes(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a hash for each block of :data:`MOONCAKE_BLOCK` ids of a prompt, of all ids up to the
    end of the block. The last block may be shorter.
    """
    hashes, digest = [], 0
    for start in range(0, len(ids), MOONCAKE_BLOCK):
        digest = zlib.crc32(array("I", ids[start : start + MOONCAKE_BLOCK]).tobytes(), digest)
        hashes.append(digest << 32 | start)
    return tuple(hashes)
