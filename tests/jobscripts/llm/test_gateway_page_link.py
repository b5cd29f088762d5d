"""The link of a service to the page of its gateway."""

from __future__ import annotations

import asyncio
import contextlib

from llmserve.gateway.page_link import PageLink

URL = "https://llm.example.org/"


class Daemon:
    """Takes links, except while ``refusal`` says why not."""

    def __init__(self) -> None:
        self.links: list[tuple[str, str, str]] = []
        self.requests = 0
        self.refusal = ""

    async def set_link(self, job: str, name: str, url: str) -> str:
        self.requests += 1
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.links.append((job, name, url))
        return ""


def test_the_link_is_set_again_for_a_service_of_this_name_that_begins_later():
    daemon = Daemon()

    async def main() -> None:
        task = asyncio.create_task(PageLink(daemon, "llama", URL, interval_s=0.0).run())
        while len(daemon.links) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert set(daemon.links) == {("llama", "LLM gateway", URL)}


def test_a_daemon_that_refuses_is_reported_once_and_asked_again(caplog):
    daemon = Daemon()

    async def main() -> None:
        link = PageLink(daemon, "llama", URL)
        daemon.refusal = "Job j1 is completed already."
        await link.set()
        await link.set()
        daemon.refusal = ""
        await link.set()

    asyncio.run(main())
    (record,) = caplog.records
    expected = "Service llama is not linked to the page: Job j1 is completed already."
    assert record.getMessage() == expected
    assert (daemon.requests, len(daemon.links)) == (3, 1)
