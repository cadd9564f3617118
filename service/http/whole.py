"""An answer in one piece: the deltas of each choice, folded. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from service.http.plan import Part, Plan
from service.http.shaping import Shaper, chat_logprobs, text_logprobs
from service.http.usage import Usage, total
from service.types import CallPart, Delta, Finish, Tier, TokenLogprob

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}


class Fold:
    """One choice of a whole answer. Feed it the deltas in order, then `close`."""

    def __init__(self, plan: Plan, part: Part) -> None:
        self.part = part
        self.usage = Usage()
        self._chat = plan.endpoint == "chat"
        self._shaper = Shaper(must_call=plan.must_call)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallPart]] = {}
        self._logprobs: list[TokenLogprob] = []
        self._finish: Finish | None = None

    def feed(self, delta: Delta) -> None:
        """Raises EngineFailed."""
        self.usage.add(delta)
        delta = self._shaper.feed(delta)
        self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for part in delta.calls:
            self._calls.setdefault(part.index, []).append(part)
        if delta.logprobs:
            self._logprobs += delta.logprobs
        self._finish = self._finish or delta.finish

    def close(self) -> None:
        """Raises EngineFailed if the answer has no end."""
        self._shaper.close()

    def choice(self) -> dict[str, Any]:
        """The entry of `choices`, once closed."""
        text, logprobs = "".join(self._text), tuple(self._logprobs)
        said: dict[str, Any] = {"message": self._message(text)} if self._chat else {"text": text}
        shown = chat_logprobs(logprobs) if self._chat else text_logprobs(logprobs, 0)
        return {"index": self.part.index, **said, "logprobs": shown, "finish_reason": self._finish}

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [_call(parts) for parts in self._calls.values()]
        return message


def _call(parts: list[CallPart]) -> dict[str, Any]:
    function = {"name": parts[0].name, "arguments": "".join(part.arguments for part in parts)}
    return {"id": parts[0].id, "type": "function", "function": function}


def whole_answer(plan: Plan, folds: Iterable[Fold], *, tier: Tier, created: int) -> bytes:
    """The response body. `folds`: a closed one for each of `plan.parts`, in their order."""
    folds = tuple(folds)
    return orjson.dumps(
        {
            "id": plan.id,
            "object": OBJECTS[plan.endpoint],
            "created": created,
            "model": plan.model,
            "service_tier": tier,
            "choices": [fold.choice() for fold in folds],
            "usage": total((fold.part.prompt, fold.usage) for fold in folds),
        }
    )
