"""A sharded model in live mode under a real daemon: it grows, hands over and survives a loss."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.embedded import gone
from tests.malletrain.elastic.sharded.test_live import counts_as_if_undisturbed
from tests.malletrain.elastic.test_run import records
from tests.torch_versions import trains_shards

OPTIONS = {"samples": 1200, "crawl": 200, "snapshot": True, "run": {"replicate_every": 2}}

SHARDED = """
import sys
sys.path.insert(0, {root!r})
import malletrain, torch
from tests.malletrain.elastic.sharded import scripts
torch.set_num_threads(1)
scripts.train(".", {options!r})
"""


@trains_shards
@pytest.mark.thorough
def test_sharded_training_over_all_changes_equals_an_undisturbed_run(embedded):
    """FSDP2 over all ranks: a node joins, one leaves with notice, one is lost without."""
    root = str(Path(__file__).parents[2])
    script = embedded.script("sharded.py", SHARDED.format(root=root, options=OPTIONS))

    def trains_on(size: int, after: int = 0) -> int:
        """Wait until ``size`` ranks train; return their round."""

        def rounds_after() -> list[int]:
            rounds = [r["generation"] for r in records(embedded.work) if r["size"] == size]
            return [number for number in rounds if number > after]

        embedded.until(rounds_after, f"it trains on {size} nodes after round {after}")
        return max(rounds_after())

    def agent_dies(signum: int) -> None:
        agent = embedded.agents()[embedded.job(job).nodes[0]]
        agent.send_signal(signum)
        embedded.until(lambda: gone(agent), "the agent has gone")

    job = embedded.submit(script, nodes=(1, 3), mode="live")
    whole = trains_on(3)
    agent_dies(signal.SIGTERM)
    whole = trains_on(3, after=trains_on(2, after=whole))
    agent_dies(signal.SIGKILL)
    trains_on(2, after=whole)
    (embedded.work / "go").touch()
    done = embedded.until_state(job, "completed", "failed")
    assert done.state == "completed", embedded.show(job).failure
    assert done.tries == 0
    counts_as_if_undisturbed(embedded.work, OPTIONS, all_changes_came=False)
    assert 1200 - 12 <= done.samples <= 1200 + 2 * 12, "a step that is not told, two done again"
