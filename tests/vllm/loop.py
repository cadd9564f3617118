"""Many tiny engines in one process, one after the other: python -m tests.vllm.loop JOBS.json OUT.json

A job: {"name", "file", "faults": [...], "mtp": n, "gate": bool}. With vLLM imported once and the engine in this process
an engine costs seconds; weights stay quantised and go through the plugin's loading code (see faults.reference_kernels).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 8
TOP = 8


def main(jobs_file: str, out_file: str) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    jobs = json.loads(Path(jobs_file).read_text())
    found = {}
    for job in jobs:
        found[job["name"]] = run(job)
        Path(out_file).write_text(json.dumps(found))
    return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding

    from service.engines.vllm import canary
    from tests.tiny_glm.oracle import prompts
    from tests.vllm.faults import put

    undo = put(set(job.get("faults", ())))
    # vLLM keeps rotary embeddings for the next model, with the implementation that they were made with.
    rotary_embedding._ROPE_DICT.clear()
    speculative = {"method": "mtp", "num_speculative_tokens": job["mtp"]} if job.get("mtp") else None
    llm = None
    try:
        llm = LLM(
            model=job["file"],
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            speculative_config=speculative,
        )
        vocab = llm.llm_engine.model_config.get_vocab_size()
        answers = [ask(llm, tuple(prompt)) for prompt in prompts()[:2]]
        gate = [ask(llm, prompt) for prompt in canary.prompts(vocab)] if job.get("gate") else answers
        return {
            "answers": [{"prompt": p.prompt, "steps": [[s.token, s.top] for s in p.steps]} for p in answers],
            "gate": [{"prompt": p.prompt, "steps": [[s.token, s.top] for s in p.steps]} for p in gate],
            "faults": canary.structural_faults(gate, vocab),
        }
    except Exception as fault:  # noqa: BLE001 - an engine that does not start is an answer here
        return {"failed": f"{type(fault).__name__}: {fault}"}
    finally:
        del llm
        undo()
        gc.collect()
        cleanup_dist_env_and_memory()


def ask(llm: Any, prompt: tuple[int, ...]) -> Any:
    from vllm import SamplingParams

    from service.engines.vllm.canary import Probe, Step

    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=TOP)
    output = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)[0].outputs[0]
    steps = []
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        best = sorted(((int(t), float(e.logprob)) for t, e in known.items()), key=lambda pair: -pair[1])
        steps.append(Step(int(token), tuple(best[:TOP])))
    return Probe(prompt, tuple(steps))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
