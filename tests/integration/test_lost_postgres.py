"""PostgreSQL goes while the daemon runs, a job trains and others are being submitted: the daemon
ends with a sentence, as often as it is started again meanwhile; when the server is back nothing is
lost, and the training has not noticed.
"""

from __future__ import annotations

import threading

import pytest

from malletrain.client import ClientError
from tests import postgres
from tests.integration.embedded import Site
from tests.integration.test_lost_database import does_not_start
from tests.integration.test_main_job import STEADY
from tests.waiting import PATIENCE_S


@pytest.fixture
def server():
    with postgres.running() as made:
        yield made


@pytest.fixture
def site(tmp_path, server):
    made = Site(tmp_path, nodes=1)
    made.config.write_text(
        made.config.read_text().replace("[daemon]", f'[daemon]\ndatabase = "{server.url}"')
    )
    try:
        made.start_daemon()
        yield made
    finally:
        made.stop()


class Submitting(threading.Thread):
    """Submits one job after another until the daemon does not answer."""

    def __init__(self, site, script):
        super().__init__(daemon=True)
        self.site, self.script = site, script
        self.taken = []
        """The names of those that the daemon has taken."""
        self.under_way = threading.Event()
        self.start()

    def run(self):
        try:
            while True:
                name = f"more{len(self.taken)}"
                self.site.submit(self.script, name=name)
                self.taken.append(name)
                self.under_way.set()
        except ClientError:
            pass


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("fast", marks=pytest.mark.thorough),
        pytest.param("immediate", marks=pytest.mark.thorough),
        "kill",
    ],
)
def test_a_server_that_goes_costs_no_job_and_no_sample(site, server, how):
    script = site.script("steady.py", STEADY)
    job = site.submit(script)
    site.until_samples(job, 20)
    [worker] = site.workers(script)
    agents = {agent.pid for agent in site.agents().values()}
    submitting = Submitting(site, script)
    assert submitting.under_way.wait(PATIENCE_S)
    server.stop(how)
    assert site.daemon.wait() == 1
    assert site.has_logged("Start its server or make it reachable")
    submitting.join()
    for _ in range(1 if how == "kill" else 6):  # as its service manager does
        assert "cannot be opened" in does_not_start(site)
    assert worker.is_running()
    server.start()
    site.start_daemon()
    view = site.job(job)
    site.until_samples(job, view.samples + 20)
    view = site.job(job)
    assert (view.state, view.tries) == ("running", 0)
    assert [p.pid for p in site.workers(script)] == [worker.pid]
    assert {agent.pid for agent in site.agents().values()} == agents
    assert [e.kind for e in site.events() if e.kind.startswith("lease-")] == ["lease-requested"]
    with site.client() as client:
        names = [row.name for row in client.jobs()]
    assert len(names) == len(set(names))
    # A submission under way at that moment is there or is not; its client got the matching reply.
    last = f"more{len(submitting.taken)}"
    assert {"job", *submitting.taken} <= set(names) <= {"job", *submitting.taken, last}
