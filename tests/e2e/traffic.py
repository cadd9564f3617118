"""Streams against a service, timed by the client alone: the truth that metrics are compared with."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import httpx

LEVEL_S = 90.0


@dataclass(frozen=True)
class Stream:
    """One answer: seconds on this client's clock, and the tokens that the answer's usage says."""

    sent: float
    first: float
    end: float
    prompt_tokens: int
    output_tokens: int
    tier: str


@dataclass(frozen=True)
class Level:
    """Streams that ran together."""

    streams: tuple[Stream, ...]
    ended_at: float
    """Unix time."""

    @property
    def output_tokens(self) -> int:
        return sum(stream.output_tokens for stream in self.streams)

    @property
    def seconds(self) -> float:
        """From the first token of the first to the end of the last: decoding, without the prefill before it."""
        return max(s.end for s in self.streams) - min(s.first for s in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


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
    sent, first, usage, done = time.monotonic(), 0.0, None, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                break
            event = json.loads(line[6:])
            if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.monotonic()
            usage = event.get("usage") or usage
    assert done and usage and first, "the stream was cut"
    return Stream(sent, first, time.monotonic(), usage["prompt_tokens"], usage["completion_tokens"], tier)


def run_level(url: str, model: str, at_once: int, tokens: int, tier: str = "default") -> Level:
    """`at_once` streams of `tokens` tokens each, begun together."""

    async def all_of_them() -> list[Stream]:
        async with asyncio.timeout(LEVEL_S), httpx.AsyncClient(base_url=url, timeout=LEVEL_S) as client:
            return await asyncio.gather(*(one(client, model, tokens, tier) for _ in range(at_once)))

    return Level(tuple(asyncio.run(all_of_them())), time.time())
