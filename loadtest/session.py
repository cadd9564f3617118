"""The steps that `sweep` and `ab` share: options to workload, probe, levels, stored run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from loadtest import environment, options, store
from loadtest.plan import Workload
from loadtest.probe import find_model, probe
from loadtest.progress import Bars
from loadtest.prompts import load_dataset
from loadtest.sweep import Settings, run_levels
from loadtest.wire import Target
from service.errors import UserError


@dataclass(frozen=True, slots=True)
class Wishes:
    """The command line's words about load, checked by `check`."""

    model: str | None
    concurrency: str
    rate: str | None
    requests: int | None
    duration_s: float | None
    input_tokens: int
    output_tokens: int
    dataset: Path | None
    shared_prefix_tokens: int
    endpoint: str
    warmup: int
    seed: int
    temperature: float | None
    ignore_eos: bool
    chunk_usage: bool
    slo: str
    timeout_s: float
    api_key: str
    metrics_url: str | None

    def check(self) -> None:
        """Raises UserError for what can be known to be wrong before a server is met."""
        if self.endpoint not in ("chat", "completions"):
            raise UserError(f"--endpoint {self.endpoint!r}: chat or completions")
        if self.shared_prefix_tokens >= self.input_tokens:
            raise UserError("--shared-prefix-tokens must be smaller than --input-tokens")
        options.slo(self.slo)
        self.levels(repeats=1, e2el_s=0.0)

    def levels(self, *, repeats: int, e2el_s: float, first_repeat: int = 0, first_index: int = 0) -> list[Any]:
        return options.levels(
            options.numbers(self.concurrency, "--concurrency"),
            options.rates(self.rate) if self.rate else [],
            requests=self.requests,
            duration_s=self.duration_s,
            repeats=repeats,
            warmup=self.warmup,
            e2el_s=e2el_s,
            timeout_s=self.timeout_s,
            first_repeat=first_repeat,
            first_index=first_index,
        )

    def workload(self, model: str) -> Workload:
        endpoint: Literal["chat", "completions"] = "chat" if self.endpoint == "chat" else "completions"
        return Workload(
            model=model,
            endpoint=endpoint,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            seed=self.seed,
            shared_tokens=self.shared_prefix_tokens,
            dataset=tuple(load_dataset(self.dataset)) if self.dataset else (),
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            chunk_usage=self.chunk_usage,
        )

    def for_the_record(self) -> dict[str, Any]:
        kept = asdict(self) | {"dataset": str(self.dataset) if self.dataset else None}
        del kept["api_key"]
        return kept


def measure(
    wishes: Wishes,
    url: str,
    run: store.Run,
    console: Console,
    *,
    repeats: int,
    first_repeat: int = 0,
    title: str = "",
) -> None:
    """Probe the server at `url` and add all levels to `run`."""
    target = Target.parse(url, wishes.api_key)
    wishes = replace(wishes, model=wishes.model or find_model(target))
    assert wishes.model is not None
    with console.status("asking the server: model, usage, prompt length"):
        found = probe(target, wishes.workload(wishes.model), wishes.timeout_s)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)
    settings = Settings(target, found.workload, wishes.metrics_url, options.slo(wishes.slo))
    levels = wishes.levels(repeats=repeats, e2el_s=found.e2el_s, first_repeat=first_repeat, first_index=len(run.levels))
    with Bars(console, found.tokens_per_event, title) as bars:
        run_levels(settings, levels, run, bars)


def open_run(
    path: Path,
    url: str,
    wishes: Wishes,
    *,
    label: str,
    gpus: int,
    profile: Path | None,
    model_file: Path | None,
    overwrite: bool,
    ask_server: bool = True,
) -> store.Run:
    target = Target.parse(url, wishes.api_key)
    if ask_server and wishes.model is None:
        find_model(target)  # a server that is not there is said before files are made
    stamp = environment.stamp(
        target if ask_server else None,
        label=label or path.name,
        gpus=gpus,
        profile=profile,
        model_file=model_file,
        options=wishes.for_the_record(),
    )
    return store.create(path, stamp, overwrite=overwrite)
