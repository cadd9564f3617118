"""What every engine is to the rest of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from service.types import Delta, EngineRequest, EngineStats, LoadProgress, ModelCard

Report = Callable[[LoadProgress], None]


class Engine(Protocol):
    """One model in this process. OpenAI JSON in, typed pieces of an answer out.

    Life: `load` once, then any number of concurrent `generate`, then `close` (idempotent; ends every process and
    thread that the engine started).
    """

    name: str
    honours: frozenset[str]
    """Request fields (of either endpoint) that this engine really obeys; http/ refuses all others by name."""

    async def load(self, report: Report) -> ModelCard:
        """Bring the model up. Calls `report` at every change of phase and at least every second. Raises UserError."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Yield the answer, piece by piece, as it is made.

        The shape is one for all engines. Strings hold whole characters only. Text, reasoning, calls and
        log-probabilities come in order; a log-probability comes with the text of its token, or before it. Exactly one
        piece has a `finish`; none after it says anything. Counts add up over the pieces, exactly; those that become
        known last come with the finish or after it.

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
