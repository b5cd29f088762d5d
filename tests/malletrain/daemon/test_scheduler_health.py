"""How a daemon and a main scheduler that has too much to do get on."""

from dataclasses import replace

from malletrain.protocol.event_kinds import EventKind
from scavenger.interface import Contact
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until


class Moody(Imagined):
    """A scheduler whose mood a test sets."""

    mood = Contact(calls={("squeue", "ok"): 7})

    def contact(self):
        return self.mood


def test_that_the_scheduler_is_busy_is_told_once_and_so_is_its_end(tmp_path):
    machine = Moody("n0")
    daemon = RunningDaemon(tmp_path, machine, several=False)

    def event_kinds():
        kinds = (EventKind.SCHEDULER_BUSY, EventKind.SCHEDULER_ANSWERS)
        return [e.kind for e in daemon.events() if e.kind in kinds]

    def metric(name, **labels):
        registry = daemon.components.state.metrics.registry
        return registry.get_sample_value(f"malletrain_{name}", labels)

    try:
        until(
            lambda: metric("scheduler_calls_total", command="squeue", outcome="ok") == 7,
            "the calls are counted",
        )
        calm = machine.mood
        machine.mood = replace(calm, busy="RPC rate limit", busy_s=5.0, refused_s=60.0)
        until(lambda: metric("scheduler_backoff_seconds", cause="busy") == 5, "it is noticed")
        until(lambda: metric("scheduler_backoff_seconds", cause="refused") == 60, "so is this")
        machine.mood = replace(machine.mood, busy="RPC rate limit", busy_s=10.0)
        until(lambda: metric("scheduler_backoff_seconds", cause="busy") == 10, "it goes on")
        machine.mood = calm
        until(lambda: metric("scheduler_backoff_seconds", cause="busy") == 0, "it is over")
        assert event_kinds() == ["scheduler-busy", "scheduler-answers"]
        [sentence] = [e.sentence for e in daemon.events() if e.kind == "scheduler-busy"]
        assert "RPC rate limit" in sentence
        with daemon.client() as client:
            assert client.usage() == []
    finally:
        daemon.stop()
