"""Reads the data that experiment trackers have stored: W&B offline, MLflow with a store of files,
TensorBoard.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of an offline run, a log in LevelDB's format: before each record are its
    checksum, its length and whether it is complete. The first record begins after seven bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, rows = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # the last record of a process that was killed
        assert kind == 1, "short records are whole"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


_STEPS = ("step", "trainer/global_step", "train/global_step")
"""Keys of the step in a row of W&B, as scripts, Lightning and Trainer name it."""
_OF_PROCESS = ("runtime", "per_second", "flos", "grad_norm", "train_loss")
"""Parts of the names of values that Trainer computes from the start of its process, or from the
share of a rank.
"""


def tensorboard_rows(folder: Path) -> list[tuple[str, int, float]]:
    """Return the scalars in ``folder`` as TensorBoard shows them, (tag, step, value). A writer that
    begins at a step replaces the values of earlier writers from that step on.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = folder.glob("events.out.tfevents.*")
    sessions = [list(LegacyEventFileLoader(str(file)).Load()) for file in files]
    rows: list[tuple[str, int, float]] = []
    for events in sorted(sessions, key=lambda events: events[0].wall_time):
        for event in events:
            if event.session_log.status == event.session_log.START:
                rows = [row for row in rows if row[1] < event.step]
            rows += [
                (value.tag, event.step, value.simple_value)
                for value in event.summary.value
                if value.HasField("simple_value")
            ]
    return rows


def tracked(folder: Path) -> dict[str, str]:
    """Return the stored values below ``folder``, one line each, by the tool's name; no entry for a
    tool that was not used. A line begins with the number of its run.
    """
    by_tool = {}
    if offline := sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        runs = sorted({file.name for file in offline})
        by_tool["wandb"] = "".join(
            f"{runs.index(file.name)} {_step(row)} {name} {row[name]}\n"
            for file in offline
            for row in wandb_rows(file)
            for name in sorted(row.keys() - set(_STEPS))
            if not name.startswith("_") and not _is_of_process(name)
        )
    if values := sorted(folder.glob("mlruns/*/*/metrics/*")):
        runs = sorted({file.parts[-3] for file in values})
        by_tool["mlflow"] = "".join(
            f"{runs.index(file.parts[-3])} {step} {file.name} {value}\n"
            for file in values
            if not _is_of_process(file.name)
            for _, value, step in map(str.split, file.read_text().splitlines())
        )
    if places := sorted({file.parent for file in folder.glob("board/**/events.out.tfevents.*")}):
        by_tool["tensorboard"] = "".join(
            f"{number} {step} {tag} {value:.6f}\n"
            for number, place in enumerate(places)
            for tag, step, value in tensorboard_rows(place)
            if not _is_of_process(tag)
        )
    return by_tool


def _is_of_process(name: str) -> bool:
    return any(part in name for part in _OF_PROCESS)


def _step(row: dict[str, Any]) -> Any:
    return next(row[name] for name in _STEPS if name in row)
