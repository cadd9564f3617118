"""Whether a connection passes the NetworkPolicies of a build, as Kubernetes reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from k8s.kuberay import Object, Pod, selects


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or with `outside` an address beyond the cluster. `space`: labels of the pod's
    namespace, None for ours. `ports`: its named ones."""

    where: str
    labels: Mapping[str, str] = field(default_factory=dict)
    space: Mapping[str, str] | None = None
    outside: bool = False
    ports: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pod: Pod) -> End:
        ports = [port for container in pod.main for port in container.get("ports") or []]
        return cls(pod.where, pod.labels, ports={port["name"]: int(port["containerPort"]) for port in ports})

    @property
    def ours(self) -> bool:
        return self.space is None and not self.outside


@dataclass(frozen=True)
class Fence:
    """The NetworkPolicies of our namespace, and its labels."""

    policies: list[Object]
    space: Mapping[str, str]

    def passes(self, source: End, target: End, port: int | None) -> bool:
        """Whether `source` may open a TCP connection to `port` of `target`; None: to every port."""
        return self._opens("Egress", source, target, target, port) and self._opens(
            "Ingress", target, source, target, port
        )

    def _opens(self, direction: str, mine: End, other: End, target: End, port: int | None) -> bool:
        if not mine.ours:
            return True
        specs = [each["spec"] for each in self.policies]
        mine_too = [
            each for each in specs if direction in _types(each) and selects(each.get("podSelector"), mine.labels)
        ]
        rules = [rule for each in mine_too for rule in each.get(direction.lower()) or []]
        side = "from" if direction == "Ingress" else "to"
        return not mine_too or any(
            self._meant(rule.get(side) or [], other) and _port_meant(rule.get("ports") or [], target, port)
            for rule in rules
        )

    def _meant(self, peers: list[Object], other: End) -> bool:
        return not peers or any(self._is(peer, other) for peer in peers)

    def _is(self, peer: Object, other: End) -> bool:
        if "ipBlock" in peer:
            # Pods have addresses too, but not every network plugin lets a block speak for them.
            return other.outside and peer["ipBlock"]["cidr"] == "0.0.0.0/0"
        if other.outside or not selects(peer.get("podSelector"), other.labels):
            return False
        if "namespaceSelector" not in peer:
            return other.ours
        return selects(peer["namespaceSelector"], self.space if other.space is None else other.space)


def _types(spec: Object) -> list[str]:
    return list(spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])])


def _port_meant(ports: list[Object], target: End, port: int | None) -> bool:
    if not ports:
        return True
    return port is not None and any(
        target.ports.get(str(each.get("port")), each.get("port")) in (port, None)
        for each in ports
        if each.get("protocol", "TCP") == "TCP"
    )
