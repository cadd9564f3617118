"""Both sides must hold the secret; a proof of one side is none of the other's, nor of another connection."""

from __future__ import annotations

import pytest

from service.link.handshake import GREETING, PROOF, REPLY, IngressSide, Refused, ReplicaSide


def test_both_hold_the_secret() -> None:
    replica, ingress = ReplicaSide(b"secret"), IngressSide(b"secret")
    assert len(replica.greeting) == GREETING
    reply = ingress.reply(replica.greeting)
    assert len(reply) == REPLY
    proof = replica.check(reply)
    assert len(proof) == PROOF
    ingress.check(proof)


def test_an_ingress_without_it_is_refused() -> None:
    replica, ingress = ReplicaSide(b"secret"), IngressSide(b"other")
    with pytest.raises(Refused, match="secret"):
        replica.check(ingress.reply(replica.greeting))


def test_a_replica_without_it_is_refused() -> None:
    ingress = IngressSide(b"secret")
    reply = ingress.reply(ReplicaSide(b"other").greeting)
    with pytest.raises(Refused):
        ingress.check(bytes(PROOF))
    # Sent back, the ingress's own proof proves nothing.
    with pytest.raises(Refused):
        ingress.check(reply[-PROOF:])


def test_a_reply_serves_one_connection_only() -> None:
    ingress = IngressSide(b"secret")
    heard = ingress.reply(ReplicaSide(b"secret").greeting)
    with pytest.raises(Refused):
        ReplicaSide(b"secret").check(heard)


def test_what_is_no_replica() -> None:
    with pytest.raises(Refused, match="no replica"):
        IngressSide(b"secret").reply(b"HTTP/1.1 400 Bad Request".ljust(GREETING))
