"""The rebuilt tokenizer gives llama.cpp's ids: byte-level BPE (GLM-5's split, SmolLM2's) and SentencePiece (Gemma)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.gguf.errors import GgufError
from service.gguf.header import read_header
from service.gguf.tokenizer import SPLITS, tokenizer_config, tokenizer_json
from tests.models import demo, gemma
from tests.tiny_glm import Tiny, make
from tests.unit.gguf.build import File, rich

pytest.importorskip("xllamacpp")
tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and\ttab\r\n\r\nnew lines \n \n",
    "It's we'll DON'T I'M they'Ve 'tis",
    "1 22 333 4444 55555 3.14159 1e-9 0x7f ½ ² ٣ १२३",
    "naïve café Ünïcödé ẞ İ ǅ",
    "emoji 🙂 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 ✌🏽 🤖🤖",
    "中文分词测试，混合English和数字123。",
    "日本語のトークン化テスト カタカナ ｶﾀｶﾅ",
    "한국어 토큰화 시험",
    "Русский текст. Ελληνικά. עברית. العربية. हिन्दी ไทย",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\tif x != 0 && y || z: pass",
    '<html><body class="a b">&nbsp;</body></html> {\'a\': [1,2,{"b":null}]}',
    "a\u0301 combining \u200b zero\u200dwidth \ufeff bom \u00a0 nbsp \u2028 separator",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "the the The THE tHe then in the thing on an and",
    "trailing spaces   ",
    "!!!???...---___***///\\\\\\",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
]
GLM = [
    "[gMASK]<sop><|user|>hi<|assistant|><think></think>",
    "a <|endoftext|> b",
    "<|user|><|user|>",
    "<|use r|>",
    "<sop",
]
SMOL = ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "<|im_start"]
GEMMA = ["<start_of_turn>user\nhi<end_of_turn>\n", "<bos><eos><pad>", "\n\n\n\n\n", "\t\t\t", "▁a▁b", "<unused0>"]


@dataclass(frozen=True)
class Subject:
    path: Path
    special: list[str]
    ours: Any
    files: dict[str, str]


@pytest.fixture(scope="module", params=["glm", "smollm", "gemma"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "glm":
        path, special = (
            make(tmp_path_factory.mktemp("tiny") / "t.gguf", "q8_0", Tiny(layers=1, dense_layers=1, mtp=0)),
            GLM,
        )
    else:
        path, special = (demo(), SMOL) if request.param == "smollm" else (gemma(), GEMMA)
    header = read_header(path)
    whole = json.dumps(tokenizer_json(header))
    files = {"tokenizer.json": whole, "tokenizer_config.json": json.dumps(tokenizer_config(header, 4096))}
    return Subject(path, special, tokenizers.Tokenizer.from_str(whole), files)


def test_ids_equal_llamacpp(subject: Subject) -> None:
    from tests.tiny_glm.llamacpp import Tokenizer

    texts = CORPUS + subject.special + [a + b for a in subject.special for b in CORPUS[2:8]]
    with Tokenizer(subject.path) as theirs:
        for text in texts:
            assert subject.ours.encode(text, add_special_tokens=True).ids == theirs.encode(text), repr(text)


def test_partial_utf8_survives(subject: Subject) -> None:
    """Tokens that are parts of a character join to it again."""
    for text in CORPUS:
        ids = subject.ours.encode(text, add_special_tokens=False).ids
        assert subject.ours.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_it(subject: Subject, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    if "gemma" in subject.path.name:
        pytest.skip("a minute of transformers' own work on 262,144 tokens")
    for name, text in subject.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in CORPUS + subject.special:
        assert loaded(text)["input_ids"] == subject.ours.encode(text, add_special_tokens=True).ids, repr(text)


def test_what_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    def header_with(**keys: object) -> object:
        base = [(k, v) for k, v in rich().keys if not k.startswith("tokenizer.")]
        found = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
        found |= {"tokenizer.ggml." + key: value for key, value in keys.items()}
        return read_header(File(keys=base + list(found.items())).write(tmp_path / "a.gguf"))

    for keys, words in [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model: 'rwkv' is not supported"),
        ({"pre": "novel"}, r"tokenizer\.ggml\.pre: 'novel' is not supported \(gpt-2"),
        ({"token_type": [1]}, "1 values for 2 tokens"),
        ({"merges": ["ab"]}, "merge 0 is not two pieces"),
        ({"model": "llama", "scores": [0.5]}, "1 values for 2 tokens"),
    ]:
        with pytest.raises(GgufError, match=words):
            tokenizer_json(header_with(**keys))  # type: ignore[arg-type]
    with pytest.raises(GgufError, match="token 9 of a vocabulary of 2"):
        tokenizer_config(header_with(eos_token_id=9), 10)  # type: ignore[arg-type]


def test_every_split_is_a_regex() -> None:
    for name, regexes in SPLITS.items():
        for regex in regexes:
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated").pre_tokenize_str(f"{name} 12 a")
