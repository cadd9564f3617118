"""Objects against schemas that know every key: Kubernetes', KubeRay's, and small ones of ours for other CRDs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from k8s.fault import Fault
from k8s.kuberay import Object, name
from service.errors import UserError

OURS = Path(__file__).resolve().parent / "schemas"
KUBERAY = Path(__file__).resolve().parents[2] / "shared" / "crds" / "rayservice.v1.schema.json"
"""Where KubeRay's closed schema is looked for unless --schema or KUBERAY_SCHEMA says otherwise."""
VERSIONS = ("1.30", "1.37")
"""Kubernetes versions that manifests must fit: matchLabelKeys of topology spread needs 1.27."""


def core(objects: list[Object], versions: tuple[str, ...] = VERSIONS) -> Iterator[Fault]:
    """What kubernetes-validate --strict says about Kubernetes' own objects. Raises UserError if not installed."""
    try:
        import kubernetes_validate
    except ModuleNotFoundError:
        raise UserError("kubernetes-validate is not installed: pip install kubernetes-validate==1.37.0") from None
    for item in objects:
        if custom(item):
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(item, version, strict=True)
            except kubernetes_validate.ValidationError as fault:
                path = ".".join(str(step) for step in fault.path)
                yield Fault(name(item), f"Kubernetes {version}: {path}: {fault.message[:300]}")
                break
            except kubernetes_validate.SchemaNotFoundError:
                yield Fault(name(item), f"Kubernetes {version} knows no {item['kind']} {item['apiVersion']}")
                break


def custom(item: Object) -> bool:
    """Whether a CustomResourceDefinition brings this kind (a group with its own domain, outside *.k8s.io)."""
    group = item["apiVersion"].partition("/")[0] if "/" in item["apiVersion"] else ""
    return "." in group and (not group.endswith(".k8s.io") or group == "gateway.networking.k8s.io")


@lru_cache
def _schema(path: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise UserError(f"schema {path}: {fault}") from None
    return tree


def crds(objects: list[Object], kuberay: Path | None) -> Iterator[Fault]:
    """Custom resources. `kuberay`: the closed schema of RayService; None skips it (the caller says so)."""
    import jsonschema

    for item in objects:
        if not custom(item):
            continue
        if item["kind"] == "RayService":
            if kuberay is None:
                continue
            schema = _schema(kuberay)
        else:
            path = OURS / f"{item['kind'].lower()}.json"
            if not path.is_file():
                yield Fault(name(item), f"there is no schema for {item['apiVersion']} {item['kind']} in k8s/schemas")
                continue
            schema = _schema(path)
        for error in jsonschema.Draft202012Validator(schema).iter_errors(item):
            where = ".".join(str(step) for step in error.absolute_path)
            yield Fault(name(item), f"{where}: {error.message[:300]}")
