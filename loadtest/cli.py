"""`glm5 load`: measure an OpenAI-compatible server, compare, gate and plot the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from loadtest.session import Wishes
    from loadtest.store import Run

OK, NO, INTERRUPTED = 0, 1, 130

app = typer.Typer(
    no_args_is_help=True,
    help="Measure any OpenAI-compatible server under load, with numbers that can be trusted.\n\n"
    "Begin with `glm5 load sweep URL --out runs/NAME`. Exit codes: 0 all well; 1 failed requests, invalid levels, "
    "or a gate that did not hold; 2 bad input; 130 Ctrl-C (what was measured is kept).",
)

Concurrency = Annotated[str, typer.Option(help="Streams held open, one level each: 1,2,10,64.")]
Rate = Annotated[
    str | None,
    typer.Option(help="Open loop: requests a second on a Poisson schedule, one level each. Replaces --concurrency."),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Measured requests a level. Default: 4 a stream, at least 10.")
]
Duration = Annotated[float | None, typer.Option(min=0.1, help="Seconds of measuring a level, instead of --requests.")]
InputTokens = Annotated[int, typer.Option(min=1, help="Prompt length, calibrated by the server's own counts.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each request.")]
Dataset = Annotated[
    Path | None, typer.Option(help="Prompts from a file instead: JSON lines with prompt or messages, and max_tokens.")
]
Shared = Annotated[
    int, typer.Option(min=0, help="Begin every prompt with the same tokens (to measure a prefix cache).")
]
Endpoint = Annotated[str, typer.Option(help="chat or completions.")]
Warmup = Annotated[int, typer.Option(min=0, help="Unmeasured requests a stream before each level.")]
Seed = Annotated[int | None, typer.Option(help="Of prompts and arrivals. Default: new each time, so caches are cold.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Default: the server's own.")]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for exactly --output-tokens (dropped where the server refuses it).")]
ChunkUsage = Annotated[bool, typer.Option(help="Ask for running token counts in every chunk (vLLM), exact under MTP.")]
Slo = Annotated[str, typer.Option(help="Limits in ms for goodput: ttft=500,tpot=50,e2el=20000,ttfa=...")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds after which a request counts as failed.")]
ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.", show_default=False)]
MetricsUrl = Annotated[
    str | None, typer.Option(help="Prometheus page for the cross-check. Default: URL/metrics; '' for no cross-check.")
]
Gpus = Annotated[int, typer.Option(min=0, help="GPUs behind the server, for tok/s per GPU.")]
ModelFile = Annotated[Path | None, typer.Option(help="Model file whose sampled hash goes into the environment stamp.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a run that is already at --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command()
def sweep(
    url: Annotated[str, typer.Argument(help="Server, like http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option(help="Directory of the run.")],
    model: Annotated[str | None, typer.Option(help="Default: the one that /v1/models names.")] = None,
    concurrency: Concurrency = "1,2,10,64",
    rate: Rate = None,
    requests: Requests = None,
    duration: Duration = None,
    input_tokens: InputTokens = 256,
    output_tokens: OutputTokens = 128,
    dataset: Dataset = None,
    shared_prefix_tokens: Shared = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measure the whole sweep so often; 3 or more give intervals.")
    ] = 1,
    endpoint: Endpoint = "chat",
    warmup: Warmup = 1,
    seed: Seed = None,
    temperature: Temperature = None,
    ignore_eos: IgnoreEos = True,
    chunk_usage: ChunkUsage = False,
    slo: Slo = "",
    timeout: Timeout = 600.0,
    api_key: ApiKey = "",
    metrics_url: MetricsUrl = None,
    label: Annotated[str, typer.Option(help="Name in tables and plots. Default: the directory's.")] = "",
    gpus: Gpus = 0,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the server, kept with its hash in the stamp.")
    ] = None,
    model_file: ModelFile = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Measure a server at several concurrencies (or arrival rates) and store the run.

    Example: glm5 load sweep http://127.0.0.1:8000 --concurrency 1,10,64 --out runs/monday --slo ttft=1000,tpot=50
    """
    from loadtest import session

    wishes = _wishes(
        model, concurrency, rate, requests, duration, input_tokens, output_tokens, dataset, shared_prefix_tokens,
        endpoint, warmup, seed, temperature, ignore_eos, chunk_usage, slo, timeout, api_key, metrics_url,
    )  # fmt: skip
    run = session.open_run(
        out, url, wishes, label=label, gpus=gpus, profile=profile, model_file=model_file, overwrite=overwrite
    )
    session.measure(wishes, url, run, _stderr(), repeats=repeats)
    _show_run(run, json)
    raise SystemExit(_code(run))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Run directory.")],
    after: Annotated[Path, typer.Argument(help="Run directory.")],
    metric: Annotated[str, typer.Option(help="output_tok_s, ttft.p95, tpot.mean, goodput.share, ...")] = "output_tok_s",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    json: Json = False,
) -> None:
    """Table of two runs: Concurrency, before, after, Improvement with its 95 % interval (log ratio, Welch).

    Improvement above 1 is always better, also for latencies. An interval that spans 1 reads "within noise".
    """
    from loadtest import compare as comparing
    from loadtest import store
    from loadtest.quantity import quantity

    result = comparing.compare(store.load(before), store.load(after), quantity(metric))
    _show_comparison(result, markdown, json)


@app.command()
def ab(
    before: Annotated[str, typer.Option(help="Profile of the server's first setting.")],
    after: Annotated[str, typer.Option(help="Profile of the second.")],
    out: Annotated[Path, typer.Option(help="Directory for both runs and their comparison.")],
    command: Annotated[
        str, typer.Option(help="How to start a server. It must answer GET /ready with 200 once it can serve.")
    ] = "glm5 serve {profile} --port {port}",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds a server may take to load.")] = 1800.0,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each server; intervals need 3.")] = 3,
    metric: Annotated[str, typer.Option(help="Of the comparison at the end.")] = "output_tok_s",
    model: Annotated[str | None, typer.Option(help="Default: the one that /v1/models names.")] = None,
    concurrency: Concurrency = "1,2,10,64",
    rate: Rate = None,
    requests: Requests = None,
    duration: Duration = None,
    input_tokens: InputTokens = 256,
    output_tokens: OutputTokens = 128,
    dataset: Dataset = None,
    shared_prefix_tokens: Shared = 0,
    endpoint: Endpoint = "chat",
    warmup: Warmup = 1,
    seed: Seed = None,
    temperature: Temperature = None,
    ignore_eos: IgnoreEos = True,
    chunk_usage: ChunkUsage = False,
    slo: Slo = "",
    timeout: Timeout = 600.0,
    api_key: ApiKey = "",
    metrics_url: MetricsUrl = None,
    gpus: Gpus = 0,
    model_file: ModelFile = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Compare two settings of a server on this machine: start each in turn, interleaved (AB BA AB), and compare.

    Example: glm5 load ab --before eager.yaml --after graphs.yaml --out runs/graphs --concurrency 1,10,64
    """
    from loadtest import ab as pairs
    from loadtest import compare as comparing
    from loadtest import session
    from loadtest.quantity import quantity

    wanted = quantity(metric)
    wishes = _wishes(
        model, concurrency, rate, requests, duration, input_tokens, output_tokens, dataset, shared_prefix_tokens,
        endpoint, warmup, seed, temperature, ignore_eos, chunk_usage, slo, timeout, api_key, metrics_url,
    )  # fmt: skip
    url, console = f"http://127.0.0.1:{port}", _stderr()
    profiles = {"before": before, "after": after}
    commands = {side: pairs.command_for(_with_own_glm5(command), profile, port) for side, profile in profiles.items()}
    runs = {
        side: session.open_run(
            out / side, url, wishes, label=_label(profiles, side), gpus=gpus,
            profile=Path(profile) if Path(profile).is_file() else None,
            model_file=model_file, overwrite=overwrite, ask_server=False,
        )
        for side, profile in profiles.items()
    }  # fmt: skip
    for repeat, side in pairs.order(repeats):
        title = f"{side} {repeat + 1}/{repeats} "
        with console.status(f"{title}starting") as status:

            def waiting(seconds: float, status: Status = status, title: str = title) -> None:
                status.update(f"{title}loading, {seconds:.0f} s")

            log = out / f"serve-{side}-{repeat + 1}.log"
            with pairs.server(commands[side], url, log, start_timeout, waiting):
                status.stop()
                session.measure(wishes, url, runs[side], console, repeats=1, first_repeat=repeat, title=title)
        if runs[side].interrupted:
            raise SystemExit(INTERRUPTED)
    result = comparing.compare(runs["before"], runs["after"], wanted)
    comparing.save(result, out)
    _show_comparison(result, False, json)
    raise SystemExit(max(_code(run) for run in runs.values()))


@app.command()
def gate(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    gates: Annotated[Path, typer.Argument(help="YAML file of limits; see docs/load-testing.md.")],
    json: Json = False,
) -> None:
    """Check a run against limits: exit 0 when all hold, 1 with the reasons when not."""
    from loadtest import gate as gating
    from loadtest import store

    findings = gating.check(store.load(run), gating.load(gates))
    failed = [finding for finding in findings if not finding.ok]
    if json:
        _print_json({"ok": not failed, "findings": [{"ok": f.ok, "text": f.text} for f in findings]})
    else:
        for finding in findings:
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.text}")
    raise SystemExit(NO if failed else OK)


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path, typer.Option(help="File: .svg, .png or .pdf.")],
    title: Annotated[str, typer.Option()] = "",
) -> None:
    """Draw tok/s and TTFT p95 against concurrency, and per-user against per-GPU tok/s."""
    from loadtest import plot as plotting
    from loadtest import store

    plotting.plot([store.load(path) for path in runs], out, title)
    typer.echo(str(out))


@app.command("import-vllm")
def import_vllm(
    files: Annotated[list[Path], typer.Argument(help="Results of `vllm bench serve --save-result`, one a level.")],
    out: Annotated[Path, typer.Option(help="Directory of the run to make.")],
    label: Annotated[str, typer.Option()] = "vllm bench serve",
    slo: Slo = "",
    gpus: Gpus = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Turn result files of vllm bench serve into a run that compare, gate and plot can read.

    With --save-detailed our definitions are applied to its requests; without, its own summary is taken over.
    """
    from loadtest import environment, options, store, vllm_import

    limits = options.slo(slo)
    raws = [vllm_import.read(path) for path in files]
    stamp = environment.stamp(
        None, label=label, gpus=gpus, profile=None, model_file=None, options={"files": [str(path) for path in files]}
    )
    run = store.create(out, stamp, overwrite=overwrite)
    seen: dict[float, int] = {}
    for index, raw in enumerate(raws):
        level, records = vllm_import.level(raw, index, limits)
        repeat, seen[level.load] = seen.get(level.load, 0), seen.get(level.load, 0) + 1
        store.add(run, vllm_import.as_repeat(level, repeat), records, 0.0)
    _show_run(run, json)


# --- helpers


def _wishes(
    model: str | None, concurrency: str, rate: str | None, requests: int | None, duration: float | None,
    input_tokens: int, output_tokens: int, dataset: Path | None, shared: int, endpoint: str, warmup: int,
    seed: int | None, temperature: float | None, ignore_eos: bool, chunk_usage: bool, slo: str, timeout: float,
    api_key: str, metrics_url: str | None,
) -> Wishes:  # fmt: skip
    from loadtest import options
    from loadtest.session import Wishes

    wishes = Wishes(
        model, concurrency, rate, requests, duration, input_tokens, output_tokens, dataset, shared, endpoint, warmup,
        options.seed(seed), temperature, ignore_eos, chunk_usage, slo, timeout, api_key, metrics_url,
    )  # fmt: skip
    wishes.check()
    return wishes


def _with_own_glm5(command: str) -> str:
    """The `glm5` beside this Python, so that a virtual environment need not be activated."""
    beside = Path(sys.executable).parent / "glm5"
    return f"{beside}{command[4:]}" if command.startswith("glm5 ") and beside.exists() else command


def _label(profiles: dict[str, str], side: str) -> str:
    names = {key: Path(profile).stem for key, profile in profiles.items()}
    return names[side] if names["before"] != names["after"] else side


def _code(run: Run) -> int:
    if run.interrupted:
        return INTERRUPTED
    well = all(level.valid and not level.measured.failed for level in run.levels)
    return OK if well and run.levels else NO


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _print_json(value: object) -> None:
    import orjson

    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _show_run(run: Run, json: bool) -> None:
    from rich.console import Console

    from loadtest import store, tables

    if json:
        _print_json({"run": str(run.path), "levels": [store.level_json(level) for level in run.levels]})
        return
    rows = tables.sweep_rows(run.levels)
    console = Console()
    if console.is_terminal:
        console.print(tables.terminal(rows, run.label, console.width))
    else:
        typer.echo(tables.markdown(rows))
    for level in run.levels:
        for reason in level.reasons:
            typer.echo(f"level {level.load:g}, repeat {level.repeat + 1}, is INVALID: {reason}")
    typer.echo(f"stored in {run.path}")


def _show_comparison(result: object, markdown: bool, json: bool) -> None:
    from rich.console import Console

    from loadtest import compare as comparing
    from loadtest import tables

    assert isinstance(result, comparing.Comparison)
    console = Console()
    if json:
        _print_json(comparing.to_json(result))
        return
    if markdown or not console.is_terminal:
        typer.echo(tables.markdown(comparing.rows(result)))
    else:
        console.print(tables.terminal(comparing.rows(result), result.quantity.name, console.width))
    for warning in result.warnings:
        typer.echo(f"note: {warning}")
