from __future__ import annotations

from service.fleet.post import Demand, Post
from service.fleet.view import QUIET_S, Shares, View
from service.types import EngineStats, ModelCard

CARD = ModelCard("m", "simulated", "glm", 4096, 100)


def replica(id: str, slots: int = 8, ready: bool = True) -> Post:
    return Post(id, "replica", "shared", ready=ready, stats=EngineStats(slots), address=("127.0.0.1", 7), card=CARD)


def ingress(id: str, running: int = 0, waiting: int = 0) -> Post:
    return Post(id, "ingress", demand={"shared": Demand(running, waiting)})


def view(*posts: Post) -> View:
    return View().updated(posts, (), 0.0)


def test_a_post_survives_the_board() -> None:
    for post in (replica("r"), ingress("i", 3, 4), Post("x", "replica", failure="no file")):
        assert Post.decode(post.encode()) == post


def test_who_is_there() -> None:
    fleet = view(replica("a"), replica("b", ready=False), ingress("i"), Post("c", "replica", "latency", ready=True))
    assert [post.id for post in fleet.replicas("shared")] == ["a", "b"]
    assert [post.id for post in fleet.ready("shared")] == ["a"]
    assert fleet.slots("shared") == 8 and fleet.slots("latency") == 0
    assert set(fleet.ingresses) == {"i"}
    assert fleet.addresses == {"a": ("127.0.0.1", 7), "b": ("127.0.0.1", 7)}
    assert fleet.cards == [CARD]


def test_a_replica_that_the_board_forgot_stays_while_it_is_linked() -> None:
    fleet = view(replica("a"), replica("b"), ingress("i"))
    after = fleet.updated([], {"a"}, 100.0)
    assert set(after.posts) == {"a"}, "b has no connection, and an ingress holds nothing for us"
    still = after.updated([], {"a"}, 100.0 + QUIET_S - 0.1)
    assert set(still.posts) == {"a"}
    assert not still.updated([], {"a"}, 100.0 + QUIET_S).posts
    assert not still.updated([], (), 101.0).posts
    back = still.updated([replica("a", 4)], {"a"}, 105.0)
    assert back.slots("shared") == 4 and not back.missing


def test_a_share_shrinks_at_once_and_grows_when_said_twice() -> None:
    shares, both = Shares("i"), view(replica("a", 8), ingress("i"), ingress("j"))
    one = view(replica("a", 8), ingress("i"))
    assert shares.part("shared", one, 0, 0, 0, 0).slots == 8, "a pool that comes up is taken at once"
    assert shares.part("shared", both, 0, 0, 8, 0).slots == 4
    assert shares.part("shared", one, 0, 0, 4, 0).slots == 4, "the other may not know yet"
    assert shares.part("shared", one, 0, 0, 4, 0).slots == 8


def test_the_shares_of_ingresses_that_know_the_same_add_up() -> None:
    posts = [replica("a", 5), replica("b", 6), ingress("i", 7, 3), ingress("j", 0, 2), ingress("k")]
    fleet = view(*posts)
    parts = [
        Shares(id).part("shared", fleet, running, waiting, 0, 0).slots
        for id, running, waiting in (("i", 7, 3), ("j", 0, 2), ("k", 0, 0))
    ]
    assert sum(parts) == 12, "11 slots, and one for an ingress that would have none"


def test_the_reserve_is_shared_too_and_rounds_up() -> None:
    fleet = view(replica("a", 8), replica("b", 8), ingress("i"), ingress("j"))
    part = Shares("i").part("shared", fleet, 0, 0, 0, reserved=1)
    assert (part.slots, part.reserved) == (8, 1)
    assert Shares("i").part("shared", view(), 0, 0, 0, 1).slots == 0
