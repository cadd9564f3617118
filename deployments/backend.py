"""What stands behind the HTTP app in an ingress process: admission and routing here, engines behind our connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager

from deployments.board import INTERVAL_S, Board, here
from deployments.last_words import last_words, still_lives
from deployments.ray_metrics import RaySink
from service.admission.gate import Gate
from service.admission.keys import KeyRing
from service.config import Config
from service.engines import registry
from service.errors import BadRequest, NotReady
from service.fleet.dispatch import Dispatch
from service.fleet.loads import Loads
from service.fleet.post import Demand, Post
from service.fleet.view import Shares, View
from service.http.backend import PoolReadiness, Readiness, RequestContext, Served
from service.link.ingress import Links
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.news import News
from service.metrics.recorders import IngressRecorder
from service.routing.pick import Choice, PoolView, Spill, Wish, home, pick
from service.types import TIERS, Delta, EngineRequest, ModelCard, PoolName

READ_S = 0.25
SMALL_CALL_S = 30.0
PROFILE_CALL_S = 120.0
"""A profile's window is at most 10 s; its trace is written and read after that."""
MISSED_S = 10.0
"""How long a request that found no replica counts as demand for one."""
GUESSED_TOKENS = 256
"""Length of an answer whose request names no limit."""


class FleetBackend:
    """Implements service/http/backend.py's Backend for one ingress process."""

    def __init__(self, id: str, config: Config, links: Links) -> None:
        self._id, self._config, self._links = id, config, links
        self._board, self._metrics, self._sink = Board(), Metrics(), RaySink()
        self._recorder = IngressRecorder(self._metrics)
        self._keys = KeyRing.load(config.admission)
        self._gates = {
            name: Gate(
                capacity=0,
                reserved=pool.reserved_slots,
                bound=config.admission.queue_requests,
                share=config.admission.lower_tier_share,
            )
            for name, pool in config.pools.items()
        }
        self._view, self._shares, self._loads = View(), Shares(id), Loads()
        self._dispatch = Dispatch(id, links, config.routing.retries)
        self._missed: dict[PoolName, deque[float]] = {name: deque(maxlen=1000) for name in config.pools}
        self._start_s: dict[PoolName, float] = {}
        self._spill = Spill(config.routing.spill_to_throughput, config.routing.spill_to_latency)
        self._honours = frozenset.intersection(*(registry.honours(p.engine.name) for p in config.pools.values()))
        self._following = asyncio.create_task(self._follow_board())

    # ------------------------------------------------------------------ the board

    async def _follow_board(self) -> None:
        """Follow the fleet's state, and say ours."""
        news, said = News(), 0.0
        while True:
            now = time.monotonic()
            if now - said >= INTERVAL_S:
                self._board.pin(self._id, self._post())
                said = now
            for name, gate in self._gates.items():
                self._recorder.queued(name, gate.queue.waiting)
            metrics = snapshot(self._metrics)
            self._sink.offer(metrics)
            fresh = news.pick(metrics, now)
            if fresh is not None:
                self._board.pin(self._id, None, fresh)
            posts = await self._board.posts()
            if posts is not None:
                self._loads.observe(posts, still_lives, last_words)
                self._update(self._view.updated(posts, self._links.linked, time.monotonic()))
            await asyncio.sleep(READ_S)

    def _post(self) -> Post:
        demand = {name: self._demand(name, gate) for name, gate in self._gates.items()}
        ready = all(self._serving(name) or not pool.min_replicas for name, pool in self._config.pools.items())
        return Post(self._id, "ingress", phase="ready" if ready else "starting", ready=ready, demand=demand, **here())

    def _demand(self, pool: PoolName, gate: Gate) -> Demand:
        missed, since = self._missed[pool], time.monotonic() - MISSED_S
        while missed and missed[0] < since:
            missed.popleft()
        return Demand(
            running=gate.queue.running,
            waiting=gate.queue.waiting,
            missed=len(missed),
            priority_wait_s=gate.oldest_wait_s("priority"),
            queued_tokens=sum(ticket.tokens for ticket in gate.queue.tickets if ticket.tier != "priority"),
        )

    def _update(self, view: View) -> None:
        """Connections, quotas and slots follow the fleet."""
        self._view = view
        self._dispatch.follow(view)
        self._keys.divide(self._id, view.ingresses)
        for name, gate in self._gates.items():
            reserved = self._config.pools[name].reserved_slots
            queue = gate.queue
            part = self._shares.part(name, view, queue.running, queue.waiting, queue.capacity, reserved)
            gate.resize(part.slots, part.reserved)
            self._start_s.update((name, post.start_s) for post in view.ready(name) if post.start_s is not None)

    def _serving(self, pool: PoolName) -> int:
        """Replicas of a pool that take requests from here."""
        return len(self._dispatch.reachable(pool)) if self._gates[pool].queue.capacity > 0 else 0

    # ------------------------------------------------------------------ what HTTP asks

    def authorize(self, credential: str | None, *, operator: bool = False) -> None:
        if operator:
            self._keys.admit_operator(credential)
        else:
            self._keys.find(credential)

    def models(self) -> list[ModelCard]:
        return self._view.cards

    def honours(self) -> frozenset[str]:
        return self._honours

    def readiness(self) -> Readiness:
        pools: dict[PoolName, PoolReadiness] = {}
        for name, settings in self._config.pools.items():
            replicas, ready = self._view.replicas(name), self._view.ready(name)
            serving, shown = self._serving(name), self._shown(name)
            phase, detail = (
                (shown.phase, shown.failure or shown.detail) if shown else ("starting", "waiting for a replica")
            )
            reason = self._loads.reason.get(name)
            if reason and not ready:
                detail = f"{detail}; try {self._loads.deaths[name]} failed: {reason}".lstrip("; ")
            pools[name] = PoolReadiness(
                ready_replicas=serving,
                target_replicas=max(settings.min_replicas, len(replicas)),
                phase="failed" if shown and shown.failure else phase,
                detail=detail,
                fraction=None if shown is None or shown.ready else shown.fraction,
                eta_s=0.0 if serving else self._eta_s(name, shown),
            )
        return Readiness(any(pool.ready_replicas for pool in pools.values()), pools)

    def _shown(self, pool: PoolName) -> Post | None:
        """The replica that speaks for a pool: one that is ready, else the one that has loaded most."""
        replicas = self._view.replicas(pool)
        ready = next((post for post in replicas if post.ready), None)
        return ready or max(replicas, key=lambda post: post.fraction or 0.0, default=None)

    def _eta_s(self, pool: PoolName, shown: Post | None) -> float | None:
        """Seconds until a pool without a ready replica can serve: what the one that loads says, else what one took."""
        if shown is not None and shown.eta_s is not None:
            return shown.eta_s
        took = self._start_s.get(pool)
        return took if took is None or shown is None else max(1.0, took - shown.phase_s)

    async def metrics(self) -> bytes:
        own = snapshot(self._metrics)
        self._board.pin(self._id, None, own)
        snapshots, native = await self._board.metrics()
        return merge(snapshots or [own], native)

    # ------------------------------------------------------------------ work

    async def generate(self, request: EngineRequest, context: RequestContext) -> AsyncGenerator[Served | Delta, None]:
        deadline = time.monotonic() + request.timeout_s
        with self._recorder.request(request.endpoint, context.stream, request.timeout_s) as meter:
            caller = self._keys.find(context.credential)
            self._dispatch.condemned.check(request.endpoint, request.body, time.monotonic())
            choice = self._choose(Wish(context.requested_tier, context.mode, caller.ceiling))
            with caller.spend(context.siblings) as budget:
                gate, tokens = self._gates[choice.pool], context.max_tokens or GUESSED_TOKENS
                async with gate.slot(request.id, choice.tier, request.timeout_s, tokens) as waited:
                    served = Served(choice.tier, choice.pool, waited)
                    meter.served(served)
                    yield served
                    answer = self._dispatch.answer(
                        choice.pool,
                        request,
                        choice.tier,
                        deadline,
                        whole=not context.stream,
                        session=context.session,
                    )
                    async with contextlib.aclosing(answer) as deltas:
                        async for delta in deltas:
                            if delta is None:
                                yield served
                                continue
                            meter.chunk(delta)
                            budget.used(delta)
                            yield delta

    def _choose(self, wish: Wish) -> Choice:
        views = {}
        for name, gate in self._gates.items():
            ready = self._serving(name) > 0
            views[name] = PoolView(
                ready=ready,
                wait_s={tier: gate.expected_wait_s(tier) for tier in TIERS},
                eta_s=0.0 if ready else self._eta_s(name, self._shown(name)),
            )
        try:
            choice = pick(wish, views, self._spill)
        except NotReady:
            for pool in self._missed:
                if pool in ("shared", home(wish)):
                    self._missed[pool].append(time.monotonic())
            raise
        if choice.reason in ("pool_down", "spill"):
            other: PoolName = "throughput" if choice.pool == "latency" else "latency"
            self._missed[other].append(time.monotonic())
        self._recorder.routed(choice.pool, choice.reason)
        return choice

    def counted(self, credential: str | None) -> AbstractContextManager[object]:
        return self._keys.find(credential).spend(1)

    async def tokenize(self, body: bytes) -> bytes:
        return await self._call("tokenize", body)

    async def detokenize(self, body: bytes) -> bytes:
        return await self._call("detokenize", body)

    async def profile(self, pool: PoolName | None, body: bytes) -> bytes:
        if pool is not None and pool not in self._gates:
            raise BadRequest(f"pool: there is no pool {pool}; pools are {', '.join(self._gates)}", param="pool")
        return await self._call("profile", body, pool, PROFILE_CALL_S)

    async def _call(
        self, method: str, body: bytes, pool: PoolName | None = None, timeout_s: float = SMALL_CALL_S
    ) -> bytes:
        return await self._dispatch.call(pool or self._choose(Wish(None, None)).pool, method, body, timeout_s)

    # ------------------------------------------------------------------ life

    def check(self) -> None:
        """Raises RuntimeError when this process no longer follows the fleet."""
        if self._following.done():
            raise RuntimeError("the task that follows the board has ended") from self._following.exception()

    def dismiss(self) -> None:
        """No new requests; those that wait are told to ask again."""
        for gate in self._gates.values():
            gate.dismiss()

    def close(self) -> None:
        self._following.cancel()
        self._links.close()
        self._board.pin(self._id, None, snapshot(self._metrics))
        self._board.unpin(self._id)
