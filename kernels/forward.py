"""A decode or verify forward made of the fused ops alone, with random weights.

For timing the kernels as a whole (``bench/kernels.py``) and for testing that their chain equals the
references' chain; the engine has its own forward, from checkpoints and with tensor parallelism.
"""

from dataclasses import dataclass, field

import torch

from kernels.catalog import Dims, Inputs, attention_case, layer_cases
from kernels.opset import OpSet, opset

EPS = 1e-6


@dataclass(slots=True, kw_only=True)
class Forward:
    """One forward: ``run()`` reads ``x``, leaves ``token`` and each layer's routing."""

    dims: Dims
    ops: OpSet
    x: torch.Tensor
    layers: list[Inputs]
    head: Inputs
    #: the output projection and the router as one op
    fused: bool = False
    token: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    experts: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """The layers, then the head with its argmax."""
        x, self.experts = self.x, []
        for weights in self.layers:
            x = self._layer(weights, x)
        self.hidden = x
        head = self.head
        self.token, _ = self.ops.norm_linear_argmax(x, head["norm"], EPS, head["w"])

    def _layer(self, w: Inputs, x: torch.Tensor) -> torch.Tensor:
        ops, normed = self.ops, None
        qkv = ops.norm_linear(x, w["norm"], EPS, w["qkv"])
        o = ops.qkv_attention(
            qkv, w["q_norm"], w["k_norm"], EPS, w["position"], w["cos"], w["sin"],
            w["k_cache"], w["v_cache"], w["slot"], w["prefix"], w["mask"],
            self.dims.head_size**-0.5,
        )  # fmt: skip
        route = (w["norm"], EPS, w["router"], self.dims.top_k)
        if self.fused:
            x, weight, expert, normed = ops.linear_route(o, w["out"], x, *route)
        else:
            x = ops.linear_add(o, w["out"], x)
            weight, expert = ops.norm_route(x, *route)
        self.experts.append(expert)
        experts = (w["norm"], EPS, w["gate_up"], w["down"], weight, expert)
        y: torch.Tensor = ops.norm_moe_add(x, *experts, x, normed=normed)
        return y

    def min_bytes(self, distinct_experts: float) -> float:
        """Weights touched (``distinct_experts`` a layer) and cache rows read."""
        total = float(self.head["w"].numel() * self.head["w"].element_size())
        for w in self.layers:
            for name in ("qkv", "out", "router", "k_cache", "v_cache"):
                total += w[name].numel() * w[name].element_size()
            for name in ("gate_up", "down"):
                each = w[name].numel() * w[name].element_size() / self.dims.experts
                total += each * distinct_experts
        return total


def build_forward(
    dims: Dims,
    num_layers: int,
    size: tuple[int, int],
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    ops: str = "triton",
) -> Forward:
    """Random weights for ``size`` = (sequences, tokens each); at most 64 tokens a sequence."""
    cases = {case.name: case for case in layer_cases(dims, *size, context)}
    attention = attention_case(dims, *size, context)
    layers = []
    for _ in range(num_layers):
        moe = cases["norm_moe_add"].make(device, dtype)
        layers.append(
            attention.make(device, dtype)
            | {
                "norm": moe["norm"],
                "qkv": cases["norm_linear"].make(device, dtype)["w"],
                "out": cases["linear_add"].make(device, dtype)["w"],
                "router": cases["norm_route"].make(device, dtype)["w"],
                "gate_up": moe["gate_up"],
                "down": moe["down"],
            }
        )
    x = torch.randn(size[0] * size[1], dims.hidden, device=device).to(dtype)
    head = cases["norm_linear_argmax"].make(device, dtype)
    return Forward(dims=dims, ops=opset(ops), x=x, layers=layers, head=head)
