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
import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from service.errors import BadRequest, EngineFailed, Overloaded

DEADLINE_S: Final = 5.0
MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 4
REMEMBERED: Final = 512
WAITING: Final = 64
_LINE: Final = 64 << 20
_END: Final = 256


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
                    self._verdicts[key] = f"took more than {DEADLINE_S:g} s or 1 GiB" if verdict is None else verdict
        self._verdicts.move_to_end(key)
        fault = self._verdicts[key]
        while len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        if fault:
            raise BadRequest(f"the schema of this request cannot be enforced: {fault}")

    async def judge(self, grammar: str, text: str) -> None:
        """Raises EngineFailed where the whole answer `text` is not one that `grammar` allows."""
        async with self._place():
            verdict = await self._ask({"grammar": grammar, "text": text})
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

    async def _ask(self, request: dict[str, str]) -> str | None:
        """The verdict, empty where there is no fault; None where the process did not reach one within its limits."""
        answered = False
        try:
            async with asyncio.timeout(DEADLINE_S):
                if self._child is None or self._child.returncode is not None:
                    self._child = await _start()
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
    # The package's root, where this one was not installed.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service.engines.llamacpp_trial",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        limit=_LINE,
    )


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
        matcher = self._library.llg_new_matcher(self._init, b"lark", grammar.encode())
        try:
            self._library.llg_matcher_compute_mask(matcher)
            return _words(self._library.llg_matcher_get_error(matcher) or b"")
        finally:
            self._library.llg_free_matcher(matcher)

    def fault_in(self, grammar: str, text: str) -> str:
        """What of `text` the grammar does not allow, empty where it is a whole answer of it."""
        data = text.encode("utf-8", "replace")
        tokens = (ctypes.c_uint32 * len(data)).from_buffer(bytearray(_wide(data)))
        matcher = self._library.llg_new_matcher(self._init, b"lark", grammar.encode())
        try:
            if self._library.llg_matcher_consume_tokens(matcher, tokens, len(data)) != 0:
                return "it left the grammar"
            return "" if self._library.llg_matcher_is_accepting(matcher) else "it ended too early"
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
    for line in sys.stdin.buffer:
        # Counted from here: the kernel ends this process even where nobody waits for it any more.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        asked = orjson.loads(line)
        text = asked.get("text")
        fault = judge.fault_of(asked["grammar"]) if text is None else judge.fault_in(asked["grammar"], text)
        sys.stdout.buffer.write(orjson.dumps({"fault": fault}) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
