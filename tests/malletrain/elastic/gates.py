"""Gates at which scripts of tests wait for a change of the group."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_LOOK_S = 0.005


def wait_at_gate(path: Path, run: Any) -> None:
    """Wait for a file. If all members of a newer round have checked in, wait until this process
    knows it, too: its thread may be slow, and the script may have only a few steps left.

    Args:
        path: of the file.
        run: the script's ``elastic.Run``.
    """
    while not path.exists():
        time.sleep(_LOOK_S)
    membership = run.membership
    check_in = membership._check_in  # noqa: SLF001
    if check_in is None or check_in.place.generation <= membership.group.place.generation:
        return
    store = TCPStore(
        "127.0.0.1",
        check_in.place.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    while store.check(["all"]) and not (membership.ready_to_go or check_in.void):
        time.sleep(_LOOK_S)
