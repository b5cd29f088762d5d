"""Two daemons and one database, and a database that is put into another place: leases belong to one
daemon at a time, and no job runs twice.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from malletrain.store import copies
from tests import postgres
from tests.integration.embedded import Site
from tests.integration.test_lost_database import does_not_start
from tests.integration.test_main_job import STEADY


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def database(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/shared.db"
        return
    with postgres.running() as server:
        yield server.url


def with_database(site, url):
    text = site.config.read_text()
    site.config.write_text(text.replace("[daemon]", f'[daemon]\ndatabase = "{url}"'))


def elsewhere(site):
    """The same site for a daemon in another place."""
    made = copy.copy(site)
    made.root, made.daemon = site.root / "other", None
    made.root.mkdir(exist_ok=True)
    made.state, made.config = made.root / "state", made.root / "site.toml"
    text = site.config.read_text().replace(
        f'state_dir = "{site.state}"', f'state_dir = "{made.state}"'
    )
    assert "[scheduler.local]" in text
    if "directory = " not in text:
        cluster = f'[scheduler.local]\ndirectory = "{site.state}/cluster"'
        text = text.replace("[scheduler.local]", cluster)
    made.config.write_text(text)
    return made


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path / "site", nodes=2)
    others = []
    made.elsewhere = lambda: others.append(elsewhere(made)) or others[-1]
    try:
        yield made
    finally:
        for other in others:
            if other.daemon is not None and other.daemon.poll() is None:
                other.kill_daemon()
        made.stop()


def goes_on_once(site, job, script, worker):
    """The job goes on under this daemon, and what ran before has ended."""
    site.until(lambda: not worker.is_running(), "the process of before has ended")
    samples = site.job(job).samples
    site.until_samples(job, samples + 20)
    assert len(site.workers(script)) == 1
    [why] = [e.sentence for e in site.events() if e.kind == "lease-unheard"]
    assert "looks for the daemon" in why


@pytest.mark.thorough
def test_the_second_daemon_of_a_database_waits_and_takes_over(site, database):
    with_database(site, database)
    site.start_daemon()
    script = site.script("steady.py", STEADY)
    job = site.submit(script)
    site.until_samples(job, 20)
    [worker] = site.workers(script)
    second = site.elsewhere()
    second.launch_daemon()
    site.until(lambda: second.has_logged("this one waits and takes over"), "the second one says so")
    site.until(lambda: site.has_logged("another daemon waits"), "and the first one")
    assert site.has_logged(f"pid {second.daemon.pid} ")
    assert second.has_logged(f"pid {site.daemon.pid} ")
    assert second.daemon.poll() is None
    assert worker.is_running()
    site.kill_daemon()
    second.until(second.answers, "the second one has taken over")
    goes_on_once(second, job, script, worker)


@pytest.mark.thorough
def test_a_copy_at_another_place_is_refused_until_somebody_says_whose_it_is(site):
    site.start_daemon()
    script = site.script("steady.py", STEADY)
    job = site.submit(script)
    site.until_samples(job, 20)
    [worker] = site.workers(script)
    saved = site.root / "copy.db"
    copies.backup(f"sqlite:///{site.state}/malletrain.db", saved)
    second = site.elsewhere()
    copies.restore(f"sqlite:///{second.state}/malletrain.db", saved)
    sentence = does_not_start(second)
    assert f"belongs to the daemon of {site.state}, which had leases in it (1)" in sentence
    assert "malletrain db adopt" in sentence
    assert worker.is_running()
    site.kill_daemon()
    words = (sys.executable, "-m", "malletrain", "db", "adopt", "--config", str(second.config))
    subprocess.run(words, check=True, env=second.environment)
    second.start_daemon()
    goes_on_once(second, job, script, worker)
