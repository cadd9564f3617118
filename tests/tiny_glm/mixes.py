"""Which type each tensor of a tiny file gets. A mix is one that published files have, or that an engine got wrong."""

from __future__ import annotations

from collections.abc import Callable

from gguf import GGMLQuantizationType as T

Choose = Callable[[str, int], T]


def _role(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _plain(kind: T) -> Choose:
    return lambda name, block: kind


def _ud(name: str, block: int) -> T:
    """Like UD-Q4_K_XL: types differ by layer and inside groups that an engine fuses."""
    role = _role(name)
    match role.removesuffix(".weight"):
        case "token_embd":
            return T.Q4_K
        case "output":
            return T.Q6_K
        case "attn_k_b" | "attn_v_b" | "attn_kv_a_mqa":
            return T.Q8_0
        case "attn_q_a":
            return T.Q4_K if block % 2 else T.Q8_0
        case "attn_q_b" | "attn_output":
            return T.Q5_K
        case "indexer.proj":
            return T.BF16
        case "ffn_down_exps":
            return (T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)[block % 4]
        case "ffn_gate_exps" | "ffn_up_exps":
            return T.Q4_K
        case "ffn_down":
            return T.Q6_K
        case "ffn_gate":
            return T.Q4_K
        case "ffn_up":
            return T.Q6_K if block == 0 else T.Q4_K
    return T.Q8_0


def _with(**changes: T) -> Choose:
    """UD, but for roles (dots written as __)."""
    table = {key.replace("__", "."): kind for key, kind in changes.items()}

    def choose(name: str, block: int) -> T:
        return table.get(_role(name).removesuffix(".weight"), _ud(name, block))

    return choose


MIXES: dict[str, Choose] = {
    "f32": _plain(T.F32),
    "f16": _plain(T.F16),
    "bf16": _plain(T.BF16),
    "q8_0": _plain(T.Q8_0),
    "ud": _ud,
    # w1 and w3 of different types: all zeros in the plugin one way round, a crash the other.
    "w1_over_w3": _with(ffn_gate_exps=T.Q6_K, ffn_up_exps=T.Q4_K),
    "w3_over_w1": _with(ffn_gate_exps=T.Q4_K, ffn_up_exps=T.Q6_K),
    "q_a_f16": _with(attn_q_a=T.F16),
    "experts_f16": _with(ffn_gate_exps=T.F16, ffn_up_exps=T.F16, ffn_down_exps=T.F16),
    "down_f32": _with(ffn_down_exps=T.F32),
    "iq4_xs": _with(ffn_gate_exps=T.IQ4_XS, ffn_up_exps=T.IQ4_XS, ffn_down_exps=T.IQ4_XS),
    "mxfp4": _with(ffn_gate_exps=T.MXFP4, ffn_up_exps=T.MXFP4, ffn_down_exps=T.MXFP4),
}
