"""Who is at the other end of a connection: both sides prove that they hold the cluster's secret, neither shows it.

    replica -> ingress   HELLO | nonce_r
    ingress -> replica   nonce_i | proof("ingress", nonce_r, nonce_i)
    replica -> ingress   proof("replica", nonce_i, nonce_r)

A proof is an HMAC-SHA256; the words keep one side's proof from serving as the other's. Nothing else is read from a peer
that has not proved itself. What follows is not encrypted, as Ray's own traffic is not: a cluster's network is closed by
its NetworkPolicy, one machine's by loopback. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

HELLO = b"glm5-link-1\n"
NONCE = 32
PROOF = 32
GREETING = len(HELLO) + NONCE
REPLY = NONCE + PROOF


class Refused(Exception):
    """The peer does not hold the secret, or is something else altogether."""


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, who + first + second, hashlib.sha256).digest()


class ReplicaSide:
    """`greeting` is sent first; `check` takes `REPLY` bytes and returns what is sent back."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self.greeting = HELLO + self._nonce

    def check(self, reply: bytes) -> bytes:
        """Raises Refused."""
        nonce, proof = reply[:NONCE], reply[NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"ingress", self._nonce, nonce)):
            raise Refused("the peer does not hold this cluster's secret")
        return _proof(self._secret, b"replica", nonce, self._nonce)


class IngressSide:
    """`reply` takes the greeting (`GREETING` bytes) and returns what is sent; `check` takes the last `PROOF` bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._own = secrets.token_bytes(NONCE)
        self._theirs = b""

    def reply(self, greeting: bytes) -> bytes:
        """Raises Refused."""
        if not greeting.startswith(HELLO):
            raise Refused("the peer is no replica of this version")
        self._theirs = greeting[len(HELLO) :]
        return self._own + _proof(self._secret, b"ingress", self._theirs, self._own)

    def check(self, proof: bytes) -> None:
        """Raises Refused."""
        if not hmac.compare_digest(proof, _proof(self._secret, b"replica", self._own, self._theirs)):
            raise Refused("the peer does not hold this cluster's secret")
