"""ModelShape: what one GPU has to hold, and to read in a step, exact from the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from service.errors import UserError
from service.planning.tensors import FLOAT_TYPES, Kind, Role, Tensor, role_of, type_bytes
from service.terminal import one_line

Attention = Literal["dense", "sparse"]
Runtime = Literal["vllm", "sglang", "llamacpp"]
MAX_NAME = 200


def experts_touched(tokens: float, top_k: int, experts: int) -> float:
    """Expected number of distinct experts that `tokens` tokens choose, each top-k of E uniformly: E(1-(1-k/E)^M).

    Real routers are skewed, which touches fewer: the expectation is an upper bound on bytes.
    """
    if not experts or tokens <= 0:
        return 0.0
    return float(experts * (1.0 - (1.0 - top_k / experts) ** tokens))


@dataclass(frozen=True, slots=True)
class RoleBytes:
    """All tensors of one role in the main stack (or the draft layer). `per_gpu`: resident on one rank."""

    role: Role
    elements: int
    file_bytes: int
    per_gpu: float
    layers: int

    def read(self, tokens: float, top_k: int, experts: int) -> float:
        """Bytes that one rank reads of it in a step of `tokens` tokens."""
        if self.role.read == "never":
            return 0.0
        if self.role.read == "experts":
            return self.per_gpu * experts_touched(tokens, top_k, experts) / experts
        return self.per_gpu


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner needs it. Counts are whole-model; `tensors` includes MTP blocks (index >= layers).
    `name` is one line without control characters.

    `kv_elements`: values a token adds to the KV cache in one layer, on one rank before any split (MLA: 576, shared by
    all heads and so held whole by every rank; else 2 * kv_heads * head_dim, split over at most kv_heads ranks).
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    vocab: int
    experts: int
    top_k: int
    mtp_layers: int
    kv_elements: int
    kv_heads: int
    mla: bool
    index_elements: int
    context: int
    tensors: tuple[Tensor, ...]
    dense_layers: int = 0
    attention_width: int = 0
    index_top_k: int = 0
    _roles_of: dict[tuple[int, str, str], list[RoleBytes]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def file_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    @cached_property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors)

    @cached_property
    def active_parameters(self) -> float:
        """Weights that one token multiplies: chosen experts; a tied head; not embedding rows, MTP, indexer."""
        total = 0.0
        for t in self._main:
            role = role_of(t.name)
            if role.read == "rows" or role.sparse_only:
                continue
            total += t.elements * (self.top_k / self.experts if role.read == "experts" else 1.0)
        if not any(role_of(t.name).kind == "lm_head" for t in self._main):  # tied: the embedding is the head too
            total += self.vocab * self.hidden
        return total

    @property
    def quantisation(self) -> str:
        """The type that holds most weights."""
        counts: dict[str, int] = {}
        for t in self.tensors:
            counts[t.type] = counts.get(t.type, 0) + t.elements
        return max(counts, key=counts.__getitem__)

    @cached_property
    def _main(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.block is None or t.block < self.layers)

    @cached_property
    def _draft(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.block is not None and t.block >= self.layers)

    def _roles(self, tensors: Iterable[Tensor], tp: int, attention: Attention, runtime: Runtime) -> list[RoleBytes]:
        found: dict[str, tuple[Role, int, int, float, set[int | None]]] = {}
        for t in tensors:
            role = role_of(t.name)
            resident = t.bytes
            if runtime != "llamacpp" and role.dequantised and t.type not in FLOAT_TYPES:
                resident = type_bytes("BF16", t.elements)
            if role.sparse_only and attention == "dense":
                # vLLM's dense MLA never builds the indexer: neither held nor read. llama.cpp loads it.
                role = Role(role.name, role.kind, role.split, "never", role.dequantised, True)
                resident = resident if runtime == "llamacpp" else 0
            per_gpu = resident / tp if role.split else float(resident)
            old = found.get(role.name, (role, 0, 0, 0.0, set()))
            blocks = old[4] | {t.block}
            found[role.name] = (role, old[1] + t.elements, old[2] + t.bytes, old[3] + per_gpu, blocks)
        return [RoleBytes(r, e, f, g, len(b)) for r, e, f, g, b in found.values()]

    def roles(self, tp: int, attention: Attention = "dense", runtime: Runtime = "vllm") -> list[RoleBytes]:
        """The main stack by role. Cached: the caller must not change the list."""
        key = (tp, attention, runtime)
        if key not in self._roles_of:
            self._roles_of[key] = self._main_roles(tp, attention, runtime)
        return self._roles_of[key]

    def _main_roles(self, tp: int, attention: Attention, runtime: Runtime) -> list[RoleBytes]:
        rows = self._roles(self._main, tp, attention, runtime)
        if not any(r.role.kind == "lm_head" for r in rows):  # tied: the embedding is read whole as the head
            embedding = [r for r in rows if r.role.kind == "embedding"]
            head = Role("lm_head", "lm_head", split=True)
            rows += [RoleBytes(head, r.elements, 0, r.per_gpu, r.layers) for r in embedding]
        return rows

    def draft_roles(self, tp: int, attention: Attention = "dense", runtime: Runtime = "vllm") -> list[RoleBytes]:
        """The MTP layer(s) by role, without the shared lm_head. Cached as `roles`."""
        key = (-tp, attention, runtime)
        if key not in self._roles_of:
            self._roles_of[key] = self._roles(self._draft, tp, attention, runtime)
        return self._roles_of[key]

    def read_bytes(
        self, tokens: float, tp: int, attention: Attention = "dense", runtime: Runtime = "vllm"
    ) -> dict[Kind, float]:
        """Bytes of weights that one rank reads in a step of `tokens` tokens, by kernel class."""
        out: dict[Kind, float] = {}
        for row in self.roles(tp, attention, runtime):
            if row.role.read == "rows":
                per_row = row.per_gpu / max(1, self.vocab)
                out[row.role.kind] = out.get(row.role.kind, 0.0) + per_row * tokens
            else:
                out[row.role.kind] = out.get(row.role.kind, 0.0) + row.read(tokens, self.top_k, self.experts)
        return out

    def weight_bytes_per_gpu(
        self, tp: int, *, mtp: bool = False, attention: Attention = "dense", runtime: Runtime = "vllm"
    ) -> float:
        """Bytes of weights resident on one rank. Tied heads share the embedding's memory."""
        main = self.roles(tp, attention, runtime)
        total = sum(r.per_gpu for r in main if r.file_bytes)  # a tied head is the embedding's own memory
        if mtp or runtime == "llamacpp":
            total += sum(r.per_gpu for r in self.draft_roles(tp, attention, runtime))
        return total

    def kv_read_bytes(
        self, running: int, context: float, tp: int, value_bytes: float = 2.0, attention: Attention = "dense"
    ) -> float:
        """Bytes of cache that one rank reads in a step of `running` requests holding `context` tokens together. Sparse
        attention reads all index keys, and the values of at most index_top_k tokens a request."""
        values = self.kv_bytes_per_token(tp, value_bytes)
        if attention == "dense":
            return context * values
        keys = context * self.layers * self.index_elements
        return keys + min(context, running * self.index_top_k) * values

    def kv_bytes_per_token(self, tp: int, value_bytes: float = 2.0, attention: Attention = "dense") -> float:
        """Bytes that one token of context occupies on one rank."""
        split = 1 if self.mla else min(tp, max(1, self.kv_heads))
        values = self.kv_elements / split
        index = self.index_elements if attention == "sparse" else 0  # fp8 keys: one byte each
        return self.layers * (values * value_bytes + index)


def from_tensors(metadata: Mapping[str, Any], tensors: Iterable[Tensor], name: str = "") -> ModelShape:
    """Build a ModelShape from GGUF metadata (flat keys, as in the file) and tensors. Raises UserError by key."""
    arch = str(metadata.get("general.architecture", ""))
    if not arch:
        raise UserError("the header has no general.architecture: not a model file?")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise UserError(f"the header lacks {arch}.{key}, which planning needs")
        if isinstance(value, (list, tuple)):
            value = max(value)
        return int(value)

    every = tuple(tensors)
    mtp = number("nextn_predict_layers", 0)
    heads = number("attention.head_count")
    kv_heads = number("attention.head_count_kv", heads)
    mla = f"{arch}.attention.kv_lora_rank" in metadata
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    value_dim = number("attention.value_length", head_dim)
    width = heads * (number("attention.key_length_mla", head_dim) + number("attention.value_length_mla", value_dim))
    vocab = metadata.get(f"{arch}.vocab_size")
    if not vocab:
        embedding = next((t for t in every if t.name == "token_embd.weight"), None)
        vocab = embedding.shape[-1] if embedding else 0  # GGUF's order: innermost first
    experts = number("expert_count", 0)
    return ModelShape(
        name=one_line((name or str(metadata.get("general.name", arch)))[:MAX_NAME]),
        architecture=arch,
        layers=number("block_count") - mtp,
        hidden=number("embedding_length"),
        vocab=int(vocab),
        experts=experts,
        top_k=number("expert_used_count", 0) if experts else 0,
        mtp_layers=mtp,
        kv_elements=head_dim if mla else kv_heads * (head_dim + value_dim),
        kv_heads=kv_heads,
        mla=mla,
        index_elements=number("attention.indexer.key_length", 0),
        context=number("context_length", 4096),
        tensors=every,
        dense_layers=number("leading_dense_block_count", 0) if experts else number("block_count") - mtp,
        attention_width=width,
        index_top_k=number("attention.indexer.top_k", 0),
    )
