"""What Serve's controller is handed, as the controller takes it: schema, policy by value, contexts in, targets out.

No cluster: tests/chaos/test_scaling.py has one.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from service.config import PROFILES, Config, load
from service.fleet.post import Demand, Post
from service.metrics.exchange import merge, snapshot
from service.types import EngineStats


@pytest.fixture
def policy() -> Iterator[Any]:
    """Made as Serve makes it, with its thread's place taken: there is no board to follow."""
    from ray import cloudpickle
    from ray.serve.schema import ServeDeploySchema

    from deployments.app import BUILDER, NAME
    from deployments.autoscaling import schema

    config = load(PROFILES / "sim-two-pools.yaml", ["pools.latency.min_replicas=0"])
    tree = ServeDeploySchema.model_validate({"applications": [schema(config, NAME, BUILDER)]}).applications[0]
    assert tree.autoscaling_policy is not None and Config.model_validate(tree.args) == config
    module = importlib.import_module(tree.autoscaling_policy["policy_function"].split(":")[0])
    cloudpickle.register_pickle_by_value(module)
    try:
        data = cloudpickle.dumps(module.Policy)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    made = cloudpickle.loads(data)(**tree.autoscaling_policy["policy_kwargs"])
    stop = threading.Event()
    made._thread = threading.Thread(target=stop.wait, daemon=True)
    made._thread.start()
    yield made
    stop.set()


def contexts(latency: tuple[int, list[str]], throughput: tuple[int, list[str]]) -> dict[Any, Any]:
    from ray.serve._private.common import DeploymentID, ReplicaID

    found = {}
    for name, (target, running) in (("latency", latency), ("throughput", throughput)):
        id = DeploymentID(name=name, app_name="glm5")
        replicas = [ReplicaID(replica, id) for replica in running]
        found[id] = SimpleNamespace(deployment_name=name, target_num_replicas=target, running_replicas=replicas)
    return found


def replica(id: str, pool: Any, **rest: Any) -> Post:
    stats = EngineStats(slots=32, running=32, output_tokens=8000, busy_s=10.0)
    return Post(id, "replica", pool, ready=True, start_s=1.0, stats=stats, **rest)


def by_name(decided: Any) -> dict[str, int]:
    return {id.name: target for id, target in decided[0].items()}


BUSY = {"latency": Demand(missed=3), "throughput": Demand(running=32, waiting=80, queued_tokens=4000)}


def test_demand_on_the_board_becomes_targets(policy: Any) -> None:
    policy._posts = (time.monotonic(), [Post("i", "ingress", demand=BUSY), replica("t1", "throughput")])
    assert by_name(policy(contexts((0, []), (1, ["t1"])))) == {"latency": 1, "throughput": 2}
    text = merge([snapshot(policy._metrics)]).decode()
    assert 'glm_scaling_decisions_total{pool="latency",direction="up",reason="queue"} 1' in text
    assert 'glm_replicas_target{pool="throughput"} 2' in text


def test_a_draining_replica_that_serve_forgot_holds_its_box(policy: Any) -> None:
    leaving = [replica(f"t{i}", "throughput") for i in range(1, 5)]
    policy._posts = (time.monotonic(), [Post("i", "ingress", demand=BUSY), *leaving])
    assert by_name(policy(contexts((0, []), (1, ["t1"])))) == {}, "four boxes are held, four is the budget"


def test_nothing_is_decided_on_an_old_word(policy: Any) -> None:
    policy._posts = (time.monotonic() - 10.0, [Post("i", "ingress", demand=BUSY), replica("t1", "throughput")])
    assert policy(contexts((0, []), (1, ["t1"]))) == ({}, {})
