"""Rules for pods, references and ports. Each takes the objects of one build and yields what breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from k8s.fault import Fault
from k8s.kuberay import Object, Pod, name, of_kind, pods, selects, services

Secrets = dict[str, list[str]]
"""Secrets made by hand: name -> keys."""

QUANTITY = re.compile(r"^([0-9.]+)(m|[kKMGTPE]i?)?$")
UNITS = {"": 1.0, "m": 1e-3, **{u: 10.0 ** (3 * i) for i, u in enumerate("kMGTPE", 1)}}
UNITS |= {f"{u}i": 2.0 ** (10 * i) for i, u in enumerate("KMGTPE", 1)}


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number (bytes, CPUs). Raises ValueError."""
    match = QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * UNITS[match[2] or ""]


def careful(objects: list[Object]) -> Iterator[Fault]:
    """Nobody is root, nobody can become it, nothing of the host is shared, the image's files stay as they are."""
    for pod in pods(objects):
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.spec.get(key):
                yield Fault(pod.where, f"{key} is not needed and must not be set")
        for volume in pod.spec.get("volumes") or []:
            if "hostPath" in volume:
                yield Fault(pod.where, f"volume {volume['name']} opens the host's file system")
        whole = pod.spec.get("securityContext") or {}
        for container in pod.containers:
            where = f"{pod.where} {container['name']}"
            own = container.get("securityContext") or {}
            if own.get("privileged"):
                yield Fault(where, "privileged")
            if own.get("allowPrivilegeEscalation") is not False:
                yield Fault(where, "allowPrivilegeEscalation must be false")
            if own.get("readOnlyRootFilesystem") is not True:
                yield Fault(where, "readOnlyRootFilesystem must be true")
            if (own.get("capabilities") or {}).get("drop") != ["ALL"] or (own.get("capabilities") or {}).get("add"):
                yield Fault(where, "capabilities must be dropped, all of them")
            if own.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
                yield Fault(where, "runAsNonRoot must be true")
            if own.get("runAsUser", whole.get("runAsUser")) == 0:
                yield Fault(where, "runAsUser 0 is root")
            profile = own.get("seccompProfile") or whole.get("seccompProfile") or {}
            if profile.get("type") not in ("RuntimeDefault", "Localhost"):
                yield Fault(where, "seccompProfile must be RuntimeDefault")
            mounts = {mount["mountPath"] for mount in container.get("volumeMounts") or [] if not mount.get("readOnly")}
            if not mounts or (pod.ray and "/tmp" not in mounts):
                yield Fault(where, "with a read-only root it needs a writable place (Ray: /tmp)")


def images(objects: list[Object]) -> Iterator[Fault]:
    """Every image has a version."""
    for pod in pods(objects):
        for container in pod.containers:
            image = str(container.get("image") or "")
            where = f"{pod.where} {container['name']}"
            tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
            if "@sha256:" not in image and (not tag or tag == "latest"):
                yield Fault(where, f"image {image or '(none)'} names no version")
            if "@sha256:" not in image and container.get("imagePullPolicy") == "Always":
                yield Fault(where, "imagePullPolicy Always makes a start depend on the registry")


def resources(objects: list[Object]) -> Iterator[Fault]:
    """Requests for CPU and memory, a limit for memory (and it is no smaller)."""
    for pod in pods(objects):
        for container in pod.containers:
            where = f"{pod.where} {container['name']}"
            have = container.get("resources") or {}
            requests, limits = have.get("requests") or {}, have.get("limits") or {}
            for key in ("cpu", "memory"):
                if key not in requests:
                    yield Fault(where, f"no request for {key}")
            if "memory" not in limits:
                yield Fault(where, "no limit for memory")
            for key in requests.keys() & limits.keys():
                if quantity(requests[key]) > quantity(limits[key]):
                    yield Fault(where, f"{key}: request {requests[key]} is above limit {limits[key]}")


def probes(objects: list[Object]) -> Iterator[Fault]:
    """KubeRay puts probes into Ray's containers (where there are none); all other lasting ones bring theirs."""
    for pod in pods(objects):
        for container in pod.main:
            where = f"{pod.where} {container['name']}"
            have = {key for key in ("readinessProbe", "livenessProbe") if key in container}
            if pod.ray and have:
                yield Fault(where, f"{', '.join(sorted(have))} replaces the probe that KubeRay makes for Ray and Serve")
            if not pod.ray and pod.lasting and len(have) < 2:
                yield Fault(where, "readinessProbe and livenessProbe are both needed")


def references(objects: list[Object], secrets: Secrets) -> Iterator[Fault]:
    """ConfigMaps, Secrets, PVCs and volumes that are named exist; volumes that exist are used."""
    maps = {item["metadata"]["name"]: set(item.get("data") or {}) for item in of_kind(objects, "ConfigMap")}
    own = {item["metadata"]["name"]: set(item.get("data") or {}) for item in of_kind(objects, "Secret")}
    known = {key: set(value) for key, value in secrets.items()} | own
    claims = {item["metadata"]["name"] for item in of_kind(objects, "PersistentVolumeClaim")}
    for where, kind, target, key in _named(objects):
        there: dict[str, set[str]] = {"ConfigMap": maps, "Secret": known}.get(kind, {claim: set() for claim in claims})
        if target not in there:
            yield Fault(where, f"{kind} {target} does not exist")
        elif key is not None and key not in there[target]:
            yield Fault(where, f"{kind} {target} has no key {key}")
    for pod in pods(objects):
        have = {volume["name"] for volume in pod.spec.get("volumes") or []}
        claimed = {
            claim["metadata"]["name"]
            for item in of_kind(objects, "StatefulSet")
            if name(item) == pod.where
            for claim in item["spec"].get("volumeClaimTemplates") or []
        }
        used = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts") or []}
        for missing in sorted(used - have - claimed):
            yield Fault(pod.where, f"volume {missing} is mounted and does not exist")
        for spare in sorted(have - used):
            yield Fault(pod.where, f"volume {spare} is mounted by nobody")


def _named(objects: list[Object]) -> Iterator[tuple[str, str, str, str | None]]:
    """(where, kind, name, key) of everything that pods, RayServices and Ingresses refer to by name."""
    for pod in pods(objects):
        for volume in pod.spec.get("volumes") or []:
            if config := volume.get("configMap"):
                yield pod.where, "ConfigMap", config["name"], None
            if secret := volume.get("secret"):
                yield pod.where, "Secret", secret["secretName"], None
            if claim := volume.get("persistentVolumeClaim"):
                yield pod.where, "PersistentVolumeClaim", claim["claimName"], None
        for container in pod.containers:
            where = f"{pod.where} {container['name']}"
            for source in container.get("envFrom") or []:
                for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
                    if key in source:
                        yield where, kind, source[key]["name"], None
            for variable in container.get("env") or []:
                origin = variable.get("valueFrom") or {}
                for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                    if key in origin:
                        yield where, kind, origin[key]["name"], origin[key]["key"]
    for item in of_kind(objects, "RayService"):
        cluster = item["spec"]["rayClusterConfig"]
        if token := (cluster.get("authOptions") or {}).get("secretName"):
            yield name(item), "Secret", token, "auth_token"
        password = (cluster.get("gcsFaultToleranceOptions") or {}).get("redisPassword") or {}
        if reference := (password.get("valueFrom") or {}).get("secretKeyRef"):
            yield name(item), "Secret", reference["name"], reference["key"]
    for item in of_kind(objects, "Ingress"):
        for tls in item["spec"].get("tls") or []:
            yield name(item), "Secret", tls["secretName"], None
    for item in of_kind(objects, "Gateway"):
        for listener in item["spec"]["listeners"]:
            for reference in (listener.get("tls") or {}).get("certificateRefs") or []:
                yield name(item), "Secret", reference["name"], None


def ports(objects: list[Object]) -> Iterator[Fault]:
    """A port has one name everywhere: container, Service, NetworkPolicy, what scrapes, Ingress and HTTPRoute agree."""
    every = pods(objects)
    for item in of_kind(objects, "NetworkPolicy"):
        mine = _chosen(item["spec"].get("podSelector"), every)
        for rule in item["spec"].get("ingress") or []:
            yield from _port_names(name(item), rule, mine)
        for rule in item["spec"].get("egress") or []:
            peers = [_chosen(peer["podSelector"], every) for peer in rule.get("to") or [] if _inside(peer)]
            yield from _port_names(name(item), rule, [pod for group in peers for pod in group])
    for item in of_kind(objects, "PodMonitor"):
        for endpoint in item["spec"]["podMetricsEndpoints"]:
            for pod in _chosen(item["spec"]["selector"], every):
                if pod.port(endpoint["port"]) is None:
                    yield Fault(name(item), f"{pod.where} has no port {endpoint['port']}")
    for item in of_kind(objects, "ScrapeConfig"):
        for source in item["spec"]["kubernetesSDConfigs"]:
            if (source.get("namespaces") or {}).get("names") != [item["metadata"].get("namespace")]:
                yield Fault(name(item), f"looks for Services elsewhere than in {item['metadata'].get('namespace')}")
        kept = [r.get("regex") for r in item["spec"].get("relabelings") or [] if r.get("action") == "keep"]
        for pod in every:
            if pod.ray == "worker" and not any(pod.port(port) for port in kept if port):
                yield Fault(name(item), f"{pod.where} has no port that it keeps ({', '.join(map(str, kept))})")
    there = {service.name: service for service in services(objects)}
    for item in of_kind(objects, "Service"):
        for port in item["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for pod in _chosen(item["spec"].get("selector"), every):
                if isinstance(target, str) and pod.port(target) is None:
                    yield Fault(name(item), f"{pod.where} has no port {target}")
    for where, target, port in _backends(objects):
        if target not in there:
            yield Fault(where, f"Service {target} does not exist")
        elif port not in there[target].ports and port not in there[target].ports.values():
            yield Fault(where, f"Service {target} has no port {port}")


def _inside(peer: Object) -> bool:
    """A peer that can only be a pod of this namespace."""
    return "podSelector" in peer and "namespaceSelector" not in peer


def _chosen(selector: Object | None, every: list[Pod]) -> list[Pod]:
    return [pod for pod in every if selects(selector, pod.labels)]


def _port_names(where: str, rule: Object, chosen: list[Pod]) -> Iterator[Fault]:
    for port in rule.get("ports") or []:
        wanted = port.get("port")
        if isinstance(wanted, str) and not any(pod.port(wanted) is not None for pod in chosen):
            yield Fault(where, f"no pod that it means has a port {wanted}")


def _backends(objects: list[Object]) -> Iterator[tuple[str, str, str | int]]:
    for item in of_kind(objects, "Ingress"):
        for rule in item["spec"].get("rules") or []:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                yield name(item), service["name"], service["port"].get("name", service["port"].get("number"))
    for item in of_kind(objects, "HTTPRoute"):
        for rule in item["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                yield name(item), backend["name"], backend["port"]
