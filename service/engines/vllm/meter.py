"""Exact token counts for each chunk, from vLLM's running usage numbers. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from service.types import Chunk


class Meter:
    """Reads one request's chunks in order; turns cumulative counts into differences and takes them out of the JSON."""

    def __init__(self) -> None:
        self._per_choice: dict[int, int] = {}
        self._prompt = 0
        self.output_tokens = 0

    def read(self, data: bytes) -> Chunk:
        """A chunk of a stream. Only the last one, which has no choices, keeps its `usage`."""
        message: dict[str, Any] = orjson.loads(data)
        usage = message.get("usage") or {}
        if not message.get("choices"):
            total = int(usage.get("completion_tokens", self.output_tokens))
            return self._chunk(message, total - self.output_tokens, usage)
        message.pop("usage", None)
        new = 0
        for choice in message["choices"]:
            index = int(choice.get("index", 0))
            seen = int(usage.get("completion_tokens", 0))
            new += seen - self._per_choice.get(index, 0)
            self._per_choice[index] = seen
        return self._chunk(message, new, usage)

    def whole(self, data: bytes) -> Chunk:
        """An answer in one piece."""
        message: dict[str, Any] = orjson.loads(data)
        usage = message.get("usage") or {}
        return self._chunk(message, int(usage.get("completion_tokens", 0)), usage)

    def _chunk(self, message: dict[str, Any], new: int, usage: dict[str, Any]) -> Chunk:
        self.output_tokens += new
        prompt = 0 if self._prompt else int(usage.get("prompt_tokens", 0))
        self._prompt += prompt
        cached = 0
        if not message.get("choices") or prompt:
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return Chunk(orjson.dumps(message), new, prompt, cached)
