"""MalleTrain on an imitated PBS, end to end: a malleable job trains on idle hosts, grows, gives way
to main jobs and completes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from malletrain.client import ClientError, Connection
from malletrain.identity.keys import KeyPair, new_pair
from malletrain.identity.state_directory import INFO, read_daemon_info
from malletrain.protocol import messages
from tests.integration.batch_site import BatchSite, running
from tests.integration.test_main_job import STEADY
from tests.scavenger.pbs.fake_pbs import PATIENT, FakePbs


class PbsSite(BatchSite):
    """One daemon on ``pbs``."""

    kind = "pbs"

    def __init__(self, root: Path, pbs: FakePbs, daemon: str = "", lines: str = "") -> None:
        # The daemon's commands speak for the user it runs as.
        environment = {**pbs.environment, "FAKE_PBS_USER": psutil.Process().username()}
        lines = f'queue = "preemptable"\n{lines}'
        super().__init__(
            root, environment, lines=lines, gaps='idle_for = "0 s"\nhold = "1 s"', daemon=daemon
        )
        self.pbs = pbs

    def leases(self) -> Collection[str]:
        return self.pbs.leases()

    def processes(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("FAKE_PBS") == str(self.pbs.state_dir)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    processes.append(process)
        return processes

    def clear(self, leases: Collection[str]) -> None:
        self.pbs.stop()
        self.until(lambda: not self.processes(), "no process is left")


def pbs_site(
    root: Path, daemon: str = "", lines: str = "", **options: object
) -> contextlib.AbstractContextManager[PbsSite]:
    return running(PbsSite(root / "site", FakePbs(root / "machine", **options), daemon, lines))  # type: ignore[arg-type]


def client_with(site: PbsSite, pair: KeyPair) -> Connection:
    """The client of another user."""
    info = read_daemon_info(site.state / INFO)
    return Connection(
        info.endpoint, info.server_key.encode(), pair.public.encode(), pair.secret.encode()
    )


@pytest.mark.check
def test_a_job_grows_on_idle_hosts_gives_way_and_completes(tmp_path):
    with pbs_site(tmp_path, hosts=3, queues=PATIENT) as site:
        first = site.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
        site.pbs.until(lambda: site.pbs.jobs()[first]["state"] == "R", "a main job has a host")
        job = site.submit(site.script("steady $(x).py", STEADY), "a b", "$(id)", nodes=(1, 3))
        site.until(lambda: len(site.job(job).nodes) == 2, "the job runs on the hosts that are idle")
        site.until_samples(job, 20)
        site.pbs.edit(lambda state: state["jobs"][first].update(delete=True))
        site.until(lambda: len(site.job(job).nodes) == 3, "it grows when the queue empties")
        before = site.job(job).samples
        main = site.pbs.submit("sleep 1", "-l", "walltime=00:01:00", hosts=2)
        site.until(
            lambda: site.pbs.jobs()[main]["state"] == "F", "a main job of two hosts runs and ends"
        )
        assert len(site.events("node-leaving")) == 2, (
            "both leases were told, and the third was left alone"
        )
        site.until(lambda: len(site.job(job).nodes) == 3, "it grows again")
        site.until_samples(job, before + 50)
        (site.work / "stop").touch()
        done = site.until_state(job, "completed", "failed")
        assert done.state == "completed", site.show(job).failure
        assert done.tries == 0
        site.until(lambda: not site.pbs.leases(), "every lease is given back")


@pytest.mark.thorough
def test_suspended_hosts_are_done_without_and_leave_nothing_running(tmp_path):
    with pbs_site(tmp_path, hosts=2, preempt_order="S") as site:
        script = site.script("steady.py", STEADY)
        job = site.submit(script, nodes=(1, 2))
        site.until(lambda: len(site.job(job).nodes) == 2, "the job runs on both hosts")
        site.until_samples(job, 20)
        main = site.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
        site.pbs.until(
            lambda: site.pbs.jobs()[main]["state"] == "R", "a main job suspends a lease and runs"
        )
        site.until(lambda: len(site.job(job).nodes) == 1, "the job does without the host")
        site.until_samples(job, site.job(job).samples + 50)
        site.until(lambda: len(site.pbs.leases()) == 1, "the suspended lease is deleted")
        busy = set()
        for process in site.processes():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                environment = process.environ()
                if str(script) in process.cmdline() and "MALLETRAIN_NODE" in environment:
                    busy.add(environment["MALLETRAIN_NODE"])
        assert len(busy) <= 1
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        site.pbs.edit(lambda state: state["jobs"][main].update(delete=True))


@pytest.mark.thorough
def test_a_requeued_lease_that_begins_again_is_sent_away(tmp_path):
    with pbs_site(tmp_path, hosts=1, preempt_order="R") as site:
        job = site.submit(site.script("steady.py", STEADY), nodes=(1, 1))
        site.until(lambda: len(site.job(job).nodes) == 1, "the job runs")
        site.until_samples(job, 20)
        [old] = site.pbs.leases().values()
        site.pbs.tools.fails(
            "qstat", "qstat: cannot connect to server pbs0"
        )  # so that only the agent itself can give it away
        site.pbs.submit("exit 0")
        log = site.state / "leases" / f"{old['name'].rpartition('-')[2]}.out"
        site.until(
            lambda: "This lease has left" in log.read_text(),
            "the agent that begins again hears that its lease has left",
        )
        site.pbs.works("qstat")
        site.until(lambda: len(site.job(job).nodes) == 1, "a lease of the day after")
        site.until_samples(job, site.job(job).samples + 20)
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"


@pytest.mark.thorough
def test_two_users_share_the_hosts_each_on_leases_of_their_own(tmp_path):
    ann, bob, eve = new_pair(), new_pair(), new_pair()
    listed = tmp_path / "users"
    listed.write_text(f"ann {ann.public}\nbob {bob.public}\n")
    lines = 'submit_as = ["env", "FAKE_PBS_USER={owner}"]'
    site_file = tmp_path / "site.json"
    with pbs_site(
        tmp_path,
        hosts=4,
        daemon=f'users = "{listed}"\noperators = ["ann"]\nannounce = "{site_file}"',
        lines=lines,
    ) as site:
        script = site.script("steady.py", STEADY)

        def submit(pair, name):
            spec = messages.JobSpec(
                name,
                "root",
                str(script),
                str(site.work),
                sys.executable,
                env={"MALLETRAIN_PRELOAD": "0"},
                min_nodes=1,
                max_nodes=4,
            )
            with client_with(site, pair) as client:
                return client.submit(spec)

        def owners(job):
            nodes = site.job(job).nodes  # first: every lease of theirs runs by now
            hosts = {lease["host"]: lease["owner"] for lease in site.pbs.leases("R").values()}
            return {hosts[node] for node in nodes if node in hosts}

        with pytest.raises(ClientError, match="does not know your key"):
            submit(eve, "hers")
        first = submit(ann, "one")
        assert first.owner == "ann", "whatever the client says"
        site.until(lambda: len(site.job(first.id).nodes) == 4, "Ann's job has all hosts")
        second = submit(bob, "two")
        site.until(lambda: site.job(second.id).nodes, "Bob's job has hosts")
        site.until_samples(second.id, 10)
        site.until(lambda: owners(first.id) == {"ann"}, "Ann's job is on leases of hers")
        site.until(lambda: owners(second.id) == {"bob"}, "Bob's job is on leases of his")
        assert "Jobs of another user have more use for the node." in {
            e.sentence for e in site.events("node-reclaimed")
        }
        assert site.job(first.id).tries == site.job(second.id).tries == 0
        with client_with(site, bob) as client:
            assert not client.cancel([first.id])[0]["ok"]
        with client_with(site, ann) as client:
            assert client.cancel([second.id])[0]["ok"], "she is an operator"
        site.until_state(second.id, "cancelled")
        (site.work / "stop").touch()
        assert site.until_state(first.id, "completed", "failed").state == "completed"
        site.until(lambda: not site.pbs.leases(), "every lease is given back")
        info = read_daemon_info(site_file, site=True)
    assert not (site.state / INFO).exists()
    assert read_daemon_info(site_file, site=True) == info, (
        "clients of the site are not told to start a daemon of their own"
    )
