"""What KubeRay makes of a RayService, as far as manifests refer to it: pods with their labels, Services, a Gateway.

Read in KubeRay's source (controllers/ray/common/pod.go, service.go, utils/validation.go; 1.5 and later).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_NAME = 47
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
UPGRADES = ("NewCluster", INCREMENTAL, "None")
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"
"""On the pods that a Gateway's controller makes in the cluster (GEP-1762)."""
POD_KINDS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template of the build. `where` names it in a fault; `ray` is "head", "worker" or "" (not Ray's)."""

    where: str
    labels: dict[str, str]
    spec: Object
    ray: str = ""
    lasting: bool = True
    """False for Jobs: nobody asks them whether they are ready."""

    @property
    def main(self) -> list[Object]:
        return list(self.spec.get("containers") or [])

    @property
    def containers(self) -> list[Object]:
        return [*self.main, *(self.spec.get("initContainers") or [])]

    def port(self, name: str) -> int | None:
        for container in self.main:
            for port in container.get("ports") or []:
                if port.get("name") == name:
                    return int(port["containerPort"])
        return None


@dataclass(frozen=True)
class Service:
    name: str
    selector: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Gateway:
    """A Gateway whose pods its controller may put into our namespace, as Istio's does. `ports`: those it listens on."""

    where: str
    labels: dict[str, str]
    kind: str
    ports: tuple[int, ...]


def name(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def ray_pods(service: Object) -> Iterator[Pod]:
    """Head and workers. KubeRay puts its own labels over the template's."""
    cluster = service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    yield _ray_pod(service, "head", "headgroup", head["template"], _autoscaler(cluster))
    for group in cluster.get("workerGroupSpecs") or []:
        yield _ray_pod(service, "worker", group["groupName"], group["template"], None)


def _ray_pod(service: Object, node: str, group: str, template: Object, beside: Object | None) -> Pod:
    labels = {
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
        **((template.get("metadata") or {}).get("labels") or {}),
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node,
        "ray.io/group": group,
        "ray.io/serve": "true" if node == "worker" else "false",
    }
    spec = template["spec"]
    if beside is not None:
        spec = {**spec, "containers": [*spec["containers"], beside]}
    return Pod(f"{name(service)} {group}", labels, spec, node)


def _autoscaler(cluster: Object) -> Object | None:
    """The container that KubeRay adds to the head."""
    if not cluster.get("enableInTreeAutoscaling"):
        return None
    options = cluster.get("autoscalerOptions") or {}
    taken = ("resources", "securityContext", "env", "envFrom", "volumeMounts")
    image = options.get("image") or cluster["headGroupSpec"]["template"]["spec"]["containers"][0].get("image")
    return {"name": "autoscaler", "image": image} | {key: options[key] for key in taken if key in options}


def pods(objects: list[Object]) -> list[Pod]:
    """Every pod template of a build."""
    found: list[Pod] = []
    for item in objects:
        if item["kind"] == "RayService":
            found += ray_pods(item)
        elif item["kind"] in (*POD_KINDS, "Job"):
            template = item["spec"]["template"]
            labels = (template.get("metadata") or {}).get("labels") or {}
            found.append(Pod(name(item), labels, template["spec"], lasting=item["kind"] != "Job"))
    return found


def services(objects: list[Object]) -> list[Service]:
    """Services of the build and those that KubeRay adds, whose ports are the head container's."""
    found = []
    for item in of_kind(objects, "Service"):
        ports = {port["name"]: int(port["port"]) for port in item["spec"]["ports"]}
        found.append(Service(item["metadata"]["name"], item["spec"].get("selector") or {}, ports))
    for item in of_kind(objects, "RayService"):
        own = item["metadata"]["name"]
        head = item["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: int(port["containerPort"]) for port in head.get("ports") or []}
        ray = {"ray.io/is-ray-node": "yes"}
        found.append(Service(f"{own}-head-svc", {**ray, "ray.io/node-type": "head"}, ports))
        if upgrade(item) == INCREMENTAL:
            # One Service for each cluster, by a name that nobody knows beforehand; clients use the Gateway.
            continue
        serve = {"serve": ports["serve"]} if "serve" in ports else {}
        found.append(Service(f"{own}-serve-svc", {**ray, "ray.io/serve": "true"}, serve))
    return found


def upgrade(service: Object) -> str | None:
    kind: str | None = (service["spec"].get("upgradeStrategy") or {}).get("type")
    return kind


def gateways(objects: list[Object]) -> list[Gateway]:
    """Gateways of the build, and the one that KubeRay makes for an incremental upgrade."""
    found = []
    for item in of_kind(objects, "Gateway"):
        own, spec = item["metadata"]["name"], item["spec"]
        ports = tuple(int(listener["port"]) for listener in spec["listeners"])
        found.append(Gateway(name(item), {GATEWAY_LABEL: own}, spec["gatewayClassName"], ports))
    for item in of_kind(objects, "RayService"):
        if upgrade(item) == INCREMENTAL:
            own = f"{item['metadata']['name']}-gateway"
            options = item["spec"]["upgradeStrategy"].get("clusterUpgradeOptions") or {}
            kind = options.get("gatewayClassName", "")
            found.append(Gateway(f"Gateway/{own} (KubeRay's)", {GATEWAY_LABEL: own}, kind, (80,)))
    return found


def serve_config(service: Object) -> Any:
    """The tree inside `serveConfigV2`; None where it is no YAML."""
    try:
        return yaml.safe_load(service["spec"].get("serveConfigV2") or "")
    except yaml.YAMLError:
        return None


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (or a Service's plain map) chooses a pod. An empty one chooses all."""
    if not selector:
        return True
    whole = "matchLabels" in selector or "matchExpressions" in selector
    wanted = selector.get("matchLabels") or {} if whole else selector
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(rule, labels) for rule in (selector.get("matchExpressions") or [] if whole else [])
    )


def _holds(rule: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values") or []
    return {
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "In": value in values,
        "NotIn": value not in values,
    }[rule["operator"]]
