"""Daemon and launcher are killed at every point at which tasks are handed out, ended, stored: each
task is done once.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.fault_points import FaultPoint
from tests.integration import farms
from tests.integration.faults import FaultySite

pytestmark = pytest.mark.slow

P = FaultPoint
OF_THE_DAEMON = (
    *(P.DAEMON_HANDS_OUT, P.DAEMON_COUNTS, P.DAEMON_SAVED, P.DAEMON_SENT, P.DAEMON_ENDS_FARM),
)
FARM_POINTS = (*OF_THE_DAEMON, P.TASK_ENDED, P.TASK_RENAMED)
FEW = (P.DAEMON_COUNTS, P.TASK_ENDED)
"""In every check: one at which the daemon is killed, and one of the launcher."""
TASKS = 12


class PatientSite(FaultySite):
    """On which no agent is killed before it reports."""

    lease_wait = "120 s"


@pytest.fixture
def faulty(tmp_path):
    made = PatientSite(tmp_path)
    try:
        made.start_daemon()
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize(
    "points",
    [pytest.param(FEW, id="few"), pytest.param(FARM_POINTS, id="all", marks=pytest.mark.thorough)],
)
def test_each_task_is_done_once_whatever_is_killed(faulty, points):
    for point in points:
        name, work = point.name, faulty.work
        command = (
            f"until test -e {name}.go; do sleep 0.05; done; "
            f"echo {{index}} >> {name}.ran; echo {{x}} > {{output}}"
        )
        rows = farms.numbered(TASKS)
        job = farms.submit(faulty, command, rows, "1:2", output=f"{name}/{{index}}.txt")
        faulty.until(
            lambda job=job: farms.tasks(faulty, job, limit=0).counts["running"], "tasks run"
        )
        faulty.arm(point)
        (work / f"{name}.go").touch()
        faulty.struck(point)
        view = faulty.until_state(job, "completed")
        assert view.samples == TASKS, name
        assert farms.tasks(faulty, job, limit=0).counts["done"] == TASKS, name
        # A launcher that is killed leaves its temporary files, which are hidden.
        files = {path.name: path.read_text() for path in (work / name).glob("[!.]*")}
        assert files == {f"{k}.txt": f"{k}\n" for k in range(TASKS)}, name
        runs = farms.runs(faulty, f"{name}.ran")
        assert set(runs) == set(range(TASKS)), name
        if point in OF_THE_DAEMON:
            assert set(runs.values()) == {1}, f"{name}: no node noticed"
        ends = [event for event in faulty.events("job-completed") if event.job == job]
        assert len(ends) == 1, name
