"""Every mix of types through the plugin's loading code, and the faults that one rank shows; all in one process.

One file, three engines: F32 and F16 go through llama.cpp too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engines.vllm.canary import Probe, Reference, Step, Tolerance, compare
from tests.tiny_glm import MIXES, Tiny, make
from tests.tiny_glm.maker import weights
from tests.tiny_glm.oracle import load, prompts, truth
from tests.tiny_glm.vocabulary import vocabulary
from tests.vllm.loop import STEPS, TOP

MIXED = sorted(set(MIXES) - {"mxfp4", "bf16", "q8_0"})
# Log-probabilities against transformers in fp32. Seen: 6e-5.
WITHIN = 1e-3
# The same where activations are rounded to half precision on the way. Garbage lies off by units.
NEAR = 0.1
KERNELS = ["reference_kernels"]
SMALL = Tiny(layers=3, dense_layers=1, experts=8, experts_used=2)
# w1 and w3 of two types, and a float among quantised experts, become Q8_0: the oracle takes the same detour.
ROUNDED = {
    "w1_over_w3": ("ffn_gate_exps", "ffn_up_exps"),
    "w3_over_w1": ("ffn_gate_exps", "ffn_up_exps"),
    "down_f32": ("ffn_down_exps",),
}


@pytest.fixture(scope="module")
def paths(workplace: Path) -> dict[str, Path]:
    return {mix: make(workplace / f"small-{mix}.gguf", mix, SMALL) for mix in MIXED}


@pytest.fixture(scope="module")
def found(workplace: Path, plugin: None, paths: dict[str, Path]) -> dict[str, Any]:
    judged = {"ud", "w1_over_w3"}
    jobs = [{"name": m, "file": str(path), "faults": KERNELS, "gate": m in judged} for m, path in paths.items()]
    ud, types = str(paths["ud"]), str(paths["w1_over_w3"])
    jobs += [
        {"name": "mtp", "file": ud, "faults": KERNELS, "mtp": 1},
        {"name": "dequantised", "file": ud, "gate": True},
        {"name": "fault: shards unsorted", "file": ud, "faults": [*KERNELS, "shards_unsorted"], "gate": True},
        {"name": "fault: w1 and w3 types", "file": types, "faults": [*KERNELS, "w1_w3_types"], "gate": True},
        {"name": "fault: rotary", "file": ud, "faults": ["rotary"], "gate": True},
    ]
    asked, out = workplace / "jobs.json", workplace / "answers.json"
    asked.write_text(json.dumps(jobs))
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1" if len(os.sched_getaffinity(0)) > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = workplace / "loop.log"
    with log.open("wb") as stream:
        code = subprocess.run(
            [sys.executable, "-m", "tests.vllm.loop", str(asked), str(out)],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=420,
            check=False,
        ).returncode
    assert code == 0, log.read_text()[-3000:]
    answers: dict[str, Any] = json.loads(out.read_text())
    return answers


def error(tree: dict[str, Any], model: Any) -> tuple[bool, float]:
    """(the oracle's tokens, largest distance of log-probabilities)."""
    assert "failed" not in tree, tree
    same, worst = True, 0.0
    for prompt, answer in zip(prompts()[:2], tree["answers"], strict=True):
        tokens = [token for token, _ in answer["steps"]]
        right = truth(model, prompt, tokens)
        same &= tokens == right.choices
        for (_, top), row in zip(answer["steps"], right.logprobs, strict=True):
            worst = max([worst, *(float(abs(p - row[t])) for t, p in top)])
    return same, worst


@pytest.mark.parametrize("mix", MIXED)
def test_each_mix_equals_transformers(mix: str, found: dict[str, Any], paths: dict[str, Path]) -> None:
    same, worst = error(found[mix], load(paths[mix], ROUNDED.get(mix, ())))
    print(f"{mix}: within {worst:.1e}")
    assert worst < WITHIN
    assert same


def test_mtp_and_dequantised_weights_change_nothing(found: dict[str, Any], paths: dict[str, Path], oracle: Any) -> None:
    for name in ("mtp", "dequantised"):
        same, worst = error(found[name], oracle(paths["ud"]))
        assert same, name
        assert worst < WITHIN


def llamacpp(path: Path) -> list[tuple[list[int], list[Any]]]:
    """The prompts, each with the steps of llama.cpp's greedy answer. Everything but weights is in fp32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.verbosity, params.ui = 512, 1, 0, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # It computes in half precision inside.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    found = []
    for prompt in prompts():
        body = {"prompt": prompt, "max_tokens": STEPS, "temperature": 0, "logprobs": TOP, "ignore_eos": True}
        seen: list[Any] = []
        server.handle_completions(json.dumps(body), lambda chunk, seen=seen: bool(seen.append(chunk)))
        answer = json.loads(seen[-1]) if isinstance(seen[-1], str | bytes) else seen[-1]
        found.append((prompt, answer["choices"][0]["logprobs"]["content"]))
    return found


@pytest.mark.parametrize("mix", ["f32", "f16"])
def test_llamacpp_equals_transformers_too(mix: str, paths: dict[str, Path], workplace: Path) -> None:
    """In the dense range. llama.cpp gets F16's weights in a file of F32: over F16 weights it rounds the activations to
    half precision, and two roundings of what differs in the sixth digit are as good as independent. That alone moves
    log-probabilities by 4e-3, an F16 cache by as much, and 5e-2 were seen on one prompt (a router's tie, perhaps)."""
    path = paths[mix]
    if mix == "f16":
        halves = {
            name.replace(".", "__"): values.astype(np.float16)
            for name, values in weights(SMALL, vocabulary()).items()
            if values.ndim > 1 and "ffn_gate_inp" not in name
        }
        path = make(workplace / "small-f16-as-f32.gguf", "f32", SMALL, **halves)
    model = load(paths[mix])
    for prompt, steps in llamacpp(path):
        tokens = [step["id"] for step in steps]
        right = truth(model, prompt, tokens)
        assert tokens == right.choices
        for step, row in zip(steps, right.logprobs, strict=True):
            assert max(abs(top["logprob"] - row[top["id"]]) for top in step["top_logprobs"]) < WITHIN


def test_llamacpp_in_half_precision_is_near(paths: dict[str, Path]) -> None:
    model = load(paths["f16"])
    for prompt, steps in llamacpp(paths["f16"]):
        right = truth(model, prompt, [step["id"] for step in steps])
        for step, row in zip(steps, right.logprobs, strict=True):
            assert row.max() - row[step["id"]] < NEAR
            assert max(abs(top["logprob"] - row[top["id"]]) for top in step["top_logprobs"]) < NEAR


def probes(tree: dict[str, Any]) -> tuple[Probe, ...]:
    return tuple(
        Probe(
            tuple(p["prompt"]),
            tuple(Step(token, tuple((t, lp) for t, lp in top)) for token, top in p["steps"]),
        )
        for p in tree["gate"]
    )


@pytest.mark.parametrize(
    ("fault", "sound"),
    [
        ("fault: shards unsorted", "ud"),
        ("fault: w1 and w3 types", "w1_over_w3"),
        ("fault: rotary", "ud"),
    ],
)
def test_each_fault_is_stopped_by_the_gate(fault: str, sound: str, found: dict[str, Any]) -> None:
    """With the reference of the sound engine, at the widest tolerance that the gate has."""
    tree = found[fault]
    if "failed" in tree:
        # Loud: vLLM did not start. Nothing was served.
        print(fault, tree["failed"][:200])
        return
    reference = Reference("f", 384, "sound", probes(found[sound]))
    faults = tree["faults"] + compare(reference, probes(tree), Tolerance(0.3, 1.5))
    print(fault, faults)
    assert faults


def test_the_gate_lets_sound_engines_pass(found: dict[str, Any]) -> None:
    reference = Reference("f", 384, "sound", probes(found["ud"]))
    assert compare(reference, probes(found["dequantised"]), Tolerance(1e-3, 1e-2)) == []
    for mix in MIXED:
        assert found[mix]["faults"] == []
        assert np.isfinite([lp for p in probes(found[mix]) for s in p.steps for _, lp in s.top]).all()
