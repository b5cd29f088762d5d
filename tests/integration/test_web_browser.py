"""The page in a real browser, before a real daemon. With MALLETRAIN_DOCS_IMAGES=docs/images it
takes the screenshots of the docs too.
"""

from __future__ import annotations

import pytest

from tests.integration.browser import IMAGES, browser
from tests.integration.embedded import site
from tests.integration.web_page import CHATTY, COLD, MARKUP, TOKEN, page, when_fitted

pytest.importorskip("fastapi")


NAME = "wind-model" if IMAGES else MARKUP
"""Of the job; the docs show an ordinary one."""


def samples(made, job):
    return made.job(job).samples


def test_a_person_follows_submits_cancels_and_goes_on_after_the_daemon_was_killed(tmp_path):
    with (
        site(tmp_path / "site", nodes=3, config=COLD) as made,
        page(made.state) as web,
        browser(tmp_path / "profile") as tab,
    ):
        script, stop = made.script("chatty.py", CHATTY), made.work / "stop"
        job = made.submit(script, str(stop), NAME, name=NAME, nodes=(1, 2), profile=False)
        made.until_samples(job, 8)

        # It opens, and the token is not in the address any more.
        tab.open(web.url)
        tab.until_text("h1", "Machine")
        assert TOKEN not in tab.driver.current_url
        tab.until(lambda: tab.run("document.querySelectorAll('rect.node-job').length"), "training")
        tab.until_text("#events", "job-started")
        tab.picture("web-machine")

        # A running job: its log follows, its metric is drawn; markup is text wherever it comes.
        tab.click('a[href="#/jobs"]')
        tab.until_text("#jobs", NAME)
        tab.click(f'#jobs a[href="#/job/{job}"]')
        tab.until_text("h1", NAME)
        tab.until_text("#log", NAME)
        tab.until_text("#job-metrics", NAME)
        before = len(tab.text("#log"))
        tab.until(lambda: len(tab.text("#log")) > before, "the log grows")
        tab.until_text("#job-scale", "Nodes over time")
        tab.picture("web-job")
        assert tab.run("document.querySelectorAll('main img').length") == 0
        assert tab.run("window.pwned") is None

        # Submitting: a mistake is reported, then the job is there and is looked at.
        tab.click('a[href="#/submit"]')
        tab.type("#script", "/nowhere.py")
        tab.click("button.primary")
        tab.until_text("#problem", "/nowhere.py")
        tab.type("#script", str(script))
        tab.type("#args", f"{stop}\nloss")
        tab.type("#name", "second")
        tab.type("#nodes", "9")
        tab.type("#workdir", str(made.work))
        tab.type("#env", "MALLETRAIN_PRELOAD=0")
        tab.click("button.primary")
        tab.until_text("h1", "second (j2)")
        tab.until_text(".why", "needs 9 nodes at least")

        # Other limits, with which it runs; then it is cancelled, after a question.
        tab.type('input[name="max_nodes"]', "1")
        tab.type('input[name="min_nodes"]', "1")
        tab.click("#rescale")
        tab.until_text("#steered", "may use 1:1 nodes")
        tab.until_text("#job-facts", "running")
        tab.click("#cancel")
        tab.click("#cancel-yes")
        tab.until_text("#job-facts", "cancelled")
        assert made.job("j2").state == "cancelled"

        # Why a job failed stands there once.
        broken = made.submit(made.script("broken.py", "raise ValueError('no data')"), name="broken")
        made.until_state(broken, "failed")
        tab.run(f"location.hash = '#/job/{broken}'")
        tab.until_text(".failure", "[rank 0]")
        assert tab.text("main").count("Rank 0 exited with code 1") == 1

        # The daemon is killed; the page says so, keeps what it has, and goes on with the next one.
        tab.click('a[href="#/"]')
        made.kill_daemon()
        tab.until(lambda: not tab.run("document.getElementById('away').hidden"), "it is said")
        assert "What you see is of" in tab.text("#away")
        assert tab.run("document.querySelectorAll('rect.node-job').length") > 0
        made.start_daemon()
        tab.until(lambda: tab.run("document.getElementById('away').hidden"), "it is back")
        seen = samples(made, job)
        made.until(lambda: samples(made, job) > seen, "the job goes on")

        # By keyboard, in the dark, on a phone.
        tab.open(f"{web.base}/")
        tab.until_text("#events", "job-cancelled")
        tab.driver.switch_to.active_element.send_keys("\ue004")  # Tab
        assert tab.run("document.activeElement.className") == "skip"
        light = tab.run("getComputedStyle(document.body).backgroundColor")
        tab.dark(True)
        assert tab.run("getComputedStyle(document.body).backgroundColor") != light
        tab.picture("web-dark")
        tab.width(390, 844)
        for address in ("", "jobs", f"job/{job}", "sweeps", "forecast", "usage", "submit"):
            tab.run(f"location.hash = '#/{address}'")
            tab.until(lambda: tab.run("document.querySelector('h1')"), "a page")
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), address
            assert tab.run(unnamed()) == [], address
            assert when_fitted(tab, unread()) == [], address
        tab.picture("web-phone")
        # 503: what was under way when the daemon was killed.
        complaints = [t for t in tab.complaints() if " 400 (" not in t and " 503 (" not in t]
        assert complaints == []
        stop.touch()
        made.until_state(job, "completed")


def unread() -> str:
    """The words in pictures that are too small for anybody, and names of jobs that are one word and
    stand on several lines.
    """
    return (
        "[...document.querySelectorAll('figure svg text, #jobs a')].filter((e) => e.closest('svg')"
        " ? e.getBoundingClientRect().height < 9"
        r" : /^[a-zA-Z0-9]+$/.test(e.textContent) && e.getClientRects().length > 1"
        ").map((e) => e.textContent)"
    )


def unnamed() -> str:
    """The fields and buttons of a page that a screen reader has no name for."""
    return (
        "[...document.querySelectorAll('input, select, textarea, button, svg[role=img]')].filter("
        "(e) => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()"
        " || e.tagName === 'svg')).map((e) => e.outerHTML)"
    )
