"""Rules that tie a RayService to the profile inside it: what Serve will ask for must be there, and time to end well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deployments.declarative import NAME, faults, serve_config
from k8s.fault import Fault
from k8s.kuberay import INCREMENTAL, MAX_NAME, UPGRADES, Object, Pod, name, of_kind, ray_pods
from k8s.kuberay import serve_config as tree_of
from k8s.policies import quantity
from service.config import Config, parse
from service.errors import UserError

RAY_VERSION = "2.60.0"
END_S = 30.0
"""Seconds of the grace period that must be left for Ray's own end after the drain."""


def profile(service: Object) -> tuple[Config | None, list[Fault]]:
    """The profile inside `serveConfigV2`, and what is wrong with the tree: by Ray's schema, by ours, and key by key."""
    where = f"{name(service)} serveConfigV2"
    tree = tree_of(service)
    if not isinstance(tree, dict):
        return None, [Fault(where, "is no YAML mapping")]
    found = [Fault(where, f"Ray: {fault}") for fault in faults(tree)]
    applications = tree.get("applications")
    if not isinstance(applications, list) or [a.get("name") for a in applications] != [NAME]:
        return None, [*found, Fault(where, f"must hold one application, {NAME}")]
    try:
        config = parse(applications[0].get("args") or {}, "args")
    except UserError as fault:
        return None, [*found, Fault(where, str(fault))]
    made = serve_config(config)
    # Ray takes keys that it does not know; a misspelt one would do nothing, silently.
    found += [Fault(where, f"{key} is not as glm5 k8s render makes it") for key in _differ(made, tree)]
    return config, found


def _differ(made: Any, there: Any, path: str = "") -> Iterator[str]:
    if isinstance(made, dict) and isinstance(there, dict):
        for key in sorted({*made, *there}):
            yield from _differ(made.get(key), there.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(made, list) and isinstance(there, list) and len(made) == len(there):
        for index, (one, other) in enumerate(zip(made, there, strict=True)):
            yield from _differ(one, other, f"{path}.{index}")
    elif made != there:
        yield path


def operator(service: Object) -> Iterator[Fault]:
    """What KubeRay itself refuses or silently undoes (its utils/validation.go)."""
    where, spec = name(service), service["spec"]
    cluster = spec["rayClusterConfig"]
    own = service["metadata"]["name"]
    if len(own) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", own):
        yield Fault(where, f"name must be a DNS label of at most {MAX_NAME} characters")
    if cluster.get("rayVersion") != RAY_VERSION:
        yield Fault(where, f"rayVersion {cluster.get('rayVersion')} is not the image's {RAY_VERSION}")
    if spec.get("excludeHeadPodFromServeSvc") is not True:
        yield Fault(where, "excludeHeadPodFromServeSvc must be true: no ingress runs on the head")
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        yield Fault(where, "authOptions.mode must be token")
    if not cluster.get("enableInTreeAutoscaling") or (cluster.get("autoscalerOptions") or {}).get("version") != "v2":
        yield Fault(where, "autoscaler v2 must be on")
    upgrade = spec.get("upgradeStrategy") or {}
    options = upgrade.get("clusterUpgradeOptions")
    if upgrade.get("type") not in UPGRADES:
        yield Fault(where, f"upgradeStrategy.type {upgrade.get('type')!r} is none of {', '.join(UPGRADES)}")
    if upgrade.get("type") == INCREMENTAL:
        wanted = {"gatewayClassName", "stepSizePercent", "intervalSeconds", "maxSurgePercent"}
        if missing := wanted - (options or {}).keys():
            yield Fault(where, f"an incremental upgrade needs clusterUpgradeOptions: {', '.join(sorted(missing))}")
        for group in cluster["workerGroupSpecs"]:
            if group.get("minReplicas"):
                yield Fault(
                    where, f"{group['groupName']}: minReplicas above 0 keeps the old cluster's boxes to the end"
                )
    elif options:
        yield Fault(where, "clusterUpgradeOptions belong to NewClusterWithIncrementalUpgrade only")
    for pod in ray_pods(service):
        if pod.spec.get("restartPolicy", "Never") != "Never":
            yield Fault(pod.where, "restartPolicy must be Never with autoscaler v2")
        names = {variable["name"] for variable in pod.main[0].get("env") or []}
        if taken := names & {"RAY_enable_autoscaler_v2", "REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN"}:
            yield Fault(pod.where, f"{', '.join(sorted(taken))} is KubeRay's to set")
    ports = {port["name"] for port in cluster["headGroupSpec"]["template"]["spec"]["containers"][0].get("ports") or []}
    for port in sorted({"gcs-server", "dashboard", "serve", "metrics"} - ports):
        yield Fault(where, f"the head has no port named {port}, from which KubeRay makes its Services")
    if "client" in ports:
        yield Fault(where, "the Ray client port lets callers run code of their own: leave it out")


def room(service: Object, config: Config) -> Iterator[Fault]:
    """The worker group can hold what the pools ask for, and each of its pods an ingress beside a replica: KubeRay asks
    every worker's serve port whether the pod is ready."""
    cluster = service["spec"]["rayClusterConfig"]
    head, *workers = ray_pods(service)
    if gpus(head) or _start(cluster["headGroupSpec"]).get("num-cpus") != "0":
        yield Fault(head.where, "the head must offer no CPUs and no GPUs: replicas belong on workers")
    for port in (pod.port("serve") for pod in workers):
        if port is not None and config.http.port != port:
            yield Fault(name(service), f"http.port is {config.http.port}, the workers' port serve is {port}")
    if config.http.host != "0.0.0.0":
        yield Fault(name(service), f"http.host is {config.http.host}: nobody outside the pod reaches it, say 0.0.0.0")
    shares = {"ingress": config.ingress.cpus} | {f"pools.{name}": p.cpus + p.gpus for name, p in config.pools.items()}
    for key in (key for key, share in shares.items() if not share):
        yield Fault(name(service), f"{key}.cpus must be above 0: what asks for nothing may land on the head")
    for group, pod in zip(cluster.get("workerGroupSpecs") or [], workers, strict=True):
        start = _start(group)
        cpus = _cpus(group, pod)
        if cpus > _asked(pod, "requests", "cpu"):
            yield Fault(pod.where, f"Ray is told of {cpus:.0f} CPUs, more than the pod requests")
        if gpus(pod) != float(start.get("num-gpus", gpus(pod))):
            yield Fault(pod.where, "num-gpus differs from the GPUs requested")
        if any(
            key.endswith("/gpu") for key in (pod.main[0].get("resources") or {}).get("limits", {})
        ) and not pod.spec.get("tolerations"):
            yield Fault(pod.where, "GPU nodes are usually tainted: it needs the toleration")
        for pool, wanted in config.pools.items():
            if wanted.cpus + config.ingress.cpus > cpus or wanted.gpus > gpus(pod):
                share = f"{wanted.cpus:g} CPUs, {wanted.gpus:g} GPUs"
                yield Fault(pod.where, f"a replica of {pool} ({share}) does not fit beside an ingress")
        most, least = int(group["maxReplicas"]), int(group.get("minReplicas", 0))
        begin = int(group.get("replicas", least))
        if not least <= begin <= most:
            yield Fault(pod.where, "replicas must lie between minReplicas and maxReplicas")
        held = _boxes(config, cpus, gpus(pod), [pool.min_replicas for pool in config.pools.values()])
        if held > most:
            yield Fault(pod.where, f"{most} pods cannot hold the pools' min_replicas, which take {held}")
        yield from _fronts(pod.where, config, max(held, begin), most, cpus)


def _boxes(config: Config, cpus: float, gpus: float, replicas: list[int]) -> int:
    """Pods that hold so many replicas of each pool, largest first, with room for one ingress left in each."""
    free: list[list[float]] = []
    wanted = [(p.gpus, p.cpus) for p, n in zip(config.pools.values(), replicas, strict=True) for _ in range(n)]
    for gpu, cpu in sorted(wanted, reverse=True):
        box = next((box for box in free if box[0] >= gpu and box[1] >= cpu), None)
        if box is None:
            box = [gpus, cpus - config.ingress.cpus]
            free.append(box)
        box[0], box[1] = box[0] - gpu, box[1] - cpu
    return max(1, len(free))


def _fronts(where: str, config: Config, pods: int, most: int, cpus: float) -> Iterator[Fault]:
    """`pods` run at all times: an ingress on each of them, and none that finds no place on `most`."""
    front = config.ingress
    each = front.per_node or front.replicas
    if front.replicas < pods:
        yield Fault(where, f"ingress.replicas ({front.replicas}) is below the {pods} pods, of which each needs one")
    elif pods > 1 and front.replicas <= each * (pods - 1):
        yield Fault(
            where,
            f"{pods - 1} of {pods} pods may take all ingresses: set ingress.per_node to {-(-front.replicas // pods)}",
        )
    if front.replicas > each * most:
        yield Fault(where, f"ingress.per_node ({each}) on {most} pods leaves no place for {front.replicas} ingresses")
    used = sum(pool.cpus * pool.min_replicas for pool in config.pools.values())
    need = used + front.cpus * front.replicas
    if need > cpus * most:
        yield Fault(where, f"{need:g} CPUs are needed, {cpus * most:g} can be had")


def pods_without_front(service: Object, config: Config) -> int:
    """Pods that come when the pools grow to `max_replicas` beyond those that the ingresses spread over."""
    cluster = service["spec"]["rayClusterConfig"]
    _, *workers = ray_pods(service)
    grown = 0
    for group, pod in zip(cluster.get("workerGroupSpecs") or [], workers, strict=True):
        wanted = [pool.max_replicas for pool in config.pools.values()]
        grown += min(int(group["maxReplicas"]), _boxes(config, _cpus(group, pod), gpus(pod), wanted))
    return max(0, grown - config.ingress.replicas)


def _cpus(group: Object, pod: Pod) -> float:
    """CPUs that Ray is told of."""
    return float(_start(group).get("num-cpus") or _asked(pod, "limits", "cpu"))


def _asked(pod: Pod, kind: str, key: str) -> float:
    """A request or limit of the Ray container; 0 where there is none."""
    return quantity(((pod.main[0].get("resources") or {}).get(kind) or {}).get(key, 0))


def _start(group: Object) -> dict[str, str]:
    return dict(group.get("rayStartParams") or {})


def gpus(pod: Pod) -> float:
    limits = pod.main[0].get("resources", {}).get("limits", {})
    return sum(float(value) for key, value in limits.items() if key.endswith("/gpu"))


def spare_boxes(service: Object, config: Config) -> int:
    """Pods of GPUs that an upgrade needs free beside those in use; the operator waits, harmlessly, until it has them.

    Serve rounds a deployment's share of `target_capacity` to at least one replica (serve/_private/utils.py,
    get_capacity_adjusted_num_replicas), so the first step of an incremental upgrade already asks for one of each pool.
    """
    spec = service["spec"]
    kind = (spec.get("upgradeStrategy") or {}).get("type")
    box = max(gpus(pod) for pod in ray_pods(service))
    if kind == "None" or not box:
        return 0
    surge = 100
    if kind == INCREMENTAL:
        surge = int(spec["upgradeStrategy"]["clusterUpgradeOptions"]["maxSurgePercent"])
    replicas = {pool: int(max(1, p.min_replicas * surge / 100 + 0.5)) for pool, p in config.pools.items()}
    return -int(-sum(replicas[pool] * p.gpus for pool, p in config.pools.items()) // box)


def memory(service: Object) -> Iterator[Fault]:
    """Shared memory of its own, sized, large enough for Ray's object store and inside the memory limit."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or [])]
    for group, pod in zip(groups, ray_pods(service), strict=True):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.main[0].get("volumeMounts") or []}
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes") or []}
        empty = (volumes.get(mounts.get("/dev/shm", "")) or {}).get("emptyDir") or {}
        if empty.get("medium") != "Memory" or "sizeLimit" not in empty:
            yield Fault(pod.where, "/dev/shm must be an emptyDir in memory with a sizeLimit")
            continue
        size = quantity(empty["sizeLimit"])
        if size < float(_start(group).get("object-store-memory", "inf")):
            yield Fault(pod.where, "/dev/shm is smaller than object-store-memory (or that is not set)")
        if size > _asked(pod, "limits", "memory"):
            yield Fault(pod.where, "/dev/shm is larger than the memory limit, which it counts against")
        if size < 2**30 * gpus(pod):
            yield Fault(pod.where, "/dev/shm must have 1 GiB for each GPU (glm5 preflight asks for it)")


def endings(service: Object, config: Config) -> Iterator[Fault]:
    """request < replica's drain < preStop < grace period: a planned end cuts no answer."""
    longest = config.http.request_timeout_s
    drain = max(pool.drain_s for pool in config.pools.values())
    for pool, settings in config.pools.items():
        if settings.drain_s <= longest:
            yield Fault(name(service), f"pools.{pool}.drain_s ({settings.drain_s:g}) must be above request_timeout_s")
    for pod in ray_pods(service):
        hook = ((pod.main[0].get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}
        command = [str(part) for part in hook.get("command") or []]
        if pod.ray == "head":
            if not command:
                yield Fault(pod.where, "no preStop")
            continue
        if "k8s.drain" not in command or "--deadline-s" not in command:
            yield Fault(pod.where, "preStop must drain the node: python -m k8s.drain --deadline-s SECONDS")
            continue
        deadline = float(command[command.index("--deadline-s") + 1])
        if deadline <= drain:
            yield Fault(pod.where, f"preStop ({deadline:g} s) must be longer than the longest drain_s, {drain:g} s")
        grace = float(pod.spec.get("terminationGracePeriodSeconds", 30))
        if grace < deadline + END_S:
            yield Fault(pod.where, f"terminationGracePeriodSeconds ({grace:g}) must be at least {deadline + END_S:g}")


def gate(objects: list[Object], config: Config) -> Iterator[Fault]:
    """The Job judges the model for the tensor parallelism and the context that it will be served with."""
    wanted = {"--context": {str(config.model.context_tokens)}}
    wanted["--tp"] = {str(p.engine.tensor_parallel) for p in config.pools.values() if p.engine.name == "vllm"} or {"1"}
    for item in of_kind(objects, "Job"):
        command = [str(part) for part in item["spec"]["template"]["spec"]["containers"][0].get("command") or []]
        if "fill" not in command:
            continue
        for option, values in wanted.items():
            given = command[command.index(option) + 1] if option in command[:-1] else "nothing"
            if {given} != values:
                yield Fault(name(item), f"{option} is {given}, the profile says {', '.join(sorted(values))}")


def paths(objects: list[Object], service: Object, config: Config) -> Iterator[Fault]:
    """Files that the profile names lie on a volume of the worker; the model is the one that the manifest brings."""
    manifests = {
        item["metadata"]["name"]: (item.get("data") or {}).get("model.yaml") for item in of_kind(objects, "ConfigMap")
    }
    for pod in ray_pods(service):
        if pod.ray != "worker":
            continue
        mounts = [mount["mountPath"].rstrip("/") for mount in pod.main[0].get("volumeMounts") or []]
        wanted = {"admission.keys_file": config.admission.keys_file}
        if config.model.path != "demo":
            wanted["model.path"] = config.model.path
        for key, path in wanted.items():
            if path is not None and not any(path.startswith(f"{mount}/") for mount in mounts):
                yield Fault(pod.where, f"{key} is {path}, and no volume is mounted there")
    text = manifests.get("glm5-model")
    if text is not None and config.model.path != "demo":
        from k8s.model import manifest_of

        try:
            entry = manifest_of(text, "ConfigMap glm5-model", may_be_empty=True).entry
        except UserError as fault:
            yield Fault("ConfigMap/glm5-model", str(fault))
            return
        if not config.model.path.endswith(f"/{entry}"):
            yield Fault("ConfigMap/glm5-model", f"entry {entry} is not the profile's model.path {config.model.path}")
