"""A profile as a declarative Serve config: what KubeRay (`serveConfigV2`) and `serve deploy` take."""

from __future__ import annotations

from typing import Any

from service.config import Config

NAME = "glm5"
"""The application's name; equals deployments.app.NAME, which cannot be had without importing Ray."""
IMPORT_PATH = "deployments.app:build"


def serve_config(config: Config) -> dict[str, Any]:
    """The tree of a Serve config file: one application at `/`; its `args` are what the profile sets.

    Number of replicas, resources and drain times follow from `args` in `build`; nothing is said twice here.
    """
    return {
        # KubeRay calls a worker ready when its own proxy answers, so every node needs one.
        "proxy_location": "EveryNode",
        "http_options": {"host": config.http.host, "port": config.http.port},
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }


def faults(tree: dict[str, Any]) -> list[str]:
    """What Ray's schema has against a Serve config. It lets unknown keys pass: k8s/ compares with `serve_config`."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(tree)
    except ValidationError as found:
        return [f"{'.'.join(str(step) for step in e['loc'])}: {e['msg']}" for e in found.errors()]
    except ValueError as found:
        return [str(found)]
    return []
