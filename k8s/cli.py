"""`glm5 k8s`: make the generated files, check every overlay, and bring a model onto a volume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import UserError

if TYPE_CHECKING:
    from k8s.model import Manifest

app = typer.Typer(help="Render and check the KubeRay manifests; fill the model's volume.", no_args_is_help=True)
model_app = typer.Typer(help="The model's volume: what the Job and the init container run.", no_args_is_help=True)
app.add_typer(model_app, name="model")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
ManifestArgument = Annotated[Path, typer.Argument(help="Manifest (YAML): entry, and files with bytes, sha256, url.")]


@app.command()
def render(
    profile: Annotated[
        Path | None, typer.Argument(help="Profile (YAML) to render as serveConfigV2.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting. Repeatable.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write every generated file of k8s/.")] = False,
    check_: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a generated file is not as it would be made.")
    ] = False,
    json_: Json = False,
) -> None:
    """Print the serveConfigV2 of a profile, or make the files in k8s/ that come from profiles and dashboards/.

    Each overlay says in its render.yaml which profile it serves. Examples:
    `glm5 k8s render deployments/profiles/one-box-8gpu.yaml`, `glm5 k8s render --write`, `glm5 k8s render --check`.
    """
    from k8s import render as files

    if (profile is not None) + write + check_ != 1:
        raise UserError("give a profile to print, or --write, or --check")
    if profile is not None:
        from deployments.declarative import serve_config
        from service.config import load

        config = load(profile, set_ or [])
        text = json.dumps(serve_config(config), indent=1) if json_ else files.serve_config_text(config).rstrip()
        typer.echo(text)
        return
    if set_:
        raise UserError("--set belongs to a profile that is printed; overlays have their own list in render.yaml")
    if write:
        changed = [str(path) for path in files.write()]
        typer.echo(json.dumps({"changed": changed}) if json_ else "\n".join(changed) or "nothing to change")
        return
    difference = files.drift()
    if json_:
        typer.echo(json.dumps({"difference": difference}))
    else:
        for line in difference:
            typer.echo(line)
    if difference:
        typer.echo("generated files differ from what they are made of: glm5 k8s render --write", err=True)
        raise SystemExit(1)


@app.command()
def check(
    overlays: Annotated[
        list[str] | None, typer.Argument(help="Overlays to check. Default: all, and the examples.", show_default=False)
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            envvar="KUBERAY_SCHEMA", help="Closed JSON schema of KubeRay's RayService v1.", show_default=False
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Build overlays with kustomize and check them: schemas, Serve config, profile, policies. Exit 1 for any fault."""
    from k8s import check as checker
    from k8s.schemas import KUBERAY

    if schema is not None and not schema.is_file():
        raise UserError(f"--schema {schema}: no such file")
    schema = schema or (KUBERAY if KUBERAY.is_file() else None)
    reports = {each: checker.run(folder, schema) for each, folder in checker.folders(overlays or []).items()}
    faults = sum(len(report.faults) for report in reports.values())
    if json_:
        tree = {
            each: {"objects": r.objects, "faults": [vars(f) for f in r.faults], "skipped": r.skipped, "notes": r.notes}
            for each, r in reports.items()
        }
        typer.echo(json.dumps(tree))
    else:
        for each, report in reports.items():
            for fault in report.faults:
                typer.echo(f"{each}: {fault.where}: {fault.what}")
            for line in report.notes:
                typer.echo(f"{each}: note: {line}")
            for line in report.skipped:
                typer.echo(f"{each}: not checked: {line} (give --schema or KUBERAY_SCHEMA)")
            typer.echo(f"{each}: {report.objects} objects, {len(report.faults)} faults")
    if faults:
        raise SystemExit(1)


@model_app.command()
def manifest(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the model's GGUF files.")],
    url: Annotated[str, typer.Option(help="Where the Job will fetch them: URL/NAME for each file.")],
    entry: Annotated[
        str | None, typer.Option(help="First file. Default: the only one, or the one with -00001-of-.")
    ] = None,
) -> None:
    """Print the manifest of a model: name, size and SHA-256 of each GGUF file. Reads every byte."""
    import yaml

    from k8s.model import manifest_from

    names = sorted(path.name for path in folder.glob("*.gguf"))
    first = [each for each in names if "-00001-of-" in each] or names
    if entry is None and len(first) != 1:
        raise UserError(
            f"{folder}: say with --entry which file is the first one ({', '.join(first) or 'no GGUF files'})"
        )
    made = manifest_from(folder, entry or first[0], url.rstrip("/"), lambda line: typer.echo(line, err=True))
    typer.echo(yaml.safe_dump(made.model_dump(mode="json"), sort_keys=False).rstrip())


@model_app.command()
def fill(
    manifest: ManifestArgument,
    to: Annotated[Path, typer.Option(help="The volume's folder.")],
    tp: Annotated[int, typer.Option(min=1, help="GPUs that will share each layer: glm5 check depends on it.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Context of one request, tokens, for glm5 check.")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=32, help="Files fetched at once.")] = 4,
) -> None:
    """Fetch a model, check every file's size and SHA-256, judge it with glm5 check, mark the volume as ready.

    Safe to repeat: what is right stays, begun downloads go on. Exit 1: glm5 check refused; 2: a file cannot be had or
    is not the one of the manifest.
    """
    from k8s.model import fill as bring

    def gate(path: Path) -> bool:
        command = [str(Path(sys.executable).with_name("glm5")), "check", str(path), "--tp", str(tp), "--json"]
        command += ["--context", str(context)] if context is not None else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        typer.echo(done.stdout)
        # The word as well as the exit code: nothing but a clear yes may open the volume.
        return done.returncode == 0 and _says_yes(done.stdout)

    if not bring(_read(manifest), _folder(to), gate, _say, parallel):
        typer.echo("glm5 check refuses this model: the volume is not marked as ready", err=True)
        raise SystemExit(1)


@model_app.command()
def wait(
    manifest: ManifestArgument,
    at: Annotated[Path, typer.Option(help="The volume's folder.")],
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait, seconds.")] = 3600.0,
) -> None:
    """Wait until the volume holds this manifest's model, judged and marked. Exit 1 if it does not in time."""
    from k8s.model import wait as until

    if not until(_read(manifest), _folder(at), timeout_s, _say):
        typer.echo(f"the model was not ready within {timeout_s:.0f} s", err=True)
        raise SystemExit(1)
    typer.echo("the model is ready")


def _says_yes(text: str) -> bool:
    try:
        return bool(json.loads(text)["servable"] is True)
    except (ValueError, KeyError, TypeError):
        return False


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def _read(path: Path) -> Manifest:
    from k8s.model import manifest_of

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise UserError(f"{path}: {fault.strerror}") from None
    return manifest_of(text, str(path))


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path} is no folder")
    return path
