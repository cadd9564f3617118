"""What docs/http.md promises of an answer, whatever the model wrote; and log-probabilities as OpenAI has them. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from service.errors import EngineFailed
from service.types import CallPart, Delta, TokenLogprob


class Shaper:
    """Watches the deltas of one choice.

    `feed` returns what to send of a delta; `close` is called when the engine is done. Guarantees, or EngineFailed:
    exactly one finish and nothing after it, arguments of every tool call that join to valid JSON, and a call where
    `must_call` says that the request's tool_choice demands one. Reasoning is left out unless `show_reasoning`.
    """

    __slots__ = ("_arguments", "_finished", "_must_call", "_show_reasoning")

    def __init__(self, *, must_call: bool = False, show_reasoning: bool = True) -> None:
        self._must_call = must_call
        self._show_reasoning = show_reasoning
        self._finished = False
        self._arguments: dict[int, str] = {}

    def feed(self, delta: Delta) -> Delta:
        if self._finished and (delta.says_something or delta.finish is not None):
            raise EngineFailed("the engine went on after its finish_reason")
        for part in delta.calls:
            self._arguments[part.index] = self._arguments.get(part.index, "") + part.arguments
        if delta.reasoning and not self._show_reasoning:
            delta = replace(delta, reasoning="")
        return delta if delta.finish is None else self._end(delta)

    def close(self) -> None:
        if not self._finished:
            raise EngineFailed("the engine ended its answer without a finish_reason")

    def _end(self, delta: Delta) -> Delta:
        self._finished = True
        cut = delta.finish == "length"
        # Half a call, or none, is let through only where the answer was cut by its length.
        if self._must_call and not self._arguments and not cut:
            raise EngineFailed("the engine called no tool although tool_choice demands it")
        mended = []
        last = max(self._arguments, default=-1)
        for index, arguments in self._arguments.items():
            if not arguments.strip() and not (cut and index == last):
                mended.append(CallPart(index, arguments="{}"))
            elif not cut:
                _check(arguments)
        return replace(delta, calls=(*delta.calls, *mended)) if mended else delta


def _check(arguments: str) -> None:
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        raise EngineFailed("the engine wrote a tool call whose arguments are not JSON") from None


def chat_logprobs(given: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
    """OpenAI's chat log-probabilities, None for none."""
    if not given:
        return None
    content = [_bare(token) | {"top_logprobs": [_bare(top) for top in token.top]} for token in given]
    return {"content": content, "refusal": None}


def _bare(token: TokenLogprob) -> dict[str, Any]:
    data = token.bytes
    return {"token": token.token, "logprob": token.logprob, "bytes": None if data is None else list(data)}


def text_logprobs(given: tuple[TokenLogprob, ...], offset: int) -> dict[str, Any] | None:
    """The older shape of /v1/completions, None for none. `offset`: characters of all tokens before these."""
    if not given:
        return None
    offsets = []
    for token in given:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in given],
        "token_logprobs": [token.logprob for token in given],
        "top_logprobs": [
            None if token.logprob is None else {top.token: top.logprob for top in token.top} for token in given
        ],
        "text_offset": offsets,
    }
