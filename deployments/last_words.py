"""What a process of the local Ray printed last, from the log that Ray keeps of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import ray

from deployments.pins import lives
from service.fleet.post import Post

MOST_BYTES = 16 << 10


def still_lives(post: Post) -> bool:
    """False only where it is known: the process was on this node, and has ended."""
    return post.node != ray.get_runtime_context().get_node_id() or lives(post.pid)


def last_words(post: Post) -> str:
    """Empty where there are none, or not on this node."""
    from ray._private.worker import _global_node

    if _global_node is None:
        return ""
    logs = Path(_global_node.get_session_dir_path()) / "logs"
    for path in logs.glob(f"worker-*-{post.pid}.err"):
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - MOST_BYTES))
            return log.read(MOST_BYTES).decode("utf-8", "replace")
    return ""
