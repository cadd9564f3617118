"""What docs and Dockerfiles say is what the manifests do."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s import check, drain, fit
from k8s.overlay import HERE, overlay
from tests.unit.k8s.conftest import pick, worker

ROOT = HERE.parent
DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
DOCKER = HERE / "docker"
Built = Callable[[str], list[dict[str, Any]]]


def test_every_secret_made_by_hand_is_in_the_docs_and_used_somewhere(built: Built) -> None:
    text = str([built(name) for name in ("cpu", "two-box", "examples/ingress", "examples/gateway")])
    for name, keys in check.secrets_made_by_hand().items():
        assert f"`{name}`" in DOCS and f"'{name}'" in text
        assert all(f"`{key}`" in DOCS for key in keys)


def test_paths_in_the_docs_exist() -> None:
    named = set(re.findall(r"`((?:k8s|base|components|overlays|docs)/[\w./-]+)`", DOCS))
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).exists() or (HERE / path).exists(), path


@pytest.mark.parametrize(("name", "words"), [("one-box", "600, 630, 680, 720 s"), ("cpu", "120, 130, 200, 240")])
def test_times_in_the_docs_are_those_of_the_manifests(name: str, words: str, built: Built) -> None:
    objects, config = built(name), overlay(name).config()
    spec = worker(objects)
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    numbers = [
        config.http.request_timeout_s,
        max(pool.drain_s for pool in config.pools.values()),
        float(command[-1]),
        spec["terminationGracePeriodSeconds"],
    ]
    assert ", ".join(f"{number:g}" for number in numbers) in words and words in DOCS


def test_the_number_of_boxes_in_the_docs(built: Built) -> None:
    service = pick(built("two-box"), "RayService")
    assert fit.spare_boxes(service, overlay("two-box").config()) == 2
    assert "two more boxes must be free" in DOCS


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_images(target: str, built: Built) -> None:
    text = (DOCKER / f"Dockerfile.{target}").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases == ["python:${PYTHON}"] * 2
    assert re.search(r"^ARG PYTHON=3\.11\.\d+-slim-bookworm$", text, re.MULTILINE)
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    # KubeRay's init container and readiness probe call these in the image.
    assert {"bash", "wget"} <= set(text.split())
    assert ".gguf" not in text and "smollm" not in text.lower(), "no model inside"
    name = {"cpu": "cpu", "gpu": "one-box"}[target]
    image = worker(built(name))["containers"][0]["image"]
    assert f"/glm5-serve-{target}:" in image and image in text, "the file says how to build what the manifests name"
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / path).exists() for path in source.split()), source


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in lines), "no pin with a local version or a range"
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("name", ["cpu-pins.txt", "gpu-constraints.txt"])
def test_pins_agree_with_the_project(name: str) -> None:
    found = pins(DOCKER / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    wanted += project["optional-dependencies"]["local"] if name.startswith("cpu") else ["vllm==0.32.0"]
    for line in wanted:
        match = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", line)
        if match:
            assert found[match[1].lower()] == match[2], line
    assert "torch" not in found, "the GPU image takes the torch that vLLM pins, the CPU image none"


def test_rays_version_is_one_everywhere() -> None:
    assert pins(DOCKER / "cpu-pins.txt")["ray"] == pins(DOCKER / "gpu-constraints.txt")["ray"] == fit.RAY_VERSION


def test_the_drain_of_a_pod_without_ray_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.drain(60.0, id="no such node") == 0
    assert "nothing to drain" in capsys.readouterr().err
