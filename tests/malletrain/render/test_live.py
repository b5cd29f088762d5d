"""The live screen as text: what a person can read on it."""

import io

import pytest

from malletrain.render.columns import PIPE_WIDTH, console
from malletrain.render.live import HISTORY, Follower, Screen
from tests.malletrain.cli.fake_daemon import event_view, job_view, node_view, status_view


def shown(screen, width=110, height=40):
    terminal = console(io.StringIO())
    terminal.width = width
    terminal.print(screen.render(width, height), height=height)
    return terminal.file.getvalue()


def filled(**changes):
    screen = Screen("A title")
    screen.update(
        changes.get("status", status_view()),
        changes.get(
            "jobs",
            [
                job_view(),
                job_view(
                    id="j2",
                    name="wide",
                    state="suspended",
                    nodes=(),
                    rate=0.0,
                    reason="needs 2 nodes",
                ),
            ],
        ),
        changes.get(
            "nodes",
            [
                node_view("n1"),
                node_view("n2", "leaving", gone_in_s=3.2),
                node_view("n3", "free", ""),
            ],
        ),
        changes.get("events", [event_view(k) for k in range(100)]),
    )
    return screen


def test_everything_is_there():
    text = shown(filled())
    for words in (
        "A title",
        "n1",
        "train",
        "leaving 3 s",
        "held, no job",
        "●●○○",
        "needs 2 nodes",
        "Event number 99.",
        "2 preemptions",
    ):
        assert words in text


@pytest.mark.parametrize("height", [10, 24, 60])
def test_it_fits(height):
    assert len(shown(filled(), height=height).splitlines()) <= height + 1


def test_a_narrow_terminal_keeps_names_and_numbers():
    text = shown(filled(), width=80)
    for words in ("suspended", "●●○○", "123/s", "5,000"):
        assert words in text


def test_empty():
    assert "Waiting for the daemon" in shown(Screen())
    assert "others use the machine" in shown(filled(jobs=[], nodes=[], events=[]))


def test_large_machine_has_a_sign_per_node():
    nodes = [
        node_view(f"n{k}", "job" if k % 2 else "idle", "j1" if k % 2 else "") for k in range(200)
    ]
    text = shown(filled(nodes=nodes, jobs=[]))
    assert text.count("█") == 100 + 1  # one in the legend
    assert "n150" not in text


def test_unreachable_keeps_the_picture():
    screen = filled()
    screen.unreachable("No daemon answers.")
    text = shown(screen)
    assert "No daemon answers." in text
    assert "●●○○" in text
    screen.update(status_view(), [job_view()], [])
    assert "No daemon answers." not in shown(screen)


def test_history_is_bounded_and_of_present_jobs_only():
    screen = Screen()
    for k in range(HISTORY + 50):
        screen.update(status_view(), [job_view(rate=float(k))], [])
    assert len(screen.history["j1"]) == HISTORY
    screen.update(status_view(), [], [])
    assert screen.history == {}


def test_a_pipe_is_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console(io.StringIO()).width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "90")
    assert console(io.StringIO()).width == 90


@pytest.mark.parametrize("is_terminal", [True, False])
def test_zero_columns_are_unknown_and_no_width(monkeypatch, is_terminal):
    """As shells have them whose terminal has no size: nothing but empty lines was printed."""
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("rich.console.Console.is_terminal", is_terminal)
    width = console(io.StringIO()).width
    assert width >= 80 if is_terminal else width == PIPE_WIDTH


class Past:
    """A daemon with ``total`` events."""

    def __init__(self, total):
        self.total = total
        self.cursors = []

    def status(self):
        return status_view()

    def jobs(self):
        return [job_view()]

    def nodes(self, *, explain=False):
        return []

    def events(self, *, since=0, limit=500, job=None, wait_s=0.0):
        self.cursors.append(since)
        begin = max(0, self.total + since) if since < 0 else since
        return [event_view(k) for k in range(begin + 1, min(self.total, begin + limit) + 1)]


def test_follower_begins_with_the_newest_and_reads_all_that_is_new():
    source = Past(5000)
    follower = Follower(Screen(), source)
    assert [e.seq for e in follower.update()][::199] == [4801, 5000]
    source.total = 7500
    assert len(follower.update()) == 2500
    assert follower.update() == []
