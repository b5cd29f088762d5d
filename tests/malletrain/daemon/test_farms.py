"""A daemon's side of farms, with agents that say whatever a test wants."""

from __future__ import annotations

import time

import pytest

from malletrain.client import operations
from malletrain.client.errors import ClientError
from malletrain.daemon import compose
from malletrain.daemon.api import service_operations
from malletrain.daemon.jobs.admission import problem_of
from malletrain.daemon.nodes.farms import Farms
from malletrain.launch.farm import RESULTS_AT_ONCE
from malletrain.protocol import messages, wire
from malletrain.protocol.farm import (
    MAX_TAIL,
    FarmSpec,
    HeldTask,
    TaskResult,
)
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon
from tests.waiting import until

pytestmark = pytest.mark.slow

STARTED = 1_700_000_000.0
FIELDS = {"mode": "farm", "goal": "throughput"}


def farm(total: int, **fields) -> FarmSpec:
    return FarmSpec(
        **{
            "command": ("run", "{x}"),
            "columns": ("x",),
            "total": total,
            "log": "logs/{index}.log",
            "cpus": 1,
            **fields,
        }
    )


def problem_with(tasks: FarmSpec) -> str:
    return problem_of(messages.JobSpec("f", "ann", "run", "/", "python", farm=tasks, **FIELDS))


class Site:
    """A daemon, a farm of Ann, and the agents of the nodes that it has."""

    def __init__(self, folder, total=4, nodes=1, min_nodes=1, **fields):
        self.folder = folder
        self.machine = Imagined(*(f"n{k}" for k in range(nodes)))
        self.daemon = RunningDaemon(folder, self.machine)
        sizes = {"min_nodes": min_nodes, "max_nodes": nodes}
        self.job = self.daemon.submit("ann", farm=farm(total, **fields), **sizes, **FIELDS)
        self.do(operations.add_tasks(self.job, 0, [[f"v{k}"] for k in range(total)]))
        leases = until(
            lambda: len(self.machine.of("ann")) == nodes and self.machine.of("ann"), "leases"
        )
        self.agents = [Agent(self.daemon, lease) for lease in leases]
        for agent in self.agents:
            agent.hello()
        for agent in self.agents:
            agent.hear(messages.Assign)
            agent.say(messages.Phase(messages.Assignment(self.job, "ready")))
            generation = agent.hear(messages.Round).generation
            agent.say(messages.Phase(messages.Assignment(self.job, "running", generation)))

    def do(self, operation, user="ann"):
        with self.daemon.client(user) as client:
            return client.do(operation)

    def counts(self):
        counts = self.do(operations.tasks(self.job, limit=0)).counts
        return {state: count for state, count in counts.items() if count}

    def restart_daemon(self):
        for agent in self.agents:
            agent.close()
        self.daemon.stop()
        self.daemon = RunningDaemon(self.folder, self.machine)

    def reconnect(self):
        self.agents = [Agent(self.daemon, agent.lease) for agent in self.agents]
        for agent in self.agents:
            agent.hello(assignment=messages.Assignment(self.job, "running", 1))
            agent.hear(messages.Welcome)

    def kinds(self):
        """The kinds of events so far."""
        return {event.kind for event in self.do(operations.events(limit=1000))}

    def rules(self, node, name):
        """What ``malletrain nodes --explain`` says about a node by this rule."""
        views = self.do(operations.nodes(explain=True))
        return [
            sentence
            for view in views
            if view.node == node
            for rule, _, sentence in view.rules
            if rule == name
        ]

    def history(self):
        """The newest counts, and the slowest tasks."""
        view = self.do(operations.task_history(self.job))
        return view.points[-1][1:], [task.number for task in view.slowest]

    def pull(self, agent=0, capacity=2, present=(), received=0, session="s"):
        """``present``: tasks that its processes run, since STARTED."""
        tasks = tuple(HeldTask(*each, True, STARTED) for each in present)
        self.agents[agent].say(messages.TaskPull(self.job, session, 2, capacity, tasks, received))

    def items(self, agent=0):
        message = self.agents[agent].hear(messages.TaskItems)
        return message.serial, [(i.number, i.attempt, *i.values) for i in message.items]

    def finish(self, *attempts, agent=0, code=0, capacity=0, received=1, **fields):
        now = time.time()
        results = tuple(
            TaskResult(number, attempt, code, now - 1, now, **fields)
            for number, attempt in attempts
        )
        self.agents[agent].say(messages.TaskResults(self.job, "s", results, capacity, received))
        acknowledged = self.agents[agent].hear(messages.TaskAck).attempts
        assert acknowledged == tuple(attempts)

    def close(self):
        for agent in self.agents:
            agent.close()
        self.daemon.stop()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def two_nodes(tmp_path):
    made = Site(tmp_path, nodes=2)
    yield made
    made.close()


def test_tasks_are_handed_out_with_their_values_and_done(site):
    site.pull()
    assert site.items() == (1, [(0, 1, "v0"), (1, 1, "v1")])
    assert site.counts() == {"waiting": 4}
    site.finish((0, 1), (1, 1), capacity=2)
    assert site.items() == (2, [(2, 1, "v2"), (3, 1, "v3")])
    site.finish((2, 1), (3, 1), received=2)
    until(lambda: site.daemon.job(site.job).state == "completed", "the farm is completed")
    assert site.daemon.job(site.job).samples == 4
    assert site.counts() == {"done": 4}


def test_a_lost_message_with_tasks_is_repeated_and_nothing_else_is_sent(site):
    site.pull()
    first = site.items()
    site.pull(capacity=4)
    assert site.items() == first
    site.pull(capacity=4, present=[(0, 1), (1, 1)], received=1)
    assert site.items() == (2, [(2, 1, "v2"), (3, 1, "v3")])


def test_a_repeated_result_counts_once(site):
    site.pull()
    site.items()
    for _ in range(3):
        site.finish((0, 1))
    assert site.counts() == {"done": 1, "waiting": 3}
    assert site.daemon.job(site.job).samples == 1


def test_the_tasks_of_an_earlier_launcher_are_handed_out_again(site):
    site.pull()
    site.items()
    site.pull(session="another", present=[(1, 1)])
    assert site.items() == (1, [(0, 2, "v0")])
    assert site.counts() == {"running": 1, "waiting": 3}


def test_tasks_that_a_node_does_not_have_wait_again(site):
    site.pull()
    site.items()
    site.pull(present=[(1, 1)], received=1, capacity=0)
    until(lambda: site.counts() == {"running": 1, "waiting": 3}, "it waits again")
    [task] = site.do(operations.tasks(site.job, state="running")).tasks
    assert (task.number, task.tries, task.started) == (1, 0, STARTED)
    waiting = site.do(operations.tasks(site.job, state="waiting")).tasks
    assert [(task.number, task.started) for task in waiting] == [(0, None), (2, None), (3, None)]


def bad_and_good(tmp_path, total=12, **fields):
    """A farm on whose first node five tasks have failed, while the second node has two."""
    site = Site(tmp_path, total=total, nodes=2, **fields)
    site.pull(1, capacity=2)
    assert len(site.items(1)[1]) == 2
    site.pull(0, capacity=7)
    numbers = [(number, attempt) for number, attempt, _ in site.items(0)[1]]
    assert numbers == [(n, 1) for n in range(2, 9)]
    site.agents[0].say(messages.TaskResults(site.job, "s", failures(*numbers[:6]), 9, 1))
    assert site.agents[0].hear(messages.TaskStop).attempts in (((7, 1),), ((8, 1),))
    return site


def failures(*attempts, code=7):
    now = time.time()
    return tuple(TaskResult(n, attempt, code, now - 1, now, "no mount") for n, attempt in attempts)


def test_tasks_done_in_the_message_that_makes_the_node_suspected_stay_done(tmp_path):
    site = Site(tmp_path, total=12, nodes=2)
    try:
        site.pull(1, capacity=2)
        site.items(1)
        site.pull(0, capacity=8)
        attempts = [(number, attempt) for number, attempt, _ in site.items(0)[1]]
        results = failures(*attempts[:5]) + failures(*attempts[5:], code=0)
        site.agents[0].say(messages.TaskResults(site.job, "s", results, 0, 1))
        site.agents[0].hear(messages.TaskAck)
        assert "tasks-failing" in site.kinds()
        assert site.counts() == {"done": 3, "waiting": 9}
        site.restart_daemon()
        assert site.counts() == {"done": 3, "waiting": 9}
        done = site.do(operations.tasks(site.job, state="done")).tasks
        assert [task.number for task in done] == [number for number, _ in attempts[5:]]
    finally:
        site.close()


def test_the_tasks_that_fail_on_one_node_run_on_another(tmp_path):
    site = bad_and_good(tmp_path)
    try:
        until(lambda: site.counts() == {"waiting": 12}, "no failure counts")
        bad, good = (agent.node for agent in site.agents)
        [sentence] = site.do(operations.tasks(site.job)).failing
        assert sentence == (
            f"{bad}: 5 tasks in a row failed on the node, and they run again on other nodes. It "
            "gets one task from time to time."
        )
        until(lambda: site.rules(bad, "tasks"), "nodes --explain says it")
        assert "5 tasks in a row failed" in site.rules(bad, "tasks")[0]
        site.pull(0, capacity=9, received=1)
        site.finish((0, 1), (1, 1), agent=1, capacity=12)
        handed_out = [number for number, *_ in site.items(1)[1]]
        assert handed_out == [*range(2, 12)], "all of them"
        assert site.counts() == {"done": 2, "waiting": 10}
        site.finish((2, 2), agent=1, received=2)
        until(lambda: "lease-released" in site.kinds(), "the node is given back")
        assert site.kinds() >= {"tasks-failing", "node-rejected"}
        assert "node-sick" not in site.kinds()
        site.finish(
            *((n, 2) for n in range(3, 9)), *((n, 1) for n in range(9, 12)), agent=1, received=2
        )
        until(lambda: site.daemon.job(site.job).state == "completed", "the farm is completed")
        assert site.counts() == {"done": 12}
        assert not site.rules(good, "tasks")
    finally:
        site.close()


def test_a_suspected_node_that_is_left_alone_gets_all_tasks(tmp_path):
    site = bad_and_good(tmp_path)
    try:
        site.finish((0, 1), (1, 1), agent=1)
        site.agents[1].say(messages.Leaving(600.0))
        generation = site.agents[1].hear(messages.Round).generation
        site.agents[1].say(messages.Drained(site.job, generation, True))
        site.agents[1].hear(messages.Release)
        site.agents[1].say(messages.Released(site.job))
        leased = site.daemon.components.state.agents
        gone = site.agents[1].node
        until(lambda: leased.on(gone) is None or not leased.on(gone).holds, "the node has no job")
        site.pull(0, capacity=9, received=1)
        serial, items = site.items(0)
        assert (serial, [number for number, *_ in items]) == (2, [2, 3, 4, 5, 6, 7, 8, 9, 10])
    finally:
        site.close()


def test_a_rejected_node_is_given_back_once_the_farm_can_do_without_it(tmp_path):
    site = bad_and_good(tmp_path, min_nodes=2)
    try:
        bad, good = (agent.node for agent in site.agents)
        praised = []
        failing = site.daemon.components.state.failing
        failing.works = lambda script, nodes: praised.extend(nodes)
        site.finish((0, 1), (1, 1), agent=1, capacity=12)
        site.items(1)
        site.finish((2, 2), agent=1, received=2)
        rejected = "at least one of them succeeds on another node"
        until(
            lambda: any(rejected in text for text in site.rules(bad, "tasks")),
            "the node is rejected",
        )
        assert "node-rejected" not in site.kinds(), "the farm needs two nodes"
        assert praised == [good], "where the task succeeded, and no other"
        site.do(operations.scale(site.job, 1, 2))
        until(lambda: "lease-released" in site.kinds(), "the node is given back")
        rejected = [event for event in site.daemon.events() if event.kind == "node-rejected"]
        assert [event.node for event in rejected] == [bad]
    finally:
        site.close()


def test_a_rejected_node_that_came_back_is_given_back_if_a_task_fails_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(compose, "Farms", lambda *parts: made.append(Farms(*parts)) or made[-1])
    site = Site(tmp_path, total=12, nodes=2, min_nodes=2)
    try:
        site.pull(1, capacity=2)
        site.items(1)
        site.pull(0, capacity=7)
        site.items(0)
        started = [(n, 1) for n in range(2, 9)]
        site.pull(0, capacity=7, present=started, received=1)
        site.finish(*started[:6], agent=0, code=7)
        site.finish((0, 1), (1, 1), agent=1, capacity=12)
        site.items(1)
        site.finish((2, 2), agent=1, received=2)
        farm = made[0].of(site.daemon.components.state.runs[site.job])
        assert farm.unwanted == {site.agents[0].node}
        farm.unwanted.clear()  # it left and came back
        site.do(operations.scale(site.job, 1, 2))
        site.finish((8, 1), agent=0, code=7)
        until(lambda: "node-rejected" in site.kinds(), "the node is given back")
    finally:
        site.close()


def test_tasks_that_fail_on_both_nodes_have_failed(tmp_path):
    site = bad_and_good(tmp_path)
    try:
        site.finish((0, 1), (1, 1), agent=1, capacity=12)
        site.items(1)
        site.finish((2, 2), agent=1, received=2, code=7)
        assert site.counts() == {"done": 2, "failed": 1, "waiting": 9}
        assert len(site.do(operations.tasks(site.job)).failing) == 1
        site.finish(*((n, 2) for n in range(3, 7)), agent=1, received=2, code=7)
        site.finish((9, 1), agent=1, received=2)
        assert site.do(operations.tasks(site.job)).failing == ()
        [*failed] = site.do(operations.tasks(site.job, state="failed")).tasks
        assert [(task.number, task.tries) for task in failed] == [(n, 1) for n in range(2, 7)]
        assert "node-rejected" not in site.kinds()
    finally:
        site.close()


@pytest.mark.parametrize("code", [0, 7])
def test_a_farm_whose_last_tasks_failed_on_a_node_on_which_nothing_works_goes_on(tmp_path, code):
    site = Site(tmp_path, total=8, nodes=2)
    try:
        site.pull(0, capacity=3)
        bad = [(number, attempt) for number, attempt, _ in site.items(0)[1]]
        site.pull(1, capacity=5)
        good = [(number, attempt) for number, attempt, _ in site.items(1)[1]]
        site.finish(*bad, code=7)
        assert site.counts() == {"waiting": 5, "failed": 3}
        site.finish(*good, agent=1, capacity=3)
        assert [number for number, *_ in site.items(1)[1]] == [0, 1, 2]
        assert "tasks-failing" in site.kinds()
        site.finish((0, 2), (1, 2), (2, 2), agent=1, received=2, code=code)
        state = "failed" if code else "completed"
        until(lambda: site.daemon.job(site.job).state == state, f"the farm is {state}")
        assert site.counts() == ({"done": 5, "failed": 3} if code else {"done": 8})
    finally:
        site.close()


def test_a_failure_is_reported_with_its_output(site):
    site.pull()
    site.items()
    site.finish((0, 1), code=-9, tail="last words", sentence="Its limit.")
    [task] = site.do(operations.tasks(site.job, state="failed")).tasks
    assert (task.exit_code, task.tries, task.log) == (-9, 1, "logs/0.log")
    assert task.tail == "last words\nIts limit."


def test_a_daemon_that_restarts_knows_what_was_handed_out_and_done(site):
    site.pull()
    site.items()
    site.finish((0, 1))
    site.restart_daemon()
    assert site.counts() == {"done": 1, "waiting": 3}
    site.reconnect()
    site.pull(present=[(1, 1)], received=7, capacity=2)
    assert site.items() == (8, [(2, 1, "v2")])


def test_the_history_of_a_farm_is_the_same_after_a_restart_and_after_its_end(site, monkeypatch):
    monkeypatch.setattr(service_operations, "ROWS_BETWEEN_PAUSES", 1)
    site.pull(capacity=4)
    site.items()
    site.finish((0, 1), (1, 1))
    site.finish((2, 1), code=7)
    assert site.history() == ((2, 1, 0), [0, 1])
    site.do(operations.retry(site.job, state="failed"))
    assert site.history() == ((2, 0, 0), [0, 1])
    site.restart_daemon()
    assert site.history()[0][:2] == (2, 0)
    site.reconnect()
    site.pull(capacity=4, present=[(3, 1)], received=1)
    site.items()
    site.finish((3, 1), received=2)
    site.finish((2, 2), received=2)
    until(lambda: site.daemon.job(site.job).state == "completed", "the farm is completed")
    (done, failed, running), slowest = site.history()
    assert ((done, failed, running), sorted(slowest)) == ((4, 0, 0), [0, 1, 2, 3])


def test_a_node_without_the_job_loses_its_tasks(two_nodes):
    site = two_nodes
    site.pull(0)
    site.items(0)
    site.pull(1, capacity=4)
    assert site.items(1) == (1, [(2, 1, "v2"), (3, 1, "v3")])
    site.pull(1, present=[(2, 1), (3, 1)], received=1, capacity=4)
    site.agents[0].say(messages.Leaving(600.0))
    site.agents[0].hear(messages.Round)
    site.agents[0].say(messages.Drained(site.job, 1, True))
    site.agents[0].hear(messages.Release)
    site.agents[0].say(messages.Released(site.job))
    assert site.items(1) == (2, [(0, 2, "v0"), (1, 2, "v1")])
    assert site.counts() == {"running": 2, "waiting": 2}


def test_a_node_that_leaves_gets_no_other_task(site):
    site.pull()
    site.items()
    site.agents[0].say(messages.Leaving(600.0))
    site.finish((0, 1), capacity=2)  # the launcher does not know it yet
    site.agents[0].say(messages.Heartbeat("b"))
    answer = site.agents[0].hear((messages.TaskItems, messages.Alive))
    assert isinstance(answer, messages.Alive)


def test_what_was_never_handed_out_is_never_done(site):
    site.pull()
    site.items()
    site.finish((2, 1), (3, 0), (999_999, 1), (0, 2))
    assert site.counts() == {"waiting": 4}
    site.pull(present=[(0, 1), (1, 1), (2, 1), (999_999, 3)], received=1, capacity=0)
    assert site.agents[0].hear(messages.TaskStop).attempts == ((2, 1),)
    assert site.counts() == {"running": 2, "waiting": 2}


def test_a_node_says_nothing_about_the_farm_of_another(two_nodes):
    site = two_nodes
    other = site.daemon.submit("bob", farm=farm(1), **FIELDS)
    site.do(operations.add_tasks(other, 0, [["x"]]), "bob")
    now = time.time()
    result = TaskResult(0, 1, 0, now, now)
    site.agents[0].say(messages.TaskPull(other, "s", 8, 8))
    site.agents[0].say(messages.TaskResults(other, "s", (result,), 8))
    site.agents[0].say(messages.Heartbeat("b"))
    site.agents[0].hear(messages.Alive)
    assert site.do(operations.tasks(other), "bob").counts["waiting"] == 1
    with pytest.raises(ClientError, match="only its owner"):
        site.do(operations.tasks(other))
    with pytest.raises(ClientError, match="only its owner"):
        site.do(operations.retry(other, state="failed"))


def test_a_job_without_tasks_takes_none(site):
    job = site.daemon.submit("ann")
    for operation in (operations.tasks(job), operations.add_tasks(job, 0, [["x"]])):
        with pytest.raises(ClientError, match="is no farm"):
            site.do(operation)
    now = time.time()
    site.agents[0].say(messages.TaskResults(job, "s", (TaskResult(0, 1, 0, now, now),), 8))
    assert site.daemon.alive()


def test_nodes_without_a_task_are_worth_nothing_at_the_end(tmp_path):
    site = Site(tmp_path, total=2, nodes=2)
    jobs = site.daemon.components.state.controller.jobs
    assert jobs[site.job].curve.at(2) > jobs[site.job].curve.at(1)
    site.pull(0)
    site.items(0)
    until(lambda: jobs[site.job].curve.at(2) == jobs[site.job].curve.at(1), "one node suffices")
    nodes = site.daemon.components.state.controller.nodes
    busy = {name for name, node in nodes.items() if node.info.busy}
    assert busy == {site.agents[0].node}
    site.close()


def test_a_farm_whose_tasks_do_not_come_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(service_operations, "ARRIVAL_LIMIT_S", 0.0)
    daemon = RunningDaemon(tmp_path, Imagined())
    job = daemon.submit("ann", farm=farm(3), **FIELDS)
    until(lambda: daemon.job(job).state == "cancelled", "it is cancelled")
    assert "no task of it was added for" in daemon.job(job).reason
    daemon.stop()


def test_a_farm_after_another_job_waits_for_both(tmp_path):
    daemon = RunningDaemon(tmp_path, Imagined())
    first = daemon.submit("ann")
    job = daemon.submit("ann", farm=farm(1), after=(first,), **FIELDS)
    with daemon.client("ann") as client:
        client.do(operations.add_tasks(job, 0, [["x"]]))
        assert daemon.job(job).reason == f"begins when {first} (ann) completed"
        client.cancel([first])
    until(lambda: daemon.job(job).state == "cancelled", "it is cancelled with the first")
    daemon.stop()


@pytest.mark.parametrize(
    ("first", "rows", "sentence"),
    [
        (0, [], "1 to 10,000 tasks, not 0"),
        (3, [["x"]], "the next one is 2, not 3"),
        (2, [["x"]] * 9, "submitted with 10 tasks"),
        (2, [["x", "y"]], "Task 2 has 2 values; the farm has 1 columns"),
        (2, [["x"], ["\0"]], "A value of task 3"),
        (2, [["x"], ["é" * 32769]], "A value of task 3 is longer than 32768 characters"),
        (0, [["x"]], ""),
        (2, [["é" * 32768]], ""),
    ],
)
def test_tasks_that_cannot_be_added(first, rows, sentence):
    problem = service_operations.rows_problem(farm(10), first, rows, 2)
    assert sentence in problem
    assert bool(sentence) == bool(problem)


def test_long_values_are_sent_a_few_at_a_time(tmp_path):
    site = Site(tmp_path, total=1)
    job = site.daemon.submit("ann", farm=farm(120), max_nodes=1, **FIELDS)
    long = "\N{GRINNING FACE}" * 32768
    for first in range(0, 120, 3):
        site.do(operations.add_tasks(job, first, [[long]] * 3))
    site.pull()
    site.items()
    site.finish((0, 1))
    site.agents[0].hear(messages.Release)
    site.agents[0].say(messages.Released(site.job))
    site.agents[0].hear(messages.Assign)
    site.job = job
    site.agents[0].say(messages.Phase(messages.Assignment(job, "ready")))
    site.agents[0].hear(messages.Round)
    site.pull(capacity=200)
    serial, items = site.items()
    assert (serial, items) == (1, [(k, 1, long) for k in range(2)])
    site.close()


def test_the_largest_message_with_results_fits():
    result = TaskResult(1, 1, 1, 0.0, 0.0, "x" * MAX_TAIL, "y" * 8192)
    assert wire.encode(messages.TaskResults("j1", "s", (result,) * RESULTS_AT_ONCE, 9))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"command": ()}, "give one"),
        ({"total": 0}, "has 1 to 1,000,000 tasks"),
        ({"columns": ("x", "x")}, "each of another name"),
        ({"command": ("run", "{y}")}, "{y} in '{y}' is no column"),
        ({"command": ("run", "{output}")}, "{output} in '{output}' is no column"),
        ({"log": "out.log"}, "All tasks have the same log, out.log; add {index}"),
        ({"output": "result"}, "All tasks have the same result file"),
        ({"columns": ("output",), "command": ("r",), "output": "{index}"}, "rename it"),
        ({"retries": -1}, "tried again 0 to"),
        ({"time_s": -1.0}, "time limit of a task"),
        ({"drain_s": -1.0}, "drain time of tasks"),
        ({"cpus": -1}, "0 or more"),
        ({"log": ""}, "has no name"),
    ],
)
def test_an_invalid_farm_is_refused_with_a_sentence(fields, sentence):
    assert sentence in problem_with(farm(**{"total": 10, **fields}))


def test_a_valid_farm_is_accepted():
    tasks = farm(10, command=("run", "{x}", "{output}"), output="out/{x}")
    assert problem_with(tasks) == ""


def test_at_most_so_many_tasks_run_on_all_nodes_together(tmp_path):
    site = Site(tmp_path, total=6, nodes=2, max_running=3)
    try:
        site.pull(0, capacity=6)
        assert site.items(0) == (1, [(0, 1, "v0"), (1, 1, "v1")]), "none waits on the node"
        site.pull(1, capacity=6)
        assert site.items(1) == (1, [(2, 1, "v2")])
        site.finish((2, 1), agent=1, capacity=6)
        assert site.items(1) == (2, [(3, 1, "v3")])
        site.finish((0, 1), (1, 1), agent=0, capacity=6)
        assert site.items(0) == (2, [(4, 1, "v4"), (5, 1, "v5")])
    finally:
        site.close()
