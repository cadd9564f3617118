"""Where each tensor of a glm-dsa file goes in vLLM's model, and in which form. Pure: a header in, a plan out.

vLLM names modules as Hugging Face does (`model.layers.3.mlp.experts`). Some it builds without a quantisation method and
some it fuses, so that their members must share a form; `weights_plan` settles both, and refuses what cannot be settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gguf.constants import GGMLQuantizationType as T

from service.errors import UserError
from service.gguf.glm_dsa import GlmDsa
from service.gguf.header import GgufHeader, TensorInfo

Form = Literal["quantised", "dequantised", "q8_0"]
Part = Literal["main", "mtp"]

FLOATS = frozenset({T.F32, T.F16, T.BF16})
# Types that vllm-gguf-plugin 0.0.5 has kernels for.
KERNELS = frozenset(
    {T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K}
    | {T.IQ1_M, T.IQ1_S, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS, T.IQ4_NL}
)

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Built by vLLM without a quantisation method, or read by it as plain weights.
ALWAYS_PLAIN = ("indexer.wk", "indexer.weights_proj", "indexer.wq_b", "kv_b_proj", "eh_proj", "mlp.gate")
FUSED = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor (or k_b with v_b) on its way. `target`: Hugging Face's name, with `{}` for the expert's number."""

    tensor: TensorInfo
    target: str
    form: Form
    partner: TensorInfo | None = None
    """v_b, where `tensor` is k_b."""

    @property
    def experts(self) -> bool:
        return "{}" in self.target

    @property
    def bytes(self) -> int:
        return self.tensor.bytes + (self.partner.bytes if self.partner else 0)


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """`plain_modules`: modules whose weights arrive dequantised. `unused`: tensors that are not read."""

    steps: tuple[Step, ...]
    plain_modules: frozenset[str]
    unused: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)


def weights_plan(header: GgufHeader, part: Part, *, indexer: bool, dequantise_all: bool) -> WeightsPlan:
    """The plan for the decoder (`main`) or the MTP block (`mtp`). Raises UserError for a type that no kernel takes.

    `indexer`: the model has one (sparse attention). `dequantise_all`: a platform without kernels for quantised weights.
    """
    shape = GlmDsa.from_header(header)
    forms = _Forms(header.tensors, dequantise_all)
    steps: list[Step] = []
    unused: list[str] = []
    for name, tensor in header.tensors.items():
        target = _target(name, shape, part, indexer)
        if target is None:
            unused.append(name)
        elif name.endswith("attn_v_b.weight"):
            continue
        else:
            partner = forms.tensor(name.replace("attn_k_b", "attn_v_b")) if ".attn_k_b." in name else None
            steps.append(Step(tensor, target, forms.of(name, target), partner))
    plain = {_module(step.target) for step in steps if step.form == "dequantised" and step.target.endswith(".weight")}
    return WeightsPlan(tuple(steps), frozenset(plain), tuple(unused))


def _target(name: str, shape: GlmDsa, part: Part, indexer: bool) -> str | None:
    if name in TOP:
        return TOP[name] if part == "main" else None
    block, role, kind = _split(name)
    if block is None or (block >= shape.layers) != (part == "mtp") or block >= shape.blocks:
        return None
    if role.startswith("indexer.") and not indexer:
        return None
    prefix = f"model.layers.{block}."
    if role in EXPERTS:
        return f"{prefix}mlp.experts.{{}}.{EXPERTS[role]}.{kind}"
    if role == "exp_probs_b":
        return f"{prefix}mlp.gate.e_score_correction_bias"
    if role in ("attn_k_b", "attn_v_b"):
        return f"{prefix}self_attn.kv_b_proj.weight"
    return f"{prefix}{PER_BLOCK[role]}.{kind}" if role in PER_BLOCK else None


def _split(name: str) -> tuple[int | None, str, str]:
    """blk.3.ffn_up.weight -> (3, "ffn_up", "weight")."""
    parts = name.split(".")
    if len(parts) < 4 or parts[0] != "blk" or not parts[1].isdigit():
        return None, "", ""
    return int(parts[1]), ".".join(parts[2:-1]), parts[-1]


def _module(target: str) -> str:
    return target.replace(".{}", "").rsplit(".", 1)[0] if "{}" not in target else target.split(".{}")[0]


class _Forms:
    """Which form each tensor takes, with fused groups seen as a whole."""

    def __init__(self, tensors: Mapping[str, TensorInfo], dequantise_all: bool) -> None:
        self._tensors = tensors
        self._all = dequantise_all
        self._hf = {hf: gguf for gguf, hf in PER_BLOCK.items()}

    def of(self, name: str, target: str) -> Form:
        tensor = self._tensors[name]
        if self._all or not target.endswith(".weight") or len(tensor.shape) == 1:
            return "dequantised"
        module = _module(target)
        if "{}" in target:
            return self._experts(name)
        if tensor.type in FLOATS or module.endswith(ALWAYS_PLAIN):
            return "dequantised"
        if any(self._type(name, mate) in FLOATS for mate in self._mates(module)):
            return "dequantised"
        if tensor.type not in KERNELS:
            # Rare and small outside the experts: plain weights cost little.
            return "dequantised"
        return "quantised"

    def _mates(self, module: str) -> tuple[str, ...]:
        for group in FUSED:
            if module.endswith(group):
                return tuple(self._hf[m] for m in group)
        return ()

    def _type(self, name: str, role: str) -> T:
        return self.tensor(f"blk.{name.split('.')[1]}.{role}.weight").type

    def tensor(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise UserError(f"tensor {name} is missing")
        return self._tensors[name]

    def _experts(self, name: str) -> Form:
        block = name.split(".")[1]
        types = {role: self._type(name, role) for role in EXPERTS}
        for role, kind in types.items():
            if kind not in KERNELS | FLOATS:
                raise UserError(f"tensor blk.{block}.{role}.weight: vLLM has no kernel for {kind.name} experts")
        if set(types.values()) <= FLOATS:
            return "dequantised"
        gate, up = types["ffn_gate_exps"], types["ffn_up_exps"]
        own = self._tensors[name].type
        # vLLM holds w1 and w3 in one tensor of one type. Q8_0 takes either with an error of at most 1/254 of a
        # block's largest weight, at 8.5 bits; bf16 for the layer would be 19 GB.
        if own in FLOATS or (not name.endswith("ffn_down_exps.weight") and gate != up):
            return "quantised" if own == T.Q8_0 else "q8_0"
        return "quantised"
