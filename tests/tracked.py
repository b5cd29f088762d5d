"""What the tools that follow trainings have stored: W&B offline, MLflow on a store of files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of an offline run, a log of LevelDB's: each record has a checksum, its length
    and whether it is whole before it; the first begins after seven bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, rows = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # the last one of a process that was killed
        assert kind == 1, "short records are whole"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def tracked(folder: Path) -> dict[str, str]:
    """What the tools have stored below ``folder``, a line for each value, by the tool's name;
    nothing where none was used. A line begins with the number of its run.
    """
    by_tool = {}
    if offline := sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        runs = sorted({file.name for file in offline})
        by_tool["wandb"] = "".join(
            f"{runs.index(file.name)} {row['step']} {name} {row[name]}\n"
            for file in offline
            for row in wandb_rows(file)
            for name in sorted(row.keys() - {"step"})
            if not name.startswith("_")
        )
    if values := sorted(folder.glob("mlruns/*/*/metrics/*")):
        runs = sorted({file.parts[-3] for file in values})
        by_tool["mlflow"] = "".join(
            f"{runs.index(file.parts[-3])} {step} {file.name} {value}\n"
            for file in values
            for _, value, step in map(str.split, file.read_text().splitlines())
        )
    return by_tool
