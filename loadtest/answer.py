"""From events to a Record: what counts as a token's arrival, and how each way to fail is named. Pure."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import orjson

from loadtest.records import Record
from loadtest.sse import Event

_DETAIL_CHARS = 200
_FAILED = ("error", "abort")  # finish reasons that say the server gave the request up (vLLM, SGLang)
_MALFORMED = "malformed"


class Answer:
    """Collects one streamed answer. `take` events as they come, then `settle` once."""

    __slots__ = ("_counts", "_sizes", "done", "record", "usage")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False
        self.usage: dict[str, Any] | None = None
        self._sizes: list[int] = []  # characters of each content chunk
        self._counts: list[int] = []  # running completion_tokens at each content chunk, where the server says it

    def fail(self, kind: str, detail: str = "") -> None:
        """The first fault names the request; later ones are its consequences."""
        if not self.record.error:
            self.record.error = kind
            self.record.detail = detail[:_DETAIL_CHARS]

    def take(self, now: float, event: Event) -> None:
        name, data = event
        if data == b"[DONE]":
            self.done = True
            return None
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return self.fail("truncated_json", data[:_DETAIL_CHARS].decode(errors="replace"))
        if name == b"error" or not isinstance(chunk, dict) or chunk.get("error"):
            return self.fail("error_event", data[:_DETAIL_CHARS].decode(errors="replace"))
        try:
            self._chunk(now, chunk)
        except (AttributeError, TypeError):  # a field of another type than the protocol's
            self.fail(_MALFORMED, data[:_DETAIL_CHARS].decode(errors="replace"))
        return None

    def _chunk(self, now: float, chunk: dict[str, Any]) -> None:
        """Raises AttributeError or TypeError for a field of a wrong type."""
        usage = chunk.get("usage")
        if usage:
            self.usage = _checked(usage)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            if delta is None:
                size, thought = len(choice.get("text") or ""), 0
            else:
                size = len(delta.get("content") or "")
                thought = len(delta.get("reasoning_content") or delta.get("reasoning") or "")
                if delta.get("tool_calls"):
                    size += 1
            finish = choice.get("finish_reason")
            if finish:
                if not isinstance(finish, str):
                    raise TypeError("finish_reason")
                self.record.finish = finish
                if finish in _FAILED:
                    self.fail("failed_finish", finish)
            if size or thought:
                if size and not self.record.first_answer:
                    self.record.first_answer = now
                self.record.times.append(now)
                self._sizes.append(size + thought)
                if usage and usage.get("completion_tokens"):
                    self._counts.append(usage["completion_tokens"])

    def settle(self, end: float) -> Record:
        """The body has ended (or will not go on). Sets token counts and the last kinds of fault."""
        record = self.record
        record.end = end
        usage = self.usage or {}
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record.output_tokens = usage.get("completion_tokens") or 0
        if not record.error:
            if not self.done:
                self.fail("missing_done")
            elif not record.times:
                self.fail("empty")
            elif not record.output_tokens:
                self.fail("no_usage")
        if record.error and not record.output_tokens:
            # Only an estimate, for the comparison with the server's counter; failed requests enter no other number.
            record.output_tokens = len(record.times)
        record.tokens = spread(record.output_tokens, self._sizes, self._counts)
        return record


def _checked(usage: Any) -> dict[str, Any]:
    """`usage` whose counts are counts. Raises AttributeError or TypeError."""
    details = usage.get("prompt_tokens_details") or {}
    for count in (usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens")):
        if count is not None and (type(count) is not int or count < 0):
            raise TypeError("usage")
    checked: dict[str, Any] = usage
    return checked


def spread(total: int, sizes: list[int], counts: list[int]) -> array[float]:
    """Tokens of each content chunk; sums to `total`.

    Exact where the server sent running counts. Else one each when there are about as many chunks as tokens (a special
    token without text makes one fewer), and otherwise in proportion to the characters of each chunk.
    """
    if not sizes:
        return array("d")
    if len(counts) == len(sizes) and counts[-1] <= total:
        steps = [counts[0], *(b - a for a, b in pairwise(counts))]
        if min(steps) >= 0:
            steps[-1] += total - counts[-1]
            return array("d", steps)
    if total == len(sizes):
        return array("d", [1.0]) * total
    if 0 < total - len(sizes) <= 2:
        ones = array("d", [1.0]) * len(sizes)
        ones[-1] += total - len(sizes)
        return ones
    scale = total / sum(sizes)
    return array("d", (size * scale for size in sizes))
