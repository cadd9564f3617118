"""Everything that must hold for a built overlay. Run by `glm5 k8s check` and in `make test`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from k8s import fences, fit, policies, schemas
from k8s.fault import Fault
from k8s.kuberay import Object, name, of_kind
from k8s.overlay import HERE, OVERLAYS, build, examples, overlay, overlays

SECRETS = HERE / "secrets.yaml"
DEFAULT_LONGEST_S = 600.0


@dataclass(frozen=True)
class Report:
    """`skipped`: what could not be looked at, and why. `notes`: what an operator should know of a right build."""

    objects: int
    faults: list[Fault]
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def secrets_made_by_hand(path: Path = SECRETS) -> policies.Secrets:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: list(value["keys"]) for key, value in tree.items()}


def examine(objects: list[Object], kuberay: Path | None) -> list[Fault]:
    """All faults of one build. `kuberay`: schema of RayService, None where it is not at hand."""
    found = [*schemas.core(objects), *schemas.crds(objects, kuberay)]
    if found:
        # The rules below may take a shape for granted that these objects do not have.
        return found
    found += [*policies.careful(objects), *policies.images(objects), *policies.resources(objects)]
    found += [*policies.probes(objects), *policies.ports(objects)]
    found += policies.references(objects, secrets_made_by_hand())
    found += [
        *fences.network(objects),
        *fences.passages(objects),
        *fences.disruption(objects),
        *fences.selectors(objects),
    ]
    found += fences.namespace(objects)
    longest = DEFAULT_LONGEST_S
    services = of_kind(objects, "RayService")
    if len(services) != 1:
        found.append(Fault("the build", f"{len(services)} RayServices instead of one"))
    for service in services:
        found += [*fit.operator(service), *fit.memory(service)]
        config, faults = fit.profile(service)
        found += faults
        if config is not None:
            longest = config.http.request_timeout_s
            found += [*fit.room(service, config), *fit.endings(service, config), *fit.paths(objects, service, config)]
            found += fit.gate(objects, config)
    found += fences.ingress(objects, longest)
    return found


def folders(names: list[str]) -> dict[str, Path]:
    """What to check: overlays by name; without names all overlays and all examples. Raises UserError."""
    if names:
        return {each: overlay(each).folder for each in names}
    found = {each.name: each.folder for each in overlays()}
    return found | {f"examples/{path.name}": path for path in examples()}


def run(folder: Path, kuberay: Path | None) -> Report:
    """Build a kustomization and examine it. Raises UserError where it does not build."""
    objects = build(folder)
    skipped = []
    if kuberay is None:
        skipped = [f"{name(item)} against KubeRay's schema" for item in of_kind(objects, "RayService")]
    faults = examine(objects, kuberay)
    return Report(len(objects), faults, skipped, [] if faults else list(notes(objects)))


def notes(objects: list[Object]) -> Iterator[str]:
    """What a build without faults still asks of its cluster."""
    for service in of_kind(objects, "RayService"):
        config, _ = fit.profile(service)
        if config is not None and (boxes := fit.spare_boxes(service, config)):
            yield f"an upgrade waits until {boxes} more GPU boxes are free"
        if config is not None and (spare := fit.pods_without_front(service, config)):
            yield f"when the pools grow, {spare} pods come without an ingress: never ready, and outside the Service"
    for item in of_kind(objects, "ConfigMap"):
        if item["metadata"]["name"] == "glm5-model" and "files: []" in (item.get("data") or {}).get("model.yaml", ""):
            yield "the model's manifest lists no files yet: glm5 k8s model manifest makes one"


__all__ = ["OVERLAYS", "Fault", "Report", "examine", "folders", "run", "secrets_made_by_hand"]
