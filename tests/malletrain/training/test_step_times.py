"""Where the time of a step goes: data, collectives, snapshots, what is left, and what this process
worked itself. The clock of the parts is one that the test sets, torch is as it is installed.
"""

import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import malletrain
from malletrain.protocol.worker_channel import WorkerProgress
from malletrain.training import report, step_times
from malletrain.training.step_times import (
    MAX_PENDING,
    Busy,
    BusyClock,
    StepClock,
    StepSection,
    counted_as,
    timed,
)
from tests.malletrain.training.worker_side import as_worker


class Hands:
    """The hands of the clock."""

    def __init__(self):
        self.now = 100.0

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def hands(monkeypatch):
    made = Hands()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(step_times, "_cuda", lambda: None)
    yield made
    step_times.stop()


def batches(hands, *seconds):
    for each in seconds:
        hands.pass_by(each)
        yield each


def test_a_part_that_never_began_is_not_known(hands):
    clock = step_times.start()
    hands.pass_by(5.0)
    assert clock.read() == (None, None, None)


def test_waits_for_batches_are_data_and_what_the_loop_does_is_not(hands):
    clock = step_times.start()
    seen = []
    for batch in timed(batches(hands, 1.0, 2.0, 4.0)):
        seen.append(batch)
        hands.pass_by(10.0)
    assert seen == [1.0, 2.0, 4.0]
    assert clock.read() == (7.0, None, None)


def test_the_outer_part_counts(hands):
    clock = step_times.start()
    with StepSection("snapshot"):
        hands.pass_by(1.0)
        with StepSection("exchange"):
            hands.pass_by(2.0)
        hands.pass_by(4.0)
    with StepSection("exchange"):
        hands.pass_by(8.0)
    assert clock.read() == (None, 8.0, 7.0)


def test_only_the_thread_that_steps_counts(hands):
    clock = step_times.start()

    def write():
        with StepSection("snapshot"):
            hands.pass_by(3.0)

    with StepSection("data"):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert clock.read() == (3.0, None, None)


def test_an_error_ends_the_part(hands):
    clock = step_times.start()

    @counted_as("snapshot")
    def save():
        hands.pass_by(1.0)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save()
    with StepSection("data"):
        hands.pass_by(2.0)
    assert clock.read() == (2.0, None, 1.0)


def test_a_timed_loader_is_still_the_loader():
    loader = [3, 1, 2]
    made = timed(loader)
    assert (len(made), list(made), made.index(1)) == (3, [3, 1, 2], 1)
    assert list(pickle.loads(pickle.dumps(made))) == loader
    with pytest.raises(TypeError):
        len(timed(iter(loader)))
    with pytest.raises(AttributeError):
        _ = made.sampler
    assert malletrain.timed is timed


# --- on a GPU: events of a stream, which the test lets occur ---


class Stream:
    """As ``torch.cuda``: an event has the time at which the stream reaches it, in milliseconds."""

    def __init__(self):
        self.reached = []
        self.now = 0.0
        self.capturing = False
        self.device = 0
        self.error = None

    def current_device(self):
        return self.device

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None, device=None)

        def record():
            if self.error is not None:
                raise self.error
            if event.device not in (None, self.device):
                raise RuntimeError("Event device does not match recording stream's device")
            event.at, event.device = self.now, self.device

        event.record = record
        event.query = lambda: event.at in self.reached
        event.elapsed_time = lambda other: other.at - event.at
        event.synchronize = lambda: pytest.fail("a step waits for the GPU")
        return event


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    monkeypatch.setattr(step_times, "_cuda", lambda: made)
    yield made
    step_times.stop()


def test_on_a_gpu_the_time_is_that_between_two_events_once_they_have_occurred(stream):
    clock = step_times.start()
    with StepSection("data"):
        stream.now = 250.0
    assert clock.read() == (0.0, None, None), "the stream is not there yet"
    stream.reached = [0.0, 250.0]
    assert clock.read() == (0.25, None, None)


def test_events_are_recorded_again_on_their_own_gpu_only(stream):
    clock = step_times.start()
    stream.reached = [1000.0 * at for at in range(20)]
    for device in (0, 1, 0, 1):
        stream.device = device
        with StepSection("data"):
            stream.now += 1000.0
        clock.read()
    assert clock.read() == (4.0, None, None)
    with StepSection("exchange"):
        stream.device = 0  # the script changes the GPU within a part, which is not counted
    with StepSection("data"):
        stream.now += 1000.0
    assert clock.read() == (5.0, None, None)


@pytest.mark.parametrize("when", ["begin", "end", "read"])
def test_an_error_of_the_gpu_stops_the_measurement_and_not_the_script(stream, capsys, when):
    report.sentence_keys.clear()
    clock = step_times.start()
    error = RuntimeError("CUDA error: an illegal memory access\nCompile with …")

    def fail():
        raise error

    for _ in range(2):
        stream.error = error if when == "begin" else None
        with StepSection("data"):
            stream.now += 1.0
            stream.error = error if when == "end" else None
        if when == "read":
            clock._pending and setattr(clock._pending[0][3], "query", fail)  # noqa: SLF001
        assert clock.read() == (None, None, None)
    log = capsys.readouterr().err
    assert log.count("not measured any more: CUDA error: an illegal memory access\n") == 1


def test_nothing_is_recorded_while_a_graph_is_captured(stream):
    clock = step_times.start()
    stream.capturing = True
    with StepSection("exchange"):
        stream.now = 100.0
    assert clock.read() == (None, None, None)


def test_a_stream_that_is_far_behind_costs_no_memory(stream):
    clock = step_times.start()
    for _ in range(2 * MAX_PENDING):
        with StepSection("data"):
            stream.now += 1.0
    stream.reached = [float(at) for at in range(2 * MAX_PENDING + 1)]
    assert clock.read()[0] == pytest.approx(MAX_PENDING / 1000.0)


# --- in torch ---


@pytest.fixture
def hooks():
    torch = pytest.importorskip("torch")
    from malletrain.training import step_hooks

    step_hooks.install()
    step_hooks.install()  # the second time does nothing
    return torch


def test_a_data_loader_is_measured_without_a_change_to_the_script(hands, hooks):
    class Numbers(hooks.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            hands.pass_by(1.0)
            return index

    loader = hooks.utils.data.DataLoader(Numbers(), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    clock = step_times.start()
    for _ in timed(loader):
        hands.pass_by(10.0)
    assert clock.read() == (6.0, None, None)


def test_an_evaluation_between_two_steps_counts_as_its_parts(hands, hooks, monkeypatch):
    loader = hooks.utils.data.DataLoader(range(3), collate_fn=lambda _: hands.pass_by(1.0))
    report.forget()
    with as_worker(monkeypatch):
        monkeypatch.setattr(report, "SEND_INTERVAL_S", 0.0)
        monkeypatch.setenv("MALLETRAIN_STEP_TIMES", "1")
        malletrain.report(1)
        clock = step_times.current()
        report.between_epochs(True)
        for _ in loader:
            hands.pass_by(10.0)
        report.between_epochs(False)
        assert clock.read() == (3.0, None, None)


def test_waits_for_collectives_are_exchange(hands, hooks, monkeypatch):
    dist = hooks.distributed
    work = dist.Work

    class Late(work):
        def wait(self, *_):  # a class of a backend, which overrides it
            hands.pass_by(8.0)
            return True

    clock = step_times.start()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(hooks.ones(2))
    finally:
        dist.destroy_process_group()
    assert clock.read()[1] == 0.0
    assert Late().wait()
    assert clock.read()[1] == 0.0, "its wait is not counted, as the page says"


@pytest.mark.parametrize(("ranks", "exchange"), [(2, 4.0), (1, None)])
def test_the_end_of_a_backward_pass_is_exchange_if_there_are_peers(
    hands, hooks, monkeypatch, ranks, exchange
):
    """As in DistributedDataParallel: a callback after the last gradient waits for the peers."""
    monkeypatch.setattr(hooks.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks.distributed, "get_world_size", lambda: ranks)
    engine = hooks.autograd.Variable._execution_engine  # noqa: SLF001 (as torch does)
    weight = hooks.ones(3, requires_grad=True)

    def gradient_ready(gradient):
        hands.pass_by(2.0)  # computing
        engine.queue_callback(lambda: hands.pass_by(4.0))
        return gradient

    weight.register_hook(gradient_ready)
    clock = step_times.start()
    (weight * 2.0).sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert clock.read() == (None, exchange, None)
    hooks.autograd.backward([(weight * 2.0).sum()])  # several roots: not measured, not in the way
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]


def test_the_broadcast_of_buffers_is_exchange(hands, hooks, monkeypatch):
    """A rank whose model has buffers waits for rank 0 before each forward pass."""
    parallel = hooks.nn.parallel.DistributedDataParallel
    monkeypatch.setattr(parallel, "_sync_module_buffers", lambda *_: hands.pass_by(4.0))
    store = hooks.distributed.HashStore()
    hooks.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = parallel(hooks.nn.BatchNorm1d(2))
        clock = step_times.start()
        model(hooks.ones(4, 2))
    finally:
        hooks.distributed.destroy_process_group()
    assert clock.read() == (None, 4.0, None)


@pytest.mark.parametrize(("on_gpu", "exchange"), [(True, None), (False, 2.0)])
def test_exchanges_of_a_sharded_model_on_gpus_are_not_known(hands, hooks, on_gpu, exchange):
    from malletrain.training import step_hooks

    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    dist = hooks.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = hooks.nn.Linear(2, 2)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        step_hooks.install()
        clock = step_times.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_times, "uses_gpu", lambda: on_gpu)
            model(hooks.ones(1, 2))
        with StepSection("exchange"):
            hands.pass_by(2.0)
    finally:
        dist.destroy_process_group()
    assert clock.read()[1] == exchange


def test_a_backward_pass_of_another_thread_is_not_counted(hands, hooks, monkeypatch):
    """For example that of a model that another thread evaluates."""
    monkeypatch.setattr(hooks.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks.distributed, "get_world_size", lambda: 2)
    engine = hooks.autograd.Variable._execution_engine  # noqa: SLF001 (as torch does)
    weight = hooks.ones(1, requires_grad=True)
    weight.register_hook(lambda _: engine.queue_callback(lambda: hands.pass_by(4.0)))
    clock = step_times.start()
    thread = threading.Thread(target=lambda: (weight * 2.0).sum().backward())
    thread.start()
    thread.join()
    assert weight.grad.tolist() == [2.0]
    assert clock.read() == (None, None, None)


def test_an_error_in_a_backward_pass_ends_the_exchange(hands, hooks, monkeypatch):
    monkeypatch.setattr(hooks.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks.distributed, "get_world_size", lambda: 2)
    weight = hooks.ones(1, requires_grad=True)

    def fail(gradient):
        raise RuntimeError("a peer is lost")

    handle = weight.register_hook(fail)
    clock = step_times.start()
    with pytest.raises(RuntimeError, match="a peer is lost"):
        weight.sum().backward()
    handle.remove()
    with StepSection("data"):
        hands.pass_by(1.0)
    assert clock.read()[0] == 1.0


# --- in the reports ---


def progress_of(agent):
    report.flush()
    return agent.received(WorkerProgress)[-1]


def test_reports_have_the_parts_up_to_the_last_step(hands, monkeypatch):
    with as_worker(monkeypatch) as agent:
        monkeypatch.setenv("MALLETRAIN_STEP_TIMES", "1")
        malletrain.report(8)  # the clock starts
        with StepSection("data"):
            hands.pass_by(0.5)
        malletrain.report(8)
        with StepSection("snapshot"):
            hands.pass_by(9.0)  # belongs to the next step
        progress = progress_of(agent)
        assert (progress.data, progress.exchange, progress.snapshot) == (0.5, None, None)
        malletrain.report(8)
        progress = progress_of(agent)
        assert (progress.data, progress.exchange, progress.snapshot) == (0.5, None, 9.0)


def test_an_agent_that_does_not_know_the_parts_gets_none(hands, monkeypatch):
    with as_worker(monkeypatch) as agent:
        monkeypatch.delenv("MALLETRAIN_STEP_TIMES", raising=False)
        for _ in range(2):
            malletrain.report(8)
            with StepSection("data"):
                hands.pass_by(0.5)
        assert progress_of(agent).data is None
        assert step_times.current() is None


def test_a_fork_measures_nothing(hands, monkeypatch):
    with as_worker(monkeypatch):
        monkeypatch.setenv("MALLETRAIN_STEP_TIMES", "1")
        malletrain.report(8)
        assert isinstance(step_times.current(), StepClock)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if step_times.current() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def clock(monkeypatch):
    # Other tests of this process may have imported it.
    monkeypatch.setattr("malletrain.training.step_times._ACCELERATOR_LIBRARIES", ("not_a_library",))
    made = BusyClock()
    if not made.read():
        made.close()
        pytest.skip("this kernel does not tell for how long a thread ran")
    yield made
    made.close()


def test_work_counts(clock):
    before, own = clock.read(), time.thread_time()
    while time.thread_time() - own < 0.2:
        pass
    worked = time.thread_time() - own
    assert clock.read() - before >= 0.5 * worked  # the kernel brings it up to date at each tick


def test_a_wait_does_not(clock):
    """As in a collective: the thread sleeps until its peers have come."""
    began, before = time.monotonic(), clock.read()
    threading.Event().wait(0.3)
    assert clock.read() - before < time.monotonic() - began


def test_it_is_that_of_the_thread_that_made_it(clock):
    readings = []
    thread = threading.Thread(target=lambda: readings.append(clock.read()))
    thread.start()
    thread.join()
    assert readings[0] is not None


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_with_an_accelerator_nothing_is_told(clock, monkeypatch, name):
    module = SimpleNamespace(**{name: SimpleNamespace(is_initialized=lambda: True)})
    monkeypatch.setitem(sys.modules, "torch", module)
    assert clock.read() is None


def test_what_the_script_says_goes_first():
    busy = Busy()
    assert busy.read() is None
    busy.step(None)
    busy.step(0.25)
    busy.step(0.5)
    assert busy.read() == 0.75
    busy.close()


def test_reports_carry_it(monkeypatch):
    with as_worker(monkeypatch) as agent:
        malletrain.report(8)
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        malletrain.report(8)
        report.flush()
        assert agent.received(WorkerProgress)[-1].busy > 0
        malletrain.report(8, busy_s=1.5)
        malletrain.report(8, busy_s=0.5)
        report.flush()
        assert agent.received(WorkerProgress)[-1].busy == 2.0
        malletrain.report(8, busy_s="long")
        report.flush()
        assert agent.received(WorkerProgress)[-1].steps == 5
        malletrain.report(np.int64(8), busy_s=np.float64(0.5))
        malletrain.report(np.float64(8.0), busy_s=np.float32(0.5))
        report.flush()
        last = agent.received(WorkerProgress)[-1]
        assert (last.steps, last.busy) == (7, 3.0)
