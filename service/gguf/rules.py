"""What an engine would make of a file: one verdict per rule, reached from the header alone.

`refuse` means wrong tokens, a crash or no memory; `note` is a thing to know; `ok` says what was looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from service.errors import UserError
from service.gguf import split
from service.gguf.glm_dsa import ARCHITECTURE, GlmDsa
from service.gguf.header import GgufHeader
from service.gguf.hf_config import Attention
from service.gguf.memory import per_gpu
from service.gguf.plan import KERNELS, weights_plan
from service.gguf.tokenizer import SPLITS
from service.gguf.values import value_faults

Level = Literal["ok", "note", "refuse"]

# Compared with llama.cpp or transformers in tests/vllm, respectively mapped by the plugin but never compared here.
PROVEN = frozenset({ARCHITECTURE, "llama", "gemma3"})
MAPPED = frozenset({"qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "stablelm", "starcoder2", "gemma2", "mistral"})


@dataclass(frozen=True, slots=True)
class Setup:
    """How the file would be served. `quantised_kernels`: False where all weights are dequantised (CPUs).
    `gpu_bytes`: memory of one GPU that may be used, None to skip the verdict; `sequences`: contexts held at once."""

    tensor_parallel: int = 1
    expert_parallel: bool = False
    pipeline_parallel: int = 1
    attention: Attention = "dense"
    mtp: bool = False
    quantised_kernels: bool = True
    context_tokens: int | None = None
    sequences: int = 1
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    rule: str
    level: Level
    text: str


def verdicts(header: GgufHeader, setup: Setup) -> list[Verdict]:
    """All verdicts, in the order of the rules. A rule that cannot read the header says so as its verdict."""
    found: list[Verdict] = []
    for name, rule in _RULES.items():
        try:
            found += [Verdict(name, level, text) for level, text in rule(header, setup)]
        except UserError as fault:
            found.append(Verdict(name, "refuse", str(fault)))
    return found


def refusals(header: GgufHeader, setup: Setup) -> list[str]:
    """The texts of the verdicts that refuse."""
    return [verdict.text for verdict in verdicts(header, setup) if verdict.level == "refuse"]


Found = Iterator[tuple[Level, str]]


def _architecture(header: GgufHeader, setup: Setup) -> Found:
    name = header.architecture
    if name in PROVEN:
        yield "ok", f"{name} has an adapter that is compared with another engine"
    elif name in MAPPED:
        yield "note", f"{name} is mapped by vllm-gguf-plugin but was never compared here: make a reference"
    else:
        yield "refuse", f"{name} has no adapter for vLLM (there are: {', '.join(sorted(PROVEN | MAPPED))})"
    if name == "llama" and header.integer("{arch}.expert_count", 0):
        yield "refuse", "a llama file with experts (Mixtral) has no adapter for vLLM"


def _tensors(header: GgufHeader, setup: Setup) -> Found:
    if header.architecture != ARCHITECTURE:
        yield from _tensors_of_others(header)
        return
    shape = GlmDsa.from_header(header)
    if len(header.tensors) < shape.blocks:
        yield "refuse", f"{len(header.tensors)} tensors cannot hold {shape.blocks} blocks"
        return
    known = {name: (size, needed) for name, size, needed in shape.tensors()}
    blocks_with_whole_kv = {n.split(".")[1] for n in header.tensors if n.endswith(".attn_kv_b.weight")}
    needed = {
        name
        for name, (_, must) in known.items()
        if must
        and not (name.endswith(("attn_k_b.weight", "attn_v_b.weight")) and name.split(".")[1] in blocks_with_whole_kv)
    }
    missing = sorted(needed - set(header.tensors))
    unknown = sorted(set(header.tensors) - set(known))
    if missing:
        yield "refuse", f"{len(missing)} tensors are missing: {_some(missing)}"
    if unknown:
        yield "refuse", f"{len(unknown)} tensors are not known to {ARCHITECTURE}: {_some(unknown)}"
    for name, tensor in header.tensors.items():
        if name in known and tensor.shape != known[name][0]:
            yield (
                "refuse",
                f"tensor {name} has shape {list(tensor.shape)}, the header's sizes say {list(known[name][0])}",
            )
    yield "ok", f"{len(header.tensors)} tensors, {len(needed)} needed"


def _tensors_of_others(header: GgufHeader) -> Found:
    layers = header.integer("{arch}.block_count")
    per_block: dict[int, set[str]] = {}
    for name in header.tensors:
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) > 3 and parts[1].isdigit():
            per_block.setdefault(int(parts[1]), set()).add(".".join(parts[2:]))
    if not 1 <= layers <= 1024 or set(per_block) != set(range(layers)):
        yield "refuse", f"the header says {layers} blocks, the file holds blocks {_some(sorted(map(str, per_block)))}"
        return
    usual = Counter(role for roles in per_block.values() for role in roles)
    for role, count in usual.items():
        # A role that nearly all blocks have belongs to all.
        if layers * 0.75 <= count < layers:
            lacking = [str(block) for block, roles in per_block.items() if role not in roles]
            yield "refuse", f"{role} is missing in block {_some(lacking)}"
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in header.tensors:
            yield "refuse", f"tensor {name} is missing"
    if "rope_freqs.weight" in header.tensors:
        yield (
            "refuse",
            "tensor rope_freqs.weight scales the rotary embedding (Llama 3.1 and later); vLLM would ignore it",
        )
    yield "ok", f"{len(header.tensors)} tensors in {layers} blocks"


def _values(header: GgufHeader, setup: Setup) -> Found:
    faults = value_faults(header)
    for fault in faults:
        yield "refuse", fault
    if not faults:
        yield "ok", "every number of the header is one that engines can use"


def _unused(header: GgufHeader, setup: Setup) -> Found:
    if header.architecture != ARCHITECTURE:
        return
    shape = GlmDsa.from_header(header)
    indexer = [n for n in header.tensors if ".indexer." in n]
    mtp = [n for n in header.tensors if n.startswith("blk.") and int(n.split(".")[1]) >= shape.layers]
    copies = [n for n in mtp if n.endswith(("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"))]
    if indexer and setup.attention == "dense":
        yield "note", f"dense attention: {len(indexer)} indexer tensors ({_gb(header, indexer)}) are not used"
    if mtp and not setup.mtp:
        yield "note", f"MTP is off: {len(mtp)} tensors of block {shape.layers} ({_gb(header, mtp)}) are not used"
    if copies and setup.mtp:
        yield "note", f"vLLM's draft shares embedding and output with the model: {_some(copies)} are not used"
    if setup.mtp and not mtp:
        yield "refuse", "MTP is on, but the file holds no MTP block (nextn_predict_layers is 0)"


def _types(header: GgufHeader, setup: Setup) -> Found:
    names = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in header.bytes_by_type.items())
    yield "ok", names
    if not setup.quantised_kernels:
        yield "note", "no kernels for quantised weights on this platform: all weights are dequantised"
        return
    if header.architecture != ARCHITECTURE:
        kinds = {t.type for t in header.tensors.values()}
        odd = sorted(k.name for k in kinds if k not in KERNELS and k.name not in ("F32", "F16", "BF16"))
        if odd:
            yield "refuse", f"vLLM has no kernel for {', '.join(odd)}"
        return
    plan = weights_plan(header, "main", indexer=setup.attention == "sparse", dequantise_all=False)
    converted = [s.tensor.name for s in plan.steps if s.form == "q8_0"]
    if converted:
        yield "note", f"experts of different types in one layer: converted to Q8_0 while loading: {_some(converted)}"
    loosened = [
        s.tensor.name
        for s in plan.steps
        if s.form == "dequantised" and s.tensor.type in KERNELS and not s.tensor.name.endswith(_BUILT_PLAIN)
    ]
    if loosened:
        yield "note", f"dequantised, since a fused partner is not quantised: {_some(loosened)}"


_BUILT_PLAIN = tuple(
    f".{role}.weight"
    for role in (
        "indexer.attn_k",
        "indexer.attn_q_b",
        "indexer.proj",
        "attn_k_b",
        "attn_v_b",
        "attn_kv_b",
        "nextn.eh_proj",
    )
)


def _splits(header: GgufHeader, setup: Setup) -> Found:
    tp = setup.tensor_parallel
    faults = split.faults(header, tp, setup.attention, quantised=setup.quantised_kernels)
    fits = split.sizes_that_fit(header, setup.attention, quantised=setup.quantised_kernels)
    best = f"sizes that fit: {', '.join(map(str, fits))}"
    for fault in faults:
        yield "refuse", f"tensor parallel {tp}: {fault} ({best})"
    if not faults:
        yield "ok", f"tensor parallel {tp}; {best}"


def _parallel(header: GgufHeader, setup: Setup) -> Found:
    if setup.expert_parallel:
        yield "refuse", "expert parallel: vllm-gguf-plugin ignores the expert map and would load the wrong experts"
    if setup.pipeline_parallel > 1:
        yield "refuse", "pipeline parallel is not proven with GGUF files"


def _memory(header: GgufHeader, setup: Setup) -> Found:
    if setup.context_tokens is None and setup.gpu_bytes is None:
        return
    need = per_gpu(header, setup.attention, setup.mtp, setup.tensor_parallel, quantised=setup.quantised_kernels)
    text = f"per GPU {need.weights / 1e9:.2f} GB weights, {need.kv_per_token / 1e3:.1f} kB of KV for each token"
    if setup.context_tokens:
        tokens = setup.context_tokens * setup.sequences
        text += f": {need.kv_per_token * tokens / 1e9:.2f} GB for {setup.sequences} x {setup.context_tokens} tokens"
        if setup.gpu_bytes is not None and need.weights + need.kv_per_token * tokens > setup.gpu_bytes:
            room = max(0, setup.gpu_bytes - need.weights) // max(1, need.kv_per_token)
            yield "refuse", f"{text}; {setup.gpu_bytes / 1e9:.1f} GB hold {room} tokens"
            return
    elif setup.gpu_bytes is not None and need.weights > setup.gpu_bytes:
        yield "refuse", f"{text}; a GPU has {setup.gpu_bytes / 1e9:.1f} GB"
        return
    yield "ok", text


def _settings(header: GgufHeader, setup: Setup) -> Found:
    if header.architecture == ARCHITECTURE:
        yield "ok", "set by us, since the header cannot hold them: scoring_func, topk_method, indexer_rope_interleave"
        if setup.attention == "dense":
            top_k = GlmDsa.from_header(header).index_topk
            longer = setup.context_tokens is None or setup.context_tokens > top_k
            yield ("note" if longer else "ok"), f"dense attention is exact up to {top_k} tokens of context"
    pre = header.text("tokenizer.ggml.pre", "gpt-2")
    model = header.text("tokenizer.ggml.model", "")
    if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in SPLITS):
        yield "refuse", f"tokenizer {model!r} with split {pre!r} cannot be rebuilt"
    if header.chat_template is None:
        yield "note", "no chat template: only /v1/completions can be served"


_RULES: dict[str, Callable[[GgufHeader, Setup], Found]] = {
    "architecture": _architecture,
    "values": _values,
    "tensors": _tensors,
    "unused": _unused,
    "types": _types,
    "splits": _splits,
    "parallel": _parallel,
    "memory": _memory,
    "settings": _settings,
}


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _gb(header: GgufHeader, names: list[str]) -> str:
    return f"{sum(header.tensors[name].bytes for name in names) / 1e9:.2f} GB"
