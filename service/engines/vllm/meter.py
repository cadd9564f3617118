"""Pieces of an answer from vLLM's stream chunks, with exact counts from its running usage numbers. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from service.engines.choice import Choice
from service.types import Delta


class Meter:
    """Reads one request's chunks in order; turns cumulative counts into differences."""

    def __init__(self) -> None:
        self._choice = Choice()
        self._output = self._prompt = self._cached = self._reasoning = 0

    @property
    def finished(self) -> bool:
        return self._choice.finished

    def read(self, data: bytes) -> Delta:
        message: dict[str, Any] = orjson.loads(data)
        usage = message.get("usage") or {}
        output = int(usage.get("completion_tokens", self._output))
        prompt = int(usage.get("prompt_tokens", self._prompt))
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self._cached)
        reasoning = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or self._reasoning)
        counts = Delta(
            output_tokens=output - self._output,
            prompt_tokens=prompt - self._prompt,
            cached_tokens=cached - self._cached,
            reasoning_tokens=reasoning - self._reasoning,
        )
        self._output, self._prompt, self._cached, self._reasoning = output, prompt, cached, reasoning
        choices = message.get("choices")
        return self._choice.read(choices[0], counts) if choices else counts
