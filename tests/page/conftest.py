"""A real Chromium (Debian's, driven by Playwright) before the page. Without one these tests fail, and do not skip."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from service.http.app import create_app
from service.http.settings import HttpSettings
from tests.unit.http.echo import EchoBackend

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards" / "page"
IMAGES = ROOT / "docs" / "images"
WAIT_MS = 20_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    assert found, "these tests need Debian's chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_MS / 1000
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.02)


class Watched:
    """A page that notes what it should never do."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.abroad: list[str] = []
        self.bytes = 0
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", lambda request: self._asked(request.url, origin))

    def _said(self, message: ConsoleMessage) -> None:
        # A status such as 401 is noted by the browser as well; the tests look at what the page makes of it.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def _asked(self, url: str, origin: str) -> None:
        if not url.startswith((origin, "data:", "blob:")):
            self.abroad.append(url)


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page at `url`. On leaving: no error, no violation of its policy, no request to anybody else."""
    context = browser.new_context(reduced_motion="reduce", **options)
    watched = Watched(context, "/".join(url.split("/")[:3]))
    try:
        watched.page.goto(url)
        watched.page.wait_for_selector("body[data-ready]")
        yield watched.page
        assert not watched.faults, watched.faults
        assert not watched.abroad, watched.abroad
    finally:
        context.close()


@contextmanager
def echoing(backend: EchoBackend, prefix: str = "", **settings: Any) -> Iterator[str]:
    """A real server over an echo backend, in a thread of its own; at `prefix` as behind a proxy that strips it."""
    listener = socket.create_server(("127.0.0.1", 0))
    app: Any = create_app(backend, HttpSettings(**settings), FOLDER)
    if prefix:
        inner = app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith(prefix), scope["path"]
            await inner({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}/"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
