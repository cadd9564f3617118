"""From OpenAI's stream chunks, which llama.cpp and vLLM write with differences, to the one shape of `Engine.generate`.
Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import orjson

from service.engines.text import Joiner
from service.errors import EngineFailed
from service.types import FINISHES, CallPart, Delta, Finish, TokenLogprob

UNLIKELY = -9999.0
"""vLLM's word for a token that has no log-probability: it leaves the default out of its chunks."""


NOTHING = Delta()


@dataclass(slots=True)
class _Call:
    """A tool call under way. `index`: its place in the answer."""

    index: int
    joiner: Joiner


class Choice:
    """Reads the entries of `choices` of one choice's chunks, in order.

    Mends what engines do differently: characters cut in two, the finish beside text, an empty repeat of the finish,
    calls without an id or numbered from anywhere, arguments as an object, both shapes of log-probabilities. Raises
    EngineFailed for what cannot be mended.
    """

    __slots__ = ("_calls", "_content", "_reasoning", "finished")

    def __init__(self) -> None:
        self._content, self._reasoning = Joiner(), Joiner()
        self._calls: dict[int, _Call] = {}
        self.finished = False

    def read(self, choice: dict[str, Any], counts: Delta = NOTHING) -> Delta:
        """What the entry, of a chat (`delta`) or a completion (`text`), says; with the `counts` of its chunk."""
        said = choice.get("delta") or choice
        finish = choice.get("finish_reason")
        text = said.get("content") or said.get("text") or ""
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        pieces = said.get("tool_calls") or ()
        if self.finished:
            if text or reasoning or pieces:
                raise EngineFailed("the engine went on after its finish_reason")
            return counts
        text = self._content.push(text) if text else ""
        reasoning = self._reasoning.push(reasoning) if reasoning else ""
        calls = [part for piece in pieces for part in self._call(piece)] if pieces else []
        if finish is not None:
            self.finished = True
            text += self._content.flush()
            reasoning += self._reasoning.flush()
            rests = ((call.index, call.joiner.flush()) for call in self._calls.values())
            calls += [CallPart(index, arguments=rest) for index, rest in rests if rest]
            finish = finish_of(finish)
        logprobs = choice.get("logprobs")
        return replace(
            counts,
            text=text,
            reasoning=reasoning,
            calls=tuple(calls),
            logprobs=logprobs_of(logprobs) if logprobs else (),
            finish=finish,
        )

    def _call(self, raw: dict[str, Any]) -> list[CallPart]:
        function = raw.get("function") or {}
        piece = function.get("arguments") or ""
        if not isinstance(piece, str):  # some parsers hand over the object itself
            piece = orjson.dumps(piece).decode()
        call = self._calls.get(key := raw.get("index", 0))
        if call is not None:
            text = call.joiner.push(piece) if piece else ""
            return [CallPart(call.index, arguments=text)] if text else []
        if not (name := function.get("name")):
            raise EngineFailed("the engine began a tool call without a name")
        call = self._calls[key] = _Call(len(self._calls), Joiner())
        return [CallPart(call.index, raw.get("id") or call_id(), name, call.joiner.push(piece) if piece else "")]


def call_id() -> str:
    """A new one, for engines that give a tool call none."""
    return f"call_{secrets.token_hex(12)}"


def finish_of(word: object) -> Finish:
    """Raises EngineFailed for a reason that is not an end of an answer (`abort`, `error`)."""
    for finish in FINISHES:
        if word == finish:
            return finish
    raise EngineFailed(f"the engine gave up on the answer: {str(word)[:64]!r}")


def logprobs_of(raw: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """Of a chat's shape, which llama.cpp uses for completions too, or of the completions' older one."""
    if "content" in raw:
        return tuple(_token(entry) for entry in raw["content"] or ())
    tops = raw.get("top_logprobs") or [None] * len(raw["tokens"])
    return tuple(
        TokenLogprob(token, value, None, tuple(TokenLogprob(*pair) for pair in (top or {}).items()))
        for token, value, top in zip(raw["tokens"], raw["token_logprobs"], tops, strict=True)
    )


def _token(entry: dict[str, Any]) -> TokenLogprob:
    data = entry.get("bytes")
    return TokenLogprob(
        whole(entry["token"]),
        entry.get("logprob", UNLIKELY),
        None if data is None else bytes(data),
        tuple(_token(top) for top in entry.get("top_logprobs") or ()),
    )


def whole(text: str) -> str:
    """Half characters replaced: a token may be one."""
    joiner = Joiner()
    return joiner.push(text) + joiner.flush()
