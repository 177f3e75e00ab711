"""Reads the metadata of a GGUF file, and nothing of the weights behind it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def gguf_fields(file: Path, *wanted: str) -> list[Any]:
    """The values of the fields called `wanted`, in that order. Raises KeyError for one that is not there."""
    found = {}
    with file.open("rb") as stream:
        magic, version, _tensors, fields = struct.unpack("<4sIQQ", stream.read(24))
        assert magic == b"GGUF", f"{file} begins with {magic!r}, version {version}: not GGUF"
        for _ in range(fields):
            name = _string(stream)
            found[name] = _value(stream, *struct.unpack("<I", stream.read(4)))
    return [found[name] for name in wanted]


def _string(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length).decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", stream.read(12))
        return [_value(stream, inner) for _ in range(count)]
    layout = _LAYOUTS[kind]
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]
