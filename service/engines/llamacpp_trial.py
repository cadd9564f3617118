"""A grammar is tried in a process of its own before the engine gets it: what would abort, hang or eat memory does so
there, within limits of time and memory. llama.cpp itself goes on without a grammar that it cannot follow, without a
word: so an answer is also judged there when it is whole.

Run as a program it is that process: requests and verdicts are JSON, one a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import random
import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from service.errors import BadRequest, EngineFailed, Overloaded

DEADLINE_S: Final = 10.0
START_S: Final = 60.0
MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 4
WALKS: Final = 4
WALKED_BYTES: Final = 100
REMEMBERED: Final = 512
WAITING: Final = 64
READY: Final = b"ready\n"
_LINE: Final = 64 << 20
_END: Final = 256
_TOO_MUCH: Final = f"it took more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to make a grammar of it"


class Trials:
    """Verdicts over grammars, each reached once (of the last `REMEMBERED`). One process, started when it is needed."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._child: asyncio.subprocess.Process | None = None
        self.tried = 0

    async def prove(self, grammar: str) -> None:
        """Raises BadRequest where `grammar` cannot be followed within the limits."""
        key = hashlib.sha256(grammar.encode()).digest()
        if key not in self._verdicts:
            async with self._place():
                if key not in self._verdicts:
                    verdict = await self._ask({"grammar": grammar})
                    self.tried += 1
                    self._verdicts[key] = _TOO_MUCH if verdict is None else verdict
        self._verdicts.move_to_end(key)
        fault = self._verdicts[key]
        while len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        if fault:
            raise BadRequest(f"the schema of this request cannot be enforced: {fault}")

    async def judge(self, grammar: str, text: str, *, cut: bool) -> None:
        """Raises EngineFailed where `grammar` does not allow the answer `text`, which may be `cut` by its length."""
        async with self._place():
            verdict = await self._ask({"grammar": grammar, "text": text, "cut": cut})
        if verdict is None:
            raise EngineFailed("the answer could not be compared with its schema in time")
        if verdict:
            raise EngineFailed(f"the answer breaks its schema: {verdict}")

    @contextlib.asynccontextmanager
    async def _place(self) -> Any:
        if self._waiting >= WAITING:
            raise Overloaded("too many schemas wait for their trial", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def _ask(self, request: dict[str, Any]) -> str | None:
        """The verdict, empty where there is no fault; None where the process did not reach one within its limits."""
        answered = False
        try:
            async with asyncio.timeout(START_S):
                if self._child is None or self._child.returncode is not None:
                    self._child = await _start()
            async with asyncio.timeout(DEADLINE_S):
                assert self._child.stdin is not None and self._child.stdout is not None
                self._child.stdin.write(orjson.dumps(request) + b"\n")
                await self._child.stdin.drain()
                line = await self._child.stdout.readline()
            answered = line.endswith(b"\n")
            return str(orjson.loads(line)["fault"]) if answered else None
        except (TimeoutError, ConnectionError, BrokenPipeError):
            return None
        finally:
            if not answered:
                await self.close()

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _start() -> asyncio.subprocess.Process:
    """The process, once it has loaded the library: a busy machine's start is no grammar's fault."""
    # The package's root, where this one was not installed.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service.engines.llamacpp_trial",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        limit=_LINE,
    )
    assert child.stdout is not None
    if await child.stdout.readline() != READY:
        raise EngineFailed("the process that tries schemas does not start")
    return child


# -- the process -----------------------------------------------------------------------------------------------------


class _Library(Protocol):
    """llguidance's C interface, as far as it is used."""

    llg_new_tokenizer: Any
    llg_constraint_init_set_defaults: Any
    llg_validate_grammar: Any
    llg_new_matcher: Any
    llg_free_matcher: Any
    llg_matcher_get_error: Any
    llg_matcher_compute_mask: Any
    llg_matcher_get_mask: Any
    llg_matcher_consume_tokens: Any
    llg_matcher_is_accepting: Any


class _TokenizerInit(ctypes.Structure):
    _fields_ = (
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.POINTER(ctypes.c_uint32)),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
    )


class Judge:
    """llguidance as it is inside xllamacpp, with the 256 bytes as its tokens."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("xllamacpp")
        if found is None or found.origin is None:
            raise RuntimeError("xllamacpp is not installed")
        self._library: _Library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
        library, pointer, text = self._library, ctypes.c_void_p, ctypes.c_char_p
        library.llg_new_tokenizer.restype = library.llg_new_matcher.restype = pointer
        library.llg_new_tokenizer.argtypes = [pointer, text, ctypes.c_size_t]
        library.llg_constraint_init_set_defaults.argtypes = [pointer, pointer]
        library.llg_validate_grammar.argtypes = [pointer, text, text, text, ctypes.c_size_t]
        library.llg_new_matcher.argtypes = [pointer, text, text]
        library.llg_free_matcher.argtypes = library.llg_matcher_compute_mask.argtypes = [pointer]
        library.llg_matcher_get_mask.argtypes, library.llg_matcher_get_mask.restype = [pointer], pointer
        library.llg_matcher_get_error.argtypes, library.llg_matcher_get_error.restype = [pointer], text
        library.llg_matcher_consume_tokens.argtypes = [pointer, pointer, ctypes.c_size_t]
        library.llg_matcher_is_accepting.argtypes, library.llg_matcher_is_accepting.restype = [pointer], ctypes.c_bool
        self._lengths = (ctypes.c_uint32 * (_END + 1))(*([1] * _END + [5]))
        self._bytes = bytes(range(_END)) + b"\xff</s>"
        how = _TokenizerInit(_END + 1, _END, self._lengths, self._bytes, None, False, None, True, None, None)
        fault = ctypes.create_string_buffer(1000)
        tokenizer = library.llg_new_tokenizer(ctypes.byref(how), fault, len(fault))
        if not tokenizer:
            raise RuntimeError(fault.value.decode(errors="replace"))
        self._init = ctypes.create_string_buffer(1024)  # larger than the structure, whose defaults are written there
        library.llg_constraint_init_set_defaults(self._init, tokenizer)

    def fault_of(self, grammar: str) -> str:
        """Why the grammar cannot be followed, empty where it can."""
        message = ctypes.create_string_buffer(4000)
        verdict = self._library.llg_validate_grammar(self._init, b"lark", grammar.encode(), message, len(message))
        if verdict < 0:
            return _words(message.value)
        return next(filter(None, (self._walked(grammar, random.Random(seed)) for seed in range(WALKS))), "")

    def _walked(self, grammar: str, rng: random.Random) -> str:
        """The fault met on the way of a random answer: a grammar may be found too large only when it is followed."""
        library, token = self._library, ctypes.c_uint32()
        matcher = library.llg_new_matcher(self._init, b"lark", grammar.encode())
        try:
            for _ in range(WALKED_BYTES):
                if library.llg_matcher_compute_mask(matcher) != 0:
                    fault = _words(library.llg_matcher_get_error(matcher) or b"")
                    return "nothing fits it" if fault == "NoExtensionBias" else fault
                mask = ctypes.string_at(library.llg_matcher_get_mask(matcher), _END // 8 + 1)
                allowed = [byte for byte in range(_END) if mask[byte // 8] >> byte % 8 & 1]
                if not allowed:
                    return "" if library.llg_matcher_is_accepting(matcher) else "nothing fits it"
                token.value = rng.choice(allowed)
                if library.llg_matcher_consume_tokens(matcher, ctypes.byref(token), 1) != 0:
                    return _words(library.llg_matcher_get_error(matcher) or b"")
            return ""
        finally:
            library.llg_free_matcher(matcher)

    def fault_in(self, grammar: str, text: str, *, cut: bool) -> str:
        """What of `text` the grammar does not allow; empty where it is an answer of it, or the beginning of one."""
        data = text.encode("utf-8", "replace")
        tokens = (ctypes.c_uint32 * len(data)).from_buffer(bytearray(_wide(data)))
        matcher = self._library.llg_new_matcher(self._init, b"lark", grammar.encode())
        try:
            if self._library.llg_matcher_consume_tokens(matcher, tokens, len(data)) != 0:
                return "it left the grammar"
            return "" if cut or self._library.llg_matcher_is_accepting(matcher) else "it ended too early"
        finally:
            self._library.llg_free_matcher(matcher)


def _wide(data: bytes) -> bytes:
    """Each byte as a 32-bit token."""
    return b"".join(byte.to_bytes(4, sys.byteorder) for byte in data)


def _words(message: bytes) -> str:
    """The library's sentence, without the grammar that it shows below."""
    text = message.decode("utf-8", "replace").removeprefix("at 2(8): failed to compile JSON schema: ")
    return text.partition("\n   1 | ")[0].partition("\n<state>")[0].strip()[:500]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge = Judge()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        # Counted from here: the kernel ends this process even where nobody waits for it any more.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        asked = orjson.loads(line)
        text = asked.get("text")
        fault = (
            judge.fault_of(asked["grammar"])
            if text is None
            else judge.fault_in(asked["grammar"], text, cut=asked["cut"])
        )
        sys.stdout.buffer.write(orjson.dumps({"fault": fault}) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
