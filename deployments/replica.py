"""The engine replica: owns one engine from load to drain. Knows Ray Serve; the engine does not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson
from ray import serve

from deployments.board import INTERVAL_S, Board, here
from deployments.conversion import Conversion, wanted
from deployments.loopback import bind_replica, node_address
from deployments.prediction import Prediction
from deployments.ray_metrics import RaySink
from deployments.secret import cluster_secret
from service.config import Config, PoolConfig, parse
from service.engines import registry
from service.errors import DeadlineExceeded, EngineFailed, NotReady, ServiceError, UserError
from service.fleet.post import Post
from service.link.replica import ReplicaLink
from service.metrics.declared import Metrics
from service.metrics.exchange import snapshot
from service.metrics.news import News
from service.metrics.recorders import ReplicaRecorder
from service.scaling.conversion import Verdict
from service.types import Delta, EngineRequest, LoadProgress, ModelCard, PoolName, Tier

SPACING_S = 0.1
"""Shortest time between two words to the board. A request that ends is told at once, otherwise `INTERVAL_S` is enough:
on two cores every wake of this loop stops a thread of the engine, and the rest of them wait for it."""
NATIVE_S = 1.0
"""Engine-native metrics are fetched this often: they cost an HTTP call or a rendering."""
CALLS = ("tokenize", "detokenize", "profile")
"""What ingresses may ask of the engine beside answers."""
FAILURES = 5
"""Engine failures in a row, with no answer between them, that open the circuit: Serve replaces the replica."""


class Replica:
    """One process, from load to drain. Ingresses ask it over its own connections (service/link/replica.py)."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self, tree: dict[str, Any], pool: PoolName
    ) -> None:
        bind_replica()
        config = parse(tree)
        self._pool, self._settings = pool, config.pools[pool]
        self._id = serve.get_replica_context().replica_tag if serve.get_replica_context() else pool
        self._board, self._metrics, self._sink = Board(), Metrics(), RaySink()
        self._recorder = ReplicaRecorder(self._metrics, pool, self._settings.slots)
        self._post = Post(self._id, "replica", pool, phase="starting", **here())
        self._phase_began = began = time.monotonic()
        self._running: Counter[Tier] = Counter()
        """Requests inside, by tier."""
        self._ended = asyncio.Event()
        """Something ended (a request, a load) that the board should hear of at once."""
        self._failures = 0
        self._config = config
        self._conversion: Conversion | None = None
        self._converting: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        """Requests may enter the engine; those that come while it is reloaded wait for this."""
        self._draining = False
        self._prediction: Prediction | None = None
        calls = {name: functools.partial(self._call, name) for name in CALLS}
        self._link = ReplicaLink(cluster_secret(), self.generate, calls, config.most_frame)
        self._engine = _make_engine(config, self._settings)
        self._tasks = [asyncio.create_task(self._speak())]
        try:
            card = await self._load()
            if pool == "shared" and config.scaling.convert != "off":
                self._conversion = Conversion(config, self._metrics, time.monotonic() - began)
        except (UserError, ServiceError) as fault:
            # Serve would retry for ever without a word: the reason stays on the board while it does.
            self._say(failure=str(fault))
            self._pin()
            await asyncio.sleep(INTERVAL_S)
            raise
        address = await self._link.listen(node_address())
        self._serve(card, start_s=time.monotonic() - began, address=address)
        if self._conversion is not None:
            self._tasks.append(asyncio.create_task(self._consider()))

    def _progress(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if progress.phase != self._post.phase:
            self._recorder.load_phase(self._post.phase, now - self._phase_began)
            self._phase_began = now
        self._say(
            phase=progress.phase,
            detail=progress.detail,
            fraction=progress.fraction,
            eta_s=progress.eta_s,
            phase_s=now - self._phase_began,
        )

    def _say(self, **news: Any) -> None:
        self._post = Post(**{**{name: getattr(self._post, name) for name in Post.__dataclass_fields__}, **news})

    def _pin(self, metrics: bytes | None = None, native: str | None = None) -> None:
        stats = self._engine.stats() if self._post.ready or self._draining else None
        self._say(
            stats=stats,
            phase_s=time.monotonic() - self._phase_began,
        )
        self._board.pin(self._id, self._post, metrics, native)

    async def _speak(self) -> None:
        """Tell the board where we are, and what was counted: every `INTERVAL_S`, and soon after a request ended."""
        news, fetched = News(), 0.0
        while True:
            native, now = None, time.monotonic()
            if self._post.ready:
                stats = self._engine.stats()
                self._recorder.engine(stats)
                predicted = self._prediction.step_s(stats) if self._prediction else None
                if predicted is not None:
                    self._recorder.predicted_step(predicted)
                if now - fetched >= NATIVE_S:
                    native, fetched = await self._engine.native_metrics(), now
            metrics = snapshot(self._metrics)
            self._sink.offer(metrics)
            self._pin(news.pick(metrics, now), native)
            await asyncio.sleep(SPACING_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), INTERVAL_S - SPACING_S)
            self._ended.clear()

    async def _load(self) -> ModelCard:
        """Bring the engine up, to its first answer. Raises UserError or ServiceError."""
        card: ModelCard = await self._engine.load(self._progress)
        self._progress(LoadProgress("warming"))
        await self._warm()
        self._prediction = Prediction.of(self._config, self._settings)
        if self._prediction is not None:
            self._recorder.predicted_curve(self._prediction.curve())
        return card

    def _serve(self, card: ModelCard, **news: Any) -> None:
        """Let requests in, and tell the board at once."""
        self._progress(LoadProgress("ready"))
        self._say(ready=True, card=card, failure="", **news)
        self._open.set()
        self._ended.set()
        self._pin()

    async def _warm(self) -> None:
        """One answer before the first client: pages are in memory, caches and thread pools exist."""
        # No chat: a base model has no template for one.
        body = orjson.dumps({"prompt": "Hi", "max_tokens": 2})
        async with asyncio.timeout(300):
            async for _ in self._engine.generate(EngineRequest("warm", "completions", body)):
                pass

    async def _consider(self) -> None:
        """Whether to reload in the other mode, again and again; one reload at a time."""
        assert self._conversion is not None
        while True:
            await asyncio.sleep(INTERVAL_S)
            posts = await self._board.posts()
            if posts is None or not self._post.ready:
                continue
            replicas = sum(1 for post in posts if post.role == "replica" and post.pool == self._pool and post.ready)
            verdict = self._conversion.observe(wanted(posts, replicas), self._running["priority"])
            if verdict is not None:
                self._converting = asyncio.create_task(self._convert(verdict))

    async def _convert(self, verdict: Verdict) -> None:
        """Reload in the other mode. Ingresses see that this replica is not ready and let requests wait; what runs may
        end, up to `drain_s`; what is on its way waits here. A mode that does not load is given up for the old one; if
        that fails too the engine counts as dead, and Serve replaces the replica."""
        assert self._conversion is not None
        began, before = time.monotonic(), self._settings
        self._open.clear()
        self._say(ready=False, phase=f"reloading for {verdict.mode}", detail=verdict.why, eta_s=self._post.start_s)
        self._pin()
        while self._engine.stats().running and time.monotonic() - began < before.drain_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), SPACING_S)
        for settings in (before.converted(), before):
            await self._engine.close()
            self._settings, self._engine = settings, _make_engine(self._config, settings)
            try:
                card = await self._load()
            except (UserError, ServiceError) as fault:
                logging.getLogger("ray.serve").error("conversion: %d slots cannot load: %s", settings.slots, fault)
                self._say(failure=str(fault))
                continue
            self._serve(card)
            if settings is not before:
                self._conversion.done(settings, verdict, time.monotonic() - began)
            return

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """One answer, as the engine gives it; counted. Closing it stops the decoding."""
        if self._draining:
            raise NotReady("this replica is being stopped")
        self._running[request.tier] += 1
        try:
            await self._entered(request)
            with self._recorder.request(request.tier) as meter:
                source = self._engine.generate(request)
                async with contextlib.aclosing(source):  # type: ignore[type-var]
                    async for delta in source:
                        meter.chunk(delta)
                        yield delta
            self._failures = 0
        except EngineFailed:
            self._failures += 1
            raise
        finally:
            self._running[request.tier] -= 1
            self._ended.set()

    async def _entered(self, request: EngineRequest) -> None:
        """Until the engine takes requests. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(request.timeout_s):
                await self._open.wait()
        except TimeoutError:
            raise DeadlineExceeded("the request's time limit ran out while the model was reloaded") from None

    async def _call(self, name: str, body: bytes) -> bytes:
        answer: bytes = await getattr(self._engine, name)(body)
        return answer

    async def check_health(self) -> None:
        """Raises when the engine is dead, stands still with work in hand or only fails, or when this process no longer
        speaks to the board or listens; busy or loading is healthy."""
        for task in self._tasks:
            if task.done():
                raise RuntimeError("a task of the replica has ended") from task.exception()
        if not self._post.ready:
            if self._draining:
                return
            if self._converting is not None and self._converting.done():
                raise RuntimeError(f"the engine could not be reloaded: {self._post.failure}")
            return
        stats = self._engine.stats()
        if not stats.alive:
            raise RuntimeError("the engine is dead")
        if self._failures >= FAILURES:
            raise RuntimeError(f"the last {self._failures} requests all failed in the engine")
        if stats.running and stats.heartbeat_age_s > self._settings.stall_s:
            raise RuntimeError(f"{stats.running} requests run, nothing decoded for {stats.heartbeat_age_s:.0f} s")

    async def __del__(self) -> None:
        """Serve calls this before it ends the process: what runs may end, up to `drain_s`. Best effort by nature: a
        killed process never gets here."""
        if not hasattr(self, "_engine"):
            return
        self._draining = True
        if self._post.ready:
            self._say(ready=False, phase="draining")
            self._pin()
            deadline = time.monotonic() + self._settings.drain_s
            while self._link.streams and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), SPACING_S)
        await self._link.close()
        for task in (*self._tasks, self._converting):
            if task is not None:
                task.cancel()
        self._board.pin(self._id, None, snapshot(self._metrics))
        self._board.unpin(self._id)
        await self._engine.close()


def _make_engine(config: Config, pool: PoolConfig) -> Any:
    path = str(config.model.file()) if pool.engine.name != "simulated" else config.model.path
    return registry.create(
        pool.engine.name,
        model=path,
        served_name=config.model.served_name,
        slots=pool.slots,
        context_tokens=config.model.context_tokens,
        options=pool.engine,
    )
