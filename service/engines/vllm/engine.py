"""vLLM behind the engine protocol: GGUF files (GLM-5 among them) and Hugging Face directories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics_core import Metric

from service.engines.fields import HONOURED
from service.engines.phases import Phases
from service.engines.protocol import Report
from service.engines.vllm import canary, launch, progress, versions, warmup
from service.engines.vllm.attention import choose_attention, exactness
from service.engines.vllm.books import Books
from service.engines.vllm.layer import Layer
from service.engines.vllm.options import VllmOptions
from service.errors import BadRequest, EngineFailed, UserError
from service.gguf.header import GgufHeader, read_header
from service.gguf.materialise import linked_file, materialise
from service.gguf.rules import Setup, refusals
from service.planning.trace import read_trace
from service.types import Delta, EngineRequest, EngineStats, LoadProgress, ModelCard

SPARSE = ("glm_moe_dsa", "deepseek_v32")
"""model_type of Hugging Face directories that vLLM serves with an indexer, which it has for GPUs only."""

POLL_S = 0.25
"""How often the loading processes' word is read: a phase's time is told as exactly as that."""


class VllmEngine:
    """One model under vLLM, `slots` sequences at once, `context_tokens` for each of them at most."""

    name = "vllm"
    honours = HONOURED["vllm"]

    def __init__(self, *, model: str, served_name: str, slots: int, context_tokens: int, options: VllmOptions) -> None:
        self._path, self._served, self._slots, self._context = Path(model), served_name, slots, context_tokens
        self._options = options
        self._layer: Layer | None = None
        self._books = Books()
        self._running = self._requests = self._output = self._prompt = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._notes: list[str] = []
        self._slow_kernels = False
        self._reference: canary.Reference | None = None
        self._traces = Path(tempfile.mkdtemp(prefix="glm5-traces-")) if options.profiler else None
        self._profiling = asyncio.Lock()

    async def load(self, report: Report) -> ModelCard:
        """Check, start, warm up, judge. Raises UserError for a file or setting that cannot be served rightly."""
        phases = Phases()
        return await self._load(lambda progress: report(phases.told(progress)))

    async def _load(self, report: Report) -> ModelCard:
        report(LoadProgress("checking", self._path.name))
        on_cpu = await _on_cpu()
        # Not beside the import of vLLM: of two threads that import the same packages one may find the other's half done
        # ("cannot import name 'AutoConfig' from 'transformers'").
        header, model = await asyncio.to_thread(self._prepare, on_cpu)
        with tempfile.TemporaryDirectory(prefix="glm5-load-") as place:
            told = Path(place) / "progress"
            argv = launch.arguments(model, self._options, on_cpu=on_cpu, traces=self._traces)
            os.environ.update(launch.variables(self._options, len(os.sched_getaffinity(0)), told))
            deadline = time.monotonic() + self._options.load_timeout_s
            starting = asyncio.create_task(asyncio.to_thread(Layer.build, argv, self._books))
            with contextlib.ExitStack() as given_up:
                # A start cannot be broken off half-way: it is ended as soon as it is done.
                given_up.callback(starting.add_done_callback, _close_when_built)
                await self._watch(starting, told, report)
                given_up.pop_all()
        # What this process starts later reports to nobody.
        os.environ.pop(progress.VARIABLE, None)
        self._layer = starting.result()
        await self._layer.open()
        await self._prove(self._layer, on_cpu, deadline, report)
        report(LoadProgress("ready", "; ".join(self._notes), 1.0))
        return ModelCard(
            name=self._served,
            engine=self.name,
            architecture=model.architecture,
            context_tokens=self._layer.context_tokens,
            vocab_size=self._layer.vocab_size,
            bytes=header.bytes if header else sum(f.stat().st_size for f in self._path.glob("*.safetensors")),
            parameters=header.parameters if header else 0,
            quantisation=header.quantisation if header else "",
        )

    async def _prove(self, layer: Layer, on_cpu: bool, deadline: float, report: Report) -> None:
        """Warm up (until `deadline` of the monotonic clock) and judge. Ends the engine and raises UserError when the
        model may not serve."""
        async with contextlib.AsyncExitStack() as refused:
            refused.push_async_callback(self.close)
            if not on_cpu:
                await self._warm(layer, deadline, report)
            if self._options.gate:
                await self._judge(layer, on_cpu, report)
            refused.pop_all()

    async def _warm(self, layer: Layer, deadline: float, report: Report) -> None:
        """Raises UserError when a batch cannot be computed, or not all are by the deadline."""
        batches = warmup.plan(layer.context_tokens, layer.sequences, layer.step_tokens)
        report(LoadProgress("warming up", f"{len(batches)} batches of up to {batches[0].tokens} tokens"))
        try:
            await warmup.warm(layer, batches, deadline - time.monotonic())
        except UserError:
            raise
        except TimeoutError:
            raise UserError(
                f"{self._path.name} did not answer the prompts of the warm-up within load_timeout_s "
                f"({self._options.load_timeout_s:g} s, of which loading took its part): vLLM's log says what it waited "
                "for; the first start on a machine compiles kernels, so allow more or start again"
            ) from None
        except Exception as fault:
            raise UserError(f"{self._path.name} could not answer the prompts of the warm-up: {fault!r}") from fault

    async def _judge(self, layer: Layer, on_cpu: bool, report: Report) -> None:
        """Raises UserError when the answers are wrong or do not come."""
        report(LoadProgress("judging", "answers before serving"))
        allowed = canary.tolerance(self._options, on_cpu=on_cpu)
        try:
            verdict = await canary.judge(layer, self._reference, allowed)
        except UserError:
            raise
        except Exception as fault:
            raise UserError(f"{self._path.name} could not answer the gate's prompts: {fault!r}") from fault
        if verdict.faults:
            raise UserError(f"{self._path.name} answers wrongly and may not serve: {'; '.join(verdict.faults)}")
        self._notes.append(verdict.note)

    def _prepare(self, on_cpu: bool) -> tuple[GgufHeader | None, launch.Model]:
        options = self._options
        gguf = not self._path.is_dir()
        versions.check_versions(versions.installed(), gguf=gguf, allow_other=options.allow_other_versions)
        if not gguf:
            if not (self._path / "config.json").is_file():
                raise UserError(f"model directory {self._path} holds no config.json")
            config = orjson.loads((self._path / "config.json").read_bytes())
            kind = str(config.get("model_type", ""))
            if on_cpu and (kind in SPARSE or "index_topk" in config):
                raise UserError(
                    f"{self._path}: {kind} attends sparsely, which vLLM's CPU build cannot; serve a GGUF file of it "
                    "(dense attention), or use a GPU"
                )
            return None, launch.Model(self._path, self._served, kind, None, self._context, self._slots)
        versions.check_entry_point()
        header = read_header(self._path)
        if not on_cpu:
            from service.engines.vllm.kernels.repack import FORM  # brings torch

            if versions.plugin_computes(header, options.kernels, FORM):
                self._slow_kernels = not versions.check_kernels(allow_slow=options.allow_slow_kernels)
        attention = choose_attention(header, options.attention, self._context, on_cpu=on_cpu)
        if options.gate:
            self._reference = canary.read_reference(options, header)
        setup = Setup(
            tensor_parallel=options.tensor_parallel,
            attention=attention,
            mtp=options.mtp_tokens > 0,
            quantised_kernels=not on_cpu,
        )
        faults = refusals(header, setup)
        if faults:
            raise UserError(f"{self._path}: " + "; ".join(faults))
        warning = exactness(header, attention, self._context)
        if warning:
            self._notes.append(warning)
        place = materialise(header, Path(options.cache_dir).expanduser() / "models", attention)
        file = linked_file(place, header)
        return header, launch.Model(file, self._served, header.architecture, place, self._context, self._slots)

    async def _watch(self, starting: asyncio.Task[Layer], path: Path, report: Report) -> None:
        """Report while vLLM starts. Raises UserError with the reason when it does not, or takes too long."""
        started, told = time.monotonic(), 0
        report(LoadProgress(progress.STARTING))
        while not starting.done():
            await asyncio.wait({starting}, timeout=POLL_S)
            seconds, now = time.monotonic() - started, progress.read(path)
            # Each of them, though several may have begun since the last look.
            for phase in now.phases[told:]:
                report(LoadProgress(phase))
            told = len(now.phases)
            report(_progress(now, seconds))
            if seconds > self._options.load_timeout_s:
                raise UserError(f"vLLM did not come up in {seconds:.0f} s")
        failure = starting.exception()
        if failure is not None:
            reason = progress.read(path).fault or str(failure)
            raise UserError(f"vLLM cannot serve {self._path}: {reason}") from failure

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        layer = self.layer
        body: dict[str, Any] = orjson.loads(request.body)
        for ours in ("service_tier", "metadata", "store", "n"):
            body.pop(ours, None)
        body |= {"model": self._served, "request_id": request.id, "stream": True}
        self._enter()
        answers = layer.answer(request.endpoint, body)
        try:
            async for delta in answers:
                self._output += delta.output_tokens
                self._prompt += delta.prompt_tokens
                yield delta
        finally:
            await answers.aclose()  # type: ignore[attr-defined]
            self._leave()

    @property
    def layer(self) -> Layer:
        """vLLM itself. Raises EngineFailed before `load` and after `close`."""
        if self._layer is None:
            raise EngineFailed("vLLM is not loaded")
        return self._layer

    def _enter(self) -> None:
        if not self._running:
            self._busy_since = self._books.beat = time.monotonic()
        self._running += 1
        self._requests += 1

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy_s += time.monotonic() - self._busy_since

    async def tokenize(self, body: bytes) -> bytes:
        ask: dict[str, Any] = orjson.loads(body)
        answer = await self.layer.tokenize({**ask, "model": self._served})
        return orjson.dumps({key: answer[key] for key in ("tokens", "count", "max_model_len")})

    async def detokenize(self, body: bytes) -> bytes:
        ask: dict[str, Any] = orjson.loads(body)
        answer = await self.layer.detokenize({"tokens": ask["tokens"], "model": self._served})
        return orjson.dumps({"prompt": answer["prompt"]})

    async def profile(self, body: bytes) -> bytes:
        if self._traces is None:
            raise BadRequest("vLLM's profiler is off: start the service with pools.<pool>.engine.profiler: true")
        if self._profiling.locked():
            raise BadRequest("another profile is being made; ask again when it is done")
        layer, asked = self.layer, float(orjson.loads(body)["seconds"])
        async with self._profiling:
            for old in self._traces.iterdir():
                old.unlink()
            steps = self._books.steps
            await layer.profile(asked)
            steps = min(self._books.steps - steps, launch.PROFILED_STEPS)
            written = sorted(self._traces.glob("*rank*0*.json*"), key=lambda f: f.stat().st_size)
            if not steps or not written:
                raise BadRequest("nothing was decoded in that time: send load, and ask again")
            causes = await asyncio.to_thread(read_trace, written[-1])
        return orjson.dumps({"causes_s": causes, "steps": steps})

    async def native_metrics(self) -> str:
        """vLLM's own Prometheus text (`vllm:*`): it registers its metrics in this process."""
        families = [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]
        return generate_latest(_Families(families)).decode() if families else ""  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        now, books = time.monotonic(), self._books
        return EngineStats(
            slots=self._slots,
            running=self._running,
            waiting=books.waiting if self._running else 0,
            output_tokens=self._output,
            prompt_tokens=self._prompt,
            requests=self._requests,
            steps=books.steps,
            busy_s=self._busy_s + (now - self._busy_since if self._running else 0.0),
            heartbeat_age_s=now - books.beat if self._running else 0.0,
            kv_used=books.kv_used,
            drafted=books.drafted,
            accepted=books.accepted,
            alive=self._layer is not None and self._layer.alive,
            extra={"kernel_fallback": float(self._slow_kernels)},
        )

    async def close(self) -> None:
        layer, self._layer = self._layer, None
        if layer is not None:
            await asyncio.to_thread(layer.close)
        if self._traces is not None:
            shutil.rmtree(self._traces, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Families:
    """What generate_latest asks of a registry."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


async def _on_cpu() -> bool:
    """Whether vLLM's build here computes on CPUs. Importing it takes seconds."""

    def ask() -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    try:
        return await asyncio.to_thread(ask)
    except ImportError as missing:
        raise UserError(f"vLLM cannot be imported: {missing}; pip install 'glm5-serve[gpu]'") from None


def _close_when_built(starting: asyncio.Task[Layer]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=starting.result().close, daemon=True).start()


def _progress(told: progress.Told, seconds: float) -> LoadProgress:
    """The phase that is under way, `seconds` after vLLM was started."""
    phase = told.phases[-1] if told.phases else progress.STARTING
    if phase != progress.STEPS["load_model"] or not told.total:
        return LoadProgress(phase, f"{seconds:.0f} s so far")
    if told.done >= told.total:
        return LoadProgress(phase, f"read in {told.seconds:.0f} s")
    eta = told.seconds * (told.total - told.done) / told.done if told.done else None
    rate = told.done / max(told.seconds, 1e-9) / 1e9
    detail = f"{told.done / 1e9:.2f} of {told.total / 1e9:.2f} GB, {rate:.2f} GB/s"
    return LoadProgress(phase, detail, told.done / told.total, eta)
