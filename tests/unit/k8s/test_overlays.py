"""Every overlay and example is right, and the schemas see what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s import check, fit, kuberay, schemas
from k8s.overlay import examples, overlay, overlays
from service.config import PROFILES, load
from service.errors import UserError
from tests.unit.k8s.conftest import cluster, pick, worker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ALL = [*(each.name for each in overlays()), *(f"examples/{path.name}" for path in examples())]
Built = Callable[[str], list[dict[str, Any]]]


def test_these_are_the_overlays() -> None:
    assert ALL == ["cpu", "one-box", "two-box", "examples/gateway", "examples/ingress"]


@pytest.mark.parametrize("name", ALL)
def test_a_build_has_no_fault(name: str, built: Built) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    assert check.examine(built(name), None) == []


@pytest.mark.parametrize("name", [each.name for each in overlays()])
def test_a_rayservice_passes_kuberays_closed_schema(name: str, built: Built, kuberay: Path) -> None:
    assert list(schemas.crds(built(name), kuberay)) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda o: cluster(o).update(autoscalerOption={}), "autoscalerOption"),
        (lambda o: worker(o)["containers"][0].update(enviroment=[]), "enviroment"),
        (lambda o: cluster(o)["authOptions"].update(mode="tokens"), "tokens"),
        (lambda o: cluster(o)["workerGroupSpecs"][0].update(maxReplicas="2"), "maxReplicas"),
    ],
)
def test_kuberays_schema_is_closed(spoil: Any, words: str, built: Built, kuberay: Path) -> None:
    objects = built("cpu")
    spoil(objects)
    faults = list(schemas.crds(objects, kuberay))
    assert len(faults) == 1 and words in faults[0].what


@pytest.mark.parametrize(
    ("kind", "name", "spoil", "words"),
    [
        ("NetworkPolicy", "dns", lambda i: i["spec"].update(egres=[]), "egres"),
        ("PodDisruptionBudget", "head", lambda i: i["spec"].update(minAvailable=[1]), "minAvailable"),
        ("Job", "glm5-model", lambda i: i["spec"].update(ttlSecondsAfterFinish=1), "ttlSecondsAfterFinish"),
        ("StatefulSet", "glm5-redis", lambda i: i["spec"].pop("selector"), "selector"),
        ("PodMonitor", "glm5-ray", lambda i: i["spec"]["podMetricsEndpoints"][0].update(intervall="1s"), "intervall"),
        ("ScrapeConfig", "glm5-service", lambda i: i["spec"].update(interval="1s"), "interval"),
        ("PrometheusRule", "glm5", lambda i: i["spec"]["groups"][0].update(every="1m"), "every"),
    ],
)
def test_kubernetes_schemas_are_closed(kind: str, name: str, spoil: Any, words: str, built: Built) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    item = pick(built("two-box"), kind, name)
    spoil(item)
    faults = [*schemas.core([item]), *schemas.crds([item], None)]
    assert len(faults) == 1 and words in faults[0].what, faults


def test_a_kind_without_a_schema_is_a_fault() -> None:
    item = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}
    assert "no schema" in next(schemas.crds([item], None)).what


@pytest.mark.parametrize("name", ["one-box-8gpu.yaml", "two-box-16gpu.yaml", "cluster-cpu.yaml"])
def test_the_profiles_serve_as_they_are_and_drain_longer_than_the_longest_request(name: str) -> None:
    config = load(PROFILES / name)
    assert all(pool.drain_s > config.http.request_timeout_s for pool in config.pools.values())


def test_pools_of_the_boxes() -> None:
    one, two = overlay("one-box").config(), overlay("two-box").config()
    assert {n: (p.gpus, p.engine.tensor_parallel) for n, p in one.pools.items()} == {"shared": (8.0, 8)}  # type: ignore[union-attr]
    assert set(two.pools) == {"latency", "throughput"}
    assert all(p.gpus == p.engine.tensor_parallel == 8 for p in two.pools.values())  # type: ignore[union-attr]
    for config in (one, two):
        assert config.http.host == "0.0.0.0" and not config.admission.anonymous


def test_strategies(built: Built) -> None:
    found = {
        each: pick(built(each), "RayService")["spec"]["upgradeStrategy"]["type"] for each in ("one-box", "two-box")
    }
    assert found == {"one-box": "None", "two-box": "NewClusterWithIncrementalUpgrade"}
    assert "gcsFaultToleranceOptions" in cluster(built("two-box"))


@pytest.mark.parametrize(("surge", "replicas", "boxes"), [(50, 1, 2), (10, 1, 2), (100, 2, 4), (50, 2, 2), (50, 3, 4)])
def test_boxes_that_an_upgrade_needs_are_what_serve_will_ask_for(
    surge: int, replicas: int, boxes: int, built: Built
) -> None:
    from ray.serve._private.utils import get_capacity_adjusted_num_replicas

    service, config = pick(built("two-box"), "RayService"), overlay("two-box").config()
    service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["maxSurgePercent"] = surge
    pools = {n: p.model_copy(update={"min_replicas": replicas, "max_replicas": 3}) for n, p in config.pools.items()}
    config = config.model_copy(update={"pools": pools})
    asked = sum(get_capacity_adjusted_num_replicas(p.min_replicas, surge) for p in pools.values())
    assert fit.spare_boxes(service, config) == asked == boxes


def test_one_box_never_needs_a_second(built: Built) -> None:
    assert fit.spare_boxes(pick(built("one-box"), "RayService"), overlay("one-box").config()) == 0
    assert next(iter(check.notes(built("two-box")))) == "an upgrade waits until 2 more GPU boxes are free"


@pytest.mark.parametrize(("name", "pods", "replicas"), [("cpu", 1, 2), ("one-box", 1, 2), ("two-box", 2, 2)])
def test_every_pod_has_an_ingress(name: str, pods: int, replicas: int) -> None:
    front = overlay(name).config().ingress
    assert front.replicas == replicas
    assert pods == 1 or front.replicas > (front.per_node or replicas) * (pods - 1), "fewer pods cannot hold them all"


def test_pods_that_come_without_an_ingress_are_told(built: Built) -> None:
    objects, config = built("two-box"), overlay("two-box").config()
    service = pick(objects, "RayService")
    assert fit.pods_without_front(service, config) == 0
    cluster(objects)["workerGroupSpecs"][0]["maxReplicas"] = 4
    pools = {n: p.model_copy(update={"max_replicas": 3}) for n, p in config.pools.items()}
    config = config.model_copy(update={"pools": pools})
    assert fit.pods_without_front(service, config) == 2
    assert list(fit.room(service, config)) == [], "it is no fault: their replicas serve through the other ingresses"


def test_an_unknown_overlay_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cpu, one-box, two-box"):
        overlay("three-box")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "render.yaml").write_text("profil: a.yaml\n")
    with pytest.raises(UserError, match="profile: NAME"):
        overlay("x", tmp_path)


def test_the_page_says_what_the_cpu_overlay_asks_of_a_cluster(built: Built) -> None:
    """Of every pod that lasts, the containers that KubeRay adds among them."""
    asked = [
        container["resources"]["requests"]
        for pod in kuberay.pods(built("cpu"))
        if pod.lasting
        for container in pod.spec["containers"]
    ]
    cpus = sum(float(each["cpu"][:-1]) / 1000 if each["cpu"].endswith("m") else float(each["cpu"]) for each in asked)
    units = {"Gi": 1.0, "Mi": 1 / 1024}
    gib = sum(float(each["memory"][:-2]) * units[each["memory"][-2:]] for each in asked)
    page = (Path(__file__).resolve().parents[3] / "docs" / "kubernetes.md").read_text()
    assert f"any cluster; {cpus:g} CPUs and {gib:g} GiB in all" in page
