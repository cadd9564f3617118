"""Our reader of vLLM's results beside vLLM's own stream of chunks: the same results, the same answer."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from service.engines.choice import Choice
from service.engines.vllm.answer import Completion, Reader, chat_deltas, completion_deltas
from service.errors import EngineFailed
from service.types import CallPart, Delta
from tests.deltas import joined

pytest.importorskip("vllm")

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
OTHER = "<tool_call>time<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call>"
SPECIAL = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "[eos]",
)  # fmt: skip


@cache
def tokenizer() -> Any:
    """A token for each byte, and GLM's own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[eos]")


def results(text: str, finish: str, steps: int, *, logprobs: bool = False) -> list[Any]:
    """vLLM's RequestOutputs of an answer, `steps` tokens at a time, after two that have a part of the prompt alone."""
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    ids = tokenizer().encode(text)
    prompt = tokenizer().encode("hi")

    def result(fresh: list[int], said: str, end: str | None) -> Any:
        tops: Any = [
            {token: Logprob(-0.5, 1, chr(token)), 7: Logprob(-1.5, 2, "x")} if logprobs else None for token in fresh
        ]
        output = CompletionOutput(0, said, fresh, None, tops if logprobs else None, finish_reason=end)
        return RequestOutput("r", "hi", prompt, None, [output], end is not None, num_cached_tokens=1)

    made, told = [result([], "", None), result([], "", None)], ""
    for at in range(0, len(ids), steps):
        # As vLLM's detokenizer does: half a character waits for its other half.
        so_far = tokenizer().decode(ids[: at + steps]).rstrip("\ufffd")
        made.append(result(ids[at : at + steps], so_far[len(told) :], None if at + steps < len(ids) else finish))
        told = so_far
    return made


async def flow(of: list[Any]) -> AsyncIterator[Any]:
    for result in of:
        yield result


@dataclass
class Layers:
    """vLLM's own class with what its stream reads of a whole server."""

    reasoning: bool = True

    def chat(self) -> Any:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.parser import ParserManager

        layer = object.__new__(OpenAIServingChat)
        config = SimpleNamespace(hf_config=SimpleNamespace(model_type="glm"), hf_text_config=SimpleNamespace())
        parsers = ParserManager.get_parser(
            tool_parser_name="glm47", reasoning_parser_name="glm45", enable_auto_tools=True, model_name="m"
        )
        layer.__dict__.update(
            parser_cls=parsers if self.reasoning else None, model_config=config, enable_force_include_usage=False,
            _include_reasoning_tokens_details=self.reasoning, enable_prompt_tokens_details=True, request_logger=None,
            enable_log_outputs=False, system_fingerprint=None, enable_per_request_metrics=False,
            response_role="assistant", return_tokens_as_token_ids=False,
        )  # fmt: skip
        return layer


async def vllms(layer: Any, asked: Any, of: list[Any]) -> Delta:
    """The answer by vLLM's chunks."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata

    stream = layer.chat_completion_stream_generator(
        asked, flow(of), "r", "m", [], tokenizer(), RequestResponseMetadata(request_id="r"), chat_template_kwargs={}
    )
    choice, pieces, usage = Choice(), [], {}
    async for event in stream:
        if (data := event.removeprefix("data: ").strip()) == "[DONE]":
            break
        chunk = orjson.loads(data)
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        pieces += [choice.read(entry) for entry in chunk["choices"]]
    counted = Delta(
        output_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )
    return nameless(joined([*pieces, counted]))


def nameless(answer: Delta) -> Delta:
    """Calls as a client puts them together; their ids are random."""
    calls: dict[int, CallPart] = {}
    for part in answer.calls:
        known = calls.get(part.index, CallPart(part.index))
        calls[part.index] = CallPart(part.index, "", known.name + part.name, known.arguments + part.arguments)
    return Delta(**{**{name: getattr(answer, name) for name in answer.__slots__}, "calls": tuple(calls.values())})


def ask(**more: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    usage = {"include_usage": True}
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options=usage, **more
    )


TEXTS = {
    "plain": ("<think>well, ä</think>Grüße 😀!", "stop", {}),
    "no reasoning": ("</think>yes", "stop", {}),
    "cut in the reasoning": ("<think>on and on", "length", {}),
    "a call": (f"<think>a tool</think>{CALL}", "stop", {"tools": TOOLS}),
    "two calls": (f"<think></think>Let me see.{CALL}{OTHER}", "stop", {"tools": TOOLS}),
    "one call of two": (f"</think>{CALL}{OTHER}", "stop", {"tools": TOOLS, "parallel_tool_calls": False}),
    "logprobs": ("<think>well</think>yes", "stop", {"logprobs": True, "top_logprobs": 2}),
    "hidden": ("<think>well</think>yes", "stop", {"include_reasoning": False, "logprobs": True, "top_logprobs": 1}),
}


@pytest.mark.parametrize("steps", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", TEXTS)
async def test_a_chat_is_what_vllms_own_stream_says(name: str, steps: int) -> None:
    text, finish, more = TEXTS[name]
    asked, layer = ask(**more), Layers().chat()
    said = results(text, finish, steps, logprobs=bool(asked.logprobs))
    right = await vllms(layer, asked, said)
    deltas = [
        d async for d in chat_deltas(layer)(asked, flow(said), "r", "m", [], tokenizer(), chat_template_kwargs={})
    ]
    found = nameless(joined(deltas))
    assert found == right
    assert found.output_tokens == len(tokenizer().encode(text))
    assert (len(found.calls), found.finish == "tool_calls") == {
        "a call": (1, True), "two calls": (2, True), "one call of two": (1, True),
    }.get(name, (0, False))  # fmt: skip


async def test_a_model_without_parsers_says_its_text() -> None:
    layer, asked = Layers(reasoning=False).chat(), ask()
    said = results("<think>x", "stop", 3)
    deltas = [d async for d in chat_deltas(layer)(asked, flow(said), "r", "m", [], tokenizer())]
    assert nameless(joined(deltas)) == await vllms(layer, asked, said)
    assert joined(deltas).text == "<think>x"


async def test_a_completion_is_its_text_with_the_prompt_before_it_where_asked() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    layer = object.__new__(OpenAIServingCompletion)
    layer.return_tokens_as_token_ids = False
    layer.model_config = SimpleNamespace(is_encoder_decoder=False)
    for echo, right in ((False, "yes, ä"), (True, "hiyes, ä")):
        asked = CompletionRequest(model="m", prompt="hi", stream=True, echo=echo, logprobs=1)

        async def numbered(of: list[Any]) -> AsyncIterator[tuple[int, Any]]:
            for result in of:
                yield 0, result

        said = results("yes, ä", "length", 2, logprobs=True)
        for result in said:
            result.prompt_logprobs = [None] * 2
        stream = completion_deltas(layer)(
            asked, [{"prompt": "hi", "prompt_token_ids": [1, 2]}], numbered(said), tokenizer=tokenizer(), num_prompts=1
        )
        whole = joined([delta async for delta in stream])
        tokens = len(tokenizer().encode("yes, ä"))
        assert (whole.text, whole.finish) == (right, "length")
        assert (whole.prompt_tokens, whole.cached_tokens, whole.output_tokens) == (2, 1, tokens)
        assert len(whole.logprobs) == tokens + 2 * echo
        assert [token.logprob for token in whole.logprobs if token.logprob is not None] == [-0.5] * tokens


async def test_an_answer_that_vllm_gives_up_is_an_error() -> None:
    asked = SimpleNamespace(echo=False, logprobs=None, max_tokens=4)
    for reason in ("abort", "error"):
        reader = Reader(Completion(asked, "", lambda ids, top: {}).said)
        with pytest.raises(EngineFailed, match=reason):
            for result in results("yes", reason, 1):
                reader.read(result)


async def test_counts_add_up_however_the_tokens_come() -> None:
    """Also those of results whose text a parser holds back."""
    lots = random.Random(5)
    text = f"<think>{'w' * 9}</think>{'yes ' * 5}{CALL}"
    for _ in range(20):
        asked, layer = ask(tools=TOOLS), Layers().chat()
        said = results(text, "stop", lots.randint(1, 9))
        stream = chat_deltas(layer)(asked, flow(said), "r", "m", [], tokenizer())
        whole = joined([delta async for delta in stream])
        assert (whole.output_tokens, whole.prompt_tokens) == (len(tokenizer().encode(text)), 2)
        assert whole.reasoning_tokens == 9
