"""Idle GPUs of machines that jobs share: known answers, from the log to the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.assess.gpus import SlotSize, gpu_report
from malletrain.assess.hosts import Hosts, MachineUse, SizeRules, divided, read_hosts
from malletrain.cli import main
from malletrain.sim.accounting_logs import read_sacct
from malletrain.sim.logged_jobs import JobLog, LogJob, Resources
from malletrain.sim.observation import Observation, moment, observe
from malletrain.sim.workloads import WorkloadError
from tests.command_runner import CliRunner

ONE_GPU = (SlotSize(),)
DAY = ["--from", "2024-01-01", "--to", "2024-01-02"]
MONTH = ["--from", "2024-01-01", "--to", "2024-02-01"]
HEADER = "JobID|Submit|Start|End|State|NNodes|NodeList|AllocTRES"


def at(hours):
    return (datetime(2024, 1, 1) + timedelta(hours=hours)).isoformat()


def sacct(*jobs):
    """The log of jobs of (first hour, last hour, nodes, number of nodes, AllocTRES)."""
    rows = [
        f"{k}|{at(a)}|{at(a)}|{at(b)}|COMPLETED|{count}|{nodes}|{tres}"
        for k, (a, b, nodes, count, tres) in enumerate(jobs, start=1)
    ]
    return "\n".join([HEADER, *rows, ""])


def pbs(*records):
    """An accounting log of (hour, kind, job, fields)."""
    lines = []
    for hour, kind, job, fields in records:
        when = datetime(2024, 1, 1) + timedelta(hours=hour)
        lines.append(f"{when:%m/%d/%Y %H:%M:%S};{kind};{job}.pbs;{fields}\n")
    return "".join(lines)


def epoch(hours):
    return int((datetime(2024, 1, 1) + timedelta(hours=hours)).timestamp())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``malletrain assess`` of a log, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def assess(text, *argv, option="--sacct", short=("--hours", "1", "--jobs", "1")):
        (tmp_path / "log").write_text(text)
        return CliRunner().invoke(main, ["assess", option, "log", *short, *argv])

    return assess


@pytest.fixture
def answer(run):
    """What ``malletrain assess --json`` answers."""

    def assess(text, *argv, **more):
        done = run(text, "--json", *argv, **more)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return assess


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The report on a day of a log of sacct, without the simulation."""
    monkeypatch.chdir(tmp_path)

    def assess(text, *gpus, nodes_file=None, nodes=None, slots=ONE_GPU):
        (tmp_path / "log").write_text(text)
        log = read_sacct("log")
        hosts = Hosts() if nodes_file is None else read_hosts(nodes_file)
        hosts = replace(hosts, gpus=SizeRules.parse("--gpus-per-node", gpus))
        observed = observe(log, *(moment(text, log) for text in ("2024-01-01", "2024-01-02")))
        return gpu_report(log, MachineUse(log, observed, hosts), hosts, slots, nodes)

    return assess


def test_a_month_of_busy_gpus_has_nothing_idle(answer):
    jobs = [
        (24 * day, 24 * day + 24, f"g{node}", 1, "billing=4,cpu=4,gres/gpu=4,mem=16G,node=1")
        for node in range(3)
        for day in range(31)
    ]
    result = answer(sacct(*jobs), *MONTH, "--gpus-per-node", "4")
    assert result["idle_gpu_fraction"] == 0.0
    assert result["idle_gpu_hours_partly_used_hosts"] == 0.0
    assert result["idle_gpu_hours_idle_hosts"] == 0.0
    assert result["fragments"] == []
    assert result["slots"][0]["gpu_hours"] == result["whole_nodes"]["gpu_hours"] == 0.0
    assert (result["gpu_hosts"], result["gpus"]) == (3, 12)


def test_one_of_four_gpus_is_idle_all_month_on_each_host(answer):
    jobs = [
        (24 * day, 24 * day + 24, f"g{node}", 1, "cpu=6,gres/gpu:a100=3,gres/gpu=3,mem=61440M")
        for node in range(3)
        for day in range(31)
    ]
    result = answer(sacct(*jobs), *MONTH, "--gpus-per-node", "4")
    idle = 3 * 31 * 24
    assert result["idle_gpu_fraction"] == 0.25
    assert result["idle_gpu_hours_partly_used_hosts"] == idle
    assert result["idle_gpu_hours_idle_hosts"] == 0.0
    (slot,) = result["slots"]
    assert (slot["slot"], slot["gpu_hours"], slot["gaps"]) == ("gpus=1", idle, 3)
    assert slot["fraction_of_idle"] == 1.0
    assert result["whole_nodes"]["gpu_hours"] == 0.0
    (fragment,) = result["fragments"]
    assert (fragment["idle_gpus"], fragment["host_idle"]) == (1, False)
    assert (fragment["fragments"], fragment["gpu_hours"]) == (3, idle)
    assert fragment["to_s"] is None


MIXED = sacct(
    # a (4 GPUs): 2 GPUs in use from 0 to 6, 3 from 6 to 12, none but 16 CPUs from 12 to 18.
    (0, 12, "a", 1, "cpu=8,gres/gpu=2,mem=100G,node=1"),
    (6, 12, "a", 1, "cpu=4,gres/gpu=1,mem=50G,node=1"),
    (12, 18, "a", 1, "cpu=16,mem=10G,node=1"),
    # b (8 GPUs): all until 23:59, then a gap of 60 s.
    (0, 23 + 59 / 60, "b", 1, "cpu=32,gres/gpu=8,mem=200G,node=1"),
    # a and b have nothing of this one, which only makes the log longer than the day.
    (25, 26, "a", 1, "cpu=1,gres/gpu=4,node=1"),
)
"""A day. Idle GPU-hours of a: 12 and 6 and 24 beside jobs, 24 without one; of b: 8 minutes."""
SIZES = [
    *("--gpus-per-node", "a=4", "--gpus-per-node", "b=8"),
    *("--cpus-per-node", "32", "--memory-per-node", "256 GiB"),
]


def test_a_mixed_day(answer):
    slots = ["--slot", "gpus=1", "--slot", "gpus=2", "--slot", "gpus=1,cpus=8,memory=103GiB"]
    result = answer(MIXED, *DAY, *SIZES, *slots)
    short = 8 / 60
    assert result["gpus"] == 12
    assert result["idle_gpu_hours_partly_used_hosts"] == pytest.approx(12 + 6 + 24)
    assert result["idle_gpu_hours_idle_hosts"] == pytest.approx(24 + short)
    assert result["idle_gpu_fraction"] == pytest.approx((66 + short) / (12 * 24))
    # The gap of b is not longer than 60 s.
    assert result["whole_nodes"]["gpu_hours"] == pytest.approx(24)
    assert (result["whole_nodes"]["gaps"], result["whole_nodes"]["gap_median_s"]) == (1, 6 * 3600)
    one, two, shaped = result["slots"]
    # One GPU of a is idle all day, one from 0 to 6 and from 12 to 24, two from 12 to 24.
    assert one["gpu_hours"] == pytest.approx(24 + 6 + 12 + 2 * 12)
    assert (one["gaps"], one["gap_median_s"]) == (5, 12 * 3600)
    # Two of a fit from 0 to 6 and from 12 to 24, and two more from 12 to 24.
    assert two["gpu_hours"] == pytest.approx(2 * (6 + 12 + 12))
    # Of the 156, 106, 246 and 256 GiB that are free, one, one, two and two slots have theirs; of
    # the 24, 20, 16 and 32 CPUs three, two, two and four.
    assert shaped["gpu_hours"] == pytest.approx(6 + 6 + 2 * 6 + 2 * 6)
    assert shaped["memory_bytes"] == 103 * 2**30
    fragments = {
        (f["idle_gpus"], f["host_idle"]): (f["fragments"], f["gpu_hours"])
        for f in result["fragments"]
    }
    assert fragments == {
        (1, False): (1, pytest.approx(6)),
        (2, False): (1, pytest.approx(12)),
        (4, False): (1, pytest.approx(24)),
        (4, True): (1, pytest.approx(24)),
        (8, True): (1, pytest.approx(short)),
    }


def test_a_pbs_log_with_vnodes(answer):
    """One host of two vnodes with four GPUs each, one of one vnode, for a day."""

    def job(start, end, vnodes, hosts, more=""):
        text = f"user=u ctime={epoch(start)} start={epoch(start)} exec_host={hosts} "
        text += f"exec_vnode={vnodes}{more}"
        return text, f"{text} end={epoch(end)} resources_used.ncpus=1 Exit_status=0"

    split = job(0, 12, "(n1[0]:ncpus=8:ngpus=4+n1[1]:ncpus=8:ngpus=2:mem=1gb)", "n1/0*16")
    both = job(
        0,
        24,
        "(n1[1]:ncpus=1:ngpus=1:mem=4194304kb)+(n2:ncpus=2:ngpus=3:mem=1048576kb)",
        "n1/1+n2/0*2",
    )
    exclusive = job(6, 18, "(n3:ncpus=1:ngpus=1)", "n3/0", " Resource_List.place=scatter:exclhost")
    summed = job(18, 24, "(n3:ncpus=2)", "n3/0*2", " Resource_List.ngpus=2 Resource_List.ncpus=2")
    log = pbs(
        (0, "S", "1", split[0]),
        (0, "S", "2", both[0]),
        (6, "S", "3", exclusive[0]),
        (12, "E", "1", split[1]),
        (18, "E", "3", exclusive[1]),
        (18, "S", "4", summed[0]),
        (24, "E", "2", both[1]),
        (24, "E", "4", summed[1]),
    )
    sizes = ["--gpus-per-node", "4", "--gpus-per-node", "n1=8"]
    result = answer(log, *DAY, *sizes, "--slot", "gpus=4", option="--pbs-logs")
    assert result["gpus"] == 16
    # n1: 1 for 12 h, 7 for 12 h. n2: 1 all day. n3: 4 for 6 h without a job, then 0, then 2.
    assert result["idle_gpu_hours_partly_used_hosts"] == pytest.approx(12 + 84 + 24 + 2 * 6)
    assert result["idle_gpu_hours_idle_hosts"] == pytest.approx(4 * 6)
    assert result["idle_gpu_fraction"] == pytest.approx((132 + 24) / (16 * 24))
    assert result["slots"][0]["gpu_hours"] == pytest.approx(4 * 12 + 4 * 6)
    assert result["evenly_spread_node_seconds"] == 0.0
    assert any("1 job counts as holding all GPUs" in line for line in result["assumptions"])


def test_steps_are_not_counted_twice_and_runs_of_requeued_jobs_are(report):
    runs = sacct(
        (0, 12, "g", 1, "gres/gpu=1,node=1"),
        (12, 24, "g", 1, "gres/gpu=1,node=1"),
        (24, 25, "g", 1, "gres/gpu=1,node=1"),
    )
    lines = runs.replace("\n2|", "\n1|").splitlines()
    steps = [lines[1].replace("1|", f"1.{step}|", 1) for step in ("batch", "extern", "0")]
    text = "\n".join([*lines, *steps, ""])
    result = report(text, "4")
    assert result.idle_gpu_hours_partly_used_hosts == pytest.approx(3 * 24)
    assert result.idle_gpu_hours_idle_hosts == 0.0


def test_a_sum_over_nodes_is_spread_evenly_and_the_report_says_for_how_long(report):
    log = sacct(
        (0, 24, "g[1-2]", 2, "gres/gpu=4,node=2"),
        (0, 24, "g[3-4]", 2, "gres/gpu=3,node=2"),
        (0, 24, "g[5-6]", 2, "gres/gpu=8,node=2"),
        (1, 2, "g[7-8]", 2, "cpu=4,node=2"),
    )
    result = report(log, "4")
    # All four of g5 and g6 are in use: nothing is assumed there.
    assert result.evenly_spread_node_s == 4 * 24 * 3600
    assert result.idle_gpu_hours_partly_used_hosts == pytest.approx(24 * (2 + 2 + 2 + 3) + 8)
    (line,) = [line for line in result.assumptions if "spread evenly" in line]
    assert line.startswith("345,600 node-seconds of jobs on several nodes are spread evenly")
    assert "Of these, 172,800 node-seconds have a number of GPUs that is no multiple" in line


def test_hosts_that_differ_and_hosts_that_no_job_used(report, tmp_path):
    (tmp_path / "nodes.txt").write_text(
        "NODELIST|CPUS|MEMORY|GRES\n"
        "g1|64|512000|gpu:a100:4(S:0-1)\n"
        "g1|64|512000|gpu:a100:4(S:0-1)\n"
        "g2|64|512000|gpu:v100:2,gpu:t4:1\n"
        "c1|64|256000|(null)\n"
        "g3|64|512000|gpu:8\n"
    )
    log = sacct(
        (0, 24, "g1", 1, "cpu=4,gres/gpu=4,node=1"),
        (0, 24, "g2", 1, "cpu=4,gres/gpu=1,node=1"),
        (0, 24, "c1", 1, "cpu=64,node=1"),
        (0, 12, "x9", 1, "cpu=4,gres/gpu=2,node=1"),
        (12, 25, "x9", 1, "cpu=4,gres/gpu=1,node=1"),
    )
    result = report(log, nodes_file="nodes.txt")
    assert (result.hosts, result.gpus) == (4, 4 + 3 + 8 + 2)
    assert result.idle_gpu_hours_idle_hosts == pytest.approx(8 * 24)
    assert result.idle_gpu_hours_partly_used_hosts == pytest.approx(2 * 24 + 12)
    sentences = " ".join(result.assumptions)
    assert "No job of the log ran on 1 of the stated hosts, g3 (nodes.txt, line 6)" in sentences
    assert "nodes.txt does not have 1 host of the log, x9 (first: x9 at log, line 5)." in sentences
    assert "1 host (x9) counts as having no more GPUs than jobs held at once" in sentences


def test_nodes_that_only_the_number_of_nodes_states(report):
    log = sacct((0, 24, "g1", 1, "gres/gpu=4,node=1"), (1, 2, "g1", 1, "cpu=1,node=1"))
    result = report(log, "4", nodes=3)
    assert (result.hosts, result.idle_gpu_hours_idle_hosts) == (3, 2 * 4 * 24)
    result = report(log, "g*=4", "x*=2", nodes=3)
    assert "No host matches x* of the options." in result.assumptions
    assert (result.hosts, result.idle_gpu_fraction) == (1, 0.0)
    assert any(line.startswith("2 nodes that neither") for line in result.assumptions)


def test_more_gpus_than_the_host_has(report):
    log = sacct((0, 24, "g1", 1, "gres/gpu=6,node=1"), (1, 2, "g2", 1, "cpu=1,node=1"))
    result = report(log, "4")
    assert result.idle_gpu_hours_partly_used_hosts == pytest.approx(4)
    sentences = " ".join(result.assumptions)
    assert "Jobs hold more GPUs than their host has for 48.0 GPU-hours on g1" in sentences
    assert "(first job on g1: log, line 2)" in sentences
    assert "No job held a GPU on 1 host, g2: the GPUs there count as idle." in sentences


def test_a_job_without_alloctres_holds_its_hosts_as_a_whole(report):
    log = sacct((0, 24, "g1", 1, ""), (1, 25, "g2", 1, "gres/gpu=1,node=1"))
    result = report(log, "4")
    assert result.idle_gpu_hours_partly_used_hosts == pytest.approx(3 * 23)
    assert any(line.startswith("1 job counts as holding all") for line in result.assumptions)


def test_a_log_without_gpus_is_assessed_as_before_unless_an_option_asks(answer, run):
    log = sacct((0, 24, "c1", 1, "cpu=64,node=1"), (1, 25, "c2", 1, "cpu=64,node=1"))
    assert "idle_gpu_fraction" not in answer(log, *DAY)
    result = answer(log, *DAY, "--gpus-per-node", "1")
    assert result["idle_gpu_fraction"] == 1.0
    assert any("AccountingStorageTRES=gres/gpu" in line for line in result["assumptions"])
    done = run(log, *DAY, "--slot", "gpus=1")
    assert done.exit_code == 1
    assert "No host has a GPU" in done.output
    columns = "\n".join(line.rpartition("|")[0] for line in log.splitlines()) + "\n"
    assert "idle_gpu_fraction" not in answer(columns, *DAY)
    done = run(columns, *DAY, "--gpus-per-node", "1")
    assert done.exit_code == 1
    assert "add the column AllocTRES" in done.output
    unnamed = log.replace("|c1|", "||").replace("|c2|", "||")
    done = run(unnamed, *DAY, "--gpus-per-node", "1")
    assert done.exit_code == 1
    assert "does not say which nodes jobs had" in done.output


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--slot", "cpus=8"], "--slot cpus=8: The slot has no GPU"),
        (["--slot", "gpus=0"], "'gpus=0' is no part of a slot such as gpus=1,cpus=8,memory=60GB"),
        (["--slot", "gpus=1,gpus=2"], "'gpus=2' is no part of a slot"),
        (["--slot", "gpus=1,memory=60"], "'memory=60' is no part of a slot"),
        (["--slot", "gpus=1,disk=6GB"], "'disk=6GB' is no part of a slot"),
        (["--gpus-per-node", "four"], "--gpus-per-node four: 'four' is no number."),
        (["--gpus-per-node", "g[2-1]=4"], "--gpus-per-node g[2-1]=4: This is no list of nodes"),
        (["--memory-per-node", "512"], '--memory-per-node 512: "512" has no unit'),
        (["--nodes-file", "absent"], "absent: There is no such file."),
    ],
)
def test_bad_options_are_refused_with_a_sentence(run, argv, says):
    done = run(MIXED, *DAY, *argv)
    assert done.exit_code == 1, done.output
    assert says in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node,gpus\ng1,4\ng1,8\n", "line 3: g1 has other resources than in line 2"),
        ("node,gpus\ng1,four\n", "line 2: 'four' is no number"),
        ("node,gpus\ng1\n", "line 2: There are 1 columns instead of 2"),
        ("g1 4\n", "line 1: The first line has to name the columns node, gpus"),
        ("node,gpus\n", "The file has no host"),
        ("node,gpus\na.site.org,4\n", "line 2: a.site.org is called a in the log"),
        ('{"nodes": 3}', "This is no output of 'pbsnodes -a -F json'"),
    ],
)
def test_bad_files_of_hosts_are_refused_with_file_and_line(run, tmp_path, text, says):
    (tmp_path / "nodes.txt").write_text(text)
    done = run(MIXED, *DAY, "--nodes-file", "nodes.txt")
    assert done.exit_code == 1, done.output
    assert f"nodes.txt{',' if says.startswith('line') else ':'} {says}" in done.output


@pytest.mark.parametrize(
    ("gpus", "nodes", "refused"),
    [(True, True, True), (True, False, True), (False, True, False), (False, False, True)],
)
def test_hosts_that_the_log_calls_otherwise_are_refused_if_they_count(
    run, tmp_path, gpus, nodes, refused
):
    """GPUs are counted by host. Nodes are not, if their number is stated."""
    log = MIXED if gpus else re.sub(r"gres/gpu=\d,", "", MIXED)
    (tmp_path / "nodes.csv").write_text("node,cpus\na.site.org,32\n")
    done = run(log, *DAY, "--nodes-file", "nodes.csv", *(("--nodes", "3") if nodes else ()))
    assert (done.exit_code != 0) == refused, done.output
    assert ("a.site.org is called a in the log" in done.output) == refused


def test_a_few_names_of_nodes_are_not_compared(run, tmp_path):
    """Most jobs of this log name none, and the file alone says how many nodes there are."""
    log = sacct((0, 20, "", 2, "cpu=8"), (0, 1, "a", 1, "cpu=8"), (25, 26, "", 1, "cpu=1"))
    (tmp_path / "nodes.csv").write_text("node,cpus\na.site.org,8\nb.site.org,8\n")
    done = run(log, *DAY, "--nodes-file", "nodes.csv")
    assert done.exit_code == 0, done.output
    assert "those of --nodes-file" in done.output


def test_options_take_precedence_over_the_file_of_hosts(report, tmp_path):
    (tmp_path / "nodes.csv").write_text('node,gpus,cpus,memory\n"a,b",4,32,256 GiB\n')
    assert report(MIXED, nodes_file="nodes.csv").gpus == 8
    result = report(MIXED, "b*=8", nodes_file="nodes.csv")
    assert result.gpus == 12
    vnodes = {
        "a": {"resources_available": {"host": "a", "ngpus": 4, "ncpus": 8, "mem": "0b"}},
        "b[0]": {"resources_available": {"host": "b", "ngpus": 4, "ncpus": 8, "mem": "2gb"}},
        "b[1]": {"resources_available": {"host": "b", "ngpus": 4, "ncpus": 8, "mem": "2gb"}},
        "b": {"resources_available": {"host": "b", "ncpus": 0, "mem": "0b"}},
    }
    (tmp_path / "pbsnodes.json").write_text(json.dumps({"nodes": vnodes}))
    small, large = (SlotSize(memory=size * 2**30) for size in (4, 5))
    result = report(MIXED, nodes_file="pbsnodes.json", slots=(small, large))
    assert result.gpus == 12
    assert [harvest.gpu_hours for _, harvest in result.slots] == [0.0, 0.0], "b's gap is short"
    whole = MIXED.replace("T23:59:00", "T12:00:00")
    result = report(whole, nodes_file="pbsnodes.json", slots=(small, large))
    assert [harvest.gpu_hours for _, harvest in result.slots] == [12.0, 0.0]


def test_options_of_gpus_are_for_logs_that_name_resources(tmp_path):
    (tmp_path / "trace.csv").write_text("time_s,node,event\n0,a,idle\n")
    argv = ["assess", "--trace", str(tmp_path / "trace.csv"), "--gpus-per-node", "4"]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 2
    assert "are for --sacct and --pbs-logs" in done.output


def test_the_text_has_sentences_and_tables(run):
    done = run(MIXED, *DAY, *SIZES, "--slot", "gpus=1", "--slot", "gpus=9")
    assert done.exit_code == 0, done.output
    assert (
        "Of 12 GPUs on 2 hosts, 23.0 % of the GPU-hours were idle: 42.0 on hosts that jobs use in "
        "part and 24.1 on hosts without a job." in done.output
    )
    assert "66.0 (100 %) in slots of gpus=1, 0.0 (0 %) in slots of gpus=9, and 24.0 (36 %) in " in (
        done.output
    )
    rows = [line.split() for line in done.output.splitlines()]
    assert ["whole", "node", "1", "6.0", "h", "24.0", "36.3", "%"] in rows
    assert "No host has 9 GPUs: a slot of gpus=9 fits nowhere." in done.output


@given(st.data())
def test_whatever_jobs_hold_the_parts_add_up(data):
    """The integrals of the report are those of a plain simulation in steps of a second."""
    duration, gpus = 40, 4
    log_jobs, busy = [], np.zeros((2, duration, 2), int)
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, duration - 1))
        end = data.draw(st.integers(start + 1, duration + 5))
        host, count = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
        part = Resources(count, 1, 0)
        log_jobs.append(LogJob(start, start, end - start, 1, (f"h{host}",), allocated=part))
        busy[host, start:end] += (1, count)
    log = JobLog("test", tuple(log_jobs), lists_resources=True, files=("log",))
    hosts = Hosts(gpus=SizeRules({"h0": gpus, "h1": gpus}))
    use = MachineUse(log, Observation(0.0, duration), hosts)
    report = gpu_report(log, use, hosts, (SlotSize(1), SlotSize(3)))
    idle = np.maximum(gpus - busy[:, :, 1], 0)
    without = busy[:, :, 0] == 0
    assert report.idle_gpu_hours_idle_hosts * 3600 == pytest.approx(idle[without].sum())
    assert report.idle_gpu_hours_partly_used_hosts * 3600 == pytest.approx(idle[~without].sum())
    by_fragment = sum(b.gpu_hours for b in report.fragments)
    assert by_fragment == pytest.approx(report.idle_gpu_hours)
    assert all(harvest.gaps == 0 for _, harvest in report.slots), "no gap is longer than 60 s"


@given(st.integers(0, 50), st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=8))
def test_a_division_loses_nothing_and_respects_limits(total, limits):
    parts = divided(total, limits)
    assert sum(parts) == total
    room = None if None in limits else sum(limits)
    if room is None or room >= total:
        assert all(
            limit is None or part <= limit for part, limit in zip(parts, limits, strict=True)
        )
        free = [part for part, limit in zip(parts, limits, strict=True) if part != limit]
        assert not free or max(free) - min(free) <= 1


def test_a_slot_of_a_wrong_text():
    assert str(SlotSize.parse("gpus=1,cpus=8,memory=60GB")) == "gpus=1,cpus=8,memory=60 GB"
    with pytest.raises(WorkloadError, match="is no part of a slot"):
        SlotSize.parse("")
