"""The secret that ingresses and replicas prove to hold, made once a cluster and kept where Ray's token guards it."""

from __future__ import annotations

import secrets
from typing import Any

from ray.experimental import internal_kv

KEY, NAMESPACE = b"glm5-link-secret", b"glm5"


def cluster_secret() -> bytes:
    """The same bytes in every process of this cluster: whoever asks first makes them."""
    kv: Any = internal_kv
    kv._internal_kv_put(KEY, secrets.token_bytes(32), overwrite=False, namespace=NAMESPACE)
    found: bytes = kv._internal_kv_get(KEY, namespace=NAMESPACE)
    return found
