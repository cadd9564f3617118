"""Clients for chaos tests: many streams at once, each with what it saw and when."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.service import Service

TEXT = "the river runs over stone and under bridge while small lights move along its bank at night"
WORDS = TEXT.split(" ")
"""What the simulated engine says, over and over."""


@dataclass
class Seen:
    """One request. `end`: `whole`, `error` (one explicit error: a status, an error event or a cut connection), or empty
    while it runs. `code`: of the error."""

    sent: float
    status: int | None = None
    end: str = ""
    code: str = ""
    text: str = ""
    first: float | None = None
    ended: float = 0.0
    retry_after: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.end == "whole"


def client(url: str, timeout_s: float = 60.0) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(timeout_s, pool=None), limits=limits)


def body(tokens: int, **rest: Any) -> dict[str, Any]:
    return {
        "model": "simulated",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": True,
        **rest,
    }


async def stream(http: httpx.AsyncClient, asked: dict[str, Any], headers: dict[str, str] | None = None) -> Seen:
    """One streamed request to its end, whatever that is. Never raises for the service's faults."""
    seen = Seen(time.monotonic())
    errors: list[str] = []
    done = False
    try:
        async with http.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as response:
            seen.status, seen.headers = response.status_code, dict(response.headers)
            if response.status_code != 200:
                after = response.headers.get("retry-after")
                seen.retry_after = float(after) if after else None
                errors.append(json.loads(await response.aread())["error"]["code"])
            else:
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            errors.append(event["error"]["code"])
                        elif event["choices"] and event["choices"][0]["delta"].get("content"):
                            seen.first = seen.first or time.monotonic()
                            seen.text += event["choices"][0]["delta"]["content"]
    except httpx.HTTPError as broken:
        # A proxy killed in mid-stream can say nothing more: a connection cut before its end is an error to any client.
        if not done and not errors:
            errors.append(type(broken).__name__)
    seen.ended = time.monotonic()
    assert len(errors) <= 1, f"more than one error: {errors}"
    assert not (done and errors), f"both [DONE] and {errors}"
    seen.end, seen.code = ("whole", "") if done else ("error", errors[0] if errors else "cut without a word")
    return seen


def right(seen: Seen, tokens: int) -> bool:
    """A whole answer has exactly the engine's words, none lost, none twice."""
    return seen.text == "".join(f" {WORDS[i % len(WORDS)]}" for i in range(tokens))


def tally(all_seen: Iterable[Seen]) -> Counter[str]:
    return Counter(seen.code or seen.end for seen in all_seen)


def books(service: Service) -> dict[str, float]:
    """The service's books: requests that ingresses hold a slot for, and requests inside engines."""
    text = httpx.get(f"{service.url}/metrics", timeout=10.0).text

    def total(name: str) -> float:
        lines = (line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    queued = total("glm_requests_queued")
    return {
        "held": total("glm_requests_in_flight") - queued,
        "queued": queued,
        "inside": total("glm_requests_running"),
        "output_tokens": total("glm_output_tokens_total"),
        "ok": total("glm_requests_total"),
    }


def settle(service: Service, within_s: float) -> float:
    """Seconds until nothing runs, waits or is held anywhere."""
    began = time.monotonic()
    found: dict[str, float] = {}
    while time.monotonic() - began < within_s:
        try:
            found = books(service)
        except httpx.HTTPError:
            found = {}
        if found and not found["held"] and not found["queued"] and not found["inside"]:
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"the books are not empty {within_s} s after the last request ended: {found}")


async def ended(tasks: list[asyncio.Task[Seen]], within_s: float) -> list[Seen]:
    """All of them, or the failure that a hanging one is."""
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in pending:
        task.cancel()
    assert not pending, f"{len(pending)} of {len(tasks)} requests hang after {within_s} s"
    return [task.result() for task in done]


@dataclass
class Bare:
    """One request over a socket of its own, with as little of a client as there can be. Seconds from sending."""

    status: int
    answered: float
    ended: float
    data: bytes

    @property
    def text(self) -> str:
        events = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


async def at_once(url: str, asked: dict[str, Any], count: int, within_s: float) -> list[Bare]:
    """`count` connections are made first; then every one sends its request in the same turn of the loop."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content
    go, places = asyncio.Event(), asyncio.Semaphore(50)

    async def one() -> Bare:
        async with places:
            reader, writer = await asyncio.open_connection(host, int(port))
        ready.append(1)
        await go.wait()
        writer.write(message)
        sent = time.monotonic()
        first = await reader.readuntil(b"\r\n\r\n")
        answered = time.monotonic() - sent
        data = await reader.read()
        writer.close()
        return Bare(int(first.split(b" ")[1]), answered, time.monotonic() - sent, first + data)

    ready: list[int] = []
    async with asyncio.timeout(within_s):
        tasks = [asyncio.create_task(one()) for _ in range(count)]
        while len(ready) < count:
            await asyncio.sleep(0.05)
        go.set()
        return await asyncio.gather(*tasks)
