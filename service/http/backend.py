"""What the HTTP app needs from whatever stands behind it: Ray handles in deployments/, an engine in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from service.types import Delta, EngineRequest, ModelCard, PoolName, Tier

RequestedTier = Literal["auto", "default", "flex", "priority"]
Mode = Literal["latency", "throughput"]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request says about itself beside its body; what admission and routing decide from.

    `credential`: the API key as presented, None if there was none; kept out of repr so that it cannot reach a log.
    `requested_tier`: the body's `service_tier`, None where absent (OpenAI reads that as "auto").
    `mode`: the header x-glm-mode. `deadline_s`: the header x-request-timeout, seconds, None where absent
    (`EngineRequest.timeout_s` already holds the smaller of it and our own limit).
    `prompt_bytes`: UTF-8 length of the prompt or messages. `max_tokens`: output bound asked for, None if none.
    `siblings`: engine requests that this HTTP request was fanned out into (n > 1, several prompts), this one included.
    `stream`: the client gets the answer as it is made. `session`: equal in all turns of a conversation; empty: unknown.
    """

    credential: str | None = field(default=None, repr=False)
    requested_tier: RequestedTier | None = None
    mode: Mode | None = None
    deadline_s: float | None = None
    prompt_bytes: int = 0
    max_tokens: int | None = None
    siblings: int = 1
    stream: bool = False
    session: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """Which tier and pool a request really got, and how many seconds it waited for admission. Becomes headers."""

    tier: Tier
    pool: PoolName
    queue_s: float


@dataclass(frozen=True, slots=True)
class PoolReadiness:
    """One pool: replicas that can serve, replicas wanted, and the load phase of the one that is furthest on.

    `eta_s`: seconds until the pool can serve, None while unknown, 0 when it can.
    """

    ready_replicas: int
    target_replicas: int
    phase: str
    detail: str = ""
    fraction: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """`ready`: a request sent now would be admitted or queued, not refused with 503."""

    ready: bool
    pools: Mapping[PoolName, PoolReadiness] = field(default_factory=dict)


class Backend(Protocol):
    """Admission, routing, retries and engines, seen from HTTP. All methods may be called concurrently, on one loop."""

    def authorize(self, credential: str | None, *, operator: bool = False) -> None:
        """Pass or raise Unauthorized. Called before a body is read, on every endpoint except the probes.

        `operator`: what is asked for concerns the service and not one caller; raises OperatorOnly where keys are asked
        for and this one is a caller's.
        """
        ...

    def counted(self, credential: str | None) -> AbstractContextManager[object]:
        """One request of the caller's limits, for as long as it is held. Raises Unauthorized, QuotaExceeded."""
        ...

    def generate(self, request: EngineRequest, context: RequestContext) -> AsyncGenerator[Served | Delta, None]:
        """The answer: one `Served` as soon as the request has its place, then deltas as `Engine.generate` promises.

        Yield another `Served` if a retry moved the request: what came before it is void. A stream may move before its
        first delta only; a whole answer (`context.stream` is false) until its end, for nothing of it has been sent. The
        last one is what the client is told. Raises ServiceError at any point: of a stream, up to the first delta it
        becomes the HTTP status, after it an error event. `aclose()` or cancelling the driver gives up the place in the
        queue or the slot at once.
        """
        ...

    async def tokenize(self, body: bytes) -> bytes:
        """See `Engine.tokenize`. Cancelling it ends the wait for the engine. Raises ServiceError."""
        ...

    async def detokenize(self, body: bytes) -> bytes:
        """See `Engine.detokenize`. Raises ServiceError."""
        ...

    async def profile(self, pool: PoolName | None, body: bytes) -> bytes:
        """See `Engine.profile`; of a replica of `pool` (None: of any). Raises ServiceError."""
        ...

    def models(self) -> list[ModelCard]:
        """What can be asked for by name; empty until known. Cheap: cached, no I/O."""
        ...

    def readiness(self) -> Readiness:
        """Cheap: cached, no I/O."""
        ...

    def honours(self) -> frozenset[str]:
        """Request fields that every engine behind really obeys; others are refused by name. See `Engine.honours`.

        Empty while no engine has reported: then nothing is refused here and generate() raises NotReady.
        """
        ...

    def metrics(self) -> Awaitable[bytes]:
        """Prometheus text exposition for GET /metrics."""
        ...
