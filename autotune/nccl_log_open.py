"""Opens what people keep NCCL's logs in: files, folders of nodes, compressed files, stdin."""

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from autotune.errors import UserError

STDIN = "-"
#: files in a folder of a run that are no logs and may be huge
_NO_LOGS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy", ".npz", ".so", ".whl", ".pyc", ".db",
     ".sqlite", ".parquet", ".tar", ".zip", ".png", ".jpg", ".nsys-rep", ".qdrep", ".json",
     ".jsonl", ".yaml", ".yml", ".csv", ".py"}
)  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz")
#: what a damaged or cut compressed file raises while it is read
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, UnicodeError)


def log_files(paths: Iterable[Path | str]) -> Iterator[Path]:
    """The files that paths stand for; a folder for every log in it and below.

    Raises ``UserError`` for a path that does not exist and for a folder without files.
    """
    for given in paths:
        path = Path(given)
        if str(path) == STDIN:
            yield path
        elif path.is_dir():
            inside = [p for p in path.rglob("*") if p.is_file() and _may_be_log(p)]
            if not inside:
                raise UserError(f"no log in the folder {path}")
            yield from sorted(inside)
        elif path.exists():
            yield path
        else:
            raise UserError(f"no NCCL log at {path}")


def _may_be_log(path: Path) -> bool:
    inner = path.stem if path.suffix in _COMPRESSED else path.name
    return Path(inner).suffix not in _NO_LOGS


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's text as bytes, decompressed where its first bytes say that it is compressed.

    Raises ``UserError`` for a compression that Python does not know.
    """
    if str(path) == STDIN:
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        start = file.peek(6)[:6]
        if start.startswith(b"\x28\xb5\x2f\xfd"):
            raise UserError(f"{path} is compressed with zstd: give `zstd -dc {path}` by a pipe (-)")
        yield _decompressed(file, start)


def chunk(file: IO[bytes], num_bytes: int) -> bytes:
    """The next bytes, at most ``num_bytes``; of a cut compressed file all that came before the cut.

    Raises one of ``DAMAGED`` where nothing more can be read.
    """
    if isinstance(file, gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile):
        return file.read1(num_bytes)
    return file.read(num_bytes)


def _decompressed(file: io.BufferedReader, start: bytes) -> IO[bytes]:
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh"):
        return cast(IO[bytes], bz2.BZ2File(file))
    if start.startswith(b"\xfd7zXZ\x00"):
        return cast(IO[bytes], lzma.LZMAFile(file))
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        # PowerShell redirects into UTF-16
        return cast(IO[bytes], codecs.EncodedFile(file, "utf-8", "utf-16", errors="replace"))
    return file
