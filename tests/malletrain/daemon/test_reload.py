"""What the daemon does by the keys of its configuration that take effect when they are reloaded."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon.api.changes import Reload
from malletrain.store.store import Store
from tests.malletrain.daemon.engines import make_engine
from tests.scavenger.slurm.slurm_world import World, job, names, why

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@pytest.fixture
def slurm(tmp_path):
    """A Slurm whose node n1 has a lease and whose other nodes are idle."""
    made = World(tmp_path / "slurm")
    made.queue(job("RUNNING", 7, "malletrain-t-l1", nodes="n1", start=made.now, end=made.now + 9e4))
    made.nodes(alloc="n1", idle="n[2-8]")
    return made


def test_the_hours_that_were_reloaded_apply_to_gaps_and_leases(tmp_path, slurm):
    today = time.localtime(slurm.now).tm_wday
    base = f'[daemon]\nstate_dir = "{tmp_path / "state"}"\n[scheduler]\nkind = "slurm"\n'

    def config(*days):
        return parse_config(f"{base}[gaps]\nhours = {[DAYS[(today + day) % 7] for day in days]}\n")

    async def play():
        engine = make_engine(config(0), store)
        scavenger = slurm.ready()
        reload = Reload(
            None, engine.state, engine.transactions, scavenger, SimpleNamespace(), SimpleNamespace()
        )
        try:
            for days, allowed in (((0,), True), ((3, 4), False), ((0, 3), True)):
                effects = reload.apply(config(*days), "ada")
                assert [line.split(":")[0] for line in effects["applied"]] == (
                    [] if days == (0,) else ["gaps.hours"]
                )
                polled = scavenger.poll()
                assert names(polled) == ([f"n{i}" for i in range(2, 9)] if allowed else [])
                assert ("hours" in why(polled, "n2")) is not allowed
                leaves = ["scancel --signal=TERM --batch 7"]
                assert slurm.tools.calls("scancel") == ([] if days == (0,) else leaves)
        finally:
            engine.close()

    with Store.open(f"sqlite:///{tmp_path / 'jobs.db'}") as store:
        asyncio.run(play())
