"""Profiles on real processes: the staircase down, the curve that comes of it, and jobs that do not
play along.
"""

from __future__ import annotations

import pytest

from tests.integration.embedded import site
from tests.integration.test_main_job import STEADY

QUICK = (
    "when_worth = false\n"
    'max_profile = "1 h"\nrescale_timeout = "1 h"\nlease_patience = "1 h"\npatience = "1 h"\n'
    'precision = 0.1\nmin_time = "2 s"\nmax_time = "1 h"\nsilence = "1 h"\n'
)
"""A size is measured as soon as it is known, however long a busy machine takes for that."""
ENDLESS = QUICK.replace('min_time = "2 s"', 'min_time = "1 h"')
DEAF = QUICK.replace('silence = "1 h"', 'silence = "2 s"').replace(
    'max_time = "1 h"', 'max_time = "6 s"'
)

SHARED = """
import os, time, malletrain
world = int(os.environ["WORLD_SIZE"])
due = time.monotonic()
while not os.path.exists("stop"):
    due += 0.06 / world
    time.sleep(max(0.0, due - time.monotonic()))
    malletrain.report(24 / world)
"""
"""A global batch of 24 samples a step that takes 60 ms of one worker: what ``--sample-delay`` does
to the example. A worker that comes late catches up: its rate does not depend on the machine's load.
"""

SILENT = """
import os, time
while not os.path.exists("stop"):
    time.sleep(0.05)
"""


@pytest.fixture
def profiled(tmp_path, request):
    with site(tmp_path, nodes=3, profiling=getattr(request, "param", QUICK), light=True) as made:
        yield made


def staircase(site, job):
    """Sizes of the rounds the job went through."""
    return [len(e.data["members"]) for e in site.events("round-formed", job)]


def test_a_job_is_profiled_down_the_stairs_and_shows_its_curve(profiled):
    script = profiled.script("shared.py", SHARED)
    job = profiled.submit(script, nodes=(1, 3))
    profiled.until(lambda: profiled.job(job).state == "profiling", "the job is profiled")
    profiled.until(lambda: profiled.events("profile-finished", job), "the profile is over")
    (finished,) = profiled.events("profile-finished", job)
    assert finished.data["result"] == "measured", finished.sentence
    assert finished.data["visited"] == [3, 2, 1]
    assert (finished.data["scale_ups"], finished.data["scale_downs"]) == (1, 2)
    profiled.until(
        lambda: staircase(profiled, job)[-1] == 3 and len(profiled.job(job).nodes) == 3,
        "the job is back on all nodes",
    )
    assert profiled.job(job).state == "running"
    walked = staircase(profiled, job)
    assert walked[-4:] == [3, 2, 1, 3], walked
    profile = profiled.show(job).profile
    assert profile.state == "measured"
    rates = {p.nodes: p.rate for p in profile.points}
    assert all(p.measured for p in profile.points)
    assert 120 < rates[1] < 560
    assert 1.4 < rates[2] / rates[1] < 2.8
    assert 1.05 < rates[3] / rates[2] < 2.1
    assert profile.down_s > 0
    # The next of its kind starts from this curve and goes where it is to go at once.
    (profiled.work / "stop").touch()
    profiled.until_state(job, "completed")
    (profiled.work / "stop").unlink()
    second = profiled.submit(script, nodes=(1, 3))
    profiled.until(
        lambda: profiled.events("profile-finished", second), "the second job needs no profile"
    )
    assert profiled.events("profile-finished", second)[0].data["visited"] == []
    (profiled.work / "stop").touch()


@pytest.mark.thorough
@pytest.mark.parametrize("profiled", [DEAF], indirect=True, ids=[""])
def test_a_job_that_reports_nothing_runs_all_the_same_and_its_owner_is_told(profiled):
    job = profiled.submit(profiled.script("silent.py", SILENT), nodes=(1, 3))
    profiled.until(lambda: profiled.events("profile-finished", job), "the profile is over")
    assert profiled.events("profile-finished", job)[0].data["result"] == "unknown"
    shown = profiled.show(job)
    assert shown.profile.state == "unknown"
    assert shown.profile.points == ()
    assert any("malletrain.report()" in sentence for sentence in shown.notices)
    (profiled.work / "stop").touch()
    assert profiled.until_state(job, "completed", "failed").state == "completed"


@pytest.mark.thorough
@pytest.mark.parametrize("profiled", [ENDLESS], indirect=True, ids=[""])
def test_a_job_that_ends_while_it_is_profiled_is_completed(profiled):
    script = profiled.script("steady.py", STEADY)
    job = profiled.submit(script, nodes=(1, 3))
    profiled.until(lambda: profiled.events("profile-started", job), "the profile begins")
    (profiled.work / "stop").touch()
    done = profiled.until_state(job, "completed", "failed")
    assert done.state == "completed", profiled.show(job).failure
    assert profiled.events("profile-finished", job)[0].data["result"] == "gone"


@pytest.mark.thorough
def test_a_daemon_killed_during_a_profile_takes_it_up_again(profiled):
    script = profiled.script("shared.py", SHARED)
    job = profiled.submit(script, nodes=(1, 3))
    profiled.until(lambda: profiled.events("profile-point", job), "the first size is measured")
    profiled.kill_daemon()
    profiled.start_daemon()
    profiled.until(lambda: profiled.events("profile-finished", job), "the profile is over")
    sizes = [e.data["nodes"] for e in profiled.events("profile-point", job)]
    assert sorted(set(sizes)) == [1, 2, 3]
    assert sizes.count(3) == 1, "what was measured is not measured again"
    (profiled.work / "stop").touch()
    assert profiled.until_state(job, "completed", "failed").state == "completed"


@pytest.mark.thorough
def test_what_cannot_be_profiled_is_refused_and_what_is_not_wanted_not_done(profiled):
    script = profiled.script("shared.py", SHARED)
    with pytest.raises(Exception, match="size to profile"):
        profiled.submit(script, nodes=(1, 3), profile_sizes=(7,))
    job = profiled.submit(script, nodes=(1, 3), profile=False)
    profiled.until_samples(job, 500)
    shown = profiled.show(job).profile
    assert shown.state in ("off", "known")
    assert "no profile" in shown.sentence
    assert not profiled.events("profile-started", job)
    (profiled.work / "stop").touch()
    profiled.until_state(job, "completed")
