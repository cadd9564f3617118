"""Deltas from the engine's own results: vLLM's reasoning and tool parsers, without its chunk models and their JSON,
which cost more than half of what a token costs in this process (docs/performance.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from service.engines.choice import Choice
from service.types import Delta

Said = Callable[[Any, Any], dict[str, Any] | None]
"""An entry of `choices` as Choice reads it, of a RequestOutput and its one CompletionOutput; None: held back."""


class Reader:
    """Of one request: vLLM's RequestOutputs of its steps, each with what is new in it, in order."""

    def __init__(self, said: Said, reasoning: Callable[[], int] = lambda: 0) -> None:
        """`reasoning`: how many of the tokens were reasoning, asked once, at the end."""
        self._said, self._reasoning = said, reasoning
        self._choice = Choice()
        self._output = self._prompt = self._cached = 0
        """Tokens of results that said nothing yet: a parser holds them back."""
        self._began = False

    def read(self, result: Any) -> Delta | None:
        """None for a result that says nothing by itself; its counts come with the next. Raises EngineFailed."""
        (output,) = result.outputs
        finish = output.finish_reason
        if self._choice.finished or not (output.text or output.token_ids or finish):
            return None  # a part of the prompt was computed
        self._output += len(output.token_ids)
        if not self._began:
            self._began = True
            self._prompt, self._cached = len(result.prompt_token_ids or ()), result.num_cached_tokens or 0
        entry = self._said(result, output)
        if entry is None and finish is None:
            return None
        counts = Delta(
            output_tokens=self._output,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            reasoning_tokens=self._reasoning() if finish is not None else 0,
        )
        self._output = self._prompt = self._cached = 0
        return self._choice.read({"finish_reason": finish} | (entry or {"delta": {}}), counts)


class Chat:
    """What a chat's results say. `parser`: vLLM's for this request, None where the model has none; `asked`: its
    request model; `logprobs`: of an output, in OpenAI's shape."""

    def __init__(self, parser: Any, asked: Any, logprobs: Callable[[Any], dict[str, Any]]) -> None:
        self._parser, self._asked, self._logprobs = parser, asked, logprobs
        self._ids: list[int] = []
        self._called = False

    def said(self, result: Any, output: Any) -> dict[str, Any] | None:
        delta = self._parsed(result, output) if self._parser is not None else {"content": output.text}
        # The log-probabilities of a reasoning that is not shown would show it.
        shown = self._asked.logprobs and (self._asked.include_reasoning or self._parser is None)
        if delta is None and not shown:
            return None
        entry: dict[str, Any] = {"delta": delta or {"content": ""}}
        if shown:
            entry["logprobs"] = self._logprobs(output)
        if output.finish_reason is not None:
            entry["finish_reason"] = self._finish(output.finish_reason)
        return entry

    def reasoning(self) -> int:
        """vLLM counts over all tokens each time: once an answer, not once a token."""
        return int(self._parser.count_reasoning_tokens(tuple(self._ids))) if self._parser is not None else 0

    def _parsed(self, result: Any, output: Any) -> dict[str, Any] | None:
        fresh = list(output.token_ids)
        self._ids += fresh
        message = self._parser.parse_delta(
            delta_text=output.text,
            delta_token_ids=fresh,
            request=self._asked,
            prompt_token_ids=result.prompt_token_ids,
            finished=output.finish_reason is not None,
        )
        if message is None:
            return None
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        self._called = self._called or bool(calls)
        if self._asked.parallel_tool_calls is False:
            calls = [call for call in calls if call["index"] == 0]
        return {"content": message.content, "reasoning": message.reasoning, "tool_calls": calls}

    def _finish(self, reason: str) -> str:
        """OpenAI's: a call that the model chose to make ends with `tool_calls`, a named one as it ends."""
        named = not isinstance(self._asked.tool_choice, str | None)
        return "tool_calls" if reason == "stop" and self._called and not named else reason


class Completion:
    """What a completion's results say. `prompt`: its text, said before the first token where `echo` is asked."""

    def __init__(self, asked: Any, prompt: str, logprobs: Callable[[Any, Any], dict[str, Any]]) -> None:
        self._asked, self._prompt, self._logprobs = asked, prompt, logprobs
        self._echoes = bool(asked.echo)

    def said(self, result: Any, output: Any) -> dict[str, Any]:
        text, ids, logprobs = output.text, output.token_ids, output.logprobs
        if self._echoes:
            self._echoes = False
            text, ids = self._prompt + text, [*result.prompt_token_ids, *ids]
            logprobs = [*(result.prompt_logprobs or ()), *(logprobs or ())]
            if self._asked.max_tokens == 0:
                text, ids, logprobs = self._prompt, result.prompt_token_ids, result.prompt_logprobs
        entry: dict[str, Any] = {"text": text}
        if self._asked.logprobs is not None:
            entry["logprobs"] = self._logprobs(ids, logprobs)
        return entry


def chat_deltas(layer: Any) -> Callable[..., AsyncIterator[Delta]]:
    """Takes the place of `layer.chat_completion_stream_generator`; `layer` is vLLM's OpenAIServingChat."""

    def generator(
        asked: Any,
        results: Any,
        request_id: str,
        model: str,
        conversation: Any,
        tokenizer: Any,
        *rest: Any,
        **more: Any,
    ) -> AsyncIterator[Delta]:
        def logprobs(output: Any) -> dict[str, Any]:
            made = layer._create_chat_logprobs(
                token_ids=output.token_ids,
                top_logprobs=output.logprobs,
                tokenizer=tokenizer,
                num_output_top_logprobs=asked.top_logprobs,
                return_as_token_id=asked.return_tokens_as_token_ids,
            )
            return dict(made.model_dump())

        parser = None
        if layer.parser_cls is not None:
            parser = layer._make_parser(asked, tokenizer, more.get("chat_template_kwargs"))
        chat = Chat(parser, asked, logprobs)
        return _read(
            results, Reader(chat.said, chat.reasoning if layer._include_reasoning_tokens_details else lambda: 0)
        )

    return generator


def completion_deltas(layer: Any) -> Callable[..., AsyncIterator[Delta]]:
    """Takes the place of `layer.completion_stream_generator`; `layer` is vLLM's OpenAIServingCompletion."""

    def generator(
        asked: Any, inputs: Any, results: Any, *rest: Any, tokenizer: Any, **more: Any
    ) -> AsyncIterator[Delta]:
        def logprobs(ids: Any, top: Any) -> dict[str, Any]:
            made = layer._create_completion_logprobs(
                token_ids=ids,
                top_logprobs=top,
                num_output_top_logprobs=asked.logprobs,
                tokenizer=tokenizer,
                return_as_token_id=asked.return_tokens_as_token_ids,
            )
            return dict(made.model_dump())

        prompt = layer._extract_prompt_text(inputs[0]) or "" if asked.echo else ""
        return _read((result async for _, result in results), Reader(Completion(asked, prompt, logprobs).said))

    return generator


async def _read(results: AsyncIterator[Any], reader: Reader) -> AsyncIterator[Delta]:
    async for result in results:
        if (delta := reader.read(result)) is not None:
            yield delta
