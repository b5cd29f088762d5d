"""Whether the GPUs of a node are in a state in which jobs fail, from the output of ``nvidia-smi
-q``. Pure.

Tables of NVIDIA's exit codes and messages (nvidia-smi(1), "RETURN VALUE"; Xid 79 "GPU has fallen
off the bus") and of the fields of the long listing. Anything else is no reason to give up a node.
:mod:`malletrain.agent.health` decides when this is checked.
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
"""Of nvidia-smi. The others (2 to 4, 6, 13, 255) say that the question was wrong or unusual."""

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
"""What it prints, whatever its exit code, when a GPU or the driver is gone."""


def _some(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def _yes(value: str) -> bool:
    return value == "Yes"


def _action(value: str) -> bool:
    return value not in ("None", "N/A", "")


FIELDS = (
    (re.compile(r"ECC Errors/Volatile/.*Uncorrectable[^/]*"), _some, "uncorrectable memory errors"),
    (re.compile(r"ECC Errors/Volatile/Double Bit/Total"), _some, "uncorrectable memory errors"),
    (re.compile(r"Retired Pages/Pending.*"), _yes, "memory pages wait to be retired"),
    (re.compile(r"Remapped Rows/Pending"), _yes, "memory rows wait to be remapped"),
    (re.compile(r"Remapped Rows/Remapping Failure Occurred"), _yes, "no spare memory rows left"),
    (re.compile(r"(GPU )?Reset Status/Reset Required"), _yes, "a reset is required"),
    (re.compile(r"GPU Recovery Action"), _action, "the driver asks for"),
)
"""(path of a field below its GPU, whether its value is bad, what it means)."""

_GPU = re.compile(r"GPU ([0-9A-Fa-f:.]+)\s*$")
_LINE = re.compile(r"( *)(.*?)(?:\s+: ?(.*))?$")


def trouble(code: int | None, printed: str) -> str:
    """What is wrong with the node's GPUs, as a part of a sentence; empty: nothing that is known.

    Args:
        code: the exit code of nvidia-smi; None: it did not end in time.
        printed: everything that it printed.
    """
    if code is None:
        return "nvidia-smi hangs"
    for pattern in SENTENCES:
        if match := pattern.search(printed):
            return f"nvidia-smi says: {match[0].strip()}"
    if code in EXIT_CODES:
        return EXIT_CODES[code]
    for gpu, path, value in listing(printed):
        for field, bad, meaning in FIELDS:
            if field.fullmatch(path) and bad(value):
                return f"GPU {gpu}: {meaning} ({path.rpartition('/')[2]}: {value})"
    return ""


def listing(printed: str) -> Iterator[tuple[str, str, str]]:
    """(GPU, path of the field, value) for each line ``NAME : VALUE`` of ``nvidia-smi -q``. Sections
    are told by how far they are indented.
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
