"""Prefetching changes no result, asks for exactly the bytes it was given, and compiles away."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels import prefetch

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")


@triton.jit  # type: ignore[untyped-decorator]
def _spans_kernel(  # type: ignore[no-untyped-def]
    first_out, size_out, num_bytes, THREADS: tl.constexpr
):
    part = tl.program_id(0)
    _, first, size = prefetch.spans(num_bytes, part, tl.num_programs(0), THREADS)
    at = part * THREADS + tl.arange(0, THREADS)
    tl.store(first_out + at, first)
    tl.store(size_out + at, size)


@pytest.mark.parametrize("num_bytes", [16, 112, 4096, 100_000, 16_777_216, 2**30])
@pytest.mark.parametrize("programs", [1, 28, 1024])
def test_threads_ask_for_every_byte_once(
    device: torch.device, num_bytes: int, programs: int
) -> None:
    first, size = (torch.empty(programs * 32, dtype=torch.int64, device=device) for _ in range(2))
    _spans_kernel[(programs,)](first, size, num_bytes, THREADS=32)
    asked = [(f, s) for f, s in zip(first.tolist(), size.tolist(), strict=True) if s > 0]
    assert all(f % 16 == 0 and s % 16 == 0 for f, s in asked)
    end = 0
    for start, length in asked:
        assert start == end
        end = start + length
    assert end == num_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(4, 8, device=META).t(), "must be contiguous"),
        (lambda: torch.empty(4, 8, device=META)[:, :4], "must be contiguous"),
    ],
    ids=["transposed", "columns"],
)
def test_a_tensor_with_gaps_is_refused(make: Callable[[], torch.Tensor], message: str) -> None:
    with prefetch.prefetching("keep"), pytest.raises(ValueError, match=message):
        prefetch.prefetch_arguments(make(), torch.empty(1, device=META))


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prefetch.VARIABLE, "always")
    with pytest.raises(ValueError, match="AUTOTUNE_PREFETCH='always': must be one of off, normal"):
        prefetch.prefetch_choice()
    with pytest.raises(ValueError, match="must be one of"), prefetch.prefetching("on"):
        pass


_COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.prefetch import prefetch_from_last

@triton.jit
def kernel(weight, num_bytes, out, MODE: tl.constexpr):
    prefetch_from_last(weight, num_bytes, 1024, MODE)
    tl.store(out, 1)

for capability, mode in ((80, 1), (89, 2), (90, 3), (90, 4), (100, 4), (120, 4), (90, 0)):
    types = {"weight": "*bf16", "num_bytes": "i32", "out": "*i32", "MODE": "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs={"MODE": mode})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    code = [line.strip() for line in ptx.splitlines() if not line.strip().startswith((".", "//"))]
    print(capability, mode, [line.split(" [")[0] for line in code if "prefetch" in line])
"""


def test_every_architecture_compiles_its_own_instruction(tmp_path: Path) -> None:
    script = tmp_path / "compile_prefetch.py"
    script.write_text(_COMPILE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = {tuple(line.split(" ", 2)[:2]): line for line in done.stdout.splitlines()}
    assert "prefetch.global.L2" in shown["80", "1"]
    assert "prefetch.global.L2::evict_last" in shown["89", "2"]
    assert "cp.async.bulk.prefetch.L2.global" in shown["90", "3"]
    for capability in ("90", "100", "120"):
        assert "cp.async.bulk.prefetch.L2.global.L2::cache_hint" in shown[capability, "4"]
    assert shown["90", "0"].endswith("[]")
