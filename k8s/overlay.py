"""An overlay of k8s/overlays: its folder, the profile that it serves, and its built objects."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from service.config import PROFILES, Config, load
from service.errors import UserError

HERE = Path(__file__).resolve().parent
OVERLAYS = HERE / "overlays"
EXAMPLES = HERE / "examples"
BUILD_S = 60.0

Object = dict[str, Any]


@dataclass(frozen=True)
class Overlay:
    """`settings` change the profile for life in a pod, as `--set` does."""

    name: str
    folder: Path
    profile: str
    settings: tuple[str, ...]

    def config(self) -> Config:
        return load(PROFILES / self.profile, self.settings)


def overlay(name: str, root: Path = OVERLAYS) -> Overlay:
    """One overlay by name. Raises UserError."""
    folder = root / name
    file = folder / "render.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob("*/render.yaml")))
        raise UserError(f"there is no overlay {name} (no {file}); overlays are {known}")
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or not tree.keys() <= {"profile", "set"} or "profile" not in tree:
        raise UserError(f"{file}: write `profile: NAME.yaml` and perhaps `set: [key=value]`, nothing else")
    return Overlay(name, folder, str(tree["profile"]), tuple(tree.get("set") or ()))


def overlays(root: Path = OVERLAYS) -> list[Overlay]:
    return [overlay(path.parent.name, root) for path in sorted(root.glob("*/render.yaml"))]


def examples(root: Path = EXAMPLES) -> list[Path]:
    """Folders of examples that build on an overlay."""
    return [path.parent for path in sorted(root.glob("*/kustomization.yaml"))]


def kustomize() -> list[str] | None:
    """The command that builds a kustomization, or None where neither kubectl nor kustomize is installed."""
    if found := shutil.which("kubectl"):
        return [found, "kustomize"]
    if found := shutil.which("kustomize"):
        return [found, "build"]
    return None


def build(folder: Path, command: Sequence[str] | None = None) -> list[Object]:
    """The objects of a kustomization, as an operator would apply them. Raises UserError."""
    command = command or kustomize()
    if command is None:
        raise UserError("neither kubectl nor kustomize is installed: one of them builds the manifests")
    try:
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(command)} {folder} took longer than {BUILD_S:.0f} s") from None
    if done.returncode:
        raise UserError(f"{folder} does not build: {done.stderr.strip()[-2000:]}")
    return [tree for tree in yaml.safe_load_all(done.stdout) if tree]
