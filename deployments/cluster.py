"""Ray beneath the service: start one here on loopback with a token, or join one; take down all that we started.

Ray reads its settings from the environment when it is imported, and hands that environment to every process it starts.
So this module alone sets it, before the first `import ray`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from deployments.loopback import LOOPBACK, keep_node_address
from deployments.vigil import Vigil
from deployments.warden import Warden
from service.config import Config
from service.errors import Stopped, UserError


def environment(config: Config, token_file: Path | None) -> dict[str, str]:
    """Settings of Ray and Serve for this profile. Measured effects: docs/performance.md."""
    flags = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Our processes answer from their own loop: no second thread between it and the sockets.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Default 10 s: a burst would wait that long for a replica.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        # Default 0.1 s: the controller would take 4 % of a core from the engine with nothing to do.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray's default is 15: every other process of the machine would go before an answer.
        "RAY_worker_niceness": "0",
        # Our engines choose their threads themselves; Ray would set OMP_NUM_THREADS to num_cpus of the actor.
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    }
    if token_file is not None:
        flags |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    return flags


@contextlib.contextmanager
def cluster(config: Config, stop: threading.Event) -> Iterator[Vigil]:
    """Ray is up inside the block. Started here, it ends with the block; joined, it stays.

    Raises UserError, or Stopped where a Ray that was started here ended of itself; `stop` is set at that moment.
    """
    if "ray" in sys.modules:
        raise AssertionError("ray was imported before its environment was set")
    if config.ray.address is not None:
        os.environ.update(environment(config, None))
        import ray

        try:
            ray.init(address=config.ray.address, log_to_driver=False, namespace="glm5")
        except (ConnectionError, ray.exceptions.RayError) as fault:
            raise UserError(f"ray.address: no Ray cluster answers at {config.ray.address}: {fault}") from None
        yield Vigil(stop)
        return
    home = Path(tempfile.mkdtemp(prefix="glm5-"))
    token = home / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    warden = Warden(home)
    os.environ.update(environment(config, token))
    import ray

    keep_node_address()
    # Ray's own processes take seconds to come up; Serve and our application are read meanwhile.
    threading.Thread(target=importlib.import_module, args=("deployments.app",), daemon=True).start()
    cpus = config.ray.num_cpus or max(4, os.cpu_count() or 1)
    vigil: Vigil | None = None
    try:
        ray.init(
            address="local",
            _node_ip_address=LOOPBACK,
            include_dashboard=False,
            num_cpus=cpus,
            resources=dict(config.ray.resources),
            object_store_memory=config.ray.object_store_mib << 20,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
            namespace="glm5",
        )
        vigil = Vigil(stop)
        yield vigil
    finally:
        lost = vigil.lost if vigil is not None else ""
        if lost:
            # Ray's own shutdown, now or when the interpreter ends, would wait for what is gone.
            atexit.unregister(ray.shutdown)
        else:
            if vigil is not None:
                vigil.over()
            with contextlib.suppress(Exception):
                ray.shutdown()
        warden.end(now=bool(lost))
        if lost and vigil is not None:
            vigil.over()
            raise Stopped(f"{lost}; the service cannot go on without it")


def free_port(host: str) -> int:
    """A TCP port that nobody uses at this moment."""
    import socket

    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_port(host: str, port: int) -> None:
    """Raises UserError where `port` is taken: Serve itself would only retry and log."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as fault:
            raise UserError(f"http.port: {host}:{port} cannot be used ({fault.strerror}); give --port N") from None
