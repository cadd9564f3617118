"""llama.cpp's C API out of xllamacpp's shared library: tokenising without a server."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any


class _Opaque(ctypes.Structure):
    """llama_model_params by value. Its fields are not needed, only its bytes: on x86-64 a structure of more than 16
    bytes is handed over in memory, so a longer one than the real one does no harm."""

    _fields_ = (("bytes", ctypes.c_ubyte * 512),)


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = _LOG(lambda level, text, data: None)


@cache
def _library() -> ctypes.CDLL:
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    library.llama_model_default_params.restype = _Opaque
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Opaque]
    library.llama_model_free.argtypes = [ctypes.c_void_p]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_tokenize.restype = ctypes.c_int32
    library.llama_tokenize.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ]
    library.llama_log_set.argtypes = [_LOG, ctypes.c_void_p]
    library.llama_log_set(_quiet, None)
    library.llama_backend_init()
    return library


class Tokenizer:
    """llama.cpp's tokenizer of a GGUF file. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        library = _library()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        assert self._model, path
        self._vocab = library.llama_model_get_vocab(self._model)

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: Any) -> None:
        _library().llama_model_free(self._model)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = _library().llama_tokenize(self._vocab, raw, len(raw), room, len(room), special, True)
        assert count >= 0, count
        return list(room[:count])
