"""`glm5 serve`: bring the application up, say how far it is, hold it until a signal, take it down."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deployments.cluster import cluster, free_port, require_port
from service.config import Config
from service.errors import Stopped, UserError
from service.fleet.loads import Loads

if TYPE_CHECKING:
    from deployments.board import Board

POLL_S = 0.25
STATUS_S = 2.0
TRIES = 3
"""Loads of a pool that may die, one after the other, before the start is given up."""

Say = Callable[[str, str], None]
"""(phase, detail) of the start; called at every poll."""


def serve(config: Config, say: Say, ready: Callable[[str], None]) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP. Raises UserError or Stopped where the service cannot start or go on."""
    port = config.http.port or free_port(config.http.host)
    require_port(config.http.host, port)
    config = config.model_copy(update={"http": config.http.model_copy(update={"port": port})})
    stop = threading.Event()
    with _signals(stop):
        say("starting Ray", "")
        # Signals again: Ray puts handlers of its own, which abort, on SIGTERM.
        with cluster(config, stop) as vigil, _signals(stop):
            if not stop.is_set():
                start(config, stop, say)
            if not stop.is_set():
                ready(f"http://{'127.0.0.1' if config.http.host == '0.0.0.0' else config.http.host}:{port}")
            while not stop.wait(1.0):
                pass
            if not vigil.lost:
                drain(config, say)
            say("stopping", "")
            if config.ray.address is not None:
                leave()


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """First signal: end in order. Second: at once (KeyboardInterrupt)."""

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drain(config: Config, say: Say) -> None:
    """Take no new requests and let the running ones end, up to the pools' `drain_s`. A second signal cuts them."""
    from ray import serve as ray_serve

    from deployments.app import NAME
    from deployments.board import INTERVAL_S, Board

    board = Board()
    time.sleep(INTERVAL_S + POLL_S)  # until the board knows of a request that began just now
    deadline = time.monotonic() + config.drain_s
    if _running(board):
        ray_serve.delete(NAME, _blocking=False)
    while (left := _running(board)) and time.monotonic() < deadline:
        say("draining", f"{left} answers still run; Ctrl-C again cuts them")
        time.sleep(POLL_S)


def leave() -> None:
    """Take our application off a cluster that stays; Serve itself may have others to run."""
    from ray import serve as ray_serve

    from deployments.app import NAME

    ray_serve.delete(NAME, _blocking=True)


def _running(board: Board) -> int:
    """Requests inside engines, or waiting at an ingress."""
    posts = board.posts_now() or []
    inside = sum(post.stats.running for post in posts if post.stats)
    return max(inside, sum(demand.running + demand.waiting for post in posts for demand in post.demand.values()))


def start(config: Config, stop: threading.Event, say: Say) -> None:
    """Deploy and wait until every pool has its replicas. Raises UserError or Stopped with the reason where one cannot
    load."""
    from ray import serve as ray_serve

    from deployments.app import NAME, deploy
    from deployments.board import Board
    from deployments.last_words import last_words, still_lives

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    say("starting Ray Serve", "controller")
    ray_serve.start(
        proxy_location="Disabled",
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    deploy(config)
    board, loads = Board(), Loads()
    looked = 0.0
    while not stop.wait(POLL_S):
        posts = board.posts_now() or []
        loads.observe(posts, still_lives, last_words)
        for pool, deaths in loads.deaths.items():
            if deaths >= TRIES:
                raise Stopped(f"the {pool} pool cannot load its model, {deaths} tries: {loads.reason[pool]}")
        replicas = [post for post in posts if post.role == "replica"]
        for post in replicas:
            if post.failure:
                raise UserError(f"the {post.pool} pool cannot load its model: {post.failure}")
        wanted = {name: pool.min_replicas for name, pool in config.pools.items()}
        have = {name: sum(1 for p in replicas if p.pool == name and p.ready) for name in wanted}
        loading = next((p for p in replicas if not p.ready), None)
        if loading is not None:
            share = "" if loading.fraction is None else f", {loading.fraction:.0%}"
            eta = "" if loading.eta_s is None else f", {loading.eta_s:.0f} s left"
            say(f"{loading.pool}: {loading.phase}", f"{loading.detail}{share}{eta}")
        elif any(have[name] < wanted[name] for name in wanted):
            say("starting replicas", "waiting for Ray to start their processes")
        else:
            say("starting the front", "HTTP processes")
        fronts = sum(1 for post in posts if post.role == "ingress" and post.ready)
        up = fronts >= config.ingress.replicas and all(have[name] >= wanted[name] for name in wanted)
        if time.monotonic() - looked >= STATUS_S or up:
            looked = time.monotonic()
            state = ray_serve.status().applications.get(NAME)
            if up and state is not None and state.status == "RUNNING":
                return
            if state is not None and state.status == "DEPLOY_FAILED":
                reasons = [f"{n}: {d.message}" for n, d in state.deployments.items() if d.status != "HEALTHY"]
                reasons = [f"{pool}: {reason}" for pool, reason in loads.reason.items()] or reasons
                raise Stopped("the service did not start: " + (" ".join(reasons) or state.message)[:2000])
