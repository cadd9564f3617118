"""Streams against a service, timed by the client alone: the truth that metrics are compared with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

LEVEL_S = 90.0


@dataclass(frozen=True)
class Stream:
    """One answer: seconds on this client's clock, and the tokens that the answer's usage says.

    `pieces`: when each piece of text came; the first of them is the first token.
    """

    sent: float
    pieces: tuple[float, ...]
    end: float
    prompt_tokens: int
    output_tokens: int
    tier: str

    @property
    def first(self) -> float:
        return self.pieces[0]


@dataclass(frozen=True)
class Level:
    """Streams that ran together. `ended_at` is Unix time."""

    streams: tuple[Stream, ...]
    ended_at: float

    @property
    def output_tokens(self) -> int:
        return sum(stream.output_tokens for stream in self.streams)

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(stream.end for stream in self.streams) - min(stream.sent for stream in self.streams)

    def tokens_per_s(self, least: int, most: float) -> float:
        """Output tok/s while `least` to `most` of the streams were between their first token and their end.

        A stream's tokens are equally many in all its pieces, and a piece was made since the piece before it.
        """
        edges = sorted([(stream.first, 1) for stream in self.streams] + [(stream.end, -1) for stream in self.streams])
        spans, running = [], 0
        for (start, change), (end, _) in pairwise(edges):
            running += change
            if least <= running <= most and end > start:
                spans.append((start, end))
        tokens = 0.0
        for stream in self.streams:
            each = stream.output_tokens / len(stream.pieces)
            for at, (since, until) in enumerate(pairwise(stream.pieces)):
                inside = sum(max(0.0, min(until, end) - max(since, start)) for start, end in spans)
                tokens += (2 * each if at == 0 else each) * inside / max(until - since, 1e-9)
        return tokens / sum(end - start for start, end in spans)


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed chat answer. Fails on anything but a whole stream."""
    done = False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event
    assert done, "the stream ended without [DONE]"


async def one(client: httpx.AsyncClient, model: str, tokens: int, tier: str = "default") -> Stream:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Count from one to a thousand, please ({time.monotonic_ns()})."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": tier,
    }
    sent, usage = time.monotonic(), None
    pieces: list[float] = []
    async for event in events(client, body):
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            pieces.append(time.monotonic())
        usage = event.get("usage") or usage
    assert usage and pieces, "the stream was empty"
    return Stream(sent, tuple(pieces), time.monotonic(), usage["prompt_tokens"], usage["completion_tokens"], tier)


def run_level(url: str, model: str, at_once: int, tokens: int, tier: str = "default") -> Level:
    """`at_once` streams of `tokens` tokens each, begun together."""

    async def all_of_them() -> list[Stream]:
        async with asyncio.timeout(LEVEL_S), httpx.AsyncClient(base_url=url, timeout=LEVEL_S) as client:
            return await asyncio.gather(*(one(client, model, tokens, tier) for _ in range(at_once)))

    return Level(tuple(asyncio.run(all_of_them())), time.time())
