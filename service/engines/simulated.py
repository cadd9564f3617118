"""Tokens on a clock: no model, but the step time, batching and slots of one.

One task is the engine's decode loop: each step takes as long as the step model says for the requests that run, then
every one of them gets its token. Used to test the layers above at sizes this machine cannot compute, and to rehearse a
box that one does not have. Real time, real queues, real cancels; only the arithmetic is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from service.engines.fields import HONOURED
from service.engines.options import SimulatedOptions
from service.engines.protocol import Report
from service.errors import BadRequest, ContextOverflow, EngineFailed
from service.types import Delta, EngineRequest, EngineStats, Finish, LoadProgress, ModelCard

CHARACTERS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 128
WORDS = [
    "",
    "the",
    "river",
    "runs",
    "over",
    "stone",
    "and",
    "under",
    "bridge",
    "while",
    "small",
    "lights",
    "move",
    "along",
    "its",
    "bank",
    "at",
    "night",
][1:]


class StepClock(Protocol):
    """What the engine asks of a step model."""

    def decode_step_s(self, running: int, context_tokens: int) -> float: ...

    def prefill_s(self, tokens: int) -> float: ...


@dataclass(frozen=True)
class LinearClock:
    """Step time = first + more * (running - 1); seconds."""

    first_s: float
    more_s: float
    prefill_tokens_per_s: float

    def decode_step_s(self, running: int, context_tokens: int) -> float:
        return self.first_s + self.more_s * (running - 1)

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s


@dataclass(eq=False)
class _Sequence:
    prompt_tokens: int
    limit: int
    emitted: int = 0
    due: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False


class SimulatedEngine:
    name = "simulated"
    honours = HONOURED["simulated"]

    def __init__(
        self,
        *,
        model: str,
        served_name: str,
        slots: int,
        context_tokens: int,
        options: SimulatedOptions,
        clock: StepClock | None = None,
    ) -> None:
        self._served, self._slots, self._context, self._options = served_name, slots, context_tokens, options
        self._clock = clock
        self._running: list[_Sequence] = []
        self._joining: list[_Sequence] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._output = self._prompt = self._requests = self._steps = 0
        self._busy_s, self._beat = 0.0, time.monotonic()
        self._loaded = False

    async def load(self, report: Report) -> ModelCard:
        if self._clock is None:
            self._clock = make_clock(self._options)
        end = time.monotonic() + self._options.load_s
        while (left := end - time.monotonic()) > 0:
            report(LoadProgress("simulated load", eta_s=left, fraction=1 - left / self._options.load_s))
            await asyncio.sleep(min(0.5, left))
        self._loaded = True
        self._loop_task = asyncio.create_task(self._decode_loop())
        return ModelCard(
            name=self._served,
            engine=self.name,
            architecture="simulated",
            context_tokens=self._context,
            vocab_size=self._options.vocab_size,
        )

    async def _decode_loop(self) -> None:
        """A step at a time. Deadlines are absolute, so that the time of sending does not stretch the steps."""
        assert self._clock is not None
        deadline = time.monotonic()
        while True:
            if not self._running and not self._joining:
                self._work.clear()
                await self._work.wait()
                deadline = time.monotonic()
            started = time.monotonic()
            joining, self._joining = self._joining, []
            self._running += joining
            context = sum(s.prompt_tokens + s.emitted for s in self._running)
            step = self._clock.decode_step_s(len(self._running), context)
            step += sum(self._clock.prefill_s(s.prompt_tokens) for s in joining)
            # Half a second behind the clock is an overloaded host, not jitter: forget it rather than burst.
            deadline = max(deadline + step, time.monotonic() - 0.5)
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            self._steps += 1
            self._beat = time.monotonic()
            self._busy_s += self._beat - started
            left = []
            for sequence in self._running:
                sequence.due += 1
                sequence.wake.set()
                if sequence.due < sequence.limit:
                    left.append(sequence)
            self._running = left

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        if not self._loaded:
            raise EngineFailed("the simulated engine is not loaded")
        if 0 < self._options.breaks_after <= self._requests:
            raise EngineFailed("the simulated engine broke, as its settings ask")
        body = orjson.loads(request.body)
        chat = request.endpoint == "chat"
        prompt_tokens = count_tokens(body["messages"] if chat else body["prompt"])
        if prompt_tokens >= self._context:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens but the context of this service is {self._context} tokens",
                param="messages" if chat else "prompt",
            )
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_OUTPUT_TOKENS
        limit = min(int(asked), self._context - prompt_tokens)
        sequence = _Sequence(prompt_tokens, limit)
        self._joining.append(sequence)
        self._work.set()
        self._requests += 1
        self._prompt += prompt_tokens
        reported = prompt_tokens
        try:
            while sequence.emitted < limit:
                await sequence.wake.wait()
                sequence.wake.clear()
                if sequence.failed:
                    raise EngineFailed("the simulated engine was closed")
                new = sequence.due - sequence.emitted
                if not new:
                    continue
                text = "".join(f" {WORDS[(sequence.emitted + i) % len(WORDS)]}" for i in range(new))
                sequence.emitted += new
                self._output += new
                finish: Finish | None = "length" if sequence.emitted == limit else None
                yield Delta(text, finish=finish, output_tokens=new, prompt_tokens=reported)
                reported = 0
        finally:
            for sequences in (self._running, self._joining):
                if sequence in sequences:
                    sequences.remove(sequence)

    async def tokenize(self, body: bytes) -> bytes:
        ask = orjson.loads(body)
        text = _text(ask["messages"] if "messages" in ask else ask["prompt"])
        pieces = [text[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(text), CHARACTERS_PER_TOKEN)]
        tokens = [sum(piece.encode()) % self._options.vocab_size for piece in pieces]
        return orjson.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": self._context})

    async def detokenize(self, body: bytes) -> bytes:
        raise BadRequest("the simulated engine has no vocabulary: it cannot turn tokens into text")

    async def profile(self, body: bytes) -> bytes:
        raise BadRequest("the simulated engine has no steps to look into: it is the step model")

    def stats(self) -> EngineStats:
        running = len(self._running) + len(self._joining)
        return EngineStats(
            slots=self._slots,
            running=running,
            output_tokens=self._output,
            prompt_tokens=self._prompt,
            requests=self._requests,
            steps=self._steps,
            busy_s=self._busy_s,
            heartbeat_age_s=time.monotonic() - self._beat if running else 0.0,
            alive=self._loaded and self._loop_task is not None and not self._loop_task.done(),
        )

    async def native_metrics(self) -> str:
        return ""

    async def close(self) -> None:
        self._loaded = False
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        for sequence in (*self._running, *self._joining):
            sequence.failed = True
            sequence.wake.set()


def make_clock(options: SimulatedOptions) -> StepClock:
    if options.hardware is None:
        return LinearClock(options.step_ms / 1e3, options.step_ms_per_request / 1e3, options.prefill_tokens_per_s)
    from service.planning.step_model import TokenClock, step_model

    # Speculative decoding makes several tokens a step; this engine emits one, in a shorter time.
    return TokenClock(step_model(options.shape, options.hardware, mtp=options.mtp, cuda_graphs=options.cuda_graphs))


def _text(content: Any) -> str:
    """All text in a prompt, messages or parts, in order."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return _text(content.get("content") or content.get("text") or "")
    if isinstance(content, list):
        return "".join(_text(item) for item in content)
    return ""


def count_tokens(content: Any) -> int:
    """Length of a prompt in tokens as this engine counts: a token is four characters; token lists count as they are."""
    if isinstance(content, list) and content and all(isinstance(item, int) for item in content):
        return len(content)
    return max(1, -(-len(_text(content)) // CHARACTERS_PER_TOKEN))
