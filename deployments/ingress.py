"""The HTTP front as a Serve deployment: it holds the service's port itself, so that no answer passes Serve's proxy.

Serve places these processes, watches their health and replaces them; several share the port of a node.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.backend import FleetBackend
from deployments.loopback import bind_replica
from deployments.secret import cluster_secret
from service.config import parse
from service.http.app import create_app
from service.http.server import HttpServer
from service.link.ingress import Links

END_S = 2.0
"""Of the drain time, what is kept for the answers' last bytes."""


class Ingress:
    """One front process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self, tree: dict[str, Any], **pools: DeploymentHandle[Any]
    ) -> None:
        """`pools`: only so that Serve takes them for parts of this application; no call goes through a handle."""
        bind_replica()
        config = parse(tree)
        self._drain_s = config.drain_s
        id = serve.get_replica_context().replica_tag
        self._backend = FleetBackend(id, config, Links(cluster_secret(), config.most_frame))
        page = files("dashboards") / "page"
        app = create_app(self._backend, config.http, page, aliases=config.model.aliases)
        self._server = HttpServer(app, config.http)
        await self._server.start()

    async def check_health(self) -> None:
        """Raises when this process no longer follows the fleet or listens."""
        self._backend.check()
        if not self._server.serving:
            raise RuntimeError("the port is not listened on any more")

    async def __del__(self) -> None:
        """Serve calls this before it ends the process. Best effort by nature: a killed process never gets here."""
        if hasattr(self, "_server"):
            self._backend.dismiss()
            await self._server.stop(self._drain_s + END_S)
            self._backend.close()
