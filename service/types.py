"""Values that travel between the layers. Frozen; anything derivable is a property."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Endpoint = Literal["chat", "completions"]
PoolName = Literal["shared", "latency", "throughput"]
Tier = Literal["priority", "default", "flex"]
Finish = Literal["stop", "length", "tool_calls", "content_filter"]

POOLS: tuple[PoolName, ...] = ("shared", "latency", "throughput")
TIERS: tuple[Tier, ...] = ("priority", "default", "flex")
FINISHES: tuple[Finish, ...] = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation as an engine sees it.

    `body` is OpenAI JSON (UTF-8) of one choice, already validated by http/; how the client wants the answer (streamed
    or whole, with usage or not, how many choices) is not in it. `timeout_s` is what is left of the request's deadline
    when this value was made (clocks do not travel).
    """

    id: str
    endpoint: Endpoint
    body: bytes
    tier: Tier = "default"
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a tool call.

    `index` numbers the calls of an answer from 0, in the order in which they begin. The first part of a call has its
    `id` and `name`, later ones have neither; the `arguments` of all its parts join to what the model wrote.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, None where it was given and not chosen (an echoed prompt's
    first). `bytes` is its UTF-8 where the engine knows it. `top` are the likeliest tokens at its place, best first, if
    they were asked for; they have no `top` of their own."""

    token: str
    logprob: float | None
    bytes: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer; `Engine.generate` says which pieces make a whole one.

    Counts are of this piece: over the answer they add up to the totals. `output_tokens`: tokens that the engine
    generated for it (0 or more: a piece is not a token), of which `reasoning_tokens` where the engine counts those.
    `prompt_tokens`: length of the prompt, on one piece; `cached_tokens` of them came from a cache.
    `drafted`/`accepted`: speculative tokens proposed and kept.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Where a replica is on its way to ready. `eta_s` is None while unknown; `fraction` in 0..1 within the phase."""

    phase: str
    detail: str = ""
    fraction: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is loaded. `context_tokens` is per request; `bytes` is the size of the file(s)."""

    name: str
    engine: str
    architecture: str
    context_tokens: int
    vocab_size: int
    bytes: int = 0
    parameters: int = 0
    quantisation: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's own books, read at one moment. Counters are since load.

    `heartbeat_age_s`: seconds since the engine last made progress (a decoded token or a prompt batch); meaningful only
    while `running` > 0. `kv_used` is a fraction 0..1, or None where the engine has no shared KV pool.
    """

    slots: int
    running: int = 0
    waiting: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_s: float = 0.0
    heartbeat_age_s: float = 0.0
    kv_used: float | None = None
    drafted: int = 0
    accepted: int = 0
    alive: bool = True
    extra: dict[str, float] = field(default_factory=dict)
