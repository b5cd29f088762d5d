"""How idle GPU-seconds of shared hosts, and the harvest of them, are added up."""

from __future__ import annotations

from benchmarks.slots_slurm import GPUS, GpuRun, account, busy_at_least, workload


def test_when_so_many_gpus_are_busy():
    pieces = [(0.0, 10.0, 1), (5.0, 20.0, 2), (20.0, 30.0, 3)]
    assert busy_at_least(pieces, 1) == ((0.0, 30.0),)
    assert busy_at_least(pieces, 2) == ((5.0, 30.0),)
    assert busy_at_least(pieces, 3) == ((5.0, 10.0), (20.0, 30.0))
    assert busy_at_least(pieces, 4) == ()


def test_known_gpu_seconds():
    # Of the four GPUs of a, one is busy all the time and a second one in the middle, so that two
    # layers are idle for 300 s, one for two gaps of 130 s and 50 s, and one never. b is idle.
    used = {"a": [(0.0, 300.0, 1), (130.0, 250.0, 1)], "b": []}
    run = GpuRun(0.0, 300.0, used, ())
    slots = {
        "a/gpu.0": ((0.0, 300.0),),
        "a/gpu.1": ((10.0, 300.0),),
        "a/gpu.2": ((0.0, 100.0), (260.0, 300.0)),
        "b/gpu.0": ((0.0, 300.0),),
    }
    sums = account(run, slots, 1)
    assert sums["idle"] == 2 * 300 + 130 + 50 + 4 * 300
    assert sums["offered"] == 2 * 300 + 130 + 4 * 300  # 50 s are no long gap
    # a: one slot works all the time, a second one from 10 s on, and in the first gap a third one
    # until 100 s, of which 10 s are before the second one began.
    assert sums["harvested"] == 300 + (290 + 10) + (100 - 10) + 300
    nodes = account(run, {"b": ((100.0, 300.0),)}, GPUS)
    assert nodes == {**sums, "harvested": 4 * 200}


def test_main_jobs_request_the_load():
    jobs = workload(4, 5.0, 0.6, 1)
    requested_s = sum(job.gpus * job.seconds for job in jobs)
    assert 0.6 <= requested_s / (4 * GPUS * 300) <= 0.6 + 4 * 200 / (4 * GPUS * 300)
    assert jobs == workload(4, 5.0, 0.6, 1)


def test_main_jobs_fit_beside_the_gpus_that_are_held():
    jobs = workload(4, 5.0, 0.6, 1, held_gpus=2)
    assert {job.gpus for job in jobs} == {1, 2}
    requested_s = sum(job.gpus * job.seconds for job in jobs)
    assert 0.6 <= requested_s / (4 * 2 * 300) <= 0.6 + 2 * 200 / (4 * 2 * 300)
