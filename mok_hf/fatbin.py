"""Which GPUs the code in an extension is for, read from its fat binaries: CUDA's cuobjdump is not needed.

An extension compiled by nvcc has one fat binary per source in the ELF section .nv_fatbin: a header, then an entry for
each compute capability (or PTX text). The layout is not documented; tests/hub/test_cli.py holds it to what nvcc writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = 0xBA55ED50
_MACHINE_CODE = 2  # kind of an entry; 1 is PTX
_EXACT, _FAMILY = 1 << 20, 1 << 21  # flags of an entry: the capability's suffix a or f


def architectures(library: Path) -> list[frozenset[str]]:
    """Of each fat binary in an extension, the compute capabilities that it has machine code for, e.g. {"9.0a"}.

    Raises:
        ValueError: `library` is no 64-bit ELF file.
    """
    return [frozenset(_entries(binary)) for section in _sections(library) for binary in _binaries(section)]


def _sections(library: Path) -> Iterator[bytes]:
    data = library.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ValueError(f"{library} is no 64-bit ELF file.")
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQ", data, table + 64 * i) for i in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        if data[start : data.index(b"\0", start)] == b".nv_fatbin":
            yield data[offset : offset + size]


def _binaries(section: bytes) -> Iterator[bytes]:
    at = 0
    while at + 16 <= len(section):
        magic, _, header, size = struct.unpack_from("<IHHQ", section, at)
        if magic != _MAGIC:
            at += 8  # padding between fat binaries
            continue
        yield section[at + header : at + header + size]
        at += header + size


def _entries(binary: bytes) -> Iterator[str]:
    at = 0
    while at + 64 <= len(binary):
        kind, _, header, size = struct.unpack_from("<HHIQ", binary, at)
        (number,) = struct.unpack_from("<I", binary, at + 28)
        (flags,) = struct.unpack_from("<I", binary, at + 40)
        if kind == _MACHINE_CODE:
            suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
            yield f"{number // 10}.{number % 10}{suffix}"
        at += header + size
