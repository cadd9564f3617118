"""A profile as a declarative Serve config: what KubeRay (`serveConfigV2`) and `serve deploy` take."""

from __future__ import annotations

from typing import Any

from service.config import Config

# As in deployments.app and deployments.autoscaling (a test compares), which cannot be had without importing Ray.
NAME = "glm5"
IMPORT_PATH = "deployments.app:build"
POLICY_PATH = "deployments.autoscaling:Policy"


def serve_config(config: Config) -> dict[str, Any]:
    """The tree of a Serve config file: one application; its `args` are what the profile sets.

    Number of replicas, resources and drain times follow from `args` in `build`; nothing is said twice here.
    """
    args = config.model_dump(mode="json", exclude_unset=True)
    application = {"name": NAME, "route_prefix": None, "import_path": IMPORT_PATH, "args": args}
    if config.scales:
        # A policy for the whole application exists in the declarative form only (deployments/autoscaling.py).
        application["autoscaling_policy"] = {"policy_function": POLICY_PATH, "policy_kwargs": {"config": args}}
    return {
        # Our ingress processes hold the port themselves.
        "proxy_location": "Disabled",
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "applications": [application],
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
