"""Prefetching changes no result, asks for exactly the bytes it was given, and compiles away."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels import prefetch
from kernels.catalog import ODD
from kernels.forward import build_forward
from kernels.launch import programmatic_launch, recording
from kernels.opset import opset

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")
SMALL = replace(ODD, hidden=72, heads=4, head_size=16, experts=6, inter=24, vocab=90)
AHEAD = {
    "norm_linear": "out", "linear_add": "router", "norm_route": "next", "norm_moe_add": "next",
    "linear_route": "next",
}  # fmt: skip


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


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "linear-route"])
def test_a_forward_that_prefetches_gives_the_same(device: torch.device, fused: bool) -> None:
    forward = build_forward(SMALL, 2, (1, 2), 7, device, torch.float32)
    forward.fused = fused
    forward.run()
    plain = forward.hidden.clone()
    forward.prefetch = AHEAD
    for choice in ("normal", "keep"):
        with prefetch.prefetching(choice):
            forward.run()
        assert torch.equal(forward.hidden, plain)
    forward.ops = opset("reference")
    forward.run()
    torch.testing.assert_close(plain, forward.hidden, rtol=1e-4, atol=1e-4)


def _recorded(choice: str, pdl: bool) -> dict[str, set[tuple[int, int]]]:
    """Kernel -> the (MODE, bytes) it is launched with."""
    found: dict[str, set[tuple[int, int]]] = {}
    forward = build_forward(SMALL, 2, (1, 2), 7, META, torch.bfloat16)
    forward.prefetch = AHEAD
    with programmatic_launch(pdl), prefetch.prefetching(choice), recording() as launches:
        for forward.fused in (False, True):
            forward.run()
    for launch in launches:
        if "PREFETCH" in launch.meta and "ahead_bytes" in launch.kernel.arg_names:
            given = launch.args[launch.kernel.arg_names.index("ahead_bytes")]
            found.setdefault(launch.kernel.__name__, set()).add((launch.meta["PREFETCH"], given))
    return found


@pytest.mark.parametrize(
    ("choice", "pdl", "mode"),
    [
        ("normal", False, prefetch.LINES),
        ("keep", False, prefetch.LINES_KEPT),
        ("normal", True, prefetch.RUNS),
        ("keep", True, prefetch.RUNS_KEPT),
    ],
)
def test_each_choice_reaches_the_kernels(choice: str, pdl: bool, mode: int) -> None:
    qkv_bytes = (4 + 2 * 2) * 16 * 72 * 2
    found = _recorded(choice, pdl)
    assert {m for given in found.values() for m, _ in given} <= {prefetch.OFF, mode}
    moe = {n for n in found if n.startswith(("down", "combine"))}
    assert any((mode, qkv_bytes) in found[name] for name in moe)
    assert any((mode, qkv_bytes) in given for n, given in found.items() if "norm_route" in n)
    assert any((mode, qkv_bytes) in given for n, given in found.items() if "linear_route" in n)


def test_off_is_the_kernel_without_prefetching() -> None:
    """The same launches as of a forward that was given nothing to prefetch."""
    shown = []
    for ahead in ({}, AHEAD):
        seen: list[object] = []
        forward = build_forward(SMALL, 2, (1, 2), 7, META, torch.bfloat16)
        forward.prefetch = ahead
        with prefetch.prefetching("off"), recording() as launches:
            forward.run()
        for launch in launches:
            numbers = [arg for arg in launch.args if not isinstance(arg, torch.Tensor)]
            seen.append((launch.kernel.__name__, launch.grid, launch.meta, numbers))
        shown.append(seen)
    assert shown[0] == shown[1]


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
