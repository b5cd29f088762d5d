"""Determines from the output of ``nvidia-smi -q`` whether the GPUs of a node are in a state in
which jobs fail. Pure.

It has tables of NVIDIA's exit codes and messages (nvidia-smi(1), "RETURN VALUE"; Xid 79 "GPU has
fallen off the bus") and of the fields of the long listing. Any other output is no reason to give up
a node. :mod:`malletrain.agent.health` decides when this is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

COMMAND = ("nvidia-smi", "-q")

EXIT_CODES = {
    8: "the external power cables of a GPU are not attached",
    9: "the NVIDIA driver is not loaded",
    10: "the driver has an interrupt issue with a GPU",
    12: "the NVML library cannot be found or loaded",
    14: "the infoROM of a GPU is corrupted",
    15: "a GPU has fallen off the bus or cannot be reached",
}
"""Exit codes of nvidia-smi that mean a broken node. The others (2 to 4, 6, 13, 255) mean that the
call was wrong or unusual.
"""

SENTENCES = tuple(
    re.compile(text, re.IGNORECASE)
    for text in (
        r"Unable to determine the device handle for GPU.*",
        r".*GPU is lost.*",
        r".*GPU requires reset.*",
        r".*GPU has fallen off the bus.*",
        r"No devices were found.*",
        r"Failed to initialize NVML.*",
        r"NVIDIA-SMI has failed.*",
    )
)
"""Output of nvidia-smi, with any exit code, if a GPU or the driver is lost."""


def _is_positive(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def _is_yes(value: str) -> bool:
    return value == "Yes"


def _is_action(value: str) -> bool:
    return value not in ("None", "N/A", "")


FIELDS = (
    (
        re.compile(r"ECC Errors/Volatile/.*Uncorrectable[^/]*"),
        _is_positive,
        "uncorrectable memory errors",
    ),
    (
        re.compile(r"ECC Errors/Volatile/Double Bit/Total"),
        _is_positive,
        "uncorrectable memory errors",
    ),
    (re.compile(r"Retired Pages/Pending.*"), _is_yes, "memory pages wait to be retired"),
    (re.compile(r"Remapped Rows/Pending"), _is_yes, "memory rows wait to be remapped"),
    (re.compile(r"Remapped Rows/Remapping Failure Occurred"), _is_yes, "no spare memory rows left"),
    (re.compile(r"(GPU )?Reset Status/Reset Required"), _is_yes, "a reset is required"),
    (re.compile(r"GPU Recovery Action"), _is_action, "the driver asks for"),
)
"""(path of a field below its GPU, predicate for a bad value, meaning)."""

_GPU = re.compile(r"GPU ([0-9A-Fa-f:.]+)\s*$")
_LINE = re.compile(r"( *)(.*?)(?:\s+: ?(.*))?$")


def trouble(code: int | None, printed: str) -> str:
    """Returns the problem of the node's GPUs, as a part of a sentence; empty if none is known.

    Args:
        code: exit code of nvidia-smi; None if it did not end in time.
        printed: its output.
    """
    if code is None:
        return "nvidia-smi hangs"
    for pattern in SENTENCES:
        if match := pattern.search(printed):
            return f"nvidia-smi says: {match[0].strip()}"
    if code in EXIT_CODES:
        return EXIT_CODES[code]
    for gpu, path, value in listing(printed):
        for field, is_bad, meaning in FIELDS:
            if field.fullmatch(path) and is_bad(value):
                return f"GPU {gpu}: {meaning} ({path.rpartition('/')[2]}: {value})"
    return ""


def listing(printed: str) -> Iterator[tuple[str, str, str]]:
    """Yields (GPU, path of the field, value) for each line ``NAME : VALUE`` of ``nvidia-smi -q``.
    The indentation determines the sections.
    """
    gpu = ""
    sections: list[tuple[int, str]] = []
    for line in printed.splitlines():
        if header := _GPU.match(line):
            gpu, sections = header[1], []
            continue
        indent, name, value = _LINE.fullmatch(line.rstrip()).groups()  # type: ignore[union-attr]
        if not gpu or not name:
            continue
        sections = [(depth, section) for depth, section in sections if depth < len(indent)]
        if value is None:
            sections.append((len(indent), name))
        else:
            yield gpu, "/".join([*(section for _, section in sections), name]), value.strip()
