"""What a daemon makes of an array's name, and of a budget with which a job would never start."""

from __future__ import annotations

import pytest

from malletrain.client import ClientError
from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.submission.task_lists import one_of
from tests.malletrain.daemon.test_forged_reports import World


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


def submit_array(world, user, name, *indices):
    spec = JobSpec(name, "", "/x.py", "/", "python", profile=False)
    with world.daemon.client(user) as client:
        return [client.submit(one_of(spec, index)).id for index in indices]


def states(world, jobs):
    return [world.daemon.job(job).state for job in jobs]


def test_an_array_is_cancelled_by_its_name(world):
    long = "n" * 64
    arrays = {name: submit_array(world, "ann", name, 1, 2, 10) for name in ("lr", "lr-1", long)}
    bobs = submit_array(world, "bob", "lr", 1)
    other = world.daemon.submit("ann", name="lr-7")
    with world.daemon.client("ann") as client:
        assert [r["ok"] for r in client.cancel(["lr", long])] == [True] * 6
        assert states(world, arrays["lr"] + arrays[long]) == ["cancelled"] * 6
        assert "cancelled" not in states(world, [*arrays["lr-1"], *bobs, other])
        (refused,) = client.cancel(["lr"])
        assert not refused["ok"], "none of it is left; what begins so is not meant"
        own = world.daemon.submit("ann", name="one", env={env.ARRAY_INDEX: "1"})
        assert [r["job"] for r in client.cancel(["one"])] == [own]


def test_a_budget_with_which_the_job_would_never_start_is_refused(world):
    with pytest.raises(ClientError, match="too small to start the job: it needs 2 nodes") as why:
        world.daemon.submit("ann", budget_nh=0.001, min_nodes=2, max_nodes=2)
    least = float(str(why.value).rpartition(" node-hours. Give")[0].rpartition(" ")[2])
    world.daemon.submit("ann", budget_nh=least, min_nodes=2, max_nodes=2)
