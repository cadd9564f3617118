from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from k8s import schemas
from k8s.overlay import EXAMPLES, OVERLAYS, build, kustomize

Object = dict[str, Any]


@lru_cache
def _built(name: str) -> list[Object]:
    folder = EXAMPLES / name.removeprefix("examples/") if name.startswith("examples/") else OVERLAYS / name
    return build(folder)


@pytest.fixture(scope="session")
def built() -> Callable[[str], list[Object]]:
    """Objects of an overlay (or `examples/NAME`), a copy that a test may spoil."""
    if kustomize() is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    return lambda name: copy.deepcopy(_built(name))


@pytest.fixture(scope="session")
def kuberay() -> Path:
    """KubeRay's closed schema of RayService."""
    path = Path(os.environ.get("KUBERAY_SCHEMA") or schemas.KUBERAY)
    if not path.is_file():
        pytest.skip(f"KubeRay's schema of RayService is not at hand: no {path} (KUBERAY_SCHEMA names another place)")
    return path


def pick(objects: list[Object], kind: str, name: str | None = None) -> Object:
    found = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert len(found) == 1, (kind, name, [item["metadata"]["name"] for item in found])
    return found[0]


def cluster(objects: list[Object]) -> Object:
    return pick(objects, "RayService")["spec"]["rayClusterConfig"]


def head(objects: list[Object]) -> Object:
    return cluster(objects)["headGroupSpec"]["template"]["spec"]


def group(objects: list[Object]) -> Object:
    return cluster(objects)["workerGroupSpecs"][0]


def worker(objects: list[Object]) -> Object:
    return group(objects)["template"]["spec"]
