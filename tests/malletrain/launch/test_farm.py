"""The launcher of a farm, with real tasks; the agent and the daemon are the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import numpy
import psutil
import pytest

from malletrain.launch.farm import (
    JUST_BEGUN_S,
    drain_time_s,
    slot_bytes,
    slots_of,
    thread_variables,
)
from malletrain.launch.task_process import COMMANDS
from malletrain.protocol import messages
from malletrain.protocol.farm import FarmSpec, TaskItem
from malletrain.protocol.launcher_channel import LaunchOrder, TaskSetting, write_order
from malletrain.protocol.messages import Peer, TaskPull, TaskResults
from tests.malletrain.agent.node_side import alive
from tests.malletrain.launch.fake_agent import FakeAgent
from tests.waiting import NEVER_S, PATIENCE_S, until

NODE = Peer("n0", "127.0.0.1")


def spec_of(*command, **fields):
    fields = {"columns": ("x",), "total": 100, "log": "logs/{index}.log", **fields}
    return FarmSpec(tuple(command), **fields)


class Node:
    """A launcher and its agent. The view with it has been sent."""

    def __init__(self, folder, farm, program=("-m", "malletrain.launch.farm"), **setting):
        self.agent, self.folder = FakeAgent(folder), folder
        self.serial, self.heard = 0, []
        workdir = folder / "work"
        workdir.mkdir(exist_ok=True)
        job = messages.JobSpec("f", "ann", "true", str(workdir), "python", mode="farm", farm=farm)
        tasks = TaskSetting(dict(os.environ), **setting)
        order = LaunchOrder("j1", job, self.agent.endpoint, "127.0.0.1", ".", 5.0, 60.0, tasks)
        write_order(folder / "order.json", order)
        command = [sys.executable, *program]
        self.process = subprocess.Popen(
            [*command, "--launch", str(folder / "order.json")],
            env={**os.environ, "MALLETRAIN_NODE": "n0"},
        )

    def begin(self):
        assert self.agent.hear_phase() == ("ready", 0)
        self.view(NODE)
        self.hear(TaskPull)
        return self

    def view(self, own):
        self.serial_of_view = getattr(self, "serial_of_view", 0) + 1
        self.agent.say(messages.Round("j1", self.serial_of_view, 0, 1, members=(own,)))

    def give(self, *rows, first=0, attempt=1):
        self.serial += 1
        items = tuple(TaskItem(first + k, attempt, tuple(row)) for k, row in enumerate(rows))
        self.agent.say(messages.TaskItems("j1", self.serial, items))

    def hear(self, kind):
        while True:
            message = self.agent.hear()
            if isinstance(message, kind):
                return message

    def result(self):
        """The next new result, acknowledged."""
        while True:
            for result in self.hear(TaskResults).results:
                key = (result.number, result.attempt)
                if key not in self.heard:
                    self.heard.append(key)
                    self.agent.say(messages.TaskAck("j1", (key,)))
                    return result

    def close(self):
        """Kill the launcher and its tasks, which lead groups of their own, as an agent does."""
        tasks = []
        if self.process.poll() is None:
            tasks = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for task in tasks:
            with suppress(psutil.NoSuchProcess):
                task.kill()
        self.agent.socket.close()


def until_drained_for(path):
    """Wait until the task that makes this file has run for so long that it has a drain time."""
    until(path.exists, "the task runs")
    seen = time.monotonic()  # as the launcher measures; the time of day and those of files differ
    until(lambda: time.monotonic() > seen + JUST_BEGUN_S, "it has not just begun")


@contextmanager
def node(folder, farm, **options):
    made = Node(folder, farm, **options)
    try:
        yield made
    finally:
        made.close()


def test_tasks_run_and_their_output_is_in_their_logs(tmp_path):
    with node(tmp_path, spec_of("echo", "{x} {index}")) as launcher:
        launcher.begin()
        launcher.give(["a b"], ["$HOME"])
        assert [launcher.result().code for _ in range(2)] == [0, 0]
        logs = tmp_path / "work" / "logs"
        assert (logs / "0.log").read_text() == "a b 0\n"
        assert (logs / "1.log").read_text() == "$HOME 1\n"
        assert sorted(os.listdir(logs)) == ["0.log", "1.log"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 can start new sessions only")
def test_a_task_leads_a_group_in_the_session_of_its_launcher(tmp_path):
    code = "import os; print(os.getpid() == os.getpgrp(), os.getsid(0))"
    with node(tmp_path, spec_of(sys.executable, "-c", code)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        assert launcher.result().code == 0
        log = (tmp_path / "work" / "logs" / "0.log").read_text()
        assert log.split() == ["True", str(os.getsid(launcher.process.pid))]


def test_a_failed_task_brings_the_end_of_its_output(tmp_path):
    with node(tmp_path, spec_of("sh", "-c", "seq 100000; echo the end; exit {x}")) as launcher:
        launcher.begin()
        launcher.give(["3"])
        result = launcher.result()
        assert result.code == 3
        assert result.tail.endswith("99999\n100000\nthe end")
        assert len(result.tail) <= 4096


def test_a_command_that_is_not_there_fails_with_a_sentence(tmp_path):
    with node(tmp_path, spec_of("no-such-program")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        result = launcher.result()
        assert (result.code, result.unstartable) == (127, True)
        assert result.sentence == "The command no-such-program is not found on this node."


def test_a_file_that_is_not_executable_fails_with_a_sentence(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").write_text("x")
    with node(tmp_path, spec_of("./data")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        result = launcher.result()
        assert (result.code, result.unstartable) == (126, True)
        assert "./data cannot be started: Permission denied" in result.sentence


def test_a_result_file_appears_only_after_success(tmp_path):
    farm = spec_of("sh", "-c", "echo {x} > {output}; exit {x}", output="out/{index}.txt")
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["0"], ["1"])
        assert sorted(launcher.result().code for _ in range(2)) == [0, 1]
        assert os.listdir(tmp_path / "work" / "out") == ["0.txt"]


def test_the_temporary_result_file_has_the_extension_of_the_file(tmp_path):
    """numpy.save, for example, appends one to other names."""
    command = "import sys, numpy; numpy.save(sys.argv[1], [1, 2])"
    farm = spec_of(sys.executable, "-c", command, "{output}", output="out/{index}.npy")
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["0"])
        result = launcher.result()
        assert result.code == 0, result.sentence
        out = tmp_path / "work" / "out"
        assert os.listdir(out) == ["0.npy"]
        assert numpy.load(out / "0.npy").tolist() == [1, 2]


def test_success_without_the_result_file_is_a_failure(tmp_path):
    with node(tmp_path, spec_of("true", "{output}", output="out/{index}.txt")) as launcher:
        launcher.begin()
        launcher.give(["0"])
        result = launcher.result()
        assert result.code == 1
        assert "did not write" in result.sentence


def test_a_task_over_its_limit_is_stopped_and_has_failed(tmp_path):
    farm = spec_of("sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait", time_s=0.2)
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["0"])
        result = launcher.result()
        assert result.code == -signal.SIGTERM
        assert "its limit is 0.2 s" in result.sentence


def test_variables_of_a_task(tmp_path):
    farm = spec_of(
        "sh",
        "-c",
        "echo $MALLETRAIN_TASK $SLURM_ARRAY_TASK_ID $SLURM_ARRAY_TASK_MAX $PBS_ARRAY_INDEX "
        "$CUDA_VISIBLE_DEVICES $MALLETRAIN_CHECKPOINT_DIR; test -d $MALLETRAIN_CHECKPOINT_DIR",
        columns=("index",),
        array_env=True,
        gpus=2,
        checkpoint="state/{index}",
    )
    with node(tmp_path, farm, devices=("GPU-a", "GPU-b", "GPU-c", "GPU-d")) as launcher:
        launcher.begin()
        launcher.give(["7"], ["8"])
        assert [launcher.result().code for _ in range(2)] == [0, 0]
        work = tmp_path / "work"
        lines = sorted((work / "logs" / f"{k}.log").read_text().split() for k in (7, 8))
        assert [line[:4] for line in lines] == [["0", "7", "99", "7"], ["1", "8", "99", "8"]]
        assert sorted(line[4] for line in lines) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
        assert [line[5] for line in lines] == [f"{work}/state/7", f"{work}/state/8"]


def test_a_task_calls_srun_as_in_a_job_array(tmp_path):
    farm = spec_of(
        "sh", "-c", 'cd "$SLURM_SUBMIT_DIR" && srun -n 1 sh -c "pwd; echo $SLURM_JOB_ID"',
        array_env=True,
    )  # fmt: skip
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["7"], ["8"])
        assert [launcher.result().code for _ in range(2)] == [0, 0]
        work = tmp_path / "work"
        lines = [(work / "logs" / f"{k}.log").read_text().split() for k in (0, 1)]
        assert [line[0] for line in lines] == [str(work), str(work)]
        assert lines[0][1] != lines[1][1], "each has a directory of its own in /tmp/$SLURM_JOB_ID"


@pytest.mark.parametrize("prefix", [(), ("env",)], ids=["host", "container"])
def test_srun_is_on_the_path_of_tasks_outside_containers_only(tmp_path, prefix):
    """The directory of the task's srun is not in the container, and the image has no srun."""
    with node(tmp_path, spec_of("sh", "-c", 'echo "$PATH"'), prefix=prefix) as launcher:
        launcher.begin()
        launcher.give(["1"])
        assert launcher.result().code == 0
        path = (tmp_path / "work" / "logs" / "0.log").read_text().strip().split(os.pathsep)
        assert (str(COMMANDS) in path) == (not prefix)


def test_an_mpi_launcher_that_the_user_has_chosen_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
    monkeypatch.delenv("I_MPI_HYDRA_BOOTSTRAP", raising=False)
    command = "echo $HYDRA_LAUNCHER $I_MPI_HYDRA_BOOTSTRAP"
    with node(tmp_path, spec_of("sh", "-c", command, array_env=True)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        assert launcher.result().code == 0
        assert (tmp_path / "work" / "logs" / "0.log").read_text() == "ssh fork\n"


def test_tasks_that_run_at_once_never_write_to_one_file(tmp_path):
    """They may: a client of another version does not check the names of results."""
    farm = spec_of(
        "sh", "-c", "echo {output}; echo {x} > {output}; until test -e ../go; do sleep 0.01; done",
        cpus=1, output="same.txt",
    )  # fmt: skip
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["7"], ["8"])
        until(lambda: len(list((tmp_path / "work").glob(".*.same.txt"))) == 2, "two results")
        (tmp_path / "go").touch()
        assert [launcher.result().code for _ in range(2)] == [0, 0]


def test_the_environment_is_entered_once(tmp_path):
    enter = ("bash", "-c", f'echo x >> {tmp_path}/times; export A="1\n2"; env -0 > {tmp_path}/v')
    farm = spec_of("sh", "-c", 'test "$A" = "1\n2"')
    with node(tmp_path, farm, enter=enter, variables_file=str(tmp_path / "v")) as launcher:
        launcher.begin()
        launcher.give(["1"], ["2"], ["3"])
        assert [launcher.result().code for _ in range(3)] == [0, 0, 0]
        assert (tmp_path / "times").read_text() == "x\n"


def test_an_environment_that_cannot_be_entered_is_unfit(tmp_path):
    with node(tmp_path, spec_of("true"), enter=("false",), variables_file="v") as launcher:
        assert launcher.process.wait(PATIENCE_S) == 78


def test_a_node_that_is_too_small_is_unfit(tmp_path):
    with node(tmp_path, spec_of("true", cpus=100_000)) as launcher:
        assert launcher.process.wait(PATIENCE_S) == 78


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 1),
        ({"cpus": 1}, 16),
        ({"cpus": 3}, 5),
        ({"cpus": 1, "gpus": 1}, 4),
        ({"gpus": 2}, 2),
        ({"cpus": 1, "memory_bytes": 30}, 3),
        ({"cpus": 17}, 0),
        ({"memory_bytes": 101}, 0),
    ],
)
def test_slots_of_a_node(fields, slots):
    assert slots_of(spec_of("x", **fields), 16, 4, 100) == slots


@pytest.mark.parametrize(
    ("fields", "slots", "environment", "threads"),
    [
        ({}, 1, {}, "16"),
        ({"cpus": 4}, 4, {}, "4"),
        ({"cpus": 4}, 2, {}, "4"),  # memory for two
        ({"gpus": 1}, 4, {}, "4"),
        ({"cpus": 1}, 32, {}, "1"),  # two hardware threads on each core
        ({"cpus": 4}, 4, {"OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_a_task_has_the_threads_of_its_part_of_the_cores(fields, slots, environment, threads):
    variables = thread_variables(spec_of("x", **fields), 16, slots, environment)
    names = ("OMP_NUM_THREADS", "MALLETRAIN_THREADS")
    assert variables == ({} if threads is None else dict.fromkeys(names, threads))


def test_a_number_that_the_job_sets_for_its_container_stays():
    environment = {"APPTAINERENV_OMP_NUM_THREADS": "2"}
    assert thread_variables(spec_of("x"), 16, 1, environment, "APPTAINERENV_") == {}


def test_tasks_get_the_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    farm = spec_of("sh", "-c", "echo $OMP_NUM_THREADS $X_OMP_NUM_THREADS", cpus=1)
    with node(tmp_path, farm, variable_prefix="X_") as launcher:
        launcher.begin()
        launcher.give(["0"])
        assert launcher.result().code == 0
        assert (tmp_path / "work" / "logs" / "0.log").read_text() == "1 1\n"


def test_memory_of_a_slot():
    assert slot_bytes({"MALLETRAIN_SLOT_MEMORY_MB": "300"}) == 300 << 20
    assert slot_bytes({"MALLETRAIN_SLOT_MEMORY_MB": ""}) is slot_bytes({}) is None


def test_tasks_on_a_slot_that_nothing_confines_share_its_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_SLOT_MEMORY_MB", "300")
    mib = 1 << 20
    farm = spec_of("true", gpus=1, memory_bytes=100 * mib)
    with node(tmp_path, farm, devices=("0", "1", "2", "3")) as launcher:
        launcher.begin()
        launcher.agent.say(messages.TaskQuery("j1"))
        assert launcher.hear(TaskPull).slots == 3
    with node(tmp_path, spec_of("true", memory_bytes=301 * mib)) as launcher:
        assert launcher.process.wait(PATIENCE_S) == 78


def test_results_are_repeated_until_they_are_acknowledged(tmp_path):
    with node(tmp_path, spec_of("true")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        [first] = launcher.hear(TaskResults).results
        launcher.agent.say(messages.TaskQuery("j1"))
        [again] = launcher.hear(TaskResults).results
        assert again == first
        launcher.agent.say(messages.TaskAck("j1", ((0, 1),)))
        launcher.agent.say(messages.TaskQuery("j1"))
        until(lambda: launcher.hear(TaskPull).tasks == (), "it is forgotten")


def test_items_that_come_twice_run_once(tmp_path):
    with node(tmp_path, spec_of("sh", "-c", "echo x >> runs")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        launcher.serial -= 1
        launcher.give(["1"])
        assert launcher.result().code == 0
        launcher.give(["1"], first=1)
        assert launcher.result().number == 1
        assert (tmp_path / "work" / "runs").read_text() == "x\nx\n"


def test_a_leaving_node_stops_its_tasks_and_says_so(tmp_path):
    with node(
        tmp_path, spec_of("sh", "-c", "echo started > up{index}; exec sleep 1000")
    ) as launcher:
        launcher.begin()
        launcher.give(["1"], ["2"])
        until((tmp_path / "work" / "up0").exists, "the first task runs")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=60.0))
        pull = until(
            lambda: next((m for m in [launcher.hear(TaskPull)] if not m.tasks), None),
            "nothing is left",
        )
        assert pull.capacity == 0
        launcher.hear(messages.Drained)
        assert not (tmp_path / "work" / "up1").exists()


def test_with_a_drain_time_a_task_ends_after_the_notice_and_no_other_begins(tmp_path):
    command = "echo > up{index}; until test -e end; do sleep 0.01; done"
    with node(tmp_path, spec_of("sh", "-c", command, drain_s=3600.0)) as launcher:
        launcher.begin()
        launcher.give(["1"], ["2"])
        work = tmp_path / "work"
        until_drained_for(work / "up0")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=7200.0))
        until(lambda: launcher.hear(TaskPull).capacity == 0, "the notice is heard")
        (work / "end").touch()
        result = launcher.result()
        assert (result.number, result.code) == (0, 0)
        launcher.hear(messages.Drained)
        assert not (work / "up1").exists()


@pytest.mark.parametrize(("drain_s", "gone_in_s"), [(0.1, 3600.0), (3600.0, 0.1)])
def test_a_task_that_outlasts_its_drain_time_or_node_is_stopped(tmp_path, drain_s, gone_in_s):
    command = "echo > up; exec sleep 1000"
    with node(tmp_path, spec_of("sh", "-c", command, drain_s=drain_s)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        until_drained_for(tmp_path / "work" / "up")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=gone_in_s))
        launcher.hear(messages.Drained)
        assert launcher.heard == []


@pytest.mark.parametrize(
    ("age_s", "drain_s", "seconds"),
    [
        (0.0, 20.0, 0.0),
        (JUST_BEGUN_S - 0.1, 20.0, 0.0),
        (JUST_BEGUN_S, 20.0, 20.0),
        (60.0, 1.0, 1.0),
    ],
)
def test_a_task_that_has_just_begun_has_no_drain_time(age_s, drain_s, seconds):
    assert drain_time_s(age_s, drain_s) == seconds


def test_a_second_notice_shortens_the_drain_time(tmp_path):
    command = "echo > up; exec sleep 1000"
    with node(tmp_path, spec_of("sh", "-c", command, drain_s=3600.0)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        until_drained_for(tmp_path / "work" / "up")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=7200.0))
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=0.1))
        launcher.hear(messages.Drained)


def test_a_node_that_stays_after_all_goes_on(tmp_path):
    command = "echo > up{index}; until test -e end{index}; do sleep 0.01; done"
    with node(tmp_path, spec_of("sh", "-c", command, drain_s=3600.0)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        work = tmp_path / "work"
        until_drained_for(work / "up0")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=7200.0))
        until(lambda: launcher.hear(TaskPull).capacity == 0, "the notice is heard")
        launcher.view(NODE)
        launcher.give(["2"], first=1)
        for number in (0, 1):
            (work / f"end{number}").touch()
            assert launcher.result().number == number


def test_an_exit_code_after_a_stop_means_nothing(tmp_path):
    farm = spec_of("sh", "-c", "trap 'exit 0' TERM; echo > up; while :; do sleep 0.01; done")
    with node(tmp_path, farm) as launcher:
        launcher.begin()
        launcher.give(["1"])
        until((tmp_path / "work" / "up").exists, "the task runs")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=60.0))
        launcher.hear(messages.Drained)
        assert launcher.heard == []


PATIENT = f"""
import sys
from malletrain.launch import farm
farm.NOTICE_S = {NEVER_S}
sys.exit(farm.main())
"""


def test_a_task_that_ends_by_the_notice_of_its_lease_has_not_failed(tmp_path):
    """The main scheduler sends SIGTERM to all processes; the view that the node leaves follows."""
    farm = spec_of("sh", "-c", "echo $$ > pid; exec sleep 1000")
    with node(tmp_path, farm, program=("-c", PATIENT)) as launcher:
        launcher.begin()
        launcher.give(["1"])
        file = tmp_path / "work" / "pid"
        pid = until(lambda: file.exists() and file.read_text().strip(), "the task runs")
        os.kill(int(pid), signal.SIGTERM)
        until(lambda: not psutil.pid_exists(int(pid)), "the launcher has seen the end")
        launcher.view(Peer("n0", "127.0.0.1", gone_in_s=60.0))
        while not isinstance(message := launcher.agent.hear(), messages.Drained):
            assert not isinstance(message, TaskResults)
        assert launcher.agent.socket.poll(0) == 0
        launcher.agent.say(messages.TaskQuery("j1"))
        assert launcher.hear(TaskPull).tasks == ()


def test_a_task_that_anyone_else_terminates_has_failed(tmp_path):
    with node(tmp_path, spec_of("sh", "-c", "kill -TERM $$")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        assert launcher.result().code == -signal.SIGTERM


def test_an_attempt_that_is_not_needed_is_stopped(tmp_path):
    with node(
        tmp_path, spec_of("sh", "-c", "echo > up{index}; test {x} = 0 || exec sleep 1000")
    ) as it:
        it.begin()
        it.give(["1"], ["0"])
        until((tmp_path / "work" / "up0").exists, "the first task runs")
        it.agent.say(messages.TaskStop("j1", ((0, 1),)))
        assert it.result().number == 1


def test_what_a_task_leaves_in_its_group_is_killed(tmp_path):
    with node(tmp_path, spec_of("sh", "-c", "sleep 1000 & echo $! > pid")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        assert launcher.result().code == 0
        pid = int((tmp_path / "work" / "pid").read_text())
        until(lambda: not alive(pid), "it is gone")


def test_a_release_ends_the_launcher_and_its_tasks(tmp_path):
    with node(tmp_path, spec_of("sh", "-c", "echo $$ > pid; exec sleep 1000")) as launcher:
        launcher.begin()
        launcher.give(["1"])
        file = tmp_path / "work" / "pid"
        pid = until(lambda: file.exists() and file.read_text().strip(), "the task runs")
        launcher.agent.say(messages.Release("j1", 5.0))
        assert launcher.process.wait(PATIENCE_S) == 0
        assert not psutil.pid_exists(int(pid))


def test_the_start_of_a_long_task_is_reported_and_of_one_that_waits_is_not(tmp_path):
    with node(tmp_path, spec_of("sleep", "{x}")) as launcher:
        launcher.begin()
        before = time.time()
        launcher.give(["1000"], ["1000"])
        running, waiting = until(
            lambda: next((m for m in [launcher.hear(TaskPull)] if len(m.tasks) == 2), None),
            "it says what it has",
        ).tasks
        assert (running.number, running.running) == (0, True)
        assert before <= running.started <= time.time()
        assert (waiting.number, waiting.running, waiting.started) == (1, False, None)
