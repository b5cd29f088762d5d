"""A database that is damaged or empty: the daemon says so and does not begin anew as if there had
been no jobs; with a copy in its place the job that ran all the while is taken up again.
"""

from __future__ import annotations

import pytest

from malletrain.store import copies
from tests.integration.embedded import Site
from tests.integration.test_main_job import STEADY
from tests.malletrain.daemon.test_known_database import emptied, overwritten


@pytest.fixture
def embedded(tmp_path):
    made = Site(tmp_path, nodes=1)
    try:
        made.start_daemon()
        yield made
    finally:
        made.stop()


def does_not_start(site):
    """The daemon does not start; return what it logs."""
    log_length = len(site.daemon_log(10**9))
    site.launch_daemon()
    assert site.daemon.wait() == 1
    return " ".join(site.daemon_log(10**9)[log_length:].split())


@pytest.mark.thorough
def test_a_daemon_without_its_database_says_so_and_with_a_copy_it_goes_on(embedded):
    script = embedded.script("steady.py", STEADY)
    job = embedded.submit(script)
    embedded.until_samples(job, 20)
    [worker] = embedded.workers(script)
    copy, database = embedded.root / "copy.db", embedded.state / "malletrain.db"
    copies.backup(f"sqlite:///{database}", copy)
    for damage, words in ((emptied, "is empty or not there"), (overwritten, "It is damaged")):
        embedded.kill_daemon()
        damage(database)
        assert words in does_not_start(embedded)
        assert worker.is_running(), "nobody has told the agent anything"
        copies.restore(f"sqlite:///{database}", copy)
        embedded.start_daemon()
        embedded.until_samples(job, embedded.job(job).samples + 20)
        assert [p.pid for p in embedded.workers(script)] == [worker.pid]
    view = embedded.job(job)
    assert (view.state, view.tries) == ("running", 0)
    embedded.kill_daemon()
    emptied(database)
    assert f"delete {embedded.state}/database." in does_not_start(embedded)
    (embedded.state / "database").unlink()
    embedded.start_daemon()
    with embedded.client() as client:
        assert client.jobs() == []
    embedded.until(lambda: not embedded.agents(), "what the old one had is ended")
