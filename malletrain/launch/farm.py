"""The launcher of a farm on one node. It takes tasks from the daemon, runs as many at a time as the
node has room for, and reports their ends.

    starting ──the software environment is entered──▶ ready ──first view──▶ running
    running ──a view in which this node leaves──▶ draining, at most as long as the farm says
    draining ──tasks ended or stopped, results sent──▶ drained

Decides how many tasks run at a time (:func:`slots_of`), how many wait here, and when one is
stopped. :mod:`malletrain.core.task_queue` decides which tasks it gets.
:mod:`malletrain.launch.task_process` is one task. Works without torch.

A SIGTERM that the main scheduler sends to every process of the lease reaches the tasks themselves.
They have no drain time then: the launcher starts no other task, and what ends reports no failure.

About one second of work waits on the node, so that short tasks do not wait for the daemon. A result
is sent until it is acknowledged. The processes of all tasks end with the launcher: its supervisor
kills them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping

from malletrain.launch.cores import (
    THREADS_VARIABLE,
    allowed_cores,
    allowed_processors,
    threads_per_worker,
)
from malletrain.launch.lines import LineConnection, ProcessLine
from malletrain.launch.loop import (
    TICK_S,
    LaunchLoop,
    order_from_arguments,
)
from malletrain.launch.task_process import TaskProcess, TaskRefused
from malletrain.memory.folder import bound
from malletrain.protocol import env
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.farm import MAX_HELD, FarmSpec, HeldTask, TaskItem, TaskResult
from malletrain.protocol.launcher_channel import LaunchOrder, TaskSetting
from malletrain.protocol.messages import (
    Assignment,
    Drain,
    Drained,
    Message,
    Phase,
    Round,
    TaskAck,
    TaskItems,
    TaskPull,
    TaskQuery,
    TaskResults,
    TaskStop,
)
from malletrain.protocol.phases import AssignmentPhase

WORK_AHEAD_S = 1.0
"""Amount of work that waits on the node, seconds."""
MAX_AHEAD = 2000
"""Maximum number of tasks that wait on the node."""
REPEAT_S = 5.0
"""Time after which results are sent again, and tasks are asked for again, seconds."""
RESULTS_EVERY_S = 0.2
"""Minimum time between two messages with results, seconds."""
STARTS_EVERY_S = 1.0
"""Minimum time between two reports of the starts of tasks, and the time for which a task has run
then, seconds."""
NOTICE_S = 2.0
"""Time for which the result of a task that a SIGTERM ended waits, seconds. The main scheduler may
have sent the signal to all processes of the lease, and the notice that the node leaves follows.
"""
JUST_BEGUN_S = 3.0
"""A task that has run for less than this is stopped at once when the node leaves, seconds: a main
job would wait for longer than the work takes to be done again.
"""
RESULTS_AT_ONCE = 200
"""Maximum number of results in a message."""
_RECENT = 200


def slots_of(farm: FarmSpec, core_count: int, gpu_count: int, memory_bytes: int) -> int:
    """Return how many tasks run at a time on a node; 0 if it is too small for one.

    Args:
        farm: what a task needs.
        core_count: number of the lease's cores.
        gpu_count: number of its GPUs.
        memory_bytes: its memory, bytes.
    """
    limits = [
        have // need
        for have, need in (
            (core_count, farm.cpus),
            (gpu_count, farm.gpus),
            (memory_bytes, farm.memory_bytes),
        )
        if need
    ]
    if not (farm.cpus or farm.gpus):
        limits.append(1)
    return min(limits)


def thread_variables(
    farm: FarmSpec,
    core_count: int,
    slots: int,
    environment: Mapping[str, str],
    prefix: str = "",
) -> dict[str, str]:
    """Return the environment variables with the number of threads of a task: its part of the cores,
    and at most the number that it asks for. Empty if the job has chosen a number.

    Args:
        farm: what a task needs.
        core_count: number of the lease's cores.
        slots: number of tasks that run at a time.
        environment: environment of the tasks.
        prefix: of variables that the container runtime passes into the container; empty: none.
    """
    threads = threads_per_worker(core_count, slots, environment)
    if not threads or environment.get(prefix + THREADS_VARIABLE, "").strip():
        return {}
    text = str(min(threads, farm.cpus or threads))
    names = (THREADS_VARIABLE, env.THREADS)
    return dict.fromkeys([*names, *(prefix + name for name in names)], text)


def drain_time_s(age_s: float, drain_s: float) -> float:
    """Return how long a task may run on after the notice that its node leaves, seconds.

    Args:
        age_s: for how long it has run, seconds.
        drain_s: drain time of the farm, seconds.
    """
    return drain_s if age_s >= JUST_BEGUN_S else 0.0


def slot_bytes(environment: Mapping[str, str]) -> int | None:
    """Return the memory of the lease's slot, bytes, which nothing may confine; None for a whole
    node. ``environment``: that of the launcher, in which the agent names it.
    """
    text = environment.get(env.SLOT_MEMORY_MB, "")
    return int(text) << 20 if text.isdecimal() and int(text) else None


def entered_variables(setting: TaskSetting, workdir: str) -> dict[str, str] | None:
    """Return the environment variables of the tasks, after their software environment was entered
    once; None if that failed, which has been printed.
    """
    if not setting.enter:
        return dict(setting.environment)
    try:
        done = subprocess.run(
            setting.enter,
            env=setting.environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == UNFIT:
            return None
        if done.returncode == 0:
            with open(setting.variables_file, "rb") as file:
                pairs = os.fsdecode(file.read()).split("\0")
            return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
        sentence = f"the setup ended with code {done.returncode}"
    except OSError as error:
        sentence = f"the software environment cannot be entered: {error.strerror}"
    print(f"malletrain: {sentence[0].upper()}{sentence[1:]}.", file=sys.stderr, flush=True)
    return None


class FarmLauncher:
    """The tasks of one farm on this node.

    Args:
        order: the agent's order.
        farm: what the tasks run.
        setting: how tasks are started here.
        variables: environment variables of the tasks.
        slots: number of tasks that run at a time.
    """

    def __init__(
        self,
        order: LaunchOrder,
        farm: FarmSpec,
        setting: TaskSetting,
        variables: dict[str, str],
        slots: int,
    ) -> None:
        self.order, self._farm, self._setting = order, farm, setting
        self._variables, self._slots = variables, slots
        self._loop = LaunchLoop(order)
        self._node = os.environ.get(env.NODE, "")
        self._session = secrets.token_hex(8)
        self._generation = 0
        self._waiting: deque[TaskItem] = deque()
        self._running: dict[tuple[int, int], TaskProcess] = {}
        self._results: OrderedDict[tuple[int, int], TaskResult] = OrderedDict()
        """Results without acknowledgement."""
        self._unsent: deque[tuple[int, int]] = deque()
        self._free_devices = deque(setting.devices)
        self._received = 0
        """Serial of the newest TaskItems."""
        self._capacity = 0
        """Number of tasks that the daemon was asked for last."""
        self._pulled_at: float | None = None
        self._begun: set[tuple[int, int]] = set()
        """The tasks whose start has been reported."""
        self._starts_at = 0.0
        """Time at which starts were reported last."""
        self._sent_at = 0.0
        self._repeat_at = 0.0
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._leaving = False
        self._stop_at: float | None = None
        """When the running tasks are stopped, monotonic time, seconds; None: not planned."""
        self._gone_at = 0.0
        """When the job has left the node, monotonic time, seconds, if ``_stop_at`` is set."""
        self._drained = False
        self._report(AssignmentPhase.READY)

    def run(self) -> int:
        """Run until the job leaves the node. Return the exit code."""
        return self._loop.run(self)

    # --- the agent ---

    def on_message(self, message: Message) -> None:
        """Handle a view, tasks, acknowledgements and stops."""
        if isinstance(message, Round) and message.job == self.order.job:
            self._generation = max(self._generation, message.generation)
            self._report(AssignmentPhase.RUNNING)
            own = [peer for peer in message.members if peer.node == self._node]
            if any(peer.gone_in_s is not None for peer in own):
                self._leave(min(peer.gone_in_s or 0.0 for peer in own))
            elif not self._loop.lease_terminated:
                self._leaving = self._drained = False  # the plan may have changed
                self._stop_at = None
            if self._pulled_at is None:
                self._pull()
        elif isinstance(message, Drain):
            self._leave(message.timeout_s)
        elif isinstance(message, TaskItems):
            if message.serial > self._received:
                self._received = message.serial
                self._waiting.extend(message.items)
                self._pulled_at = None
        elif isinstance(message, TaskAck):
            for number, attempt in message.attempts:
                self._results.pop((number, attempt), None)
        elif isinstance(message, TaskStop):
            self._stop_attempts({(number, attempt) for number, attempt in message.attempts})
        elif isinstance(message, TaskQuery):
            self._repeat_at = 0.0
            self._pull()

    def on_line(self, connection: LineConnection, message: ProcessLine) -> None:
        """Reject the connection: tasks do not talk to the launcher."""
        self._loop.lines.hang_up(connection)

    def _report(self, phase: AssignmentPhase) -> None:
        self._loop.agent.send(Phase(Assignment(self.order.job, phase, self._generation)))

    def _pull(self) -> None:
        """Report what is here, and ask for tasks."""
        self._capacity, self._pulled_at = self._target(), time.monotonic()
        self._starts_at, self._begun = self._pulled_at, set(self._running)
        items = [
            *(HeldTask(*key, True, task.started) for key, task in self._running.items()),
            *(HeldTask(item.number, item.attempt) for item in self._waiting),
            *(HeldTask(*key) for key in self._results),
        ]
        self._loop.agent.send(
            TaskPull(
                self.order.job,
                self._session,
                self._slots,
                self._capacity,
                tuple(items[:MAX_HELD]),
                self._received,
            )
        )

    def _target(self) -> int:
        """Return the number of tasks that this node wants to have."""
        if self._leaving or self._loop.ending:
            return 0
        ahead = 0
        if len(self._ends) > 1 and (span_s := self._ends[-1] - self._ends[0]) > 0:
            ahead = min(MAX_AHEAD, int(WORK_AHEAD_S * (len(self._ends) - 1) / span_s))
        return min(MAX_HELD, self._slots + ahead)

    def _send_results(self, now: float) -> None:
        if self._results and now >= self._repeat_at:
            self._unsent = deque(self._results)
        if not self._unsent or now < self._sent_at + RESULTS_EVERY_S:
            return
        keys = [self._unsent.popleft() for _ in range(min(len(self._unsent), RESULTS_AT_ONCE))]
        results = tuple(self._results[key] for key in keys if key in self._results)
        self._sent_at, self._repeat_at, self._pulled_at = now, now + REPEAT_S, now
        self._capacity = self._target()
        self._loop.agent.send(
            TaskResults(self.order.job, self._session, results, self._capacity, self._received)
        )

    # --- tasks ---

    def check_processes(self) -> None:
        """Handle the ends of tasks and their limits, start others, and report."""
        now = time.monotonic()
        if self._loop.lease_terminated and not self._leaving:
            self._leaving = True
            for task in self._running.values():
                task.stopping = task.stopping or not task.ended()  # the tasks have the signal, too
            self._waiting.clear()
            self._pull()
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self._stop_running(max(self._gone_at - now, self.order.stop_grace_s))
        self._reap(now)
        while self._waiting and len(self._running) < self._slots and not self._leaving:
            self._start(self._waiting.popleft(), now)
        self._send_results(now)
        if self._needs_tasks(now) or self._has_starts(now):
            self._pull()
        if self._leaving and not (self._running or self._results or self._drained):
            self._drained = True
            self._pull()
            self._loop.agent.send(Drained(self.order.job, self._generation, True))
        self._loop.wake_in(self._due_in(now))

    def _needs_tasks(self, now: float) -> bool:
        """Return whether it is time to ask for tasks."""
        target, present = self._target(), len(self._waiting) + len(self._running)
        if not self._generation or present >= target:
            return False
        if self._pulled_at is not None and now < self._pulled_at + REPEAT_S:
            return False
        return present < self._slots or 2 * len(self._waiting) <= target - self._slots

    def _has_starts(self, now: float) -> bool:
        """Return whether it is time to report that tasks have begun. Short ones are not."""
        if self._leaving or now < self._starts_at + STARTS_EVERY_S:
            return False
        before = time.time() - STARTS_EVERY_S
        return any(
            task.started <= before and key not in self._begun for key, task in self._running.items()
        )

    def _due_in(self, now: float) -> float:
        """Return the time until something is due, seconds."""
        due = [now + TICK_S]
        if self._unsent:
            due.append(self._sent_at + RESULTS_EVERY_S)
        if self._stop_at is not None:
            due.append(self._stop_at)
        due += [at for task in self._running.values() if (at := task.next_limit()) is not None]
        return max(0.0, min(due) - now)

    def _reap(self, now: float) -> None:
        for key, task in list(self._running.items()):
            task.check_limits(now, self.order.stop_grace_s)
            if not task.ended():
                continue
            leaves = self._leaving or self._loop.lease_terminated
            if task.terminated and not leaves and now < (task.ended_at or now) + NOTICE_S:
                continue
            del self._running[key]
            self._free_devices.extend(task.devices)
            if task.stopping or (task.terminated and leaves):
                task.move_files()  # it was cut off: no result
                continue
            self._ends.append(now)
            self._keep(task.result())

    def _start(self, item: TaskItem, now: float) -> None:
        devices = [self._free_devices.popleft() for _ in range(self._farm.gpus)]
        try:
            task = TaskProcess(
                self._loop,
                self.order.job,
                self.order.spec.name,
                self._farm,
                self.order.spec.workdir,
                item,
                self._setting,
                self._variables,
                devices,
                self._farm.cpus or max(1, allowed_processors() // self._slots),
            )
        except TaskRefused as refusal:
            self._free_devices.extend(devices)
            self._ends.append(now)
            at = time.time()
            code, sentence = refusal.code, str(refusal)
            self._keep(
                TaskResult(item.number, item.attempt, code, at, at, "", sentence, unstartable=True)
            )
            return
        self._running[item.number, item.attempt] = task

    def _keep(self, result: TaskResult) -> None:
        key = (result.number, result.attempt)
        self._results[key] = result
        self._unsent.append(key)

    def _stop_attempts(self, keys: set[tuple[int, int]]) -> None:
        self._waiting = deque(
            item for item in self._waiting if (item.number, item.attempt) not in keys
        )
        for key in keys:
            if key in self._running:
                self._running[key].stop(self.order.stop_grace_s)
            self._results.pop(key, None)

    def _leave(self, within_s: float) -> None:
        """Start no more tasks, and stop those that run when the farm's drain time is over, because
        the node leaves the job within this time, seconds. Tasks that have just begun have no drain
        time.
        """
        now, within_s = time.monotonic(), max(0.0, within_s)
        drain_s = min(self._farm.drain_s, within_s)
        if drain_s == 0:
            self._stop_at = None
            self._stop_running(within_s)
        elif not self._leaving:
            self._stop_at, self._gone_at = now + drain_s, now + within_s
            for task in self._running.values():
                if not task.stopping and not drain_time_s(task.age_s, drain_s):
                    task.stop(self.order.stop_grace_s)
        elif self._stop_at is not None:  # a second notice may leave less time, and never more
            self._stop_at = min(self._stop_at, now + within_s)
            self._gone_at = min(self._gone_at, now + within_s)
        self._leaving = True
        self._waiting.clear()
        self._pull()

    def _stop_running(self, grace_s: float) -> None:
        for task in self._running.values():
            if not task.stopping:
                task.stop(grace_s)

    def stop(self) -> None:
        """Stop all tasks, and report those that succeed meanwhile."""
        for task in self._running.values():
            task.stop(self.order.stop_grace_s)
        self._leaving = True
        while self._running:
            self._reap(time.monotonic())
            if self._running:
                next(iter(self._running.values())).wait(0.05)
        self._repeat_at = self._sent_at = 0.0
        while self._results and self._unsent:
            self._send_results(time.monotonic())
            self._sent_at = 0.0


def main() -> int:
    """Read the order and run it."""
    order = order_from_arguments(
        "malletrain.launch.farm", "Run the tasks of one farm on this node."
    )
    if order is None or order.spec.farm is None or order.tasks is None:
        return 2
    farm, setting = order.spec.farm, order.tasks
    core_count, memory_bytes = allowed_processors(), bound(1.0, slot_bytes(os.environ))
    slots = slots_of(farm, core_count, len(setting.devices), memory_bytes)
    if slots < 1:
        print(
            f"malletrain: This node has {core_count} cores, {len(setting.devices)} GPUs and "
            f"{memory_bytes >> 20} MiB of memory; one task needs {max(1, farm.cpus)} cores, "
            f"{farm.gpus} GPUs and {farm.memory_bytes >> 20} MiB.",
            file=sys.stderr,
            flush=True,
        )
        return UNFIT
    variables = entered_variables(setting, order.spec.workdir)
    if variables is None:
        return UNFIT
    slots = min(slots, MAX_HELD)
    variables |= thread_variables(farm, allowed_cores(), slots, variables, setting.variable_prefix)
    return FarmLauncher(order, farm, setting, variables, slots).run()


if __name__ == "__main__":
    sys.exit(main())
