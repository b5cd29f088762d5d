"""Jobs that share nodes: known answers, with and without names of nodes."""

from __future__ import annotations

import json

import pytest

from malletrain.assess.hosts import Hosts, HostSize, MachineUse, SizeRules
from malletrain.assess.sharing import sharing_report
from malletrain.cli import main
from malletrain.sim.idle import idle_nodes
from malletrain.sim.logged_jobs import JobLog, LogJob, Resources
from malletrain.sim.observation import Observation
from tests.command_runner import CliRunner

HOUR = 3600.0
DAY = Observation(0.0, 24 * HOUR)


def job(first_h, last_h, names, cpus=None):
    resources = None if cpus is None else Resources(cpus=cpus)
    start, run = first_h * HOUR, (last_h - first_h) * HOUR
    return LogJob(start, start, run, len(names), tuple(names), allocated=resources)


def report(*jobs, hosts=None):
    log = JobLog("test", jobs, files=("log",))
    hosts = hosts or Hosts()
    available = idle_nodes(log, 4, DAY, cpus_per_node=hosts.largest_cpus())
    return sharing_report(log, DAY, hosts, available, MachineUse(log, DAY, hosts))


def test_jobs_beside_each_other_share_a_node():
    shared = report(
        job(0, 10, "a", 6), job(2, 4, "a", 2), job(12, 24, "a", 8), job(0, 24, ["b", "c"], 16)
    )
    # The second job ends before the first: both share. The last two have all CPUs of their nodes.
    assert (shared.jobs, shared.all_jobs, shared.node_hours) == (2, 4, 12.0)
    assert shared.fraction_of_used == 12.0 / 72.0
    # On a: 2 CPUs idle for 8 hours while it has a job; nothing counts while it has none.
    assert shared.idle_cpu_hours == 16.0


def test_a_short_job_within_a_longer_one_hides_no_third():
    shared = report(job(0, 10, "a"), job(1, 2, "a"), job(5, 6, "a"), job(10, 11, "a"))
    assert (shared.jobs, shared.idle_cpu_hours) == (3, None)


def test_jobs_that_fill_their_nodes_share_nothing():
    alone = report(job(0, 10, "a", 8), job(10, 12, "a", 8))
    assert (alone.jobs, alone.idle_cpu_hours) == (0, 0.0)
    assert alone.sentences(counts_slots=False) == []


def test_the_stated_size_of_a_host_counts():
    hosts = Hosts(listed={"a": HostSize(cpus=32), "b": HostSize(cpus=8)})
    shared = report(job(0, 10, "a", 8), job(0, 10, "b", 8), hosts=hosts)
    assert (shared.jobs, shared.idle_cpu_hours) == (1, 240.0)


@pytest.mark.parametrize(
    ("options", "listed", "cpus"),
    [
        ([], {}, None),
        ([], {"a": HostSize(cpus=32), "b": HostSize(cpus=8), "c": HostSize(gpus=4)}, 32),
        (["8", "big*=64"], {}, 64),
        (["8", "big[1-2]=48", "big*=16"], {}, 48),
        (["96", "big*=64"], {}, 96),
        (["n*=16"], {"a": HostSize(cpus=32)}, 32),
        # Options take precedence over the file.
        (["a=16"], {"a": HostSize(cpus=32)}, 16),
        (["8"], {"a": HostSize(cpus=32)}, 8),
    ],
)
def test_the_largest_host_of_all_that_is_stated(options, listed, cpus):
    hosts = Hosts(cpus=SizeRules.parse("--cpus-per-node", options), listed=listed)
    assert hosts.largest_cpus() == cpus


def test_without_names_the_idle_cpus_are_the_most_possible():
    jobs = [LogJob(0, 0, 10 * HOUR, 1, allocated=Resources(cpus=c)) for c in (2, 6, 8)]
    shared = report(*jobs)
    assert (shared.jobs, shared.idle_cpu_hours) == (2, 80.0)
    (line,) = shared.sentences(counts_slots=False)
    assert "2 of 3 jobs, with 66.7 % of the node-hours" in line
    assert "Up to 80 CPU-hours" in line


def test_a_few_jobs_without_names_are_among_all_jobs():
    named = [job(0, 10, "a", 8), job(0, 10, "a", 4), job(0, 24, ["b", "c"], 16)]
    shared = report(*named, LogJob(0, 0, 0.5 * HOUR, 1, allocated=Resources(cpus=1)))
    assert (shared.jobs, shared.all_jobs, shared.is_named) == (2, 4, True)
    assert shared.fraction_of_used == 20.0 / 68.5


def test_jobs_without_names_make_a_log_without_names():
    """One rule for the idle nodes and for sharing: of 11 node-hours one lacks its node."""
    lacking = LogJob(0, 0, HOUR, 1, allocated=Resources(cpus=8))
    shared = report(job(0, 10, "a", 4), lacking)
    assert (shared.jobs, shared.all_jobs, shared.is_named) == (1, 2, False)
    # The first job leaves 4 of 8 CPUs idle.
    assert shared.idle_cpu_hours == 40.0


ROWS = """JobID|Submit|Start|End|State|NNodes|{names}AllocTRES
1|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-02T00:00:00|COMPLETED|1|{n1}cpu=8,mem=1G,node=1
2|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T12:00:00|COMPLETED|1|{n1}cpu=8,mem=1G,node=1
3|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T12:00:00|COMPLETED|1|{n2}cpu=32,mem=9G,node=1
"""
DAY_OPTIONS = ("--from", "2024-01-01", "--to", "2024-01-02", "--cpus-per-node", "32")


@pytest.fixture
def assess(tmp_path):
    def run(text, *options):
        log = tmp_path / "day.txt"
        log.write_text(text)
        argv = ["assess", "--sacct", str(log), "--output", str(tmp_path / "report.html")]
        done = CliRunner().invoke(main, [*argv, "--jobs", "5", *DAY_OPTIONS, *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_with_names_the_count_is_exact(assess):
    text = ROWS.format(names="NodeList|", n1="n1|", n2="n2|")
    result = json.loads(assess(text, "--json"))
    assert result["idle_bounds"] == {
        "least_node_hours": 12.0,
        "most_node_hours": 12.0,
        "exact": True,
        "cpus_inferred": False,
    }
    # n1: 24 and 16 CPUs idle beside jobs for half a day each.
    assert result["sharing"] == {
        "jobs": 2,
        "node_hours": 36.0,
        "fraction_of_used_node_hours": 0.75,
        "idle_cpu_hours_beside_jobs": 16 * 12.0 + 24 * 12.0,
    }


def test_without_names_the_bounds_are_told(assess):
    text = ROWS.format(names="", n1="", n2="")
    result = json.loads(assess(text, "--json", "--nodes", "3"))
    # 72 node-hours: 48 used if each job has a node of its own, 36 if the first two share one.
    assert result["idle_bounds"] == {
        "least_node_hours": 24.0,
        "most_node_hours": 36.0,
        "exact": False,
        "cpus_inferred": False,
    }
    assert result["gaps"]["idle_node_hours"] == 24.0
    words = assess(text, "--nodes", "3")
    assert "On average 1.0 of 3 nodes (33.3 %) were idle" in words
    assert "Up to 1.5 of 3 nodes (50.0 %) were idle if jobs shared nodes" in words
    assert "The machine has 3 nodes, as stated (--nodes)." in words
    assert "Leases of whole nodes cannot use a node with such a job" in words


def test_a_machine_that_may_be_idle_is_not_called_busy(assess):
    text = ROWS.format(names="", n1="", n2="").replace("2024-01-01T12", "2024-01-02T00")
    words = assess(text, "--nodes", "3")
    assert "The log leaves open whether nodes were idle" in words
    assert "1.0 of 3 nodes (33.3 %) on average if jobs shared nodes" in words
    assert "nothing to harvest" not in words


def test_hosts_of_an_option_are_the_machine_only_if_the_log_names_nodes(assess, tmp_path):
    """Without names, an option for one host says nothing about the number of hosts."""
    text = ROWS.format(names="", n1="", n2="")
    inferred = json.loads(assess(text, "--json"))
    some = json.loads(assess(text, "--json", "--cpus-per-node", "big1=32"))
    assert some["gaps"]["nodes"] == inferred["gaps"]["nodes"] == 2
    (tmp_path / "nodes.csv").write_text("node,cpus\nn[1-5],32\n")
    words = assess(text, "--nodes-file", str(tmp_path / "nodes.csv"))
    assert "The machine has 5 nodes, those of --nodes-file." in words
    named = ROWS.format(names="NodeList|", n1="n1|", n2="n2|")
    union = json.loads(assess(named, "--json", "--cpus-per-node", "big1=32"))
    assert union["gaps"]["nodes"] == 3


def test_what_jobs_hold_is_read_once_for_gpus_and_sharing(assess, monkeypatch):
    text = ROWS.format(names="NodeList|", n1="n1|", n2="n2|").replace("mem=", "gres/gpu=2,mem=")
    built = []
    read_jobs = MachineUse.__init__

    def counted(self, *arguments, **more):
        built.append(self)
        read_jobs(self, *arguments, **more)

    monkeypatch.setattr(MachineUse, "__init__", counted)
    result = json.loads(assess(text, "--json", "--slot", "gpus=1,memory=1GB"))
    assert len(built) == 1
    assert result["sharing"]["idle_cpu_hours_beside_jobs"] == 16 * 12.0 + 24 * 12.0
    # n1 has 4 GPUs, of which two are idle for half a day; n2 has no job then.
    assert result["idle_gpu_hours_partly_used_hosts"] == 24.0


def test_a_log_of_gpus_alone_says_nothing_of_idle_cpus(assess):
    text = ROWS.format(names="NodeList|", n1="n1|", n2="n2|")
    for cpus in (8, 32):
        text = text.replace(f"cpu={cpus},mem", "gres/gpu=1,mem")
    result = json.loads(assess(text, "--json"))
    assert result["gpus"] == 3
    assert result["sharing"]["idle_cpu_hours_beside_jobs"] is None
