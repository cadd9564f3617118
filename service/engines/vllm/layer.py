"""The one module that touches vLLM's serving internals (pinned to 0.32.0): AsyncLLM under its own OpenAI layer.

No socket: the serving objects that `vllm serve` puts behind its routes are called directly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
from pydantic import ValidationError

from service.engines.vllm.answer import chat_deltas, completion_deltas
from service.engines.vllm.books import Books, stat_logger
from service.errors import BadRequest, ContextOverflow, EngineFailed, ModelNotFound, ServiceError
from service.types import Delta, Endpoint


class Layer:
    """A running AsyncLLM and vLLM's OpenAI layer over it. `build` blocks; call it on a thread."""

    def __init__(self, engine: Any, args: Any) -> None:
        self._engine = engine
        self._args = args
        self._state: Any = None

    @staticmethod
    def build(argv: list[str], books: Books) -> Layer:
        """Start the engine's processes and load the model. Raises ValueError or RuntimeError from vLLM."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))  # type: ignore[no-untyped-call]
        args = parser.parse_args(argv)
        validate_parsed_serve_args(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        engine = AsyncLLM.from_vllm_config(config, stat_loggers=[stat_logger(books)], disable_log_stats=False)
        return Layer(engine, args)

    async def open(self) -> None:
        """Make the OpenAI layer."""
        from starlette.datastructures import State
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        state = State()
        await init_app_state(self._engine, state, self._args, await self._engine.get_supported_tasks())
        chat, completion = state.openai_serving_chat, state.openai_serving_completion
        chat.chat_completion_stream_generator = chat_deltas(chat)
        completion.completion_stream_generator = completion_deltas(completion)
        self._state = state

    @property
    def alive(self) -> bool:
        return not self._engine.errored

    @property
    def context_tokens(self) -> int:
        return int(self._engine.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        return int(self._engine.model_config.get_vocab_size())

    @property
    def sequences(self) -> int:
        """Sequences that one step computes at most, as vLLM settled it."""
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes at most, as vLLM settled it."""
        scheduler = self._engine.vllm_config.scheduler_config
        return int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)

    @property
    def attention_backend(self) -> str:
        config = self._engine.vllm_config.attention_config
        return str(getattr(config, "backend", None) or "")

    async def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncIterator[Delta]:
        """An answer's pieces. Closing the iterator aborts the request in the engine. Raises ServiceError."""
        identity = body["request_id"]
        result = await self._start(endpoint, body)
        finished = False
        try:
            async for delta in result:
                finished = finished or delta.finish is not None
                yield delta
        except Exception as fault:
            raise translate(fault) from fault
        finally:
            if not finished:
                # The generator's own clean-up runs when the collector gets to it; the slot must be free at once.
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._abort(identity))
                with contextlib.suppress(RuntimeError):
                    await result.aclose()
        if not finished:
            raise EngineFailed("vLLM ended the answer without a finish reason")

    async def _start(self, endpoint: Endpoint, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        try:
            if endpoint == "chat":
                result = await self._state.openai_serving_chat.create_chat_completion(ChatCompletionRequest(**body))
            else:
                result = await self._state.openai_serving_completion.create_completion(CompletionRequest(**body))
        except ValidationError as fault:
            first = fault.errors()[0]
            where = ".".join(str(step) for step in first["loc"]) or None
            raise BadRequest(f"{where or 'body'}: {first['msg']}", param=where) from None
        except ServiceError:
            raise
        except Exception as fault:
            raise translate(fault) from fault
        if isinstance(result, ErrorResponse):
            raise error_of(result.error.model_dump())
        return result

    async def _abort(self, identity: str) -> None:
        known = self._engine.output_processor.external_req_ids
        names = [name for name in tuple(known) if identity in name]
        if names:
            await self._engine.abort(names)

    async def generate(self, prompt: list[int], params: dict[str, Any], identity: str) -> Any:
        """The engine's own result for token ids, without the OpenAI layer (the gate uses it)."""
        from vllm import SamplingParams

        found = None
        stream = self._engine.generate({"prompt_token_ids": prompt}, SamplingParams(**params), request_id=identity)
        async for result in stream:
            found = result
        return found

    async def generate_together(self, prompts: list[list[int]], params: dict[str, Any], identity: str) -> list[Any]:
        """The engine's own results for prompts that its scheduler sees at once: what fits into one step is computed in
        one. For before ready: all other requests are held back while these are handed over, and stay so if that is
        broken off."""
        from vllm import SamplingParams

        queues: list[Any] = []
        async with contextlib.AsyncExitStack() as broken_off:
            broken_off.push_async_callback(self._withdraw, queues)
            # Asked one after the other the first would have its step before the second arrives.
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            try:
                for index, prompt in enumerate(prompts):
                    ask = ({"prompt_token_ids": prompt}, SamplingParams(**params))
                    queues.append(await self._engine.add_request(f"{identity}-{index}", *ask))
            finally:
                await self._engine.resume_generation()
            found = [await _last(queue) for queue in queues]
            broken_off.pop_all()
        return found

    async def _withdraw(self, queues: list[Any]) -> None:
        """Nobody waits for these requests any more. An engine that died has none."""
        with contextlib.suppress(Exception):
            await asyncio.shield(self._engine.abort([queue.request_id for queue in queues], internal=True))

    async def profile(self, seconds: float) -> None:
        """Have the workers write a trace of the steps of the next `seconds` (launch.PROFILED_STEPS at most)."""
        await self._engine.start_profile()
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.shield(self._engine.stop_profile())

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

        make = TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest
        return await self._serve(self._state.serving_tokenization.create_tokenize, make, body)

    async def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest

        return await self._serve(self._state.serving_tokenization.create_detokenize, DetokenizeRequest, body)

    async def _serve(self, call: Any, make: Any, body: dict[str, Any]) -> dict[str, Any]:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        try:
            result = await call(make(**body), _NoRequest())
        except ValidationError as fault:
            first = fault.errors()[0]
            raise BadRequest(f"{first['loc']}: {first['msg']}") from None
        except Exception as fault:
            raise translate(fault) from fault
        if isinstance(result, ErrorResponse):
            raise error_of(result.error.model_dump())
        found: dict[str, Any] = orjson.loads(result.model_dump_json())
        return found

    def close(self) -> None:
        """End the engine's processes. Blocks up to some seconds."""
        self._engine.shutdown(timeout=10)


async def _last(queue: Any) -> Any:
    """A request's whole result, out of the queue that vLLM fills step by step."""
    while not (result := queue.get_nowait() or await queue.get()).finished:
        pass
    return result


class _NoRequest:
    """Stands for the HTTP request that vLLM reads a request id from."""

    headers: dict[str, str] = {}  # noqa: RUF012


def translate(fault: Exception) -> ServiceError:
    """vLLM's exception as one of ours."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(fault, ServiceError):
        return fault
    if isinstance(fault, EngineDeadError):
        return EngineFailed("vLLM's engine died")
    return error_of(create_error_response(fault).error.model_dump())


def error_of(error: dict[str, Any]) -> ServiceError:
    """vLLM's error object as one of ours."""
    message, code = str(error.get("message", "unknown error")), int(error.get("code") or 500)
    if "maximum context length" in message or "longer than the maximum model length" in message:
        return ContextOverflow(message, param=error.get("param"))
    if code == 404:
        return ModelNotFound(message, param=error.get("param"))
    if code < 500:
        return BadRequest(message, param=error.get("param"))
    return EngineFailed(f"vLLM: {message}")
