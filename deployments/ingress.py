"""The HTTP front as a Serve deployment: the app of service/http over a RayBackend."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.backend import RayBackend
from deployments.loopback import bind_replica
from service.config import parse
from service.http.app import create_app
from service.types import PoolName


class Ingress:
    """One front process. `handles` are the pools' deployments, by pool name."""

    def __init__(self, tree: dict[str, Any], **handles: DeploymentHandle[Any]) -> None:
        bind_replica()
        self._config = parse(tree)
        self._handles: dict[PoolName, DeploymentHandle[Any]] = {name: handles[name] for name in self._config.pools}

    def __serve_build_asgi_app__(self) -> Any:
        context = serve.get_replica_context()
        backend = RayBackend(context.replica_tag, self._config, self._handles)
        page = files("dashboards") / "page"
        return create_app(backend, self._config.http, page, aliases=self._config.model.aliases)
