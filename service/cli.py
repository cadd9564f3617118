"""The command `glm5`. Each area brings its own commands; they are imported when called, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import Stopped, UserError
from service.terminal import lines

if TYPE_CHECKING:
    from service.config import Config

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="glm5",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=HELP,
)
config_app = typer.Typer(help="Look at and check profiles.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ProfileArgument = Annotated[
    Path | None, typer.Argument(help="Profile (YAML). Default: the packaged local-cpu.yaml.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as pools.shared.slots=4. Repeatable."),
]


@app.command()
def serve(
    profile: ProfileArgument = None,
    model: Annotated[str | None, typer.Option(help="GGUF file to serve (first part of a split one).")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes a free one.")] = None,
    set_: SetOption = None,
) -> None:
    """Serve a model until Ctrl-C.

    Without arguments: the demo model on this machine's CPU, at http://127.0.0.1:8000. Ends every process it started.
    """
    from service.config import load

    overrides = list(set_ or [])
    if port is not None:
        overrides.append(f"http.port={port}")
    config = load(profile, overrides)
    _check_files(config)
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    for pool in config.pools.values():
        if pool.engine.name != "simulated" and not config.model.file().exists():
            raise UserError(f"model.path: {config.model.file()} does not exist; give --model FILE.gguf")
    from service.progress import StartProgress

    progress = StartProgress(config.model.served_name)
    from deployments.launch import serve as launch

    with progress:
        launch(config, progress.say, progress.ready)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; default: the one that is served.")] = None,
    key: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0, max=2)] = 0.7,
) -> None:
    """Chat in the terminal; answers stream. Ctrl-C stops an answer, Ctrl-D ends the chat. Piped lines work too."""
    from service.chat import run

    run(url, model, key, system, max_tokens, temperature)


@config_app.command("show")
def config_show(
    profile: ProfileArgument = None,
    set_: SetOption = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every setting with default and meaning instead.")] = False,
) -> None:
    """Print a profile with all defaults filled in, or every key there is."""
    from service import config

    typer.echo(config.markdown_table() if keys else config.dump(config.load(profile, set_ or [])).rstrip())


@config_app.command("check")
def config_check(profile: ProfileArgument = None, set_: SetOption = None) -> None:
    """Exit 0 if the profile is right; else say what is wrong, where, and exit 2."""
    from service.config import DEFAULT_PROFILE, load

    config = load(profile, set_ or [])
    _check_files(config)
    pools = ", ".join(f"{name}: {pool.engine.name} x {pool.slots} slots" for name, pool in config.pools.items())
    typer.echo(f"{profile or DEFAULT_PROFILE}: right ({pools})")


def _check_files(config: Config) -> None:
    """Raises UserError where the keys file is missing or wrong, or would let nobody in."""
    from service.admission.keys import KeyRing

    KeyRing.load(config.admission)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as of

    typer.echo(f"glm5-serve {of('glm5-serve')}")


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version_: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve GLM-5 (or any GGUF model) behind OpenAI- and Anthropic-compatible HTTP: vLLM on 8-GPU boxes, llama.cpp
    anywhere else."""


PASS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
AREAS = {
    "load": (
        "loadtest.cli",
        "Measure any OpenAI-compatible server: sweeps over concurrency, comparisons, gates, plots.",
    ),
    "check": ("service.gguf.cli:check", "Say what a GGUF file is and whether it can be served right."),
    "plan": ("service.planning.cli:plan_app", "Predict fit, speed and best settings of a model on a machine."),
    "explain": ("service.planning.cli:explain_app", "Split the live service's decode step and name the culprit."),
    "simulate": ("service.planning.cli:simulate_app", "Run a trace through a simulated fleet in virtual time."),
    "preflight": ("service.preflight.cli", "Check this machine: GPUs, links, memory, limits."),
    "dashboards": ("dashboards.cli", "Build, check and push the Grafana dashboards."),
    "top": ("service.metrics.cli", "Live figures of a running service in the terminal."),
    "warm": ("service.engines.cli:warm", "Start a model once, so that later starts find what was compiled."),
    "tune": ("service.engines.vllm.kernels.cli", "Find the best kernel configurations on this GPU."),
    "k8s": ("k8s.cli", "Render and check the KubeRay manifests."),
    "keys": ("service.admission.cli", "Make and list API keys."),
}


def _mount(name: str, target: str, help: str) -> None:
    module, _, attribute = target.partition(":")

    @app.command(name, help=help, context_settings=PASS)
    def run(context: typer.Context) -> None:
        area = getattr(import_module(module), attribute or "app")
        if not isinstance(area, typer.Typer):
            function, area = area, typer.Typer(add_completion=False, rich_markup_mode="rich")
            area.command()(function)
        command = typer.main.get_command(area)
        command.context_settings.update(HELP)
        code = command.main(context.args, prog_name=f"glm5 {name}", standalone_mode=False)
        if isinstance(code, int) and code:
            raise typer.Exit(code)


for _name, (_target, _help) in AREAS.items():
    _mount(_name, _target, _help)


def main() -> None:
    """Entry point: no traceback for the user's mistakes; 2 for bad input, 1 for a no or an end, 130 for Ctrl-C."""
    try:
        code = app(standalone_mode=False)
    except UserError as fault:
        typer.secho(f"error: {lines(str(fault))}", fg="red", err=True)
        code = 2
    except Stopped as fault:
        typer.secho(f"error: {lines(str(fault))}", fg="red", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter's own end would wait for, or crash in, threads of a Ray that is gone
    except KeyboardInterrupt:
        code = 130
    except typer.Exit as leave:
        code = leave.exit_code
    except typer.Abort:
        code = 130
    except Exception as fault:
        # Click's own usage errors know how to show themselves.
        if not hasattr(fault, "show"):
            raise
        fault.show()
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
