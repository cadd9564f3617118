"""Stop texts, looked for in the text of the answer alone: never in a tool call, nor in reasoning.

llama.cpp looks for them in all that the model writes, and loses what it holds back when an answer ends by its length.
Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.types import Delta, TokenLogprob


def stop_texts(body: dict[str, Any]) -> tuple[str, ...]:
    given = body.get("stop") or ()
    return (given,) if isinstance(given, str) else tuple(given)


class Stops:
    """Feed it the deltas in order. `hit` once a stop text was found: then the delta that came back is the last one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._held = ""
        self._tokens: tuple[TokenLogprob, ...] = ()
        self._ahead = 0  # characters by which the last token that was handed on went beyond its text
        self.hit = False

    def feed(self, delta: Delta) -> Delta:
        if not self._texts:
            return delta
        text = self._held + delta.text
        # The one that is complete first: which deltas the text came in must not matter.
        found = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            self.hit = True
            _, end = min(found)
            return replace(delta, text=text[:end], calls=(), logprobs=self._begun(delta, end), finish="stop")
        over = delta.finish is not None or delta.calls
        end = len(text) if over else len(text) - self._begins_stop(text)
        self._held = text[end:]
        if self._held and not delta.reasoning:
            logprobs = self._begun(delta, end)
        else:
            logprobs, self._tokens, self._ahead = self._tokens + delta.logprobs, (), 0
        return replace(delta, text=text[:end], logprobs=logprobs)

    def _begins_stop(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop text may begin."""
        longest = max(map(len, self._texts)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._texts):
                return length
        return 0

    def _begun(self, delta: Delta, end: int) -> tuple[TokenLogprob, ...]:
        """Those of the held tokens and the delta's whose text begins before `end`; the others are held."""
        tokens, at = self._tokens + delta.logprobs, self._ahead
        for count, token in enumerate(tokens):
            if at >= end:
                self._tokens, self._ahead = tokens[count:], at - end
                return tokens[:count]
            at += len(token.token)
        self._tokens, self._ahead = (), max(0, at - end)
        return tokens
