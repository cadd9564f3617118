"""Rules for what surrounds the pods: network policies, disruption budgets, selectors, one namespace."""

from __future__ import annotations

from collections.abc import Iterator

from k8s.fault import Fault
from k8s.kuberay import Object, gateways, name, of_kind, pods, selects
from k8s.reach import End, Fence


def network(objects: list[Object]) -> Iterator[Fault]:
    """Closed by default in both directions; nothing but `serve` (and metrics) is open to other namespaces' clients, and
    of a Gateway what it listens on."""
    closed: set[str] = set()
    every = pods(objects)
    for item in of_kind(objects, "NetworkPolicy"):
        spec = item["spec"]
        allowed: set[object] = {"serve", "metrics", "dashboard"}
        if not any(selects(spec.get("podSelector"), pod.labels) for pod in every):
            chosen = [each for each in gateways(objects) if selects(spec.get("podSelector"), each.labels)]
            allowed = {port for each in chosen for port in each.ports}
        if not spec.get("podSelector") and not spec.get("ingress") and not spec.get("egress"):
            closed |= set(spec.get("policyTypes") or [])
        for rule in spec.get("ingress") or []:
            peers = rule.get("from") or []
            if not peers:
                yield Fault(name(item), "an ingress rule without `from` lets everybody in")
            outside = [peer for peer in peers if "namespaceSelector" in peer or "ipBlock" in peer]
            if outside and not rule.get("ports"):
                yield Fault(name(item), "opens every port to other namespaces")
            for port in rule.get("ports") or []:
                if outside and port.get("port") not in allowed:
                    yield Fault(name(item), f"opens port {port.get('port')} to other namespaces")
                if port.get("port") == "dashboard" and not all(_operator(peer) for peer in outside):
                    yield Fault(name(item), "opens the dashboard to others than the operator")
        for rule in spec.get("egress") or []:
            if not rule.get("to"):
                yield Fault(name(item), "an egress rule without `to` lets everything out")
            if any("ipBlock" in peer for peer in rule.get("to") or []) and not rule.get("ports"):
                yield Fault(name(item), "lets every port out to addresses")
    for missing in sorted({"Ingress", "Egress"} - closed):
        yield Fault("NetworkPolicy", f"nothing denies {missing} by default")


def passages(objects: list[Object]) -> Iterator[Fault]:
    """What must get through the policies does."""
    labels = [item["metadata"].get("labels") or {} for item in of_kind(objects, "Namespace")]
    space = {key: str(value) for each in labels for key, value in each.items()}
    fence = Fence(of_kind(objects, "NetworkPolicy"), space)
    for source, target, port, why in _ways(objects):
        if not fence.passes(source, target, port):
            wanted = "some port" if port is None else f"port {port}"
            yield Fault(target.where, f"the network policies keep {source.where} from {wanted} of it: {why}")


def _ways(objects: list[Object]) -> Iterator[tuple[End, End, int | None, str]]:
    """(from, to, port or None for all, why)."""
    ray = [pod for pod in pods(objects) if pod.ray]
    client = End("a client's namespace", space={"glm5-serve/client": "yes"})
    scraper = End("Prometheus' namespace", space={"glm5-serve/monitoring": "yes"})
    operator = End("the operator", {"app.kubernetes.io/component": "kuberay-operator"}, space={})
    for one in ray:
        for other in ray:
            yield (
                End.of(one),
                End.of(other),
                None,
                "Ray, and replicas for their ingresses, listen on ports that they pick",
            )
        if one.ray == "head":
            yield operator, End.of(one), one.port("dashboard"), "the operator submits the Serve config there"
        else:
            yield client, End.of(one), one.port("serve"), "there the service answers"
        if one.ray == "worker" and of_kind(objects, "ScrapeConfig"):
            yield scraper, End.of(one), one.port("serve"), "/metrics of the service"
        if of_kind(objects, "PodMonitor"):
            yield scraper, End.of(one), one.port("metrics"), "metrics of the Ray node"
    for gateway in gateways(objects):
        pod = End(gateway.where, gateway.labels)
        for one in ray:
            if one.ray == "worker":
                yield pod, End.of(one), one.port("serve"), "the Gateway passes requests on"
        for port in gateway.ports:
            yield client, pod, port, "the Gateway listens there"
        if gateway.kind == "istio":
            istiod = End("istiod", {"app": "istiod"}, space={})
            yield pod, istiod, 15012, "a Gateway's pod without its configuration never becomes ready"


def _operator(peer: Object) -> bool:
    labels = (peer.get("podSelector") or {}).get("matchLabels") or {}
    return labels.get("app.kubernetes.io/component") == "kuberay-operator"


def disruption(objects: list[Object]) -> Iterator[Fault]:
    """Each kind of Ray pod has a budget, and in the only form that Kubernetes can count for a RayCluster."""
    budgets = of_kind(objects, "PodDisruptionBudget")
    for item in budgets:
        least = item["spec"].get("minAvailable")
        if not isinstance(least, int) or "maxUnavailable" in item["spec"]:
            yield Fault(name(item), "RayCluster has no scale subresource: only minAvailable as a number is counted")
    for pod in pods(objects):
        if pod.ray and not any(selects(item["spec"].get("selector"), pod.labels) for item in budgets):
            yield Fault(pod.where, "no PodDisruptionBudget covers it")


def selectors(objects: list[Object]) -> Iterator[Fault]:
    """A selector that chooses nothing is a typing error."""
    every = pods(objects)
    labels = [pod.labels for pod in every] + [gateway.labels for gateway in gateways(objects)]
    for item in of_kind(objects, "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service"):
        selector = item["spec"].get("podSelector") or item["spec"].get("selector")
        if selector and not any(selects(selector, each) for each in labels):
            yield Fault(name(item), f"selects no pod: {selector}")
    for pod in every:
        for spread in pod.spec.get("topologySpreadConstraints") or []:
            if not selects(spread.get("labelSelector"), pod.labels):
                yield Fault(pod.where, "its topology spread does not count itself")


def namespace(objects: list[Object]) -> Iterator[Fault]:
    """All in one namespace, which exists and enforces the restricted pod standard; no name twice."""
    made = {item["metadata"]["name"]: item for item in of_kind(objects, "Namespace")}
    seen: set[tuple[str, str]] = set()
    for item in objects:
        key = (item["kind"], item["metadata"]["name"])
        if key in seen:
            yield Fault(name(item), "exists twice")
        seen.add(key)
        if item["kind"] != "Namespace" and item["metadata"].get("namespace") not in made:
            yield Fault(name(item), f"namespace {item['metadata'].get('namespace')} is not made here")
    for space, item in made.items():
        labels = item["metadata"].get("labels") or {}
        if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield Fault(f"Namespace/{space}", "does not enforce the restricted pod security standard")


def ingress(objects: list[Object], longest_s: float) -> Iterator[Fault]:
    """TLS, no buffering, and time for the longest answer (`longest_s`, seconds)."""
    prefix = "nginx.ingress.kubernetes.io/"
    for item in of_kind(objects, "Ingress"):
        notes = item["metadata"].get("annotations") or {}
        if not item["spec"].get("tls"):
            yield Fault(name(item), "no TLS")
        if notes.get(f"{prefix}proxy-buffering") != "off":
            yield Fault(name(item), "proxy-buffering holds tokens back: switch it off")
        for key in ("proxy-read-timeout", "proxy-send-timeout"):
            if float(notes.get(f"{prefix}{key}", 60)) <= longest_s:
                yield Fault(name(item), f"{key} must be above the longest request, {longest_s:.0f} s")
    for item in of_kind(objects, "Gateway"):
        for listener in item["spec"]["listeners"]:
            if listener["protocol"] != "HTTPS" or not listener.get("tls"):
                yield Fault(name(item), f"listener {listener['name']} has no TLS")
    for item in of_kind(objects, "HTTPRoute"):
        for rule in item["spec"]["rules"]:
            limit = str((rule.get("timeouts") or {}).get("request", "15s"))
            if limit not in ("0", "0s") and not (limit.endswith("s") and float(limit[:-1]) > longest_s):
                yield Fault(
                    name(item), f"timeouts.request ({limit}) must be above {longest_s:.0f} s, the longest request"
                )
