"""The environment of another process as C ``getenv`` sees it inside, now.

``/proc/<pid>/environ`` shows what a process was started with: not what it or a library changed
since, nothing after setproctitle blanked it, and in a forked child the environment of its parent.
So the list that libc's ``environ`` points at is read from the process's memory. Works for 64-bit
Linux processes with a dynamic libc that we may trace: our own descendants.
Formats: ELF-64 (System V ABI), proc(5).
"""

import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

_SYMBOLS = frozenset({b"environ", b"__environ"})
_LIBC = ("libc.so.6", "libc-2.", "ld-musl-")
_SHT_DYNSYM = 11
_ET_DYN = 3
#: more variables or longer ones than any sane process has
_MAX_VARIABLES = 20_000
_MAX_BYTES = 1 << 20
_PAGE = 4096


def started_with(pid: int) -> dict[str, str] | None:
    """What the process was executed with; None where it is blanked, denied or gone."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if data and not data.strip(b"\0"):
        return None
    return _pairs(data.split(b"\0"))


def seen_inside(pid: int) -> dict[str, str] | None:
    """What ``getenv`` gives inside the process; None where its memory cannot be read."""
    try:
        address = _environ_address(pid)
        if address is None:
            return None
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            (array,) = struct.unpack("<Q", _read(memory, address, 8))
            return None if array == 0 else _pairs(_strings(memory, array))
    except (OSError, struct.error, ValueError):
        # gone, denied, or changed while it was read
        return None


def _pairs(words: list[bytes]) -> dict[str, str]:
    """The first of equal names counts, as for ``getenv``."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition(b"=")
        if equals:
            found.setdefault(name.decode("utf-8", "replace"), value.decode("utf-8", "replace"))
    return found


def _read(memory: BinaryIO, address: int, num_bytes: int) -> bytes:
    memory.seek(address)
    return memory.read(num_bytes) or b""


def _strings(memory: BinaryIO, array: int) -> list[bytes]:
    """The strings of a NULL-terminated array of pointers."""
    found: list[bytes] = []
    while len(found) < _MAX_VARIABLES:
        block = _read(memory, array + 8 * len(found), _PAGE - (array + 8 * len(found)) % _PAGE)
        for (pointer,) in struct.iter_unpack("<Q", block[: len(block) // 8 * 8]):
            if pointer == 0:
                return found
            found.append(_string(memory, pointer))
        if len(block) < 8:
            raise ValueError("the array runs out of memory")
    raise ValueError("the array has no end")


def _string(memory: BinaryIO, address: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    while total < _MAX_BYTES:
        # never across a page that may not be there
        block = _read(memory, address + total, _PAGE - (address + total) % _PAGE)
        if not block:
            raise ValueError("a string runs out of memory")
        head, end, _ = block.partition(b"\0")
        parts.append(head)
        if end:
            return b"".join(parts)
        total += len(block)
    raise ValueError("a string has no end")


def _environ_address(pid: int) -> int | None:
    """Where ``environ`` is in the process: in a program with a copy of its own, else in libc."""
    program = str(Path(f"/proc/{pid}/exe").readlink())
    loaded: dict[str, int] = {}
    with Path(f"/proc/{pid}/maps").open("rb") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if len(fields) < 6 or int(fields[2], 16) != 0:
                continue
            path = fields[5].strip().decode("utf-8", "replace")
            if path == program or Path(path).name.startswith(_LIBC):
                loaded.setdefault(path, int(fields[0].split(b"-")[0], 16))
    # a linked program may hold the variable itself (a copy relocation): libc uses that one then
    for path in sorted(loaded, key=lambda path: path != program):
        # through the process's own root: it may be in a container
        file = Path(f"/proc/{pid}/root{path}")
        status = file.stat()
        symbol = _symbol(str(file), status.st_ino, status.st_size)
        if symbol is not None:
            offset, relative = symbol
            return offset + (loaded[path] if relative else 0)
    return None


@lru_cache(maxsize=64)
def _symbol(path: str, inode: int, size: int) -> tuple[int, bool] | None:
    """Address of ``environ`` in an ELF file, and whether it counts from where it is loaded."""
    del inode, size  # part of the key only: another file of that name
    data = Path(path).read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return None
    (kind,) = struct.unpack_from("<H", data, 0x10)
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    for section in sections:
        if section[1] != _SHT_DYNSYM:
            continue
        start, length, names = section[4], section[5], sections[section[6]][4]
        for at in range(start, start + length, 24):
            name, _, _, defined, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", names + name)
            if defined and value and data[names + name : end] in _SYMBOLS:
                return int(value), kind == _ET_DYN
    return None
