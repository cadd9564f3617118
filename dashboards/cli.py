"""`glm5 dashboards`: build the dashboards, check them, push them to a Grafana."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from service.errors import UserError

app = typer.Typer(
    help="Grafana dashboards and Prometheus alerts: build the files, check every metric name, push to a Grafana.",
    no_args_is_help=True,
    add_completion=False,
)

TOKEN_VARIABLE = "GLM5_GRAFANA_TOKEN"
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command()
def build(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if the files differ from the code.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into. Default: dashboards/out of this project.")
    ] = None,
) -> None:
    """Build the dashboards' JSON files from code.

    The files are what `push` sends and what a Grafana without access to this project imports by hand.
    """
    from dashboards import build as files

    folder = out or files.OUT
    try:
        if not check:
            for path in files.write(folder):
                typer.echo(f"wrote {path}")
            return
        difference = files.drift(folder)
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is not installed; docs/metrics.md (Grafana) says how") from None
    for line in difference:
        typer.echo(line)
    if difference:
        typer.echo("dashboards differ from the code: run `glm5 dashboards build`", err=True)
        raise SystemExit(1)
    typer.echo("dashboards are as the code says")


@app.command()
def check(
    metrics: Annotated[
        str | None, typer.Option(help="URL of a running service's /metrics: check against what it really exposes.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="GLM5_API_KEY", help="An operator's API key, where the service asks for one.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check that every metric, label and bucket in panels and alerts exists. Exit 1 if one does not.

    Ours are taken from the code, or with --metrics from a live scrape; vLLM's, llama.cpp's and DCGM's from lists whose
    source is stated in dashboards/known/.
    """
    from dashboards import check as checker

    rules = checker.load_rules()
    faults = checker.run(None if metrics is None else _fetch(metrics, key), rules)
    count = len(checker.expressions(rules))
    if json_:
        typer.echo(json.dumps({"expressions": count, "faults": [vars(fault) for fault in faults]}))
    else:
        for fault in faults:
            typer.echo(f"{fault.where}: {fault.what}")
        typer.echo(f"{count} expressions, {len(faults)} faults")
    if faults:
        raise SystemExit(1)


@app.command()
def push(
    grafana: Annotated[str, typer.Option(help="Address of the Grafana, such as http://127.0.0.1:3000.")],
    token_file: Annotated[
        Path | None, typer.Option(help=f"File that holds a service account token. Default: ${TOKEN_VARIABLE}.")
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(help="Prometheus as Grafana reaches it; becomes a data source. Default: none."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; change nothing.")] = False,
    json_: Json = False,
) -> None:
    """Create or update folder, data source and dashboards in a Grafana. Safe to repeat: what is right is left alone.

    The token needs the role Editor, or Admin where --prometheus is given.
    """
    from dashboards import build as files
    from dashboards.push import Grafana

    if not grafana.startswith(("http://", "https://")):
        raise UserError(f"--grafana {grafana}: write it with http:// or https://")
    models = {model["uid"]: model for model in (json.loads(text) for text in files.render().values())}
    target = Grafana(grafana, _token(token_file))
    steps = target.plan(models, prometheus)
    if not dry_run:
        target.apply(steps)
    if json_:
        rows = [{"kind": s.kind, "uid": s.uid, "title": s.title, "verb": s.verb, "changes": s.changes} for s in steps]
        typer.echo(json.dumps({"dry_run": dry_run, "steps": rows}))
        return
    for step in steps:
        would = "would " if dry_run and step.verb != "keep" else ""
        typer.echo(f"{would}{step.verb} {step.kind} {step.title!r} ({step.uid})")
        for line in step.changes[:20]:
            typer.echo(f"         {line}")
        if len(step.changes) > 20:
            typer.echo(f"         and {len(step.changes) - 20} more")


def _token(file: Path | None) -> str:
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError as fault:
            raise UserError(f"token file {file}: {fault.strerror}") from None
        where = str(file)
    else:
        # The one setting that is a secret: it may come from the environment, and from nowhere on the command line.
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
    if not token or len(token.split()) != 1:
        raise UserError(f"{where} holds no token: give --token-file FILE, or set {TOKEN_VARIABLE}")
    return token


def _fetch(url: str, key: str | None) -> str:
    import httpx

    try:
        response = httpx.get(url, timeout=10.0, headers={"authorization": f"Bearer {key}"} if key else {})
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise UserError(f"{url} cannot be read: {fault}") from None
    if response.status_code != 200:
        raise UserError(f"{url} answered {response.status_code}")
    return response.text
