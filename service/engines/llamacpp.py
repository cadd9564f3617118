"""llama.cpp in this process, through xllamacpp's server layer: bytes in, bytes out, one thread a running request.

The layer opens an HTTP listener of its own on loopback that cannot be turned off. It is locked with a random key and
used by us alone, for /tokenize, /detokenize, /apply-template and /slots, which have no in-process call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import xllamacpp

from service.engines.fields import HONOURED
from service.engines.llamacpp_grammar import grammar, plain, wanted_schema
from service.engines.llamacpp_stops import Stops, stop_texts
from service.engines.llamacpp_tools import Gatherer, must_call, wants_tools, wrap
from service.engines.llamacpp_trial import Trials
from service.engines.llamacpp_wire import Meter, alternatives, counter, error_from, request_body
from service.engines.options import LlamaCppOptions
from service.engines.protocol import Report
from service.engines.text import parse_chunk
from service.errors import BadRequest, EngineFailed, UnsupportedField, UserError
from service.gguf.header import read_header
from service.gguf.values import value_faults
from service.types import Delta, EngineRequest, EngineStats, LoadProgress, ModelCard

METRICS_S = 2.0
"""llama.cpp answers between two batches; its own metrics are not worth a longer wait."""
CLOSE_S = 30.0
ASKED_AT_ONCE = 2
"""Of /tokenize and its like. One more thread answers, for its metrics."""


class LlamaCppEngine:
    """One GGUF file under llama.cpp, `slots` sequences at once, `context_tokens` for each of them."""

    name = "llamacpp"
    honours = HONOURED["llamacpp"]

    def __init__(
        self, *, model: str, served_name: str, slots: int, context_tokens: int, options: LlamaCppOptions
    ) -> None:
        self._path, self._served, self._slots, self._context = Path(model), served_name, slots, context_tokens
        self._options = options
        self._server: Any = None
        self._http: httpx.AsyncClient | None = None
        self._template = True
        self._template_has_tools = False
        self._trials = Trials()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        # One thread more than slots: a cancelled call may linger for one decode step while its successor starts.
        self._threads = ThreadPoolExecutor(slots + 1, thread_name_prefix="llama")
        self._running: set[_Call] = set()
        self._output = self._prompt = self._requests = self._drafted = self._accepted = self._steps = 0
        self._busy_s, self._busy_since, self._beat = 0.0, 0.0, time.monotonic()

    async def load(self, report: Report) -> ModelCard:
        if not self._path.is_file():
            raise UserError(f"model file {self._path} does not exist; give --model FILE.gguf or set model.path")
        header = await asyncio.to_thread(read_header, self._path)
        if faults := value_faults(header):
            raise UserError(f"{self._path}: " + "; ".join(faults))
        size = self._path.stat().st_size
        key = secrets.token_urlsafe(32)
        report(LoadProgress("reading weights", f"{self._path.name}, {size / 1e9:.2f} GB"))
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(None, xllamacpp.Server, self._params(key))
        started = time.monotonic()
        while not (await asyncio.wait({loading}, timeout=0.5))[0]:
            seconds = time.monotonic() - started
            report(LoadProgress("reading weights", f"{self._path.name}, {size / 1e9:.2f} GB, {seconds:.0f} s so far"))
        try:
            self._server = loading.result()
        except RuntimeError as failure:
            raise UserError(f"llama.cpp cannot load {self._path}: {failure}") from failure
        self._http = httpx.AsyncClient(
            base_url=self._server.listening_address, headers={"authorization": f"Bearer {key}"}, timeout=30.0
        )
        self._template = header.chat_template is not None
        capabilities = (await self._http.get("/props")).json().get("chat_template_caps") or {}
        self._template_has_tools = bool(capabilities.get("supports_tools"))
        meta = (await self._http.get("/v1/models")).json()["data"][0]["meta"]
        self._context = int(meta["n_ctx"])
        return ModelCard(
            name=self._served,
            engine=self.name,
            architecture=str(meta.get("architecture", "")) or header.architecture,
            context_tokens=self._context,
            vocab_size=int(meta["n_vocab"]),
            bytes=int(meta["size"]),
            parameters=int(meta["n_params"]),
            quantisation=str(meta.get("ftype", "")),
        )

    def _params(self, key: str) -> Any:
        options, params = self._options, xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.model_alias = {self._served}
        params.n_parallel = self._slots
        params.n_ctx = self._slots * self._context
        params.n_batch, params.n_ubatch = options.batch_tokens, min(options.batch_tokens, 512)
        if options.threads:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        params.cache_prompt, params.cache_ram_mib = options.prefix_cache, options.prefix_cache_mib
        params.n_gpu_layers = options.gpu_layers
        params.n_threads_http = ASKED_AT_ONCE + 1
        params.endpoint_slots = params.endpoint_metrics = True
        params.api_keys, params.ui, params.port = [key], False, 0
        params.verbosity = 1
        return params

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        asked: dict[str, Any] = orjson.loads(request.body)
        if request.endpoint == "chat":
            self._check_chat(asked)
        gatherer = None
        if wants_tools(asked) and (must_call(asked) or not self._native(asked)):
            if asked.get("logprobs"):
                raise UnsupportedField(
                    "logprobs: there are none for tool calls that are held to their parameters", param="logprobs"
                )
            asked, gatherer = wrap(asked), Gatherer()
        schema = wanted_schema(asked)
        held = None if schema is None else grammar(schema)
        if held is not None:
            await self._trials.prove(held)
        stops, text = Stops(stop_texts(asked)), ""
        call = _Call(self, request.endpoint, request_body(asked, self._context), asyncio.get_running_loop())
        self._enter(call)
        job = self._threads.submit(call.run)
        meter = Meter(alternatives(asked))
        try:
            async for raw in call.chunks():
                message = parse_chunk(raw)
                if "error" in message:
                    raise error_from(message["error"], "messages" if "messages" in asked else "prompt")
                self._beat = time.monotonic()
                delta = meter.read(message)
                if delta is None:
                    continue
                self._output += delta.output_tokens
                self._prompt += delta.prompt_tokens
                self._drafted += delta.drafted
                self._accepted += delta.accepted
                if held is not None:
                    text += delta.text
                    if delta.finish is not None:
                        await self._trials.judge(held, text, cut=delta.finish == "length")
                if gatherer is not None:
                    delta = gatherer.read(delta)
                yield stops.feed(delta)
                if stops.hit:
                    return
            if not meter.finished:
                raise EngineFailed("llama.cpp ended the answer without a finish reason")
        finally:
            call.stop()
            if job.cancel():
                self._leave(call)

    def _check_chat(self, asked: dict[str, Any]) -> None:
        if not self._template:
            raise BadRequest(
                f"{self._served} has no chat template: it completes text, so ask /v1/completions with a prompt",
                param="messages",
            )
        if not asked.get("messages"):
            return
        if wants_tools(asked) and asked["messages"][-1]["role"] == "assistant":
            raise BadRequest(
                "with tools the last message may not be the assistant's: there is nothing to answer", param="messages"
            )
        held = wanted_schema(asked) is not None or must_call(asked)
        if held and (asked.get("chat_template_kwargs") or {}).get("enable_thinking"):
            raise BadRequest(
                "llama.cpp writes an answer that is held to a schema without thinking: leave enable_thinking out",
                param="chat_template_kwargs",
            )

    def _native(self, asked: dict[str, Any]) -> bool:
        """Whether llama.cpp's own way with tools keeps what their parameters say."""
        return self._template_has_tools and wanted_schema(asked) is None and plain(asked["tools"])

    def _enter(self, call: _Call) -> None:
        if self._server is None:
            raise EngineFailed("llama.cpp is not loaded")
        if not self._running:
            self._busy_since = self._beat = time.monotonic()
        self._running.add(call)
        self._requests += 1

    def _leave(self, call: _Call) -> None:
        """The call's thread has come back, or never began. Until then it runs, whoever still wants its answer."""
        if call not in self._running:
            return
        self._running.discard(call)
        if not self._running:
            self._busy_s += time.monotonic() - self._busy_since

    async def tokenize(self, body: bytes) -> bytes:
        ask: dict[str, Any] = orjson.loads(body)
        if "messages" in ask:
            self._check_chat(ask)
            keys = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
            rendered = await self._ask("/apply-template", {key: ask[key] for key in keys if key in ask})
            text, special = rendered["prompt"], False
        else:
            text, special = ask["prompt"], ask.get("add_special_tokens", True)
        answer = await self._ask("/tokenize", {"content": text, "add_special": special, "parse_special": True})
        tokens = answer["tokens"]
        return orjson.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": self._context})

    async def detokenize(self, body: bytes) -> bytes:
        answer = await self._ask("/detokenize", {"tokens": orjson.loads(body)["tokens"]})
        return orjson.dumps({"prompt": answer["content"]})

    async def profile(self, body: bytes) -> bytes:
        raise BadRequest("llama.cpp has no profiler of its steps; glm5 explain without --profile splits them by model")

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One of llama.cpp's small calls. Who gives up waits no longer, but llama.cpp goes on: until it is done the
        call keeps its place, so that no more than `ASKED_AT_ONCE` ever hold memory there."""
        if self._http is None:
            raise EngineFailed("llama.cpp is not loaded")
        await self._asking.acquire()
        asked = asyncio.ensure_future(self._http.post(path, content=orjson.dumps(body)))
        asked.add_done_callback(lambda _: self._asking.release())
        try:
            response = await asyncio.shield(asked)
        except httpx.HTTPError as fault:
            raise EngineFailed(f"llama.cpp did not answer {path}: {type(fault).__name__}") from fault
        answer: dict[str, Any] = orjson.loads(response.content)
        if response.status_code != 200:
            raise error_from(answer["error"]) if "error" in answer else BadRequest(str(answer))
        return answer

    def stats(self) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            slots=self._slots,
            running=len(self._running),
            output_tokens=self._output,
            prompt_tokens=self._prompt,
            requests=self._requests,
            steps=self._steps,
            busy_s=self._busy_s + (now - self._busy_since if self._running else 0.0),
            heartbeat_age_s=now - self._beat if self._running else 0.0,
            drafted=self._drafted,
            accepted=self._accepted,
            alive=self._server is not None,
        )

    async def native_metrics(self) -> str:
        """llama.cpp's own Prometheus text (`llamacpp:*`)."""
        if self._http is None:
            return ""
        with contextlib.suppress(httpx.HTTPError):
            text = (await self._http.get("/metrics", timeout=METRICS_S)).text
            self._steps = counter(text, "llamacpp:n_decode_total")
            return text
        return ""

    async def close(self) -> None:
        for call in tuple(self._running):
            call.stop()
        if self._http is not None:
            await self._http.aclose()
        await self._trials.close()
        ending = threading.Thread(target=self._threads.shutdown, daemon=True)
        ending.start()
        await asyncio.get_running_loop().run_in_executor(None, ending.join, CLOSE_S)
        if ending.is_alive():
            # Its thread would be waited for; the process that ends takes it along.
            logging.getLogger("ray.serve").error("llama.cpp did not end its calls within %.0f s", CLOSE_S)
        self._server = None


class _Call:
    """One blocking call of llama.cpp on a thread, read from the event loop.

    The callback appends to a deque and wakes the loop only when it may be asleep, so a burst of chunks costs one wake.
    """

    def __init__(self, engine: LlamaCppEngine, endpoint: str, body: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._endpoint, self._body, self._loop = engine, endpoint, body, loop
        self._chunks: deque[bytes] = deque()
        self._wake, self._stop = asyncio.Event(), threading.Event()
        self._done = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            if not self._stop.is_set():
                server = self._engine._server
                handle = server.handle_chat_completions if self._endpoint == "chat" else server.handle_completions
                handle(self._body, self._receive)
        except ValueError as fault:  # xllamacpp's answer to a body that llama.cpp's JSON reader refuses
            self._failure = BadRequest(f"llama.cpp refused the request: {fault}")
        except Exception as fault:  # noqa: BLE001 - edge of the thread: whatever it was fails the request, not the process
            self._failure = EngineFailed(f"llama.cpp failed: {fault}")
        finally:
            self._done = True
            self._notify()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._engine._leave, self)

    def _receive(self, chunk: bytes) -> bool:
        self._chunks.append(chunk)
        self._notify()
        return self._stop.is_set()

    def _notify(self) -> None:
        # A closed loop means that the process is ending: nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            done = self._done
            while self._chunks:
                yield self._chunks.popleft()
            if done:
                self._engine._leave(self)
                if self._failure is not None:
                    raise self._failure
                return
            await self._wake.wait()
            self._wake.clear()

    def stop(self) -> None:
        """Decoding ends at the next chunk; the thread frees llama.cpp's slot."""
        self._stop.set()
