"""Farms with real processes: each task is done once, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.host_image import host_binds, make_image
from malletrain.agent.start import FARM_NICENESS
from malletrain.client import operations
from malletrain.client.errors import ClientError
from malletrain.launch.cores import allowed_processors
from malletrain.protocol import messages
from malletrain.protocol.farm import FarmSpec
from tests.integration import farms
from tests.integration.embedded import gone, site

pytestmark = pytest.mark.slow


@pytest.mark.check
def test_200_tasks_run_once_each(shared):
    job = farms.submit(shared, farms.APPEND, farms.numbered(200))
    view = shared.until_state(job, "completed")
    assert view.samples == 200
    assert farms.runs(shared) == dict.fromkeys(range(200), 1)
    state = farms.tasks(shared, job, limit=3)
    assert (state.counts["done"], state.counts["waiting"]) == (200, 0)
    assert [task.values for task in state.tasks] == [("0",), ("1",), ("2",)]
    assert {task.state for task in state.tasks} == {"done"}
    assert (shared.work / state.tasks[0].log).exists()
    assert state.tasks[0].ended >= state.tasks[0].started


def test_tasks_run_at_a_lower_priority_than_the_agent(shared):
    job = farms.submit(shared, "nice > niceness", farms.numbered(1))
    shared.until_state(job, "completed")
    of_task = int((shared.work / "niceness").read_text())
    assert of_task == min(19, os.nice(0) + FARM_NICENESS)


def test_a_farm_waits_for_its_tasks(shared):
    job = farms.empty(shared, farms.APPEND, 3)
    assert shared.job(job).state == "queued"
    assert farms.add(shared, job, 0, [["a"], ["b"]]) == 2
    assert shared.job(job).reason == "Its tasks are being added (2 of 3)."
    with pytest.raises(ClientError, match="the next one is 2, not 5"):
        farms.add(shared, job, 5, [["c"]])
    with pytest.raises(ClientError, match="these are more"):
        farms.add(shared, job, 2, [["c"], ["d"]])
    shared.kill_daemon()
    shared.start_daemon()
    assert shared.job(job).state == "queued"
    assert farms.add(shared, job, 0, [["a"], ["b"]]) == 2
    assert farms.add(shared, job, 1, [["b"], ["c"]]) == 3
    shared.until_state(job, "completed")
    assert farms.add(shared, job, 1, [["b"], ["c"]]) == 3
    assert farms.runs(shared) == {0: 1, 1: 1, 2: 1}


def test_a_farm_without_its_tasks_can_be_cancelled(shared):
    job = farms.empty(shared, farms.APPEND, 3)
    farms.add(shared, job, 0, [["a"]])
    with shared.client() as client:
        client.cancel([job])
    assert shared.job(job).state == "cancelled"
    assert farms.tasks(shared, job).counts["cancelled"] == 1
    with pytest.raises(ClientError, match="takes no more tasks"):
        farms.add(shared, job, 1, [["b"]])


def test_failures_are_tried_again_and_reported(shared):
    command = "echo {index} >> tries; echo sorry; test {index} != 3 || exit 7"
    job = farms.submit(shared, command, farms.numbered(5), retries=2)
    view = shared.until_state(job, "failed")
    assert view.reason == f"1 of 5 tasks failed; `malletrain tasks {job} --failed` lists them."
    assert farms.runs(shared, "tries") == {0: 1, 1: 1, 2: 1, 3: 3, 4: 1}
    [task] = farms.tasks(shared, job, state="failed").tasks
    assert (task.number, task.tries, task.exit_code, task.tail) == (3, 3, 7, "sorry")
    with shared.client() as client, pytest.raises(ClientError, match="malletrain map"):
        client.do(operations.retry(job, state="failed"))


def test_a_node_without_its_files_does_not_burn_the_tasks(shared):
    here = ': >> "here-$MALLETRAIN_NODE"'
    wait = "until test -e here-n2 -a -e here-n3; do sleep 0.05; done"
    fail = 'if test "$MALLETRAIN_NODE" = n1; then WAIT; echo {index} >> broken; exit 9; fi'
    others_wait = 'until test "$(cat broken | wc -l)" -ge 5; do sleep 0.05; done'
    command = f"{here}; {fail.replace('WAIT', wait)}; {others_wait}; {farms.APPEND}"
    count = more_than_two_nodes_take(60)
    job = farms.submit(shared, command, farms.numbered(count), "3:3")
    shared.until_state(job, "completed")
    assert farms.runs(shared) == dict.fromkeys(range(count), 1)
    with shared.client() as client:
        events = [e for e in client.events(job=job, limit=1000) if e.node in ("", "n1")]
    sentences = [event.sentence for event in events if event.kind == "tasks-failing"]
    assert "they run again on other nodes" in sentences[0]
    assert "at least one of them succeeds on another node" in sentences[1]
    kinds = {event.kind for event in events}
    assert not kinds & {"node-rejected", "job-suspended"}, "the farm keeps its minimum of nodes"


def test_a_time_limit_stops_a_task(shared):
    job = farms.submit(shared, "sleep {x}", [["1000"]], time_s=0.5)
    shared.until_state(job, "failed")
    [task] = farms.tasks(shared, job, state="failed").tasks
    assert "its limit is 0.5 s" in task.tail


def test_a_command_that_is_not_there_fails_the_farm_at_once(shared):
    with shared.client() as client:
        farm = FarmSpec(("no-such-program", "{x}"), ("x",), 5000, "logs/{index}.log", cpus=1)
        job = client.submit(
            messages.JobSpec(
                *("farm", "", "no-such-program", str(shared.work), "python"),
                mode="farm",
                farm=farm,
            )
        ).id
    farms.add(shared, job, 0, farms.numbered(5000))
    view = shared.until_state(job, "failed")
    assert "no-such-program is not found on this node" in view.reason
    assert farms.tasks(shared, job).counts["cancelled"] > 0


def test_setup_is_entered_once_for_all_tasks_of_a_node(shared):
    setup = "echo x >> setups; export COLOUR=blue"
    job = farms.submit(shared, 'test "$COLOUR" = blue', farms.numbered(8), nodes="1:1", setup=setup)
    shared.until_state(job, "completed")
    assert (shared.work / "setups").read_text() == "x\n"


def test_the_setup_sets_umask_and_limits_of_tasks(shared):
    """As for a training, for which the options' help names ``ulimit`` in a setup."""
    command = "umask >> masks; ulimit -n >> files; touch made"
    setup = "umask 027; ulimit -n 123"
    job = farms.submit(shared, command, farms.numbered(2), nodes="1:1", setup=setup)
    shared.until_state(job, "completed")
    assert (shared.work / "masks").read_text() == "0027\n" * 2
    assert (shared.work / "files").read_text() == "123\n" * 2
    modes = {(shared.work / name).stat().st_mode & 0o777 for name in ("made", "logs/0.log")}
    assert modes == {0o640}


def test_a_command_that_is_not_there_is_told_if_tasks_have_limits_too(shared):
    words = ("no-such-program",)
    job = farms.submit(shared, "", farms.numbered(1), words=words, setup="ulimit -n 123")
    shared.until_state(job, "failed")
    [task] = farms.tasks(shared, job, state="failed").tasks
    assert "no-such-program is not found on this node" in task.tail


def test_tasks_and_commands_run_in_the_container_of_the_site(tmp_path):
    image = make_image(tmp_path / "image", Path(sys.executable))
    containers = (
        f'[containers]\nimage = "{image}"\nruntime = "charliecloud"\n'
        f"binds = {json.dumps(host_binds(tmp_path))}\n"
    )
    with site(tmp_path / "site", nodes=1, config=containers) as made:
        wait = "until test -e go; do sleep 0.1; done; "
        command = f"{wait}echo $IMAGE_SAYS $MALLETRAIN_TASK {{x}} > {{output}}"
        words = ("/bin/sh", "-c", command)
        rows = [["a"], ["b"]]
        job = farms.submit(made, "", rows, nodes="1:1", output="out/{index}", words=words)
        made.until(lambda: farms.tasks(made, job).counts["running"], "a task runs")
        exec_words = ["exec", "--state-dir", str(made.state), job, "--", "/bin/sh", "-c"]
        done = subprocess.run(
            [sys.executable, "-m", "malletrain", *exec_words, "echo $IMAGE_SAYS; pwd"],
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines() == ["so", str(made.work)], done.stderr
        (made.work / "go").touch()
        view = made.until_state(job, "completed", "failed")
        assert view.state == "completed", (view.reason, farms.tasks(made, job))
        folder = made.work / "out"
        assert (folder / "0").read_text() == "so 0 a\n"
        assert (folder / "1").read_text() == "so 1 b\n"


def test_a_lost_node_and_a_killed_launcher_lose_no_task(shared):
    shared.script("hold", "")
    command = "while [ -e hold ]; do sleep 0.05; done; " + farms.APPEND
    count = more_than_two_nodes_take(40)
    job = farms.submit(shared, command, farms.numbered(count))
    shared.until(
        lambda: len({task.node for task in farms.tasks(shared, job, state="running").tasks}) == 3,
        "all three nodes have tasks",
    )
    agents = shared.agents()
    first, second = (agents[name] for name in sorted(agents)[:2])
    below = {agent: agent.children(recursive=True) for agent in (first, second)}
    shells = [p for each in below.values() for p in each if is_named(p, "sh")]
    task = next(p for p in below[second] if p in shells)
    launcher = next(p for p in task.parents() if is_launcher(p))
    first.kill()
    launcher.kill()
    shared.until(lambda: all(map(gone, shells)), "their tasks are killed")
    (shared.work / "hold").unlink()
    shared.until_state(job, "completed")
    assert farms.runs(shared) == dict.fromkeys(range(count), 1)
    assert shared.job(job).samples == count


def test_a_killed_daemon_loses_no_task(shared):
    job = farms.submit(shared, farms.APPEND + "; sleep 0.02", farms.numbered(150))
    for count in (20, 80):
        shared.until(lambda count=count: len(farms.runs(shared)) >= count, f"{count} tasks")
        shared.kill_daemon()
        shared.start_daemon()
    shared.until_state(job, "completed")
    assert farms.runs(shared) == dict.fromkeys(range(150), 1)


def test_a_preempted_node_gives_its_tasks_back(shared):
    shared.script("hold", "")
    command = "while [ -e hold ]; do sleep 0.05; done; " + farms.APPEND
    job = farms.submit(shared, command, farms.numbered(20), cpus=0)
    shared.until(lambda: farms.tasks(shared, job).counts["running"] == 3, "all nodes have tasks")
    agent = shared.agents()[shared.job(job).nodes[0]]
    agent.send_signal(signal.SIGTERM)
    shared.until(lambda: gone(agent), "the agent has left")
    (shared.work / "hold").unlink()
    shared.until_state(job, "completed")
    assert farms.runs(shared) == dict.fromkeys(range(20), 1)
    assert {task.tries for task in farms.tasks(shared, job).tasks} == {0}


@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_200_random_faults_over_2000_tasks(tmp_path, any_seed):
    seed = any_seed(11)
    print(f"seed {seed}")
    choices = random.Random(seed)
    with site(tmp_path, nodes=3, agent_timeout_s=3.0) as made:
        command = "sleep 0.3; " + farms.APPEND
        job = farms.submit(made, command, farms.numbered(2000), retries=1000)
        faults = 0
        while faults < 200 and made.job(job).ended is None:
            before = len(farms.runs(made))
            made.until(
                lambda before=before: (
                    len(farms.runs(made)) > before or made.job(job).ended is not None
                ),
                "a task ends",
            )
            faults += fault(made, choices)
        made.until_state(job, "completed")
        assert faults == 200
        assert set(farms.runs(made)) == set(range(2000))
        assert made.job(job).samples == 2000
        assert farms.tasks(made, job).counts["done"] == 2000


def more_than_two_nodes_take(spare):
    """Return a number of tasks of which ``spare`` are left when two nodes have one for each of
    their cores.
    """
    return spare + 2 * allowed_processors()


def is_launcher(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.endswith("launch/entry.py") for word in process.cmdline()[:2])
    return False


def is_named(process, *names):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() in names
    return False


def fault(made, choices):
    """Kill or stop one process of the site. Return whether there was one."""
    kind = choices.choice(("daemon", "agent", "launcher", "launcher", "task", "task", "preempt"))
    if kind == "daemon":
        made.kill_daemon()
        made.start_daemon()
        return True
    agents = list(made.agents().values())
    if not agents:
        return False
    agent = choices.choice(agents)
    try:
        children = agent.children(recursive=True)
        if kind == "preempt":
            agent.terminate()
            return True
        if kind == "agent":
            victims = [agent]
        elif kind == "launcher":
            victims = [p for p in children if is_launcher(p)]
        else:
            victims = [p for p in children if is_named(p, "sh", "sleep")]
        if not victims:
            return False
        os.kill(choices.choice(victims).pid, signal.SIGKILL)
    except (psutil.Error, ProcessLookupError):
        return False
    return True
