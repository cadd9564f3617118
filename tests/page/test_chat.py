"""Chat, in a real browser, over a real server whose engine says back what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import IMAGES, echoing, opened, until
from tests.unit.http.echo import EchoBackend

EVIL = (
    "<script>document.body.dataset.owned=1</script> <img src=x onerror=document.body.dataset.owned=1> <b>not bold</b> "
    "[a](javascript:document.body.dataset.owned=1) ![b](http://127.0.0.1:9/c.png) **bold**"
)


@pytest.fixture
def backend() -> EchoBackend:
    return EchoBackend()


@pytest.fixture
def url(backend: EchoBackend) -> Iterator[str]:
    with echoing(backend) as url:
        yield url


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answer(page: Page) -> str:
    """The last answer's text, once it has ended."""
    text = page.locator("article.assistant .text").last
    # The button is enabled before an answer begins, too.
    expect(text).not_to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    return text.inner_text().strip()


def set_to(page: Page, label: str, value: str) -> None:
    page.get_by_text("Settings", exact=True).click()
    field = page.get_by_label(label, exact=True)
    if field.evaluate("element => element.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
        field.blur()


def test_an_answer_streams_and_says_how_fast_it_was(browser: Browser, backend: EchoBackend, url: str) -> None:
    with opened(browser, url) as page:
        say(page, "steady:" + " ".join(f"w{at}" for at in range(50)))
        expect(page.locator("article.assistant .text").last).to_contain_text("w1")
        assert "w49" not in page.locator("article.assistant .text").last.inner_text()  # it is still being written
        assert answer(page).endswith("w49")
        stats = page.locator(".stats").last.inner_text()
        assert "TTFT" in stats and "tok/s" in stats and "50 tokens" in stats and "pool shared" in stats


def test_stop_frees_the_slot_and_keeps_what_came(browser: Browser, backend: EchoBackend, url: str) -> None:
    with opened(browser, url) as page:
        say(page, "hang-later:one two three")
        expect(page.locator("article.assistant .text").last).to_contain_text("one")
        assert backend.running == 1
        page.get_by_role("button", name="Stop").click()
        assert answer(page) == "one"
        assert "stopped" in page.locator(".stats").last.inner_text()
        until(lambda: backend.running == 0 and len(backend.closed) == 1)


def test_an_answer_with_markup_is_text(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        say(page, EVIL)
        shown = answer(page)
        assert "<script>document" in shown and "<b>not bold</b>" in shown and "<img src=x" in shown
        text = page.locator("article.assistant .text").last
        assert text.locator("script, img, b").count() == 0
        assert [a.get_attribute("href") for a in text.locator("a").all()] == ["http://127.0.0.1:9/c.png"]  # not loaded
        assert text.locator("strong").inner_text() == "bold"
        assert page.evaluate("document.body.dataset.owned") is None


def test_markdown_and_code_are_rendered(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        say(
            page,
            "# Head\n\n`in` it\n\n```python\nfor x in y:\n    z\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<https://a.example/>",
        )
        answer(page)
        text = page.locator("article.assistant .text").last
        assert text.locator("pre").inner_text().rstrip() == "for x in y:\n    z"
        assert text.locator("h3").inner_text() == "Head" and text.locator("td").count() == 2
        assert text.locator("a").get_attribute("rel") == "noopener noreferrer"


def test_reasoning_is_folded_and_tool_calls_are_shown(browser: Browser, backend: EchoBackend, url: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    with opened(browser, url) as page:
        say(page, "think:it is")
        assert answer(page) == "it is"
        thoughts = page.locator("details.reasoning .plain-text")
        expect(thoughts).to_be_hidden()
        page.locator("summary", has_text="Reasoning").click()
        expect(thoughts).to_be_visible()
        assert thoughts.inner_text().strip() == "so"
        set_to(page, "Tools (JSON list)", json.dumps(tools))
        say(page, 'tool:{"city":"Rome"}')
        expect(page.locator(".call code")).to_have_text("weather")
        expect(page.locator(".call pre")).to_contain_text('"city": "Rome"')
        page.get_by_label("Result of the tool call weather").fill("sunny")
        page.get_by_role("button", name="Send").click()
        assert answer(page) == "sunny"
    told = json.loads(backend.seen[-1][0].body)["messages"]
    assert [message["role"] for message in told[-3:]] == ["user", "assistant", "tool"]
    assert told[-1]["tool_call_id"] == told[-2]["tool_calls"][0]["id"]


def test_settings_reach_the_service(browser: Browser, backend: EchoBackend, url: str) -> None:
    with opened(browser, url) as page:
        set_to(page, "System prompt", "Be brief.")
        for label, value in (("Temperature", "0.5"), ("Max tokens", "2")):
            page.get_by_label(label, exact=True).fill(value)
        page.get_by_label("Tier", exact=True).select_option("flex")
        page.get_by_label("Mode", exact=True).select_option("throughput")
        say(page, "a b c d")
        assert answer(page) == "a b"
        assert "cut at the token limit" in page.locator(".stats").last.inner_text()
    request, context = backend.seen[-1]
    body = json.loads(request.body)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.5, 2)
    assert (context.requested_tier, context.mode) == ("flex", "throughput")


def test_a_reload_keeps_the_conversation_and_it_can_be_edited_exported_and_deleted(
    browser: Browser, backend: EchoBackend, url: str
) -> None:
    with opened(browser, url) as page:
        say(page, "remember me")
        answer(page)
        page.reload()
        expect(page.locator("article")).to_have_count(2)
        assert page.locator("article.assistant .text").inner_text().strip() == "remember me"
        page.get_by_role("button", name="Edit").click()
        say(page, "changed")
        assert answer(page) == "changed"
        expect(page.locator("article")).to_have_count(2)
        assert len(json.loads(backend.seen[-1][0].body)["messages"]) == 1
        with page.expect_download() as started:
            page.get_by_role("button", name="Export all").click()
        exported = json.loads(started.value.path().read_text())
        assert [message["content"].strip() for message in exported[0]["messages"]] == ["changed", "changed"]
        page.get_by_role("button", name="Delete changed").click()
        expect(page.locator("article")).to_have_count(0)
        page.reload()
        expect(page.locator(".conversations li")).to_have_count(0)


def test_errors_are_said(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        say(page, "refuse:x")
        expect(page.locator("p.error").last).to_contain_text("engine_failed")
        say(page, "die:one two three four")
        expect(page.locator("p.error").last).to_contain_text("the engine died")
        assert answer(page) == "one two"


def test_a_key_is_asked_for_and_kept_in_this_tab_only(browser: Browser) -> None:
    with echoing(EchoBackend(key="secret", operator_key="boss")) as url, opened(browser, url) as page:
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("Key", exact=True).fill("secret")
        page.get_by_role("button", name="Use it").click()
        say(page, "hello")
        assert answer(page) == "hello"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert page.evaluate("sessionStorage.length") == 1
        page.get_by_role("link", name="Service").click()
        expect(page.get_by_role("alert")).to_contain_text("operator")
        page.get_by_role("button", name="Enter an operator's key").click()
        page.get_by_label("Key", exact=True).fill("boss")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("[data-pool=shared]")).to_be_visible()


def test_it_works_behind_a_path_prefix(browser: Browser) -> None:
    with echoing(EchoBackend(), prefix="/models/glm") as url, opened(browser, url) as page:
        say(page, "hello")
        assert answer(page) == "hello"


def test_a_loading_service_says_what_it_waits_for(browser: Browser) -> None:
    backend = EchoBackend(ready=False)
    with echoing(backend) as url, opened(browser, url) as page:
        expect(page.locator("#loading")).to_contain_text("Pool shared: loading, ready in about 7")
        backend.ready = True
        expect(page.locator("#loading")).to_be_hidden()


def test_it_can_be_used_by_keyboard(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.keyboard.type("by keys")  # the field has the focus
        page.keyboard.press("Enter")
        assert answer(page) == "by keys"
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("hang-later:stop me")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant .text").last).to_contain_text("stop")
        page.keyboard.press("Escape")
        expect(page.locator(".stats").last).to_contain_text("stopped")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_axe_finds_no_serious_fault(browser: Browser, url: str, scheme: str, width: int) -> None:
    with opened(browser, url, color_scheme=scheme, viewport={"width": width, "height": 844}) as page:
        say(page, "think:# What is it?\n\nA **list**:\n\n- one\n- `two`\n\n```\ncode\n```")
        answer(page)
        faults = serious(page)
        assert not faults, faults
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if (scheme, width) in (("light", 1200), ("dark", 390)):
            page.screenshot(path=IMAGES / f"page-chat-{scheme}.png")


def serious(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {[node['html'] for node in fault['nodes']][:3]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
