"""What every engine is to the rest of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from service.types import Chunk, EngineRequest, EngineStats, LoadProgress, ModelCard

Report = Callable[[LoadProgress], None]


class Engine(Protocol):
    """One model in this process. OpenAI JSON in, OpenAI JSON out.

    Life: `load` once, then any number of concurrent `generate`, then `close` (idempotent; ends every process and
    thread that the engine started).
    """

    name: str
    honours: frozenset[str]
    """Request fields (of either endpoint) that this engine really obeys; http/ refuses all others by name."""

    async def load(self, report: Report) -> ModelCard:
        """Bring the model up. Calls `report` at every change of phase and at least every second. Raises UserError."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Yield the answer. A streamed answer always ends with a chunk that carries `usage`.

        Closing the iterator (or cancelling the task that drives it) stops decoding and frees the slot at once.
        Raises ServiceError: BadRequest family for the request's faults, EngineFailed for the engine's.
        """
        ...

    async def tokenize(self, body: bytes) -> bytes:
        """`{"prompt": str}` or `{"messages": [...]}` -> `{"tokens", "count", "max_model_len"}`."""
        ...

    async def detokenize(self, body: bytes) -> bytes:
        """`{"tokens": [int]}` -> `{"prompt": str}`."""
        ...

    async def native_metrics(self) -> str:
        """The engine's own Prometheus text, empty where it has none."""
        ...

    async def profile(self, body: bytes) -> bytes:
        """`{"seconds": float}` -> `{"causes_s": {cause: seconds}, "steps": int}`: what the steps of the next `seconds`
        spend their time on, measured. Raises BadRequest where this engine cannot tell, or where nothing ran."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
