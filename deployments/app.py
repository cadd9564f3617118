"""`build(config)`: the whole service as one Ray Serve application. Also the import path of declarative deployments."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from ray import serve
from ray.serve import Application

from deployments.ingress import Ingress
from deployments.replica import Replica
from service.config import Config, parse

NAME = "glm5"
BUILDER = "deployments.app:build"
GRACE_S = 10.0
"""Beyond the drain time of a process, until Serve kills it."""


def build(profile: Config | dict[str, Any]) -> Application:
    """Deployments: `ingress`, and one per pool, named after it. Raises UserError for a bad profile."""
    config = profile if isinstance(profile, Config) else parse(profile)
    tree = TypeAdapter(Config).dump_python(config, mode="json")
    pools = {}
    for name, pool in config.pools.items():
        scaling: dict[str, Any] = {"num_replicas": pool.min_replicas}
        if pool.max_replicas > pool.min_replicas:
            # Bounds only: deployments/autoscaling.py decides, with its own patience.
            scaling = {
                "autoscaling_config": {
                    "min_replicas": pool.min_replicas,
                    "max_replicas": pool.max_replicas,
                    "initial_replicas": pool.min_replicas,
                    "upscale_delay_s": 0.0,
                    "downscale_delay_s": 0.0,
                }
            }
        options: dict[str, Any] = {"num_cpus": pool.cpus, "num_gpus": pool.gpus}
        if pool.slot_resources:
            options["resources"] = {"slot": pool.slot_resources}
        deployment: Any = serve.deployment(
            Replica,
            name=name,
            ray_actor_options=options,
            graceful_shutdown_timeout_s=pool.drain_s + GRACE_S,
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=2.0,
            health_check_timeout_s=max(30.0, pool.stall_s),
            **scaling,
        )
        pools[name] = deployment.bind(tree, name)
    per_node: dict[str, Any] = {"max_replicas_per_node": config.ingress.per_node} if config.ingress.per_node else {}
    front: Any = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=config.ingress.replicas,
        ray_actor_options={"num_cpus": config.ingress.cpus},
        graceful_shutdown_timeout_s=config.drain_s + GRACE_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        **per_node,
    )
    application: Application = front.bind(tree, **pools)
    return application


def deploy(config: Config) -> None:
    """Hand the application to Serve and return at once. Where replicas are to be scaled it goes the declarative way,
    the only one that takes a policy for a whole application."""
    if not config.scales:
        target = serve.RunTarget(build(config), name=NAME, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        return
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from deployments.autoscaling import schema

    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [schema(config, NAME, BUILDER)]}))
