"""The views of the service and of load, over `glm5 serve` with the simulated engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import IMAGES, opened, until
from tests.page.test_chat import serious
from tests.service import Service, running

PROFILE = str(Path(__file__).resolve().parents[2] / "deployments/profiles/sim-8x-rtx-pro-6000.yaml")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(PROFILE, sets=["pools.shared.cpus=0.1", "pools.shared.engine.load_s=3"]) as service:
        yield service


@contextmanager
def load(service: Service, users: int) -> Iterator[None]:
    """`users` streams, begun anew as they end."""
    over = threading.Event()

    def one() -> None:
        body = {
            "model": service.model,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2000,
            "stream": True,
        }
        while not over.is_set():
            with service.client as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        break

    threads = [threading.Thread(target=one) for _ in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def look(page: Page, view: str) -> None:
    page.get_by_role("link", name=view).click()


def shown(page: Page, bucket: str) -> str:
    """Tok/s since the start at so many at once, as the table has it."""
    row = page.get_by_role("table", name="Tok/s of one replica").locator(
        "tr", has=page.get_by_role("rowheader", name=bucket, exact=True)
    )
    return row.locator("td").first.inner_text()


def test_the_curve_fills_and_moves_under_load(browser: Browser, service: Service) -> None:
    with opened(browser, service.url + "/", viewport={"width": 1200, "height": 1250}) as page:
        look(page, "Service")
        expect(page.locator("[data-pool=shared]")).to_contain_text("1 of 1 replicas ready")
        for users, bucket in ((1, "1"), (4, "3-4"), (12, "9-16")):
            with load(service, users):
                expect(page.locator(".cards")).to_contain_text(f"decoding{users}", use_inner_text=False)
                expect(page.get_by_role("rowheader", name=bucket, exact=True)).to_be_visible()
        assert float(shown(page, "1")) < float(shown(page, "3-4")) < float(shown(page, "9-16"))
        assert page.locator("[data-pool=shared] canvas").count() == 1
        with httpx.Client(base_url=service.url, timeout=30) as client:
            wrong = {"model": service.model, "messages": [{"role": "user", "content": "x " * 40_000}]}
            assert client.post("/v1/chat/completions", json=wrong).status_code == 400
        expect(page.get_by_role("table", name="Since the start, by code")).to_contain_text("context_length_exceeded")
        expect(page.get_by_role("table", name="Seen while somebody looked")).to_contain_text("context_length_exceeded")
        expect(page.get_by_role("table", name="Since the start, by tier")).to_contain_text("ms")
        assert not serious(page)
        page.screenshot(path=IMAGES / "page-service-light.png")


def test_a_sweep_asks_first_is_refused_while_others_are_served_and_makes_a_curve(
    browser: Browser, service: Service, tmp_path: Path
) -> None:
    run = tmp_path / "summary.json"
    levels = [{"concurrency": users, "measured": {"output_tok_s": 20.0 * users, "ok": 3}} for users in (1, 8)]
    run.write_text(json.dumps({"format": 1, "interrupted": False, "levels": levels}))
    with opened(browser, service.url + "/", viewport={"width": 1200, "height": 1250}) as page:
        look(page, "Load")
        start, status = page.get_by_role("button", name="Start a sweep"), page.locator("#load [role=status]")
        with load(service, 1):
            until(lambda: service.metric("glm_requests_in_flight") == 1)
            page.wait_for_timeout(3000)  # until the page knows of it
            start.click()
            expect(status).to_contain_text("of others are being served")
        page.get_by_label("Start although").check()
        start.click()
        page.get_by_role("button", name="Cancel").click()
        expect(status).to_contain_text("of others are being served")  # nothing was begun
        start.click()
        page.get_by_role("button", name="Start", exact=True).click()
        expect(status).to_have_text("Done.", timeout=60_000)
        table = page.get_by_role("table", name="This sweep")
        rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
        assert [row[0] for row in rows] == ["1", "2", "4", "8"]
        assert float(rows[0][1]) < float(rows[3][1])
        page.get_by_label("Lay over").set_input_files(run)
        expect(page.get_by_role("table", name="Stored run")).to_contain_text("160.0")
        page.screenshot(path=IMAGES / "page-load-light.png")
        page.get_by_label("Lay over").set_input_files(Path(__file__))
        expect(status).to_contain_text("not JSON")
        assert not serious(page)


def test_stop_in_the_page_frees_the_slot(browser: Browser, service: Service) -> None:
    with opened(browser, service.url + "/") as page:
        page.get_by_label("Message", exact=True).fill("go on")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Max tokens").fill("4000")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant .text")).to_contain_text("river")
        until(lambda: service.metric("glm_requests_in_flight") == 1)
        page.get_by_role("button", name="Stop").click()
        until(lambda: service.metric("glm_requests_in_flight") == 0)
