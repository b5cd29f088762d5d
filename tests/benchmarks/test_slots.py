"""Both kinds of slots in one simulation of two logs."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.slots import both_kinds

GPU_JOBS = "timestamp,duration,num_gpus,cluster\n" + "".join(
    f"2020-01-01 {hour:02d}:00:00,3000,2,a\n" for hour in range(12)
)
"""Two of four GPUs are used for 50 minutes of each hour."""
CPU_JOBS = "; MaxNodes: 4\n" + "".join(
    f"{k} {3600 * k} 0 1800 3 -1 -1 3 -1 -1 1 1 1 -1 -1 -1 -1 -1\n" for k in range(12)
)
"""Three of four nodes are used for 30 minutes of each hour."""


def test_gpus_and_whole_nodes(tmp_path):
    log, cpu_log = tmp_path / "gpus.csv.gz", tmp_path / "cpus.swf"
    with gzip.open(log, "wt") as file:
        file.write(GPU_JOBS)
    cpu_log.write_text(CPU_JOBS)
    rows = both_kinds(log, cpu_log, per_host=4, load=0.4, hours=2.0)
    kinds = {row["kind"]: row for row in rows}
    assert (kinds["gpu"]["slots"], kinds["gpu"]["price"]) == (
        4 * (kinds["gpu"]["slots"] // 4),
        0.25,
    )
    assert (kinds["cpu"]["slots"], kinds["cpu"]["price"]) == (4, 1.0)
    assert kinds["cpu"]["idle_slot_hours"] == pytest.approx(2 * (4 - 3 * 0.5), abs=0.2)
    assert kinds["gpu"]["idle_slot_hours"] == pytest.approx(2 * (8 - 2 * 5 / 6), abs=0.2)
    assert all(0.8 < row["harvested_fraction"] <= 1 for row in rows)
