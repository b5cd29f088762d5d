"""The app of Open OnDemand: its templates rendered by Ruby, its session run, and the page used in a
real browser by way of the portal's proxy (tests/integration/portal.py).
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration import portal
from tests.integration.browser import browser
from tests.integration.embedded import site
from tests.integration.web_page import CHATTY, COLD

pytest.importorskip("fastapi")


@pytest.fixture
def ruby() -> None:
    """Ruby is there."""
    if shutil.which("ruby") is None:
        reason = "There is no ruby (Debian: ruby); run tests/slurm/install.sh as root"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(reason)
        pytest.skip(reason)


def test_the_form_has_a_field_for_each_word_of_the_templates():
    form = portal.form()
    assert set(form["attributes"]) <= set(form["form"])
    text = "".join(file.read_text() for file in (portal.APP / "template").iterdir())
    used = {name for name in ("malletrain", "portal", "bc_queue") if f"context.{name}" in text}
    assert used == {"malletrain", "portal"}
    assert text.count("context.") == len(used)
    manifest = yaml.safe_load((portal.APP / "manifest.yml").read_text())
    assert manifest["role"] == "batch_connect"


def test_what_a_user_puts_into_the_form_stays_one_word(ruby, tmp_path):
    portal.stage(tmp_path / "s", {"malletrain": "/opt/a b;reboot", "portal": "x y"})
    script = (tmp_path / "s" / "script.sh").read_text()
    assert r"exec /opt/a\ b\;reboot web" in script
    assert r"--allow-host x\ y" in script
    submit = portal.render((portal.APP / "submit.yml.erb").read_text(), {})
    assert yaml.safe_load(submit)["batch_connect"] == {"template": "basic"}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("location", "./?a=b", "/rnode/n/1/?a=b"),
        ("location", "./", "/rnode/n/1/"),
        ("set-cookie", "c=t; HttpOnly; Path=/", "c=t; Path=/rnode/n/1; HttpOnly"),
        ("etag", "/x", "/x"),
    ],
)
def test_what_the_proxy_makes_of_answers(key, value, expected):
    assert portal.edited("/rnode/n/1", key, value) == expected


@pytest.mark.thorough
def test_a_person_looks_and_cancels_by_way_of_the_portal(ruby, tmp_path):
    with site(tmp_path / "site", nodes=1, config=COLD) as made:
        script, stop = made.script("chatty.py", CHATTY), made.work / "stop"
        job = made.submit(script, str(stop), "loss", name="wind", nodes=(1, 1), profile=False)
        folder = tmp_path / "session"
        program = str(Path(sys.executable).with_name("malletrain"))
        portal.stage(folder, {"malletrain": program, "portal": portal.NAME})
        with portal.session(folder, made.state) as connection:
            assert stat.S_IMODE((folder / "connection.yml").stat().st_mode) == 0o600
            view = (portal.APP / "view.html.erb").read_text()
            card = portal.render(view, {}, **connection)
            with portal.portal(card) as address, browser(tmp_path / "profile") as tab:
                tab.open(f"{address}/card")
                tab.click("button")
                tab.until(lambda: len(tab.driver.window_handles) == 2, "the page opens")
                tab.driver.switch_to.window(tab.driver.window_handles[1])
                tab.until_text("h1", "Machine")
                assert connection["password"] not in tab.driver.current_url
                (cookie,) = tab.driver.get_cookies()
                assert cookie["path"] == f"/rnode/{portal.NODE}/{connection['port']}"
                tab.until_text("#events", "job-submitted")
                tab.run(f"location.hash = '#/job/{job}'")
                tab.until_text("h1", "wind")
                tab.click("#cancel")
                tab.click("#cancel-yes")
                tab.until_text("#job-facts", "cancelled")
                assert made.job(job).state == "cancelled"
                # The portal itself has no icon.
                assert [
                    complaint for complaint in tab.complaints() if "/favicon.ico " not in complaint
                ] == []
