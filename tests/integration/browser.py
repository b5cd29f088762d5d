"""A real browser without a screen, for tests: Chromium and its driver from the distribution's
packages (tests/slurm/install.sh).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests import waiting

T = TypeVar("T")

IMAGES = os.environ.get("MALLETRAIN_DOCS_IMAGES", "")
"""Folder for screenshots; empty: none are made."""


class Browser:
    """Chromium at one page. Elements are named by CSS selectors."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Go to an address."""
        self.driver.get(url)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements, also of those that cannot be seen."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.driver.execute_script(script, selector)

    def text(self, selector: str) -> str:
        """The texts of all elements together."""
        return " ".join(self.texts(selector))

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait for what the page is to show. Return the condition's value."""
        return waiting.until(condition, what, 0.1, lambda: self.text("body")[:3000])

    def until_text(self, selector: str, text: str) -> None:
        """Wait until an element has this text."""
        self.until(lambda: text in self.text(selector), f"{selector} shows {text!r}")

    def click(self, selector: str) -> None:
        """Click as a person does: it must be there to be clicked."""
        self._use(selector, lambda element: element.click())

    def type(self, selector: str, text: str) -> None:
        """Put text in the place of what is in a field."""

        def typed(field) -> None:
            field.clear()
            field.send_keys(text)

        self._use(selector, typed)

    def _use(self, selector: str, do: Callable[[object], None]) -> None:
        """Do something with an element once it is there. Retries while the page redraws it."""
        errors = importlib.import_module("selenium.common.exceptions")
        not_now = (
            errors.StaleElementReferenceException,
            errors.ElementClickInterceptedException,
            errors.InvalidElementStateException,  # nobody could click there, or type
        )

        def done() -> bool:
            elements = self.driver.find_elements("css selector", selector)
            try:
                for element in elements[:1]:
                    do(element)
            except not_now:
                return False
            return bool(elements)

        self.until(done, f"{selector} can be used")

    def run(self, script: str) -> object:
        """Return the value of a JavaScript expression on the page."""
        return self.driver.execute_script(f"return {script}")

    def dark(self, on: bool) -> None:
        """Whether the person likes it dark."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def width(self, pixels: int, height: int = 900) -> None:
        """A screen of this size."""
        size = {"width": pixels, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def picture(self, name: str) -> None:
        """A screenshot for the docs, where they are asked for."""
        if IMAGES:
            self.driver.save_screenshot(str(Path(IMAGES, f"{name}.png")))

    def complaints(self) -> list[str]:
        """Return the browser's complaints since the previous call: script errors, and violations of
        the page's own policy.
        """
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with nothing in its memory."""
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        why = "Chromium and its driver are not installed (Debian: chromium chromium-driver)"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(why)
        pytest.skip(why)
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
        "--no-first-run",
        "--window-size=1200,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
    made = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        made.set_script_timeout(waiting.PATIENCE_S)
        made.set_page_load_timeout(waiting.PATIENCE_S)
        yield Browser(made)
    finally:
        made.quit()
