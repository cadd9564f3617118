"""Ray Serve's application-level autoscaling policy: service/scaling decides, this reads and hands over.

Serve's controller makes one `Policy` and calls it at every turn of its loop (0.1 s), in its own event loop: so nothing
here may wait. A thread follows the board; a call takes its latest word.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from pydantic import TypeAdapter

from deployments.board import INTERVAL_S, Board
from service.config import Config, parse
from service.fleet.post import Post
from service.metrics.declared import Metrics
from service.metrics.exchange import snapshot
from service.metrics.recorders import ControlRecorder
from service.scaling.policy import Decision, Memory, Reading, Rules, decide
from service.scaling.reading import DemandWord, ReplicaWord, read
from service.types import PoolName

PATH = "deployments.autoscaling:Policy"
ID = "control"
DECIDE_S = 0.25
UNUSED_S = 60.0
"""A policy that was replaced is never called again: then its thread ends."""
BELIEVED_S = 3.0
"""A word of the board older than this is no ground for a decision."""


class Policy:
    """`config`: the whole profile as plain data."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse(config)
        self._rules: dict[PoolName, Rules] = {
            name: Rules(pool.min_replicas, pool.max_replicas, pool.slots, pool.boxes)
            for name, pool in self._config.pools.items()
        }
        self._metrics = Metrics()
        self._recorder = ControlRecorder(self._metrics, self._config.pools)
        self._memory, self._decided = Memory(), 0.0
        self._start_s: dict[PoolName, float] = {}
        self._targets: dict[PoolName, int] = {}
        self._posts: tuple[float, list[Post]] = (0.0, [])
        self._called = time.monotonic()
        self._thread: threading.Thread | None = None

    def _follow(self) -> None:
        board = Board()
        while time.monotonic() - self._called < UNUSED_S:
            posts = board.posts_now()
            if posts is not None:
                self._posts = (time.monotonic(), posts)
            board.pin(ID, None, snapshot(self._metrics))
            time.sleep(INTERVAL_S / 2)

    def __call__(self, contexts: dict[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Targets by deployment. Only pools that change are named: Serve keeps the others as they are."""
        now = self._called = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._follow, name="glm5-board", daemon=True)
            self._thread.start()
        seen_at, posts = self._posts
        if now - self._decided < DECIDE_S or now - seen_at > BELIEVED_S:
            return {}, {}
        self._decided = now
        ours = {context.deployment_name: (id, context) for id, context in contexts.items()}
        readings = {name: self._read(name, posts, ours.get(name)) for name in self._rules}
        decision = decide(self._rules, readings, self._config.scaling, self._memory, now)
        self._memory = decision.memory
        self._record(decision, readings)
        changed = {
            ours[name][0]: target
            for name, target in decision.targets.items()
            if name in ours and target != readings[name].target
        }
        return changed, {}

    def _read(self, name: PoolName, posts: list[Post], ours: tuple[Any, Any] | None) -> Reading:
        """`ours`: Serve's (id, context) of the pool; a pool of fixed size has none."""
        replicas = [post for post in posts if post.role == "replica" and post.pool == name]
        if ours is None:
            target, running = self._rules[name].floor, {post.id for post in replicas if post.ready}
        else:
            target, running = ours[1].target_num_replicas, {id.unique_id for id in ours[1].running_replicas}
        words = [ReplicaWord(post.id, post.ready, post.stats, post.start_s) for post in replicas]
        wants = [
            DemandWord(want.waiting, want.missed, want.priority_wait_s, want.queued_tokens)
            for post in posts
            if (want := post.demand.get(name)) is not None
        ]
        reading = read(target, running, words, wants, self._start_s.get(name))
        if reading.start_s is not None:
            self._start_s[name] = reading.start_s
        return reading

    def _record(self, decision: Decision, readings: dict[PoolName, Reading]) -> None:
        for name, target in decision.targets.items():
            before = readings[name].target
            direction = "up" if target > before else "down" if target < before else "hold"
            self._recorder.scaling(name, direction, decision.reasons[name])  # type: ignore[arg-type]
            self._recorder.replicas(name, target, self._rules[name].ceiling)
            if target != before:
                logging.getLogger("ray.serve").info(
                    "pool %s: %d -> %d replicas (%s); %s", name, before, target, decision.reasons[name], readings[name]
                )


def schema(config: Config, application: str, builder: str) -> dict[str, Any]:
    """The application for Serve's declarative API: only there may it have a policy of its own."""
    tree = TypeAdapter(Config).dump_python(config, mode="json")
    return {
        "name": application,
        "route_prefix": None,
        "import_path": builder,
        "args": tree,
        "autoscaling_policy": {"policy_function": PATH, "policy_kwargs": {"config": tree}},
    }
