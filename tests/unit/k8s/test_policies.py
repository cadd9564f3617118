"""Each rule catches what it is there for: a right build, spoilt in one place, has exactly that fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from k8s import check, fences, fit, policies
from k8s.kuberay import services
from tests.unit.k8s.conftest import cluster, group, head, pick, worker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Built = Callable[[str], list[dict[str, Any]]]


def ray(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return pick(objects, "RayService")


def main(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return worker(objects)["containers"][0]


def policy(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return pick(objects, "NetworkPolicy", name)["spec"]


def without_schemas(objects: list[dict[str, Any]]) -> list[str]:
    """All rules but the schemas, which have their own test and would hide what comes after them."""
    secrets = check.secrets_made_by_hand()
    found = [*policies.careful(objects), *policies.images(objects), *policies.resources(objects)]
    found += [*policies.probes(objects), *policies.ports(objects), *policies.references(objects, secrets)]
    found += [
        *fences.network(objects),
        *fences.passages(objects),
        *fences.disruption(objects),
        *fences.selectors(objects),
    ]
    found += fences.namespace(objects)
    service = ray(objects)
    found += [*fit.operator(service), *fit.memory(service)]
    config, faults = fit.profile(service)
    found += faults
    if config is not None:
        found += [*fit.room(service, config), *fit.endings(service, config), *fit.paths(objects, service, config)]
        found += [*fit.gate(objects, config), *fences.ingress(objects, config.http.request_timeout_s)]
    return [f"{fault.where}: {fault.what}" for fault in found]


def edit(old: str, new: str) -> Callable[[list[dict[str, Any]]], None]:
    """Change the text of serveConfigV2."""

    def change(objects: list[dict[str, Any]]) -> None:
        text = ray(objects)["spec"]["serveConfigV2"]
        assert old in text
        ray(objects)["spec"]["serveConfigV2"] = text.replace(old, new, 1)

    return change


def put(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = to

    return change


def _port(container: dict[str, Any], name: str) -> dict[str, Any]:
    return next(port for port in container["ports"] if port["name"] == name)


def _unmount(container: dict[str, Any], path: str) -> None:
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["mountPath"] != path]


SPOILS: list[tuple[str, str, Callable[[list[dict[str, Any]]], Any], str]] = [
    # careful
    ("cpu", "privileged", lambda o: main(o)["securityContext"].update(privileged=True), "privileged"),
    ("cpu", "escalation", lambda o: main(o)["securityContext"].pop("allowPrivilegeEscalation"), "allowPrivilegeEsc"),
    ("cpu", "root fs", lambda o: main(o)["securityContext"].update(readOnlyRootFilesystem=False), "readOnlyRoot"),
    ("cpu", "capability", lambda o: main(o)["securityContext"].update(capabilities={"drop": []}), "capabilities"),
    ("cpu", "root", lambda o: main(o)["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
    ("cpu", "root by number", lambda o: worker(o)["securityContext"].update(runAsUser=0), "runAsUser 0"),
    ("cpu", "root in one", lambda o: main(o)["securityContext"].update(runAsUser=0), "runAsUser 0"),
    ("cpu", "host path", lambda o: worker(o)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}), "volume h"),
    ("cpu", "host ipc", lambda o: worker(o).update(hostIPC=True), "hostIPC"),
    ("cpu", "host network", lambda o: head(o).update(hostNetwork=True), "hostNetwork"),
    ("cpu", "autoscaler", lambda o: cluster(o)["autoscalerOptions"].pop("securityContext"), "autoscaler: readOnly"),
    ("cpu", "no /tmp", lambda o: _unmount(main(o), "/tmp"), "writable place"),
    # images, resources, probes
    ("cpu", "latest", lambda o: main(o).update(image="x/y:latest"), "names no version"),
    ("cpu", "no tag", lambda o: main(o).update(image="host:5000/y"), "names no version"),
    ("cpu", "no request", lambda o: main(o)["resources"]["requests"].pop("cpu"), "no request for cpu"),
    ("cpu", "no limit", lambda o: main(o)["resources"]["limits"].pop("memory"), "no limit for memory"),
    ("cpu", "limit", lambda o: main(o)["resources"]["limits"].update(memory="3Gi"), "above limit"),
    ("cpu", "probe", lambda o: main(o).update(readinessProbe={"exec": {"command": ["true"]}}), "replaces the probe"),
    (
        "two-box",
        "redis probe",
        lambda o: pick(o, "StatefulSet")["spec"]["template"]["spec"]["containers"][0].pop("livenessProbe"),
        "both needed",
    ),
    # references
    ("cpu", "ConfigMap", lambda o: o.remove(next(i for i in o if "demo" in i["metadata"]["name"])), "does not exist"),
    ("one-box", "PVC", lambda o: o.remove(pick(o, "PersistentVolumeClaim", "glm5-cache")), "glm5-cache does not"),
    ("cpu", "token", lambda o: cluster(o)["authOptions"].update(secretName="other"), "Secret other does not exist"),
    (
        "two-box",
        "Secret's key",
        lambda o: put("redisPassword", "valueFrom", "secretKeyRef", "key", to="pass")(
            cluster(o)["gcsFaultToleranceOptions"]
        ),
        "has no key pass",
    ),
    ("cpu", "mount", lambda o: main(o)["volumeMounts"].append({"name": "no", "mountPath": "/no"}), "volume no is"),
    ("cpu", "spare", lambda o: worker(o)["volumes"].append({"name": "no", "emptyDir": {}}), "mounted by nobody"),
    # ports
    (
        "cpu",
        "policy port",
        lambda o: put("ingress", 0, "ports", 0, "port", to="http")(policy(o, "clients-to-serve")),
        "http",
    ),
    ("one-box", "monitor", lambda o: _port(main(o), "metrics").update(name="prom"), "has no port metrics"),
    ("one-box", "scrape", lambda o: _port(main(o), "serve").update(name="http"), "has no port that it keeps (serve)"),
    (
        "one-box",
        "scrape elsewhere",
        lambda o: put("kubernetesSDConfigs", 0, "namespaces", "names", to=["default"])(pick(o, "ScrapeConfig")["spec"]),
        "elsewhere than in glm5-serve",
    ),
    ("cpu", "head port", lambda o: head(o)["containers"][0]["ports"].pop(0), "no port named"),
    (
        "cpu",
        "client port",
        lambda o: head(o)["containers"][0]["ports"].append({"name": "client", "containerPort": 10001}),
        "Ray client",
    ),
    (
        "examples/ingress",
        "backend",
        lambda o: put("spec", "rules", 0, "http", "paths", 0, "backend", "service", "name", to="glm5-svc")(
            pick(o, "Ingress")
        ),
        "Service glm5-svc does not exist",
    ),
    (
        "examples/ingress",
        "backend port",
        lambda o: put("spec", "rules", 0, "http", "paths", 0, "backend", "service", "port", "name", to="http")(
            pick(o, "Ingress")
        ),
        "has no port http",
    ),
    (
        "examples/gateway",
        "route port",
        lambda o: put("spec", "rules", 0, "backendRefs", 0, "port", to=80)(pick(o, "HTTPRoute")),
        "has no port 80",
    ),
    # fences
    ("cpu", "not denied", lambda o: policy(o, "deny-all").update(policyTypes=["Ingress"]), "nothing denies Egress"),
    ("cpu", "everybody", lambda o: policy(o, "clients-to-serve")["ingress"][0].pop("from"), "lets everybody in"),
    ("cpu", "all ports", lambda o: policy(o, "clients-to-serve")["ingress"][0].pop("ports"), "opens every port"),
    (
        "cpu",
        "gcs",
        lambda o: put("ingress", 0, "ports", 0, "port", to="gcs-server")(policy(o, "clients-to-serve")),
        "opens port gcs-server",
    ),
    (
        "cpu",
        "dashboard",
        lambda o: put("ingress", 0, "ports", 0, "port", to="dashboard")(policy(o, "clients-to-serve")),
        "dashboard to others",
    ),
    ("cpu", "out", lambda o: policy(o, "head-to-api-server")["egress"][0].pop("ports"), "lets every port out"),
    ("cpu", "links", lambda o: policy(o, "ray-to-ray")["ingress"][0].update(ports=[{"port": 6379}]), "some port of it"),
    ("cpu", "links out", lambda o: policy(o, "ray-to-ray").update(egress=[]), "keep RayService/glm5 workers from some"),
    (
        "cpu",
        "no clients",
        lambda o: o.remove(pick(o, "NetworkPolicy", "clients-to-serve")),
        "keep a client's namespace",
    ),
    ("cpu", "no operator", lambda o: o.remove(pick(o, "NetworkPolicy", "operator-to-head")), "keep the operator from"),
    (
        "one-box",
        "no scrapes",
        lambda o: policy(o, "prometheus-to-metrics")["ingress"][0]["ports"].pop(),
        "keep Prometheus' namespace from port 8000",
    ),
    *[
        (overlay, f"gateway without {name}", lambda o, n=name: o.remove(pick(o, "NetworkPolicy", n)), words)
        for overlay, gateway in (("examples/gateway", "Gateway/glm5"), ("two-box", "Gateway/glm5-gateway (KubeRay's)"))
        for name, words in (
            ("gateway-to-ray", f"keep {gateway} from port 8000"),
            ("ray-from-gateway", f"keep {gateway} from port 8000"),
            ("gateway-to-control-plane", f"keep {gateway} from port 15012"),
        )
    ],
    (
        "two-box",
        "closed gateway",
        lambda o: o.remove(pick(o, "NetworkPolicy", "clients-to-gateway")),
        "Gateway/glm5-gateway (KubeRay's): the network policies keep a client's namespace from port 80",
    ),
    (
        "two-box",
        "gateway's other port",
        lambda o: policy(o, "clients-to-gateway")["ingress"][0]["ports"].append({"port": 15000}),
        "opens port 15000 to other namespaces",
    ),
    (
        "examples/gateway",
        "policy without a gateway",
        lambda o: [o.remove(pick(o, kind, "glm5")) for kind in ("Gateway", "HTTPRoute")],
        "selects no pod",
    ),
    (
        "cpu",
        "budget",
        lambda o: pick(o, "PodDisruptionBudget", "head")["spec"].update(minAvailable="50%"),
        "only minAvailable",
    ),
    ("cpu", "no budget", lambda o: o.remove(pick(o, "PodDisruptionBudget", "workers")), "no PodDisruptionBudget"),
    (
        "cpu",
        "selector",
        lambda o: put("selector", "matchLabels", to={"a": "b"})(pick(o, "PodDisruptionBudget", "head")["spec"]),
        "selects no pod",
    ),
    (
        "cpu",
        "spread",
        lambda o: put("topologySpreadConstraints", 0, "labelSelector", "matchLabels", to={"ray.io/group": "gpu"})(
            worker(o)
        ),
        "does not count itself",
    ),
    (
        "cpu",
        "namespace",
        lambda o: pick(o, "PodDisruptionBudget", "head")["metadata"].update(namespace="other"),
        "namespace other",
    ),
    ("cpu", "standard", lambda o: pick(o, "Namespace")["metadata"].pop("labels"), "restricted pod security"),
    (
        "examples/ingress",
        "buffering",
        lambda o: pick(o, "Ingress")["metadata"]["annotations"].pop("nginx.ingress.kubernetes.io/proxy-buffering"),
        "holds tokens back",
    ),
    (
        "examples/ingress",
        "timeout",
        lambda o: pick(o, "Ingress")["metadata"]["annotations"].update(
            {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"}
        ),
        "above the longest request",
    ),
    ("examples/ingress", "no TLS", lambda o: pick(o, "Ingress")["spec"].pop("tls"), "no TLS"),
    ("examples/gateway", "route time", lambda o: pick(o, "HTTPRoute")["spec"]["rules"][0].pop("timeouts"), "15s"),
    # the operator
    ("cpu", "version", lambda o: cluster(o).update(rayVersion="2.59.0"), "is not the image's"),
    ("cpu", "auth", lambda o: cluster(o).update(authOptions={"mode": "disabled"}), "authOptions.mode"),
    ("cpu", "autoscaler", lambda o: cluster(o)["autoscalerOptions"].update(version="v1"), "autoscaler v2"),
    ("cpu", "strategy", lambda o: ray(o)["spec"]["upgradeStrategy"].update(type="Recreate"), "none of NewCluster"),
    (
        "two-box",
        "options",
        lambda o: ray(o)["spec"]["upgradeStrategy"]["clusterUpgradeOptions"].pop("gatewayClassName"),
        "gatewayClassName",
    ),
    ("two-box", "min", lambda o: group(o).update(minReplicas=1), "boxes to the end"),
    ("cpu", "restart", lambda o: worker(o).update(restartPolicy="Always"), "restartPolicy"),
    ("cpu", "taken", lambda o: main(o)["env"].append({"name": "RAY_AUTH_TOKEN", "value": "x"}), "KubeRay's to set"),
    # the profile and the room for it
    ("cpu", "our key", edit("context_tokens", "context_token"), "did you mean model.context_tokens"),
    (
        "cpu",
        "Ray's unknown key",
        edit("proxy_location:", "http_option: {}\nproxy_location:"),
        "http_option is not as",
    ),
    ("cpu", "Ray's schema", edit("proxy_location: Disabled", "proxy_location: Everywhere"), "Ray: proxy_location"),
    ("cpu", "Serve's proxy", edit("proxy_location: Disabled", "proxy_location: EveryNode"), "proxy_location is not as"),
    ("cpu", "other port", edit("host: 0.0.0.0", "host: 0.0.0.0\n      port: 8001"), "http.port is 8001"),
    ("cpu", "loopback", edit("host: 0.0.0.0", "host: 127.0.0.1"), "http.host is 127.0.0.1"),
    ("cpu", "front for nothing", edit("replicas: 2", "replicas: 2\n      cpus: 0.0"), "ingress.cpus must be above 0"),
    ("cpu", "pool for nothing", edit("cpus: 2.0", "cpus: 0.0"), "pools.shared.cpus must be above 0"),
    ("cpu", "two pods", lambda o: group(o).update(replicas=2), "set ingress.per_node to 1"),
    ("two-box", "one front", edit("replicas: 2\n      per_node", "replicas: 1\n      per_node"), "below the 2 pods"),
    ("two-box", "fronts anywhere", edit("      per_node: 1\n", ""), "set ingress.per_node to 1"),
    (
        "two-box",
        "fronts too many",
        edit("replicas: 2\n      per_node", "replicas: 3\n      per_node"),
        "no place for 3",
    ),
    ("two-box", "fronts too large", edit("cpus: 1.0", "cpus: 9.0"), "does not fit beside an ingress"),
    ("cpu", "fronts too large", edit("replicas: 2", "replicas: 30"), "8 CPUs are needed, 6 can be had"),
    ("cpu", "head serves", lambda o: ray(o)["spec"].pop("excludeHeadPodFromServeSvc"), "no ingress runs on the head"),
    ("cpu", "not YAML", edit("applications:", "applications: ]"), "no YAML mapping"),
    (
        "cpu",
        "head CPUs",
        lambda o: put("rayStartParams", "num-cpus", to="2")(cluster(o)["headGroupSpec"]),
        "no CPUs and no GPUs",
    ),
    (
        "cpu",
        "too many CPUs",
        lambda o: put("rayStartParams", "num-cpus", to="8")(group(o)),
        "more than the pod requests",
    ),
    ("cpu", "no room", edit("cpus: 2.0", "cpus: 4.0"), "does not fit"),
    ("two-box", "one box", lambda o: group(o).update(replicas=1, maxReplicas=1), "cannot hold the pools"),
    ("one-box", "GPUs", lambda o: put("rayStartParams", "num-gpus", to="4")(group(o)), "num-gpus differs"),
    ("one-box", "taint", lambda o: worker(o).pop("tolerations"), "toleration"),
    (
        "one-box",
        "shm",
        lambda o: put("emptyDir", "sizeLimit", to="4Gi")(next(v for v in worker(o)["volumes"] if v["name"] == "shm")),
        "1 GiB for each GPU",
    ),
    (
        "cpu",
        "shm disk",
        lambda o: next(v for v in worker(o)["volumes"] if v["name"] == "shm").update(emptyDir={}),
        "in memory with a sizeLimit",
    ),
    # endings
    ("one-box", "drain", edit("drain_s: 630.0", "drain_s: 590.0"), "must be above request_timeout_s"),
    (
        "one-box",
        "preStop",
        lambda o: put("lifecycle", "preStop", "exec", "command", 4, to="630")(main(o)),
        "longer than the longest",
    ),
    ("one-box", "no preStop", lambda o: main(o).pop("lifecycle"), "preStop must drain"),
    ("one-box", "grace", lambda o: worker(o).update(terminationGracePeriodSeconds=690), "must be at least 710"),
    # paths
    ("one-box", "keys", edit("/etc/glm5/keys/", "/etc/keys/"), "no volume is mounted there"),
    ("one-box", "entry", edit("-00001-of-00010", "-00001-of-00009"), "is not the profile's model.path"),
    (
        "one-box",
        "gate",
        lambda o: put("command", 8, to="4")(pick(o, "Job")["spec"]["template"]["spec"]["containers"][0]),
        "--tp is 4, the profile says 8",
    ),
]


@pytest.mark.parametrize(("overlay", "what", "spoil", "words"), SPOILS, ids=[f"{s[0]}: {s[1]}" for s in SPOILS])
def test_a_spoilt_build_is_caught(overlay: str, what: str, spoil: Any, words: str, built: Built) -> None:
    objects = built(overlay)
    assert without_schemas(objects) == []
    spoil(objects)
    found = without_schemas(objects)
    assert any(words in line for line in found), found


def test_quantities() -> None:
    assert [policies.quantity(text) for text in ("250m", "2", "1Gi", "500M", 8)] == [0.25, 2.0, 2.0**30, 5e8, 8.0]
    with pytest.raises(ValueError, match="no quantity"):
        policies.quantity("lots")


def test_services_that_kuberay_makes(built: Built) -> None:
    found = {service.name: service.ports for service in services(built("cpu"))}
    assert found["glm5-serve-svc"] == {"serve": 8000}
    assert "glm5-serve-svc" not in {service.name for service in services(built("two-box"))}, (
        "one for each cluster there"
    )
    assert found["glm5-head-svc"] == {"gcs-server": 6379, "dashboard": 8265, "serve": 8000, "metrics": 8080}
