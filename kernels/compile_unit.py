"""Compiling one recorded launch for one GPU architecture, without a GPU.

A unit is what Triton would compile for a launch: the kernel, the types of its arguments, what is
known of them (constants, divisibility by 16) and the launch options.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launch import Launch
from kernels.shared_memory import estimate

#: compute capability -> shared memory a block may use, bytes (CUDA C++ programming guide, technical
#: specifications per compute capability)
SHARED_LIMIT_BYTES = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
#: arguments whose type is the model's
_WEIGHTS = ("weight", "router", "gate_up", "down", "k_cache")
_OPTIONS = ("num_warps", "launch_pdl")


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation; ``key`` is equal for launches that share a binary."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable identity."""
        return (
            self.kernel.__name__, self.signature, self.constants, self.divisible, self.options
        )  # fmt: skip

    @property
    def estimate_bytes(self) -> int:
        """Upper bound of the shared memory it needs."""
        blocks = {name: int(value) for name, value in self.constants if isinstance(value, int)}
        wide = any(kind == "*fp32" for name, kind in self.signature if name in _WEIGHTS)
        return estimate(self.kernel.__name__, blocks, 4 if wide else 2)

    @property
    def text(self) -> str:
        """The choices that make this unit, for a report."""
        shown = {k: v for k, v in self.constants if k.startswith(("BLOCK", "SPLIT", "STAGES"))}
        shown |= dict(self.options)
        return " ".join(f"{k}={v}" for k, v in shown.items())


def unit_of(launch: Launch) -> Unit:
    """The compilation that ``launch`` needs, as Triton's own launcher would specialise it."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.args, strict=False))
    values |= {name: value for name, value in launch.meta.items() if name in names}
    signature, constants, divisible = [], [], []
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = values[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((name, "*" + _TYPES[value.dtype]))
            if value.storage_offset() * value.element_size() % 16 == 0:
                divisible.append(index)
        elif isinstance(value, float):
            signature.append((name, "fp32"))
        else:
            signature.append((name, "i32" if abs(value) < 2**31 else "i64"))
            if value % 16 == 0:
                divisible.append(index)
    options = tuple((name, launch.meta[name]) for name in _OPTIONS if name in launch.meta)
    return Unit(launch.kernel, tuple(signature), tuple(constants), tuple(divisible), options)


def compile_unit(unit: Unit, capability: int) -> int:
    """Compile for sm_``capability``; returns the shared memory it needs, bytes.

    Raises what Triton raises where the kernel does not compile.
    """
    source = ASTSource(
        fn=unit.kernel,
        signature=dict(unit.signature),
        constexprs=dict(unit.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in unit.divisible},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(unit.options)
    )
    return int(compiled.metadata.shared)
