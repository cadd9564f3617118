"""A Hugging Face tokenizer made from a GGUF header alone; ids equal llama.cpp's (tests/unit/gguf/test_tokenizer.py).

Two families: byte-level BPE (`tokenizer.ggml.model` = gpt2; the split into words is chosen by `tokenizer.ggml.pre`) and
SentencePiece BPE (= llama; merges follow from the scores). Any other value is an error that names the key.
"""

from __future__ import annotations

from typing import Any

from service.gguf.errors import GgufError
from service.gguf.header import GgufHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREE, _BY_ONE = _CASELESS + r"\p{N}{1,3}" + _REST, _CASELESS + r"\p{N}" + _REST

# What llama.cpp splits by for each name (src/llama-vocab.cpp, llm_tokenizer_bpe); applied one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama-bpe": (_BY_THREE,),
    "llama3": (_BY_THREE,),
    "glm4": (_BY_THREE,),
    "chatglm-bpe": (_BY_THREE,),
    "qwen2": (_BY_ONE,),
    "deepseek-r1-qwen": (_BY_ONE,),
    "stablelm2": (_BY_ONE,),
}
# These look a whole word up before they merge.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "glm4"})
# These begin with BOS unless the header says otherwise.
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3"})


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json. Raises GgufError."""
    model = header.text("tokenizer.ggml.model")
    tokens = header.texts("tokenizer.ggml.tokens")
    types = header.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in header else []
    types = types or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(header.path, "key tokenizer.ggml.token_type", f"{len(types)} values for {len(tokens)} tokens")
    if model == "gpt2":
        body = _byte_level(header, tokens, types)
    elif model == "llama":
        body = _sentencepiece(header, tokens, types)
    else:
        raise GgufError(header.path, "key tokenizer.ggml.model", f"{model!r} is not supported (gpt2 and llama are)")
    return {"version": "1.0", "truncation": None, "padding": None, **body}


def tokenizer_config(header: GgufHeader, context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = header.texts("tokenizer.ggml.tokens")

    def named(key: str) -> str | None:
        if key not in header:
            return None
        number = header.integer(key)
        if not 0 <= number < len(tokens):
            raise GgufError(header.path, f"key {key}", f"token {number} of a vocabulary of {len(tokens)}")
        return tokens[number]

    found = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("tokenizer.ggml.bos_token_id"),
        "eos_token": named("tokenizer.ggml.eos_token_id"),
        "pad_token": named("tokenizer.ggml.padding_token_id") or named("tokenizer.ggml.eos_token_id"),
        "chat_template": header.chat_template,
    }
    return {key: value for key, value in found.items() if value is not None}


def stop_tokens(header: GgufHeader) -> list[int]:
    """Ids that end an answer: end of text, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [header.integer(f"tokenizer.ggml.{key}") for key in keys if f"tokenizer.ggml.{key}" in header]
    return list(dict.fromkeys(found))


def _added(tokens: list[str], types: list[int], kinds: frozenset[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **flags, "special": kind in (CONTROL, UNKNOWN)}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in kinds and token
    ]


def _begins_with_bos(header: GgufHeader, default: bool) -> int | None:
    if header.boolean("tokenizer.ggml.add_bos_token", default) and "tokenizer.ggml.bos_token_id" in header:
        return header.integer("tokenizer.ggml.bos_token_id")
    return None


def _template(tokens: list[str], bos: int) -> dict[str, Any]:
    mark = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    known = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, second],
        "special_tokens": known,
    }


def _byte_level(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    pre = header.text("tokenizer.ggml.pre", "gpt-2")
    if pre not in SPLITS:
        raise GgufError(header.path, "key tokenizer.ggml.pre", f"{pre!r} is not supported ({', '.join(SPLITS)} are)")
    added = _added(tokens, types, frozenset({CONTROL, USER_DEFINED}))
    # Special ones too: an added token that the model does not know would get an id past the end.
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    merges = [merge.split(" ", 1) for merge in header.texts("tokenizer.ggml.merges")]
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise GgufError(header.path, "key tokenizer.ggml.merges", f"merge {number} is not two pieces")
    merges = [m for m in merges if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in SPLITS[pre]
    ]
    bos = _begins_with_bos(header, default=pre in _BOS_BY_DEFAULT)
    return {
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_only]},
        "post_processor": {**bytes_only, "trim_offsets": False} if bos is None else _template(tokens, bos),
        "decoder": {**bytes_only, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _sentencepiece(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    added = _added(tokens, types, frozenset({CONTROL, USER_DEFINED, UNKNOWN}))
    vocab = {token: number for number, token in enumerate(tokens)}
    usable = {t: i for t, i in vocab.items() if types[i] == NORMAL}
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise GgufError(header.path, "key tokenizer.ggml.scores", f"{len(scores)} values for {len(tokens)} tokens")
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-scores[number], usable[left], usable[right], left, right))
    found.sort()
    prefix = header.boolean("tokenizer.ggml.add_space_prefix", True)
    bos = _begins_with_bos(header, default=True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = header.integer("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise GgufError(header.path, "key tokenizer.ggml.unknown_token_id", f"token {unknown} of {len(tokens)}")
    return {
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": ([{"type": "Prepend", "prepend": "\u2581"}] if prefix else []) + [spaces],
        },
        "pre_tokenizer": None,
        "post_processor": None if bos is None else _template(tokens, bos),
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[left, right] for _, _, _, left, right in found],
        },
    }
