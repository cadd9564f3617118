"""GLM-5 and the demo model in vLLM on CUDA: modes compared with each other and with transformers, faults put back.

    python -m tests.tiny_glm FILES                # anywhere xllamacpp is: makes the tiny files
    python -m tests.gpu.validate_vllm --files FILES [--demo SmolLM2.gguf] [--gemma gemma-3.gguf] [--out DIR]

Prints one table; exit code 0 when every case is as it should be. Needs vLLM 0.32 with the plugin's CUDA kernels and
transformers; uses a second GPU for tensor parallel 2 when there is one. Some eight minutes on two H200: engines
start slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.gpu.cases import SOUND, Case, cases
from tests.tiny_glm.oracle import load, truth
from tests.vllm.faults import VARIABLE, plugin_path

STEPS = 16
# Random weights, logits of spread 1.5: tokens lie close together, and a router's tie falls this way or that. Measured
# (docs/gpu-validation.md): sound engines lie 0.02 to 0.13 off fp32 on average, engines with known faults 0.74 to 0.78
# off the gate's reference.
MEAN, MEAN_MOST, MEAN_FP32 = 0.15, 0.3, 0.35
TIE, TIE_FP32 = 0.5, 1.0
"""MEAN, TIE: how far two modes may lie apart on average, and how far apart the first may think two tokens of which each
chose one. Both grow to what the two are off fp32 where that is more (kernels with 8-bit activations differ from each
other as from the truth), the mean to MEAN_MOST at most, which is what the gate allows.
MEAN_FP32, TIE_FP32: the same beside fp32, whatever a case is compared with; so no tie grows beyond TIE_FP32. At 1.0 the
token is e times less likely than the right one: of two sound modes the widest tie measured is 0.70."""
CASE_TIMEOUT_S = 420
AT_ONCE = 6
"""Engines started at the same time on one GPU: their starts are Python and compilers, 13 took 230 s on 32 cores."""


def orjson_or_json() -> None:
    """Where orjson is not installed the standard library stands in: a GPU host may have no package index."""
    if importlib.util.find_spec("orjson") is None:
        stand_in = types.ModuleType("orjson")
        stand_in.loads = json.loads
        stand_in.dumps = lambda value: json.dumps(value).encode()
        stand_in.JSONDecodeError = json.JSONDecodeError
        sys.modules["orjson"] = stand_in


# -- one case, in its own process ------------------------------------------------------------------------------------


async def run_case(path: Path, options: dict[str, Any], faults: str, reference: str) -> dict[str, Any]:
    from service.engines.vllm import canary, engine
    from service.engines.vllm.options import VllmOptions
    from service.errors import UserError
    from tests.tiny_glm.oracle import prompts
    from tests.tiny_glm.vocabulary import vocabulary

    if "no_checks" in faults:
        engine.refusals = lambda header, setup: []
    started = time.monotonic()
    made = engine.VllmEngine(
        model=str(path),
        served_name="m",
        slots=8,
        context_tokens=1024,
        options=VllmOptions(
            cache_dir=tempfile.mkdtemp(),
            load_timeout_s=CASE_TIMEOUT_S,
            reference=reference or None,
            prefix_cache=False,
            allow_other_versions=True,
            # Several cases share a GPU: no measuring of memory that others take and give back.
            gpu_memory_fraction=0.06,
            extra_args=(
                f"--kv-cache-memory-bytes={1 << 30}",
                "--max-num-batched-tokens=2048",
                *options.pop("extra_args", ()),
            ),
            **options,
        ),
    )
    try:
        card = await made.load(lambda progress: None)
    except UserError as fault:
        return {"stopped": str(fault), "load_s": time.monotonic() - started}
    try:
        asked = prompts() if "tiny" in path.name else real_prompts()
        answers = [await canary.ask(made.layer, tuple(p), STEPS, f"case-{i}") for i, p in enumerate(asked)]
        stats = made.stats()
        found = canary.Reference(
            canary.fingerprint(engine.read_header(path)), made.layer.vocab_size, "case", tuple(answers)
        )
        gate = await canary.make_reference(made.layer, engine.read_header(path), "this run")
        causes = await profile(made, asked[0]) if options.get("profiler") else {}
        return {
            "causes_s": causes,
            "answers": json.loads(found.to_json()),
            "reference": json.loads(gate.to_json()),
            "card": card.architecture,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "load_s": time.monotonic() - started,
            "vocab": vocabulary().size,
        }
    finally:
        await made.close()


async def profile(made: Any, prompt: list[int]) -> dict[str, float]:
    """Seconds of a decode step by cause, from `glm5 explain --profile`'s own way in, while four answers are decoded."""
    long = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
    work = [asyncio.create_task(made.layer.generate(prompt, long, f"load-{i}")) for i in range(4)]
    await asyncio.sleep(0.3)
    found = json.loads(await made.profile(b'{"seconds": 0.5}'))
    await asyncio.gather(*work)
    return {cause: seconds / found["steps"] for cause, seconds in found["causes_s"].items()}


def real_prompts() -> list[list[int]]:
    """Plain ids that the real models' vocabularies have: enough for a comparison of modes."""
    return [[504, 3575, 282, 4649, 314], [198, 788, 260, 1743, 28, 665, 436, 253]]


# -- all cases -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    case: Case
    tree: dict[str, Any]
    log: str
    truth: Found | None = None
    """Beside fp32, once judged."""
    right: bool = False
    """Judged so."""

    @property
    def backend(self) -> str:
        names = re.findall(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend", self.log)
        return names[-1] if names else ""


def where(case: Case, args: argparse.Namespace) -> Path:
    path = {"demo": args.demo, "gemma": args.gemma}.get(case.file, args.files / case.file)
    assert isinstance(path, Path)
    return path


def start(case: Case, args: argparse.Namespace, work: Path, visible: str, reference: str = "") -> Result:
    slug = re.sub(r"\W+", "-", case.name)
    out, log = work / f"{slug}.json", work / f"{slug}.log"
    path = where(case, args)
    plugin = plugin_path(work / f"plugin-{slug}", faults=bool(case.faults))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), plugin, os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": visible,
        "VLLM_CACHE_ROOT": str(work / f"cache-{slug}"),
        VARIABLE: case.faults,
    }
    command = [sys.executable, "-m", "tests.gpu.validate_vllm", "--case", str(path), json.dumps(case.options)]
    with log.open("wb") as stream, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, case.faults, reference, str(out)],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=CASE_TIMEOUT_S,
            check=False,
        )
    tree = json.loads(out.read_text()) if out.is_file() else {"broken": f"no result; see {log.name}"}
    return Result(case, tree, log.read_text(errors="replace"))


@dataclass
class Found:
    """Steps compared and equal; distances of log-probabilities; the widest gap at which another token was chosen."""

    equal: int = 0
    compared: int = 0
    gaps: list[float] = field(default_factory=list)
    tie: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.gaps) / len(self.gaps) if self.gaps else math.inf

    def __str__(self) -> str:
        worst = max(self.gaps, default=math.inf)
        return f"logprobs {self.mean:.2g} off on average, {worst:.2g} at worst, worst tie {self.tie:.2g}"


def compare(base: dict[str, Any], other: dict[str, Any]) -> Found:
    found = Found()
    for a, b in zip(base["answers"]["probes"], other["answers"]["probes"], strict=True):
        for right, here in zip(a["steps"], b["steps"], strict=True):
            found.compared += 1
            known = dict(map(tuple, here["top"]))
            found.gaps += [abs(p - known[t]) for t, p in right["top"][:4] if t in known]
            if right["token"] != here["token"]:
                likely = dict(map(tuple, right["top"]))
                found.tie = max(found.tie, likely[right["token"]] - likely.get(here["token"], -math.inf))
                break
            found.equal += 1
    return found


@cache
def oracle(path: Path) -> Any:
    """The model in fp32 by transformers."""
    if path.name.startswith("tiny"):
        return load(path)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32").eval()


def against_oracle(path: Path, tree: dict[str, Any]) -> Found:
    """The same against transformers in fp32."""
    model = oracle(path)
    found = Found()
    for probe in tree["answers"]["probes"]:
        tokens = [step["token"] for step in probe["steps"]]
        right = truth(model, list(probe["prompt"]), tokens)
        for step, choice, row in zip(probe["steps"], right.choices, right.logprobs, strict=True):
            found.compared += 1
            found.equal += step["token"] == choice
            found.tie = max(found.tie, float(row[choice] - row[step["token"]]))
            found.gaps += [abs(p - float(row[t])) for t, p in step["top"][:4]]
    return found


def judge(result: Result, done: dict[str, Result], args: argparse.Namespace) -> tuple[bool, str]:
    """Whether the case is as it should be, and what was found. `done`: cases judged before, by name."""
    case, tree = result.case, result.tree
    if "broken" in tree:
        return False, tree["broken"]
    if case.stopped:
        said = tree.get("stopped", "NOT STOPPED: it served")
        by_gate = "answers wrongly" in said or "cannot serve" in said
        right = by_gate if case.stopped == "gate" else "blocks of" in said or "heads" in said
        return "stopped" in tree and right, said[-150:]
    if "stopped" in tree:
        return False, "stopped: " + tree["stopped"][-200:]
    result.truth = beside = against_oracle(where(case, args), tree)
    words = [f"{beside.equal}/{beside.compared} as transformers fp32, {beside}"]
    good = beside.mean < MEAN_FP32 and beside.tie <= TIE_FP32
    base = done.get(case.same_as)
    if base and base.truth:
        found = compare(base.tree, tree)
        tie, mean = max(TIE, base.truth.tie), min(MEAN_MOST, max(MEAN, base.truth.mean + beside.mean))
        alike = found.equal == found.compared if case.exact else found.tie <= tie and found.mean < mean
        good &= alike and base.right
        words.insert(0, f"{found.equal}/{found.compared} tokens as {case.same_as}, {found}")
        if not base.right:
            words.insert(0, f"{case.same_as} is wrong itself")
    elif case.same_as:
        good = False
        words.append(f"nothing to compare with: {case.same_as}")
    if case.options.get("mtp_tokens"):
        words.append(f"drafted {tree['drafted']}, kept {tree['accepted']}")
        good &= tree["drafted"] > 0
    if case.options.get("profiler"):
        split = ", ".join(f"{cause} {1e6 * seconds:.0f}" for cause, seconds in tree["causes_s"].items())
        words.append(f"a step, µs: {split}")
        good &= sum(tree["causes_s"].values()) > 0
    return good, "; ".join(words)


def start_fault(case: Case, args: argparse.Namespace, visible: str, sound: Future[Result] | None) -> Result:
    reference = ""
    if sound is not None and "reference" in (tree := sound.result().tree):
        path = args.out / f"reference-{case.file}.json"
        path.write_text(json.dumps(tree["reference"]))
        reference = str(path)
    return start(case, args, args.out, visible, reference)


def overrun() -> tuple[bool, str]:
    """The plugin's matrix kernel on rows of 18 blocks with NaN behind them: as it is, and as service/.../tails.py
    calls it."""
    import torch
    from vllm_gguf_plugin import ops

    from service.engines.vllm import tails
    from service.engines.vllm.kernels import measure
    from service.engines.vllm.kernels import reference as ref

    raw = measure.random_raw(64, 576, ref.Q4_1)
    memory = torch.full((raw.numel() + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    memory[: raw.numel()] = raw.flatten()
    weight, x = memory[: raw.numel()].view(raw.shape), torch.randn(24, 576, device="cuda").bfloat16()
    bare = ops.ggml_mul_mat_a8(weight, x, ref.Q4_1, 64)
    cured = tails.before_call(ops.ggml_mul_mat_a8, 0, 2)(weight, x, ref.Q4_1, 64)
    exact = x.double() @ ref.dequantize(raw, ref.Q4_1).double().T
    error = float((cured.double() - exact).norm() / exact.norm())
    spoilt = int((~torch.isfinite(bare)).sum())
    return (
        error < 0.05,
        f"{spoilt} of {bare.numel()} values not finite without the tail; with it {error:.1e} from float64",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, default=Path(".gpu/tiny"), help="folder of tiny files")
    parser.add_argument("--demo", type=Path, help="the demo model's GGUF file; left out: its cases are skipped")
    parser.add_argument("--gemma", type=Path, help="Gemma 3 270M's GGUF file; left out: its cases are skipped")
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()), help="folder for logs and results")
    parser.add_argument("--only", default="", help="regular expression of cases")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    orjson_or_json()
    if args.case:
        path, options, faults, reference, out = args.case
        tree = asyncio.run(run_case(Path(path), json.loads(options), faults, reference))
        Path(out).write_text(json.dumps(tree))
        return 0
    import torch

    gpus = torch.cuda.device_count()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [c for c in cases(gpus, args.demo is not None, args.gemma is not None) if re.search(args.only, c.name)]
    started = time.monotonic()
    done: dict[str, Result] = {}
    print(f"{torch.cuda.get_device_name(0)} x {gpus}, torch {torch.__version__}, bf16, {STEPS} steps, 3 prompts")
    good, words = overrun()
    print(f"rows that the plugin's kernel leaves: {'ok' if good else 'WRONG'}: {words}")
    print("| case | verdict | seconds | attention | found |\n|---|---|---|---|---|", flush=True)
    # Sound ones first, since faults are judged by their answers: each fault waits for the one that it needs.
    ordered = [*(c for c in wanted if not c.faults), *(c for c in wanted if c.faults)]
    with ThreadPoolExecutor(AT_ONCE * gpus) as pool:
        jobs: dict[str, Future[Result]] = {}
        for number, case in enumerate(ordered):
            visible = "0,1" if case.gpus == 2 else str(number % gpus)
            if case.faults:
                jobs[case.name] = pool.submit(start_fault, case, args, visible, jobs.get(SOUND.get(case.file, "")))
            else:
                jobs[case.name] = pool.submit(start, case, args, args.out, visible)
        for job in as_they_can_be_judged(ordered, jobs):
            result = job.result()
            done[result.case.name] = result
            result.right, words = judge(result, done, args)
            good &= result.right
            show(result, result.right, words)
    print(f"{time.monotonic() - started:.0f} s in all; logs in {args.out}")
    return 0 if good else 1


def as_they_can_be_judged(ordered: list[Case], jobs: dict[str, Future[Result]]) -> Iterator[Future[Result]]:
    """Finished ones first, each after the one that it is compared with: a run that is cut off has said what it knew."""
    left = {case.name: case for case in ordered}
    while left:
        ready = [n for n, c in left.items() if jobs[n].done() and c.same_as not in left]
        for name in ready:
            del left[name]
            yield jobs[name]
        if not ready:
            time.sleep(0.5)


def show(result: Result, right: bool, words: str) -> None:
    """One row, at once."""
    case = result.case
    verdict = ("stopped, as it must be" if case.stopped else "ok") if right else "WRONG"
    print(f"| {case.name} | {verdict} | {result.tree.get('load_s', 0):.0f} | {result.backend} | {words} |", flush=True)
    if not right:
        tail = [line for line in result.log.splitlines() if "Error" in line or "error" in line][-4:]
        print("\n".join("    " + line[:260] for line in tail), flush=True)
    print(f"    slowest: {slowest(result.log)}", flush=True)


def slowest(log: str) -> str:
    """The longest silences of vLLM's log, in seconds, with what came before each."""
    stamped = [
        (int(h) * 3600 + int(m) * 60 + int(s), text)
        for h, m, s, text in re.findall(r"(?:INFO|WARNING|DEBUG) \d\d-\d\d (\d\d):(\d\d):(\d\d) (.*)", log)
    ]
    waits = sorted(((b[0] - a[0], a[1][:70]) for a, b in itertools.pairwise(stamped)), reverse=True)
    return "; ".join(f"{wait} s after {text}" for wait, text in waits[:4] if wait > 2)


if __name__ == "__main__":
    sys.exit(main())
