"""What a dialect is: a reader (body -> the chat or completion that an engine is asked) and a writer (deltas -> events,
or a whole body). Nothing else of a request differs between them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.errors import ServiceError
from service.http.dialects.fold import Fold
from service.http.plan import Body, Part, Plan
from service.http.schema import ChatRequest, CompletionRequest
from service.http.shaping import Shaper
from service.http.usage import Usage
from service.types import Delta, Tier


@dataclass(frozen=True, slots=True)
class Reading:
    """A body as an engine's endpoint has it: checked, and as JSON.

    `ignored`: names in the client's body that were taken and change nothing. `soft`: fields of `raw` that are wishes
    in this dialect: an engine that cannot obey them does without, and the client is told. `client`: the client's own
    body, where the answer repeats parts of it.
    """

    asked: ChatRequest | CompletionRequest
    raw: Body
    ignored: tuple[str, ...] = ()
    soft: frozenset[str] = frozenset()
    client: Body = field(default_factory=dict)
    show_reasoning: bool = True


class Framer:
    """The events of one part of a stream."""

    __slots__ = ("_shaper", "part", "usage")

    def __init__(self, plan: Plan, part: Part) -> None:
        self.part = part
        self.usage = Usage()
        self._shaper = Shaper(must_call=plan.must_call, show_reasoning=plan.show_reasoning)

    def feed(self, delta: Delta) -> bytes:
        """The events that `delta` makes, possibly none. Raises EngineFailed."""
        self.usage.add(delta)
        return self.events(self._shaper.feed(delta))

    def events(self, delta: Delta) -> bytes:
        """Of a delta that keeps the promises of `Shaper`."""
        raise NotImplementedError

    def close(self) -> None:
        """Once the engine is done. Raises EngineFailed if the answer has no end."""
        self._shaper.close()


class Dialect(Protocol):
    prefix: str
    """How ids of answers begin."""
    keepalive: bytes
    """What a stream that has nothing to say sends."""

    def read(self, raw: Body) -> Reading:
        """Raises BadRequest, naming the field in the client's own terms."""
        ...

    def explain(self, error: ServiceError) -> ServiceError:
        """An error about `Reading.raw` in the client's own terms."""
        ...

    def framer(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> Framer: ...

    def last(self, plan: Plan, framers: Sequence[Framer], *, tier: Tier, created: int) -> bytes:
        """The end of a good stream. `framers`: a closed one for each part, in order."""
        ...

    def broken(self, plan: Plan, framers: Sequence[Framer], error: ServiceError, *, request_id: str) -> bytes:
        """The end of a stream that failed. `framers`: of the parts that had begun."""
        ...

    def whole(self, plan: Plan, folds: Sequence[Fold], *, tier: Tier, created: int) -> bytes:
        """The body of a whole answer. `folds`: a closed one for each part, in order."""
        ...


def renamed(error: ServiceError, names: Mapping[str, str]) -> ServiceError:
    """`error` with a chat's field names replaced by the dialect's own."""
    words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)")
    told = copy.copy(error)
    told.message = words.sub(lambda found: names[found[0]], error.message)
    told.param = error.param and words.sub(lambda found: names[found[0]], error.param)
    return told
