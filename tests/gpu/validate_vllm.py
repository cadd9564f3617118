"""GLM-5 and the demo model in vLLM on CUDA: modes compared with each other and with transformers, faults put back.

    python -m tests.tiny_glm FILES                # anywhere xllamacpp is: makes the tiny files
    python -m tests.gpu.validate_vllm --files FILES [--demo SmolLM2.gguf] [--out DIR]

Prints one table; exit code 0 when every case is as it should be. Needs vLLM 0.29 with the plugin's CUDA kernels and
transformers; uses a second GPU for tensor parallel 2 when there is one. Three to six minutes on an H200.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 16
# Next to a tie closer than this, bf16 kernels may choose differently (random weights: logits of spread 1.5).
TIE = 0.25
CASE_TIMEOUT_S = 150


@dataclass(frozen=True)
class Case:
    """One engine. `same_as`: the case whose tokens it must give. `faults`: what is put back, then the gate (`stopped`:
    gate) or the check before loading (check) must stop it."""

    name: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)
    same_as: str = ""
    faults: str = ""
    stopped: str = ""

    @property
    def gpus(self) -> int:
        return int(self.options.get("tensor_parallel", 1))


def cases(gpus: int, demo: bool) -> list[Case]:
    ud, eager, two = "tiny-ud.gguf", {"cuda_graphs": False}, {"tensor_parallel": 2}
    dense, sparse = {"attention": "dense"}, {"attention": "sparse"}
    found = [
        Case("dense eager", ud, {**dense, **eager}),
        Case("dense graph", ud, dense, "dense eager"),
        Case("dense graph MTP", ud, {**dense, "mtp_tokens": 2}, "dense eager"),
        Case("sparse eager", ud, {**sparse, **eager}, "dense eager"),
        Case("sparse graph", ud, sparse, "sparse eager"),
        Case("sparse graph MTP", ud, {**sparse, "mtp_tokens": 2}, "sparse eager"),
        Case("dense graph, packed kernels", ud, {**dense, "kernels": "packed"}, "dense eager"),
        Case("w1 Q6_K, w3 Q4_K", "tiny-w1_over_w3.gguf", {**dense, **eager}),
        Case("fault: w1/w3 types", "tiny-w1_over_w3.gguf", {**dense, **eager}, faults="w1_w3_types", stopped="gate"),
        Case("fault: shards unsorted", ud, {**dense, **eager}, faults="shards_unsorted", stopped="gate"),
    ]
    if demo:
        found += [Case("demo eager", "demo", eager), Case("demo graph", "demo", {}, "demo eager")]
        found += [Case("demo graph, packed kernels", "demo", {"kernels": "packed"}, "demo eager")]
    if gpus > 1:
        found += [
            Case("dense eager TP=2", ud, {**dense, **eager, **two}, "dense eager"),
            Case("dense graph MTP TP=2", ud, {**dense, **two, "mtp_tokens": 2}, "dense eager"),
            Case("sparse graph TP=2", ud, {**sparse, **two}, "sparse eager"),
            Case("fault: rank missing TP=2", ud, {**dense, **eager, **two}, faults="rank_missing", stopped="gate"),
            Case("fault: misaligned TP=2", "tiny-misaligned.gguf", {**dense, **eager, **two}, stopped="check"),
            Case(
                "fault: misaligned, unchecked",
                "tiny-misaligned.gguf",
                {**dense, **eager, **two},
                faults="no_checks",
                stopped="gate",
            ),
        ]
    return found


def orjson_or_json() -> None:
    """The lent machine's Python has no orjson, and no index to fetch it from: the standard library stands in."""
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
            extra_args=(f"--kv-cache-memory-bytes={1 << 30}", "--max-num-batched-tokens=2048"),
            **options,
        ),
    )
    try:
        card = await made.load(lambda progress: None)
    except UserError as fault:
        return {"stopped": str(fault), "load_s": time.monotonic() - started}
    try:
        asked = prompts() if "tiny" in path.name else demo_prompts()
        answers = [await canary.ask(made.layer, tuple(p), STEPS, f"case-{i}") for i, p in enumerate(asked)]
        stats = made.stats()
        found = canary.Reference(
            canary.fingerprint(engine.read_header(path)), made.layer.vocab_size, "case", tuple(answers)
        )
        gate = await canary.make_reference(made.layer, engine.read_header(path), "this run")
        return {
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


def demo_prompts() -> list[list[int]]:
    """Plain ids of the demo model's vocabulary: enough for a comparison of modes."""
    return [[504, 3575, 282, 4649, 314], [198, 788, 260, 1743, 28, 665, 436, 253]]


# -- all cases -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    case: Case
    tree: dict[str, Any]
    log: str

    @property
    def backend(self) -> str:
        names = re.findall(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend", self.log)
        return names[-1] if names else ""


def start(case: Case, args: argparse.Namespace, work: Path, visible: str, reference: str = "") -> Result:
    slug = re.sub(r"\W+", "-", case.name)
    out, log = work / f"{slug}.json", work / f"{slug}.log"
    path = args.demo if case.file == "demo" else args.files / case.file
    from tests.vllm.faults import VARIABLE, plugin_path

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


def compare(base: dict[str, Any], other: dict[str, Any]) -> tuple[int, int, float, float]:
    """(steps equal, steps compared, largest distance of log-probabilities, gap at the worst disagreement)."""
    equal = compared = 0
    worst, tie = 0.0, 0.0
    for a, b in zip(base["answers"]["probes"], other["answers"]["probes"], strict=True):
        for right, here in zip(a["steps"], b["steps"], strict=True):
            compared += 1
            known = dict(map(tuple, here["top"]))
            worst = max([worst, *(abs(p - known[t]) for t, p in right["top"][:4] if t in known)])
            if right["token"] != here["token"]:
                likely = dict(map(tuple, right["top"]))
                tie = max(tie, likely[right["token"]] - likely.get(here["token"], -math.inf))
                break
            equal += 1
    return equal, compared, worst, tie


def against_oracle(path: Path, tree: dict[str, Any]) -> tuple[int, int, float, float]:
    """The same against transformers in fp32."""
    import numpy as np

    from tests.tiny_glm.oracle import load, truth

    model = load(path)
    equal = compared = 0
    worst, tie = 0.0, 0.0
    for probe in tree["answers"]["probes"]:
        tokens = [step["token"] for step in probe["steps"]]
        right = truth(model, list(probe["prompt"]), tokens)
        for step, choice, row in zip(probe["steps"], right.choices, right.logprobs, strict=True):
            compared += 1
            equal += step["token"] == choice
            tie = max(tie, float(row[choice] - row[step["token"]]))
            worst = max([worst, *(abs(p - float(np.asarray(row)[t])) for t, p in step["top"][:4])])
    return equal, compared, worst, tie


def judge(result: Result, done: dict[str, Result], args: argparse.Namespace) -> tuple[bool, str]:
    case, tree = result.case, result.tree
    if "broken" in tree:
        return False, tree["broken"]
    if case.stopped:
        said = tree.get("stopped", "NOT STOPPED: it served")
        right = "answers wrongly" in said or "cannot serve" in said if case.stopped == "gate" else "blocks of" in said
        return "stopped" in tree and right, said[-150:]
    if "stopped" in tree:
        return False, "stopped: " + tree["stopped"][-200:]
    words, good = [], True
    if case.same_as and case.same_as in done and "answers" in done[case.same_as].tree:
        equal, compared, worst, tie = compare(done[case.same_as].tree, tree)
        good &= tie < TIE
        words.append(f"{equal}/{compared} tokens as {case.same_as}, logprobs within {worst:.2g}, worst tie {tie:.2g}")
    elif case.same_as:
        good = False
        words.append(f"nothing to compare with: {case.same_as}")
    if case.file.startswith("tiny"):
        equal, compared, worst, tie = against_oracle(args.files / case.file, tree)
        good &= tie < 3 * TIE
        words.append(f"{equal}/{compared} as transformers fp32, within {worst:.2g}, worst tie {tie:.2g}")
    if case.options.get("mtp_tokens"):
        words.append(f"drafted {tree['drafted']}, kept {tree['accepted']}")
        good &= tree["drafted"] > 0
    return good, "; ".join(words)


def reference_for(case: Case, done: dict[str, Result], work: Path) -> str:
    """Faults are judged against the answers of the sound engine on the same file, as an operator would do it."""
    sound = {"tiny-ud.gguf": "dense eager", "tiny-w1_over_w3.gguf": "w1 Q6_K, w3 Q4_K"}.get(case.file)
    if sound is None or sound not in done or "reference" not in done[sound].tree:
        return ""
    path = work / f"reference-{case.file}.json"
    path.write_text(json.dumps(done[sound].tree["reference"]))
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, default=Path(".gpu/tiny"), help="folder of tiny files")
    parser.add_argument("--demo", type=Path, help="the demo model's GGUF file; left out: its cases are skipped")
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
    wanted = [c for c in cases(gpus, args.demo is not None) if re.search(args.only, c.name)]
    started = time.monotonic()
    done: dict[str, Result] = {}
    # Sound ones first, since faults are judged by their answers; those of two GPUs beside the others.
    for wave in ([c for c in wanted if not c.faults], [c for c in wanted if c.faults]):
        with ThreadPoolExecutor(4) as pool:
            jobs = []
            for number, case in enumerate(wave):
                visible = "0,1" if case.gpus == 2 else str(number % gpus)
                jobs.append(
                    pool.submit(
                        start, case, args, args.out, visible, reference_for(case, done, args.out) if case.faults else ""
                    )
                )
            for job in jobs:
                result = job.result()
                done[result.case.name] = result
    good = True
    print(f"{torch.cuda.get_device_name(0)} x {gpus}, torch {torch.__version__}, bf16, {STEPS} steps, 3 prompts")
    print("| case | verdict | seconds | attention | found |\n|---|---|---|---|---|")
    for case in wanted:
        result = done[case.name]
        right, words = judge(result, done, args)
        good &= right
        verdict = ("stopped, as it must be" if case.stopped else "ok") if right else "WRONG"
        print(f"| {case.name} | {verdict} | {result.tree.get('load_s', 0):.0f} | {result.backend} | {words} |")
        if not right:
            tail = [line for line in result.log.splitlines() if "Error" in line or "error" in line][-6:]
            print("\n".join("    " + line[:300] for line in tail))
    print(f"{time.monotonic() - started:.0f} s in all; logs in {args.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
