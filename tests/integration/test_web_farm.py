"""The page of a farm in a real browser, before a real daemon."""

from __future__ import annotations

import pytest

from tests.integration import farms
from tests.integration.browser import browser
from tests.integration.embedded import site
from tests.integration.test_web_browser import unnamed, unread
from tests.integration.web_page import COLD, MARKUP, page, when_fitted

pytest.importorskip("fastapi")

ANSWER = """
window.asked = 0; window.later = 0;
const [fetches, waits] = [window.fetch, window.setTimeout];
window.fetch = (url, options) => url.includes("/tasks")
  ? (window.asked++, Promise.resolve(new Response('{"error": "Not yours."}', {status: STATUS})))
  : fetches(url, options);
window.setTimeout = (call, ms) => (window.later += ms === 2000, waits(call, ms && 10));
"""
"""Replaces the answers about tasks, and counts the requests, and the timers for further ones."""
COMMAND = (
    "case {x} in slow*) while ! test -e stop; do sleep 0.1; done;;"
    f" bad*) echo first; echo '{MARKUP}'; exit 7;; esac"
)
ROWS = [["bad1"], ["a"], ["b"], ["slow1"], ["bad2"], ["c"]]


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """A site, its page, and a browser."""
    folder = tmp_path_factory.mktemp("farm")
    with (
        site(folder / "site", nodes=2, config=COLD) as made,
        page(made.state) as web,
        browser(folder / "profile") as tab,
    ):
        yield made, web, tab


@pytest.fixture
def viewed(standing, request):
    made, _, tab = standing
    made.begin(f"work-{request.node.name}")
    tab.width(1200)
    tab.open("about:blank")
    yield standing
    made.clear()


def test_a_person_follows_a_farm(viewed):
    made, web, tab = viewed
    job = farms.submit(made, COMMAND, ROWS, "1:2")
    made.until(
        lambda: (
            farms.tasks(made, job).counts["done"] == 3
            and farms.tasks(made, job).counts["failed"] == 2
            and farms.tasks(made, job).counts["running"] == 1
        ),
        "all but the slow task have ended",
    )
    made.until(
        lambda: job in [each["id"] for each in web.get("jobs") if each["mode"] == "farm"],
        "the page has seen it",
    )
    history = web.get(f"jobs/{job}/tasks/history")
    assert history["points"][-1][1:] == [3, 2, 1]
    assert sorted(task["number"] for task in history["slowest"]) == [1, 2, 5]
    failed = web.get(f"jobs/{job}/tasks?state=failed&limit=1")
    assert [task["number"] for task in failed["tasks"]] == [0]
    made.until(lambda: web.get("machine")["status"]["nodes_farming"] > 0, "its nodes are counted")
    assert web.get("machine")["status"]["nodes_training"] == 0
    assert web.ask(f"jobs/{job}/tasks?state=nothing").status == 400

    tab.open(web.url)
    tab.until_text(".numbers", "Running tasks")
    tab.run(f"location.hash = '#/job/{job}'")
    tab.until_text("h1", "farm")
    tab.until_text("#tasks-counts", "3 of 6 tasks")
    assert "Failed2 of 6 tasks" in tab.text("#tasks-counts")
    tab.until_text("#tasks-failed", MARKUP)
    assert "first" not in tab.text("#tasks-failed"), "only the last line"
    assert "logs/4.log" in tab.text("#tasks-failed")
    assert "slow1" in tab.text("#tasks-slowest")
    assert tab.run("document.querySelectorAll('#tasks-picture svg path.line').length") == 3
    visible = "[...document.querySelectorAll('h2')].filter((e) => e.offsetParent)"
    assert tab.run(f"{visible}.map((e) => e.textContent)") == [
        *("Tasks", "Scale", "Notices", "Log")
    ]
    assert "Command" in tab.text("#job-facts")
    tab.picture("web-farm")
    assert tab.run("document.querySelectorAll('main img').length") == 0
    assert tab.run("window.pwned") is None

    tab.width(400, 844)
    tab.until(lambda: tab.run("document.documentElement.scrollWidth <= innerWidth"), "it fits")
    assert tab.run(unnamed()) == []
    assert when_fitted(tab, unread()) == []

    # It follows to the end.
    (made.work / "stop").touch()
    made.until_state(job, "failed")
    tab.until_text("#tasks-counts", "4 of 6 tasks")
    tab.until_text("#job-facts", "failed")
    assert web.get(f"jobs/{job}/tasks/history")["points"][-1][1:] == [4, 2, 0]
    assert tab.complaints() == []

    # So does the page of a farm that ended before.
    made.kill_daemon()
    made.start_daemon()
    made.until(lambda: web.ask(f"jobs/{job}").status == 200, "the daemon is back")
    assert web.get(f"jobs/{job}/tasks/history")["points"][-1][1:] == [4, 2, 0]


def test_the_page_of_a_farm_does_not_repeat_what_is_refused(viewed):
    made, web, tab = viewed
    job = farms.submit(made, COMMAND, [["slow1"]], "1:1")
    made.until(lambda: job in [each["id"] for each in web.get("jobs")], "the page has it")

    def answered(status):
        tab.open("about:blank")
        tab.open(web.url)
        tab.until_text(".numbers", "node")
        tab.driver.execute_script(ANSWER.replace("STATUS", str(status)))
        tab.run(f"location.hash = '#/job/{job}'")
        tab.until_text("#tasks-counts", "Not yours.")

    answered(409)
    assert tab.run("[window.asked, window.later]") == [2, 0]
    answered(503)  # no daemon answers for a moment
    tab.until(lambda: tab.run("window.asked") > 4, "it asks again")
