"""Deaths during a load are counted from posts, and their reason is one line."""

from __future__ import annotations

from service.fleet.loads import Loads
from service.fleet.post import Post

ASSERT = "llama_model_load: loading\n/src/ggml.c:12: GGML_ASSERT(eps >= 0) failed\n  frame 1\n"


def post(id: str, *, ready: bool = False, phase: str = "loading weights") -> Post:
    return Post(id, "replica", "shared", phase=phase, ready=ready, pid=int(id))


def test_each_death_counts_once_and_says_why() -> None:
    loads = Loads()
    for tries in range(1, 4):
        loads.observe([post(str(tries))], lambda _: False, lambda _: ASSERT)
        for _ in range(2):
            loads.observe([], lambda _: False, lambda _: ASSERT)
        assert loads.deaths["shared"] == tries
    assert loads.reason["shared"] == (
        "its process died in the phase loading weights: /src/ggml.c:12: GGML_ASSERT(eps >= 0) failed"
    )


def test_an_empty_board_is_no_death() -> None:
    loads = Loads()
    loads.observe([post("1")], lambda _: True, lambda _: "")
    loads.observe([], lambda _: True, lambda _: "")
    assert not loads.deaths
    loads.observe([], lambda _: False, lambda _: "")
    assert loads.reason == {"shared": "its process died in the phase loading weights"}


def test_a_ready_replica_wipes_the_slate_and_its_own_end_is_no_failed_load() -> None:
    loads = Loads()
    loads.observe([post("1")], lambda _: False, lambda _: "")
    loads.observe([post("2")], lambda _: False, lambda _: "")
    assert loads.deaths["shared"] == 1
    loads.observe([post("2", ready=True)], lambda _: False, lambda _: "")
    loads.observe([], lambda _: False, lambda _: "")
    assert not loads.deaths and not loads.reason
