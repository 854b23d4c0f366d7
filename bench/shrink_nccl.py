"""Makes a small libnccl for one GPU architecture, to carry to a machine without network.

usage: python bench/shrink_nccl.py --version 2.30.7 [--cuda 13] [--arch 90] [--out .whl]
       python bench/shrink_nccl.py --unpack .whl/libnccl-2.30.7.so.xz --out DIR

The wheel comes from the package index by pip. Every embedded GPU program of another architecture,
every program before linking and the debug sections are zeroed in place (layout, symbols and offsets
stay, so the dynamic loader sees the same file); xz compresses the rest. ``--unpack`` is for the GPU
machine and needs nothing but Python.
"""

import argparse
import ctypes
import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
#: kind of an embedded program; PTX is 1
MACHINE_CODE = 2
MEMBER = "nvidia/nccl/lib/libnccl.so.2"
#: linked programs, which the driver loads
LINKED = ".nv_fatbin"
#: the same before linking: read only when no linked program fits the GPU
RELOCATABLE = "__nv_relfatbin"


@dataclass(frozen=True, slots=True)
class Program:
    """One embedded GPU program: PTX or machine code of one architecture."""

    kind: int
    arch: int
    offset: int
    num_bytes: int


def sections(image: bytes | bytearray) -> dict[str, tuple[int, int]]:
    """File offset and size in bytes of each ELF64 section, by name."""
    table = struct.unpack_from("<Q", image, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_size) for i in range(count)
    ]
    names = headers[names_index][4]
    found = {}
    for header in headers:
        start = names + header[0]
        name = bytes(image[start : image.index(b"\0", start)]).decode()
        found[name] = (header[4], header[5])
    return found


def fat_binaries(image: bytes | bytearray, offset: int, size: int) -> Iterator[list[Program]]:
    """The programs of each fat binary in the ``.nv_fatbin`` section."""
    position, end = offset, offset + size
    while position + 16 <= end:
        magic, _, header_bytes, length = struct.unpack_from("<IHHQ", image, position)
        if magic != FATBIN_MAGIC:
            position += 8
            continue
        cursor, stop = position + header_bytes, position + header_bytes + length
        programs = []
        while cursor < stop:
            kind, _, entry_bytes, payload = struct.unpack_from("<HHIQ", image, cursor)
            arch = struct.unpack_from("<I", image, cursor + 0x1C)[0]
            programs.append(Program(kind, arch, cursor + entry_bytes, payload))
            cursor += entry_bytes + payload
        yield programs
        position = (stop + 7) & ~7


def zero_other_architectures(image: bytearray, arch: int) -> tuple[int, int]:
    """Zero in place what a GPU of ``arch`` never loads; returns bytes kept and zeroed.

    Linked machine code of ``arch`` stays. Raises ``ValueError`` if the library has none.
    """
    kept = zeroed = 0
    table = sections(image)
    for name in (LINKED, RELOCATABLE):
        if name not in table:
            continue
        for programs in fat_binaries(image, *table[name]):
            for p in programs:
                if name == LINKED and p.kind == MACHINE_CODE and p.arch == arch:
                    kept += p.num_bytes
                else:
                    image[p.offset : p.offset + p.num_bytes] = bytes(p.num_bytes)
                    zeroed += p.num_bytes
    for name, (offset, size) in table.items():
        if name.startswith(".debug_"):
            image[offset : offset + size] = bytes(size)
            zeroed += size
    if kept == 0:
        raise ValueError(f"no machine code of sm_{arch} in this library")
    return kept, zeroed


def download(version: str, cuda: int, folder: Path) -> Path:
    """The wheel of one NCCL version, through pip; a wheel already in ``folder`` is used again."""
    pattern = f"nvidia_nccl_cu{cuda}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.12"]
        for tag in ("manylinux_2_18_x86_64", "manylinux2014_x86_64"):
            command += ["--platform", tag]
        command += ["-d", str(folder), f"nvidia-nccl-cu{cuda}=={version}"]
        subprocess.run(command, check=True)
        found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"pip gave no nvidia-nccl-cu{cuda} {version}")
    return found[0]


def library_version(path: Path) -> str:
    """What ``ncclGetVersion`` of a library says, as "2.30.7" (loads it into this process)."""
    code = ctypes.c_int()
    ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def unpack(archive: Path, out: Path) -> Path:
    """Write ``libnccl.so.2`` of an archive made here into ``out/<archive name>/``; returns it."""
    folder = out / archive.name.removesuffix(".so.xz")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnccl.so.2"
    if not library.exists():
        partial = folder / "libnccl.so.2.part"
        partial.write_bytes(lzma.decompress(archive.read_bytes()))
        partial.rename(library)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="NCCL version, such as 2.30.7")
    parser.add_argument("--cuda", type=int, default=13, help="CUDA major version of the wheel")
    parser.add_argument("--arch", type=int, default=90, help="GPU architecture to keep (90 = H200)")
    parser.add_argument("--out", type=Path, default=Path(".whl"))
    parser.add_argument("--wheels", type=Path, help="folder that keeps downloaded wheels")
    parser.add_argument("--unpack", type=Path, metavar="ARCHIVE")
    options = parser.parse_args()
    if options.unpack is not None:
        print(unpack(options.unpack, options.out))
        return
    if options.version is None:
        parser.error("give --version or --unpack")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.wheels or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        wheel = download(options.version, options.cuda, folder)
        image = bytearray(zipfile.ZipFile(wheel).read(MEMBER))
        kept, zeroed = zero_other_architectures(image, options.arch)
        library = Path(scratch) / "libnccl.so.2"
        library.write_bytes(image)
        version = library_version(library)
        archive = options.out / f"libnccl-{version}.so.xz"
        preset = 6 | lzma.PRESET_EXTREME
        archive.write_bytes(lzma.compress(bytes(image), preset=preset))
    print(
        f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, NCCL {version}, "
        f"sm_{options.arch} kept {kept / 2**20:.1f} MiB, zeroed {zeroed / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
