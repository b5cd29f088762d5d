"""Which phase a job is in, from the batch sizes of its reports."""

from malletrain.core.profiling import WINDOW, PhaseTracker


def feed(tracker, nodes, batch, times=2 * WINDOW):
    for _ in range(times):
        tracker.feed(nodes, batch)
    return tracker.phase


def test_the_short_last_step_of_an_epoch_is_no_phase():
    tracker = PhaseTracker()
    for _ in range(20):
        feed(tracker, 3, 128.0, 6)
        tracker.feed(3, 29.0)
    assert tracker.phase == "default"


def test_another_batch_at_the_same_scale_is_another_phase_and_the_way_back_is_found():
    tracker = PhaseTracker()
    feed(tracker, 3, 128.0)
    assert feed(tracker, 3, 256.0) == "batch x2"
    assert feed(tracker, 3, 128.0) == "default"


def test_a_batch_per_node_is_one_phase_at_all_scales():
    tracker = PhaseTracker()
    assert [feed(tracker, k, 32.0 * k) for k in (4, 3, 2, 4)] == ["default"] * 4
    assert feed(tracker, 4, 64.0 * 4) == "batch x2"
    assert feed(tracker, 2, 64.0 * 2) == "batch x2"
    assert feed(tracker, 2, 32.0 * 2) == "default"


def test_a_global_batch_that_grows_while_the_scale_changes_is_another_phase():
    tracker = PhaseTracker()
    tracker.global_batch(1.0)
    feed(tracker, 4, 256.0)  # four batches of 64 for each update
    assert feed(tracker, 2, 512.0) == "batch x2"
    assert feed(tracker, 3, 256.0) == "default"
    again = PhaseTracker("batch x2")
    again.global_batch(2.0)
    assert feed(again, 3, 512.0) == "batch x2"
    assert feed(again, 2, 1024.0) == "batch x4"


def test_a_batch_that_the_script_states_is_another_phase_at_once():
    tracker = PhaseTracker()
    tracker.global_batch(1.0)
    feed(tracker, 4, 256.0)
    tracker.global_batch(2.0)
    assert tracker.phase == "batch x2"
    tracker.feed(4, 256.0)  # of a step before
    assert feed(tracker, 4, 512.0) == "batch x2"
    tracker.global_batch(1.0)
    tracker.global_batch(2.0)  # a script that restarts states its first batch, too
    assert tracker.phase == "batch x2"
    assert feed(tracker, 4, 256.0) == "default", "the reports decide"


def test_after_a_restart_it_goes_on_in_the_phase_it_was_in():
    tracker = PhaseTracker("batch x2")
    assert feed(tracker, 2, 64.0) == "batch x2"
    assert feed(tracker, 2, 32.0) == "default"


def test_a_few_odd_reports_and_none_at_all_decide_nothing():
    tracker = PhaseTracker("batch xnonsense")
    feed(tracker, 2, 64.0)
    feed(tracker, 2, 640.0, 3)
    assert feed(tracker, 2, 0.0) == "batch xnonsense"


def test_another_model_is_another_phase_at_every_batch_and_survives_a_restart():
    tracker = PhaseTracker()
    feed(tracker, 2, 32.0)
    tracker.another_model("3e+06")
    assert feed(tracker, 2, 32.0) == "default, model 3e+06"
    assert feed(tracker, 2, 64.0) == "batch x2, model 3e+06"
    again = PhaseTracker("batch x2, model 3e+06")
    assert feed(again, 2, 64.0) == "batch x2, model 3e+06"
    assert feed(again, 2, 32.0) == "default, model 3e+06"


def test_another_layout_is_another_phase_and_survives_a_restart():
    tracker = PhaseTracker()
    tracker.another_layout("2 processes × 1 thread")
    assert feed(tracker, 2, 32.0) == "default, layout 2 processes × 1 thread"
    tracker.another_model("3e+06")
    both = "batch x2, model 3e+06, layout 2 processes × 1 thread"
    assert feed(tracker, 2, 64.0) == both
    assert feed(PhaseTracker(both), 2, 64.0) == both
