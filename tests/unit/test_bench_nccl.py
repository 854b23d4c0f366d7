"""The recorder keeps what the selector needs; the shrinker zeroes only what a GPU never loads."""

import importlib.util
import io
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autotune.nccl_log import parse_nccl_stream
from autotune.selector_check import check_log

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "nccl_logs"


def bench(name: str) -> ModuleType:
    """A script of ``bench/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(DATA.glob("*.rank0.log")), ids=lambda path: path.stem)
def test_recorded_lines_suffice_for_the_selector(path: Path) -> None:
    recorder = bench("record_nccl_cases")
    text = path.read_text()
    lines = recorder.telling_lines(text)
    assert len(lines) < text.count("\n") - 40
    choices = [line for line in text.splitlines() if " Bytes -> " in line]
    data = "\n".join([*lines, *choices]).encode()
    report = check_log(parse_nccl_stream(io.BytesIO(data), "case"))
    assert (report.lines, report.equal, report.differences) == (len(choices), len(choices), ())
    (comm,) = report.comms
    assert (comm.search_equal, comm.table_equal) == (True, 6)


def test_recorded_cases_are_many_and_cover_the_switch_points() -> None:
    recorder = bench("record_nccl_cases")
    sizes = recorder.sizes()
    assert (sizes[0], sizes[-1]) == (8, 64 << 20)
    assert all(size % 2 == 0 for size in sizes)
    assert {256 << 10, 512 << 10, 1 << 20, 14336} <= set(sizes)
    cases = list(recorder.cases(Path("/a/libnccl.so.2"), [Path("/b/libnccl.so.2")]))
    assert len(cases) * len(sizes) >= 100
    assert len({(case.library, tuple(sorted(case.env.items()))) for case in cases}) == len(cases)


def fat_binary(programs: list[tuple[int, int, bytes]]) -> bytes:
    """A fat binary of (kind, architecture, payload)."""
    body = b""
    for kind, arch, payload in programs:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12)
        head += struct.pack("<I", arch)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(contents: dict[str, bytes]) -> bytearray:
    """The least of an ELF64 file with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*contents, ".shstrtab"])
    image = bytearray(64)
    headers = [bytes(64)]
    place = 1
    for name, data in [*contents.items(), (".shstrtab", names)]:
        image += bytes(-len(image) % 8)
        headers.append(
            struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, len(image), len(data), 0, 0, 8, 0)
        )
        image += data
        place += len(name) + 1
    struct.pack_into("<Q", image, 0x28, len(image))
    struct.pack_into("<HHH", image, 0x3A, 64, len(headers), len(headers) - 1)
    return image + b"".join(headers)


def test_shrinking_keeps_the_wanted_machine_code_and_every_offset() -> None:
    shrink = bench("shrink_nccl")
    code = {arch: bytes([arch]) * 72 for arch in (80, 90, 120)}
    linked = fat_binary([(2, 80, code[80]), (2, 90, code[90]), (1, 120, code[120])])
    relocatable = fat_binary([(2, 90, b"r" * 80)])
    image = elf({".nv_fatbin": linked + relocatable[:0], "__nv_relfatbin": relocatable,
                 ".debug_info": b"d" * 50, ".text": b"t" * 30})  # fmt: skip
    before = bytes(image)
    kept, zeroed = shrink.zero_other_architectures(image, 90)
    assert (kept, zeroed) == (72, 72 + 72 + 80 + 50)
    assert len(image) == len(before)
    assert code[90] in image
    assert b"t" * 30 in image
    assert not any(data in image for data in (code[80], code[120], b"r" * 8, b"d" * 8))
    assert shrink.sections(image) == shrink.sections(before)


def test_a_library_without_the_wanted_architecture_is_refused() -> None:
    shrink = bench("shrink_nccl")
    image = elf({".nv_fatbin": fat_binary([(2, 80, b"x" * 8)])})
    with pytest.raises(ValueError, match="no machine code of sm_90"):
        shrink.zero_other_architectures(image, 90)
