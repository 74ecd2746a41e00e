"""What general compressors need for a text, in bits per byte."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from typing import NamedTuple

Compress = Callable[[bytes], bytes]


class Compressed(NamedTuple):
    name: str
    file_by_file: float
    """Bits per byte, each file on its own: what a model is compared with that starts each file afresh."""
    as_one: float
    """Bits per byte of all files as one stream, where later files profit from earlier ones."""


def compress_all(contents: Sequence[bytes]) -> list[Compressed]:
    """At their strongest settings, headers and checksums included."""
    total, joined = sum(map(len, contents)), b"".join(contents)
    found = []
    for name, compress in known().items():
        apart = sum(len(compress(content)) for content in contents)
        found.append(Compressed(name, 8 * apart / total, 8 * len(compress(joined)) / total))
    return found


def known() -> dict[str, Compress]:
    """gzip, bz2 and xz come with Python; zstd from Python 3.14 on, or with the zstandard package."""
    strongest: dict[str, Compress] = {
        "gzip -9": lambda content: gzip.compress(content, 9),
        "bz2 -9": lambda content: bz2.compress(content, 9),
        "xz -9e": lambda content: lzma.compress(content, preset=9 | lzma.PRESET_EXTREME),
    }
    zstd = find_zstd()
    return strongest if zstd is None else {**strongest, "zstd -22": zstd}


def find_zstd() -> Compress | None:
    try:
        from compression import zstd  # type: ignore[import-not-found]  # from Python 3.14 on

        return lambda content: zstd.compress(content, level=22)
    except ImportError:
        pass
    try:
        import zstandard

        return lambda content: zstandard.ZstdCompressor(level=22).compress(content)
    except ImportError:
        return None
