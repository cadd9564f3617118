"""A small real engine and a backend over it, in process. The engine answers with the last message, a token a word, and
takes its orders (slow, fail, hang, tools, ...) from the prompt, so that every test says in its request what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from service.errors import (
    BadRequest,
    ContextOverflow,
    EngineFailed,
    OperatorOnly,
    Overloaded,
    QuotaExceeded,
    Unauthorized,
)
from service.http.backend import PoolReadiness, Readiness, RequestContext, Served
from service.types import CallPart, Delta, EngineRequest, Finish, ModelCard, PoolName, TokenLogprob

CARD = ModelCard("echo", "echo", "none", context_tokens=64, vocab_size=1000, bytes=1, parameters=1, quantisation="F32")

SAMPLING = "temperature top_p frequency_penalty presence_penalty logit_bias seed top_k min_p repetition_penalty"
EVERYTHING = frozenset(
    f"{SAMPLING} max_tokens stop logprobs tools tool_choice parallel_tool_calls response_format echo"
    " chat_template_kwargs".split()
)


@dataclass
class EchoBackend:
    """Slots and a bounded queue like the real one's; `log` records what happened to each request."""

    slots: int = 4
    queue: int = 4
    fields: frozenset[str] = EVERYTHING
    ready: bool = True
    key: str | None = None
    operator_key: str | None = None
    """Good for everything; where it is set, `key` is a caller's."""
    concurrency: int = 1000
    """Of every key, for calls that are no generations."""
    counting: int = 0
    tokenizing: int = 0
    tokenized: bytes = b""
    looked: int = 0
    """Readings of the metrics."""
    running: int = 0
    waiting: int = 0
    closed: list[str] = field(default_factory=list)
    seen: list[tuple[EngineRequest, RequestContext]] = field(default_factory=list)
    output_tokens: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self.may_tokenize = asyncio.Event()
        self.may_tokenize.set()

    def authorize(self, credential: str | None, *, operator: bool = False) -> None:
        if self.key is None or (credential and credential == self.operator_key):
            return
        if credential != self.key:
            raise Unauthorized("a valid API key is needed")
        if operator and self.operator_key is not None:
            raise OperatorOnly("this needs an operator's key")

    @contextlib.contextmanager
    def counted(self, credential: str | None) -> Iterator[None]:
        if self.counting >= self.concurrency:
            raise QuotaExceeded(f"this key may run {self.concurrency} requests at once", retry_after_s=1.0)
        self.counting += 1
        try:
            yield
        finally:
            self.counting -= 1

    async def generate(self, request: EngineRequest, context: RequestContext) -> AsyncGenerator[Served | Delta, None]:
        self.seen.append((request, context))
        if self._free.locked() and self.waiting >= self.queue:
            raise Overloaded("slots busy and queue full", retry_after_s=1.5)
        loop = asyncio.get_running_loop()
        before = loop.time()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield Served(tier="default", pool="shared", queue_s=loop.time() - before)
            async for delta in _echo(request):
                self.output_tokens += delta.output_tokens
                yield delta
        finally:
            self.running -= 1
            self.closed.append(request.id)
            self._free.release()

    async def tokenize(self, body: bytes) -> bytes:
        self.tokenized = body
        self.tokenizing += 1
        try:
            await self.may_tokenize.wait()
        finally:
            self.tokenizing -= 1
        asked = orjson.loads(body)
        text = asked["prompt"] if "prompt" in asked else _last(asked["messages"])
        tokens = [ord(character) % CARD.vocab_size for character in text]
        return orjson.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": CARD.context_tokens})

    async def detokenize(self, body: bytes) -> bytes:
        return orjson.dumps({"prompt": "".join(map(chr, orjson.loads(body)["tokens"]))})

    async def profile(self, pool: PoolName | None, body: bytes) -> bytes:
        if pool not in (None, "shared"):
            raise BadRequest(f"pool: there is no pool {pool}", param="pool")
        return orjson.dumps({"causes_s": {"gemm": orjson.loads(body)["seconds"]}, "steps": 3})

    def models(self) -> list[ModelCard]:
        return [CARD]

    def readiness(self) -> Readiness:
        pool = PoolReadiness(1, 1, "serving", eta_s=0.0) if self.ready else PoolReadiness(0, 1, "loading", eta_s=7.2)
        return Readiness(self.ready, {"shared": pool})

    def honours(self) -> frozenset[str]:
        return self.fields

    async def metrics(self) -> bytes:
        self.looked += 1
        return b"glm_echo_output_tokens_total %d\n" % self.output_tokens


def _last(messages: list[dict[str, Any]]) -> str:
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def _echo(request: EngineRequest) -> AsyncGenerator[Delta, None]:
    body = orjson.loads(request.body)
    chat = request.endpoint == "chat"
    given = _last(body["messages"]) if chat else body["prompt"]
    text = given if isinstance(given, str) else " ".join(map(str, given))
    order, _, rest = text.partition(":")
    words = (rest if order in _ORDERS else text).split(" ")
    if len(words) > CARD.context_tokens:
        raise ContextOverflow(
            f"the prompt has {len(words)} tokens, the context {CARD.context_tokens}",
            param="messages" if chat else "prompt",
        )
    limit = body.get("max_tokens", 1000)
    finish: Finish = "length" if limit < len(words) else "stop"
    pieces = [word + " " for word in words[:limit]]
    if order == "refuse":
        raise EngineFailed("refused to start")
    if order == "bug":
        raise RuntimeError("secret insides")
    if order in ("hang", "hang-later"):
        if order == "hang-later":
            yield Delta(pieces[0], output_tokens=1)
        await asyncio.sleep(3600)
    while order == "flood":
        yield Delta("x" * 4000, output_tokens=1)
        await asyncio.sleep(0)
    if order == "slow":
        await asyncio.sleep(0.5)
    if order == "think":
        for letter in "so ":
            yield Delta(reasoning=letter, output_tokens=1, reasoning_tokens=1)
    if body.get("tools") and order == "tool":
        name = body["tools"][0]["function"]["name"]
        for part in (CallPart(0, "call_1", name), *(CallPart(0, arguments=letter) for letter in rest)):
            yield Delta(calls=(part,), output_tokens=1)
        yield Delta(finish="tool_calls", prompt_tokens=len(words), cached_tokens=len(words) - 1)
        return
    for at, piece in enumerate(pieces):
        if at == 2 and order in ("die", "vanish", "crash"):
            if order == "die":
                raise EngineFailed("the engine died")
            if order == "crash":
                raise RuntimeError("secret insides")
            return
        await asyncio.sleep(0.02 if order == "steady" else 0)
        yield Delta(piece, logprobs=_logprobs(piece) if body.get("logprobs") else (), output_tokens=1)
    yield Delta(finish=finish)
    yield Delta(prompt_tokens=len(words))


_ORDERS = {"think", "refuse", "bug", "hang", "hang-later", "slow", "tool", "die", "vanish", "crash", "steady", "flood"}


def _logprobs(piece: str) -> tuple[TokenLogprob, ...]:
    top = TokenLogprob(piece, -0.5, piece.encode())
    return (replace(top, top=(top,)),)
