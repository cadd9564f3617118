"""What a decode step of GLM-5 costs inside vLLM: one synthetic TP=8 rank, the plugin's kernels against the packed ones.

    python benchmarks/kernels_in_engine.py            # both, about 4 minutes on an H200
    python benchmarks/kernels_in_engine.py --variant packed --layers 14 --no-compile
    python benchmarks/kernels_in_engine.py --tp 2      # two GPUs: the same rank twice, joined by real all-reduces
    python benchmarks/kernels_in_engine.py --tiny      # no GPU: a dry run of the plumbing on a toy model

The model is vLLM's own DeepseekV3ForCausalLM (GLM-5 in dense MLA mode) with the sizes that one rank of eight holds:
8 heads, experts of width 256, a 19360-row vocabulary. Weights are random GGUF blocks (Q4_K, Q5_K down, Q6_K head), made
on the GPU. 26 layers, 1 dense and 25 with experts, are exactly a third of GLM-5's 78 (3 and 75), so

    step(78 layers) = 3 * forward(26 layers) + head          (generally: 78 / layers * forward + head)

With --real-router vLLM's own router chooses, for one user only: eight experts whichever they are, while several users'
random hidden states might choose alike.

forward: the median GPU time of replaying the CUDA graph that vLLM captured for C sequences, after a real generation has
left block tables and lengths of about 1k tokens in its buffers (64 distinct contexts; 256 sequences share them by
fours). head: lm_head alone. Not in it: communication, sampling, the scheduler. Routing is uniform, by vLLM's simulator.

With --tp 2 the model is twice as wide, so that each of two GPUs holds what one of eight holds of GLM-5; only the
all-reduces are those of two. `wall` is a whole step, scheduler and sampling included: the time of 32 more tokens a
sequence, over 32. The step model's prediction (service/planning, link as preflight measured it) is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

USERS = (1, 2, 10, 64, 256)
VARIANTS = {
    "plugin": {"packed": False},
    "packed": {"packed": True, "bf16_copies": "none"},
    "packed+copies": {"packed": True, "bf16_copies": "all"},
}
RANK = {
    "hidden_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 19360,
}  # fmt: skip
TINY = RANK | {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}  # fmt: skip


SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""What tensor parallelism divides."""


def config_of(sizes: dict[str, int], layers: int) -> dict[str, object]:
    """config.json of the synthetic rank."""
    return dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_hidden_layers=layers,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, hidden_act="silu", rms_norm_eps=1e-5,
        max_position_embeddings=8192, rope_theta=1e6, tie_word_embeddings=False, attention_bias=False,
        torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1, **sizes,
    )  # fmt: skip


def register_loader() -> None:
    """load_format "synthetic": every quantised parameter gets random blocks through the plugin's own parameters."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from service.engines.vllm.kernels import reference as ref
    from service.engines.vllm.kernels.measure import random_raw

    def kind(name: str) -> int:
        last = name.rpartition(".")[2]
        return ref.Q6_K if last == "lm_head" else ref.Q5_K if last == "down_proj" else ref.Q4_K

    def fill(name: str, module: torch.nn.Module, device: str) -> None:
        if hasattr(module, "w13_qweight"):
            for part, ggml_type, weight in (
                ("w13", ref.Q4_K, module.w13_qweight), ("w2", ref.Q5_K, module.w2_qweight),
            ):  # fmt: skip
                experts, width, hidden = module.w13_qweight.tensor_shape
                rows, k = (width, hidden) if part == "w13" else (hidden, width // 2)
                raw = random_raw(experts * rows, k, ggml_type, device=device).view(experts, rows, -1)
                weight.materialize(raw.shape, device=device, dtype=torch.uint8)
                weight.data.copy_(raw)
                getattr(module, f"{part}_qweight_type").weight_type = ggml_type
            return
        shards = getattr(module, "output_partition_sizes", None) or [module.qweight.tensor_shape[0]]
        for i, rows in enumerate(shards):
            raw = random_raw(rows, module.qweight.tensor_shape[1], kind(name), device=device)
            shard = i if len(shards) > 1 else None
            module.qweight._store(raw, shard_id=shard)
            module.qweight_type._store(torch.tensor(kind(name)), shard_id=shard)

    @register_model_loader("synthetic")
    class SyntheticLoader(BaseModelLoader):
        def download_model(self, model_config: object) -> None:
            pass

        def load_model(self, vllm_config, model_config, prefix=""):  # type: ignore[no-untyped-def]
            self.device = torch.device(vllm_config.device_config.device)
            vllm_config.quant_config.unquantized_modules.extend(
                f"model.layers.{i}.self_attn.kv_b_proj" for i in range(model_config.hf_config.num_hidden_layers)
            )
            return super().load_model(vllm_config, model_config, prefix)

        def load_weights(self, model, model_config):  # type: ignore[no-untyped-def]
            started = time.perf_counter()
            for name, module in model.named_modules():
                if hasattr(module, "w13_qweight") or hasattr(module, "qweight"):
                    fill(name, module, str(self.device))
            for name, p in model.named_parameters():
                if "qweight" not in name and p.dtype.is_floating_point:
                    p.data.fill_(1.0) if "norm" in name else p.data.normal_(0, 0.02)
            print(f"weights made in {time.perf_counter() - started:.1f} s", flush=True)


def compile_ahead(copies: bool) -> None:
    """Compile the kernels that the engine will meet, in parallel: one by one inside it would take minutes."""
    import torch

    from service.engines.vllm.kernels import measure, ops, tune

    table = ops.here(torch.device("cuda", 0))
    # from COPY_FROM tokens on the copies are used
    few = [m for m in (*USERS, 1024) if not (copies and m >= ops.COPY_FROM)]
    jobs = tune.chosen_jobs(table, tune.GLM5_LINEARS, few) + tune.chosen_jobs(table, tune.GLM5_MOE[:1], (*USERS, 1024))
    started = time.perf_counter()
    failed = [e for e in measure.precompile(jobs, min(14, os.cpu_count() or 2)) if e]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - started:.0f} s {failed}", flush=True)


def run(
    variant: str, layers: int, compiled: bool, tiny: bool, tp: int = 1, eager: bool = False, real_router: bool = False
) -> dict[str, object]:
    """One engine, in this process (with tp > 1: one of the ranks that torchrun started); the result as JSON."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if not real_router:
        os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    if variant != "plugin" and not tiny and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        compile_ahead(variant.endswith("copies"))
    import vllm_gguf_plugin
    from vllm import LLM, SamplingParams

    from service.engines.vllm.kernels.quant_method import register

    vllm_gguf_plugin.register()
    register()
    register_loader()
    users = (1, 2) if tiny else (1,) if real_router else USERS
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rank = TINY if tiny else RANK
        sizes = rank | {key: rank[key] * tp for key in SPLIT}
        (Path(folder) / "config.json").write_text(json.dumps(config_of(sizes, layers)))
        graphs: dict[str, object] = {
            "mode": 3 if compiled else 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(users),
        }  # fmt: skip
        if tiny or eager:
            graphs = {"mode": 0} | ({"custom_ops": ["-rotary_embedding"]} if tiny else {})
        engine = LLM(
            folder, load_format="synthetic", quantization="gguf", skip_tokenizer_init=True, max_model_len=2048,
            max_num_seqs=max(users), max_num_batched_tokens=1024 if not tiny else 64, enforce_eager=tiny or eager,
            compilation_config=graphs, tensor_parallel_size=tp,
            **({"distributed_executor_backend": "external_launcher"} if tp > 1 else {}),
            additional_config={"glm5": VARIANTS[variant]}, dtype="bfloat16",
            **({} if tiny else {"gpu_memory_utilization": 0.8}), disable_log_stats=True,
            enable_chunked_prefill=True, seed=0,
        )  # fmt: skip
    ready = time.perf_counter() - started
    result: dict[str, object] = {
        "variant": variant, "layers": layers, "tp": tp, "eager": eager, "ready_s": round(ready, 1), "users": {},
    }  # fmt: skip
    for c in users:
        length = 8 if tiny else 1000
        prompts = [
            {"prompt_token_ids": [(7 + 31 * (i % 64) + 17 * j) % (sizes["vocab_size"] - 2) + 2 for j in range(length)]}
            for i in range(c)
        ]

        def seconds(tokens: int, prompts: object = prompts) -> float:
            begun = time.perf_counter()
            asked = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.generate(prompts, asked, use_tqdm=False)
            return time.perf_counter() - begun

        entry: dict[str, object] = {"generate_s": round(seconds(8), 2)}
        if not tiny:
            # the least of three each: what disturbs a run only adds to it
            short, long = (min(seconds(tokens) for _ in range(3)) for tokens in (4, 36))
            entry["wall_ms"] = round(1e3 * (long - short) / 32, 3)
        if not tiny and not eager:
            entry |= engine.collective_rpc(time_replay, args=(c,))[0]
            entry["step78_ms"] = round(78 / layers * entry["forward_ms"] + entry["head_ms"], 3)  # type: ignore[operator]
        result["users"][c] = entry  # type: ignore[index]
        print(variant, c, json.dumps(entry), flush=True)
    return result


def time_replay(worker: object, users: int) -> dict[str, object]:
    """GPU milliseconds of the captured graph for `users` sequences, of the head, and of the graph by kernel class."""
    import torch

    from service.engines.vllm.kernels.measure import graph_us

    runner = worker.model_runner  # type: ignore[attr-defined]
    entries = {
        key.num_tokens: value.cudagraph for key, value in runner.model.concrete_cudagraph_entries.items()
        if value.cudagraph is not None
    }  # fmt: skip
    graph = entries[users]
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    hidden = torch.randn(users, runner.model_config.get_hidden_size(), device="cuda", dtype=torch.bfloat16)
    head = graph_us(lambda i: runner.model.compute_logits(hidden), 1) / 1000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    classes: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in profile.key_averages():
        spent = float(getattr(event, "self_device_time_total", 0.0)) / 1000
        classes[kernel_class(event.key)] = classes.get(kernel_class(event.key), 0.0) + spent
        names[event.key[:80]] = spent
    top = dict(sorted(names.items(), key=lambda p: -p[1])[:12])
    if users == 1:
        timeline(profile)
    return {
        "forward_ms": round(sorted(times)[len(times) // 2], 4),
        "idle_ms": round(sorted(times)[len(times) // 2] - sum(classes.values()), 4),
        "head_ms": round(head, 4),
        "classes_ms": {k: round(v, 4) for k, v in sorted(classes.items(), key=lambda p: -p[1])},
        "top_ms": {k: round(v, 4) for k, v in top.items()},
    }


def timeline(profile: Any) -> None:
    """Print the kernels of one layer with experts, in order: start and duration in microseconds, stream, name."""
    events = sorted((e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    starts = [i for i, e in enumerate(events) if "w2_pair" in e.name]
    if len(starts) > 9:
        chosen = events[starts[8] + 1 : starts[9] + 4]
        for e in chosen:
            begun = e.time_range.start - chosen[0].time_range.start
            print(f"  {begun:8.1f} {e.time_range.elapsed_us():6.1f} s{e.thread} {e.name[:90]}", flush=True)


def kernel_class(name: str) -> str:
    """Which part of the step a CUDA kernel belongs to, by its name."""
    table = {
        "all-reduce": "nccl cross_device all_reduce allreduce multimem",
        "attention": "mla flash attention concat_and_cache reshape_and_cache",  # FA3's kernels are named cutlass too
        "experts": "w13_ w2_pair w2_group prepare_kernel sum_kernel moe_vec moe_q moe_sum moe_align act_and_mul silu",
        "linears": "linear_kernel mul_mat quantize_q8 gemm nvjet cutlass gemv splitk rows_kernel scale_kernel",
        "routing": "topk routing sort random philox uniform distribution",
        "norms and elementwise": "norm rotary triton_ elementwise cat copy reduce fill",
    }
    low = name.lower()
    return next((label for label, parts in table.items() if any(p in low for p in parts.split())), "other")


def predicted(layers: int, variant: str, eager: bool) -> dict[int, dict[str, float]]:
    """The step model's split, ms, for each number of users: these layers of a TP=8 rank, all-reduces over 2 GPUs."""
    from dataclasses import replace

    from service.planning import glm5, hardware
    from service.planning.settings import EngineSettings
    from service.planning.shape import from_tensors
    from service.planning.step_model import StepModel

    down = dict.fromkeys(("ffn_down_exps", "ffn_down_shexp", "ffn_down"), "Q5_K")
    mix = glm5.Mix("benchmark", "Q4_K", glm5.PLAIN | down | {"output": "Q6_K", "attn_kv_b": "BF16"})
    # one dense layer, the rest with experts
    shape = from_tensors(*glm5.some_layers(mix, glm5.DENSE_LAYERS - 1, layers))
    box = replace(hardware.box("2x-h200"), gpus=8)
    settings = EngineSettings(
        tp=8, kernels="plugin" if variant == "plugin" else "hybrid", graphs=not eager, capture_sizes=USERS, slots=256
    )
    model = StepModel(shape, box, settings)
    return {c: {k: 1e3 * v for k, v in model.split(c, c * 1000).parts.items()} for c in USERS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=list(VARIANTS), help="only this one, in this process")
    parser.add_argument("--variants", default="plugin,packed+copies", help="which to compare")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="with --variant: no CUDA graphs")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile (starts faster)")
    parser.add_argument("--real-router", action="store_true", help="one user, with vLLM's own router")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("kernels_in_engine.json"))
    given = parser.parse_args()
    if given.variant or given.tiny:
        result = run(
            given.variant or "packed", 2 if given.tiny else given.layers, not given.no_compile, given.tiny, given.tp,
            given.eager, given.real_router,
        )  # fmt: skip
        if int(os.environ.get("RANK", "0")) == 0:
            print("RESULT " + json.dumps(result), flush=True)
        return 0
    results = []
    wanted = [(variant, False) for variant in given.variants.split(",")]
    if given.tp > 1:
        wanted.append((wanted[-1][0], True))
    for variant, eager in wanted:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={given.tp}"] if given.tp > 1 else []
        command = [sys.executable, *launcher, __file__, "--variant", variant, "--layers", str(given.layers)]
        command += [f"--tp={given.tp}", *["--no-compile"] * given.no_compile, *["--eager"] * eager]
        command += ["--real-router"] * given.real_router
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | paths())
        lines = done.stdout.splitlines()
        sys.stdout.write("\n".join(line for line in lines if not line.startswith("RESULT ")) + "\n")
        results += [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
        given.out.write_text(json.dumps(results, indent=1))
    show(results, given.layers)
    return 0 if len(results) == len(wanted) else 1


def show(results: list[dict[str, Any]], layers: int) -> None:
    """Markdown: measured steps beside each other, and with two GPUs the prediction and the split beside them."""
    for result in results:
        name = f"{result['variant']}, {'eager' if result['eager'] else 'graph'}, TP={result['tp']}"
        print(f"\n{name}: {layers} layers, 1k context, ms; step(78) = 78 / {layers} * forward + head")
        forecast = predicted(layers, result["variant"], result["eager"]) if result["tp"] > 1 else {}
        for c in USERS:
            entry = result["users"].get(str(c), {})
            split = {k: round(v, 2) for k, v in forecast.get(c, {}).items() if v}
            total = f"predicted {sum(split.values()):.2f} {split}" if split else ""
            kept = ("wall_ms", "forward_ms", "head_ms", "step78_ms", "idle_ms", "classes_ms")
            print(f"C={c:<4d} {total} measured { {k: entry[k] for k in kept if k in entry} }")


def paths() -> dict[str, str]:
    """The checkout on PYTHONPATH, for a machine where the project is not installed."""
    root = str(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
