"""The basic ops (one mathematical step each) as cases; see ``catalog``."""

from typing import Any

import torch

from kernels.catalog import Case, Dims, Inputs
from kernels.opset import OpSet


def basic_case(
    name: str,
    make: Any,
    run: Any,
    weights: tuple[str, ...] = (),
) -> Case:
    """A case without tuning; its floor is every tensor among its inputs, once."""

    def min_bytes(inputs: Inputs) -> int:
        tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    return Case(name=name, tuned=(), make=make, run=run, weights=weights, min_bytes=min_bytes)


def random_values(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal values; no values on the meta device."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device)


def _chain(num_sequences: int, num_nodes: int, device: torch.device) -> torch.Tensor:
    parent = torch.arange(-1, num_nodes - 1, device=device)
    return parent.repeat(num_sequences, 1)


def basic_cases(dims: Dims, num_sequences: int, num_tokens: int, context: int) -> list[Case]:
    """One case per basic op; min_bytes counts every input once."""
    rows = num_sequences * num_tokens
    cache = (num_sequences, context + num_tokens, dims.kv_heads, dims.head_size)
    batch = (num_sequences, num_tokens)

    def norm(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "x": random_values(device, dtype, rows, dims.hidden),
            "residual": random_values(device, dtype, rows, dims.hidden),
            "w": random_values(device, dtype, dims.hidden),
        }

    def heads(device: torch.device, dtype: torch.dtype) -> Inputs:
        angle = torch.rand(context + num_tokens, dims.head_size // 2, device=device).repeat(1, 2)
        return {
            "q": random_values(device, dtype, rows, dims.heads, dims.head_size),
            "k": random_values(device, dtype, rows, dims.kv_heads, dims.head_size),
            "q_norm": random_values(device, dtype, dims.head_size),
            "k_norm": random_values(device, dtype, dims.head_size),
            "position": torch.arange(rows, device=device) % (context + num_tokens),
            "cos": angle.cos(),
            "sin": angle.sin(),
        }

    def kv(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "q": random_values(device, dtype, *batch, dims.heads, dims.head_size),
            "k": random_values(device, dtype, *batch, dims.kv_heads, dims.head_size),
            "v": random_values(device, dtype, *batch, dims.kv_heads, dims.head_size),
            "k_cache": random_values(device, dtype, *cache),
            "v_cache": random_values(device, dtype, *cache),
            "slot": torch.arange(num_sequences, device=device),
            "prefix": torch.full((num_sequences,), context, dtype=torch.int64, device=device),
        }

    def compact(device: torch.device, dtype: torch.dtype) -> Inputs:
        inputs = kv(device, dtype)
        source = torch.arange(num_tokens, device=device).repeat(num_sequences, 1)
        return {
            "cache": torch.stack([inputs["k_cache"], inputs["v_cache"]]),
            "slot": inputs["slot"],
            "start": inputs["prefix"],
            "source": (source * 2).clamp(max=num_tokens - 1),
            "count": torch.full_like(inputs["slot"], (num_tokens + 1) // 2),
        }

    def tree(device: torch.device, dtype: torch.dtype) -> Inputs:
        token = torch.zeros(batch, dtype=torch.int64, device=device)
        probability = torch.rand(*batch, dims.vocab, device=device)
        probability = probability / probability.sum(-1, keepdim=True)
        return {
            "token": token,
            "parent": _chain(num_sequences, num_tokens, device),
            "target": token,
            "p": probability,
            "uniform_BT": torch.rand(batch, device=device),
            "uniform_B": torch.rand(num_sequences, device=device),
        }

    def logits(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "logits": random_values(device, dtype, rows, dims.vocab),
            "uniform": torch.rand(rows, device=device),
        }

    def attention(ops: OpSet, i: Inputs) -> Any:
        scale = dims.head_size**-0.5
        return ops.tree_attention(
            i["q"], i["k_cache"], i["v_cache"], i["slot"], i["prefix"], None, scale
        )

    return [
        basic_case("rms_norm", norm, lambda ops, i: ops.rms_norm(i["x"], i["w"], 1e-6)),
        basic_case(
            "add_rms_norm",
            norm,
            lambda ops, i: ops.add_rms_norm(i["x"], i["residual"], i["w"], 1e-6),
        ),
        basic_case(
            "qk_norm_rope",
            heads,
            lambda ops, i: ops.qk_norm_rope(
                i["q"], i["k"], i["q_norm"], i["k_norm"], 1e-6, i["position"], i["cos"], i["sin"]
            ),
        ),
        basic_case(
            "route",
            lambda device, dtype: {"logits": random_values(device, dtype, rows, dims.experts)},
            lambda ops, i: ops.route(i["logits"], dims.top_k),
        ),
        basic_case(
            "store_kv",
            lambda device, dtype: {k: v for k, v in kv(device, dtype).items() if k != "q"},
            lambda ops, i: ops.store_kv(
                i["k"], i["v"], i["k_cache"], i["v_cache"], i["slot"], i["prefix"]
            ),
        ),
        basic_case("tree_attention", kv, attention),
        basic_case(
            "kv_compact",
            compact,
            lambda ops, i: ops.kv_compact(
                i["cache"], i["slot"], i["start"], i["source"], i["count"]
            ),
        ),
        basic_case(
            "tree_mask",
            lambda device, dtype: {"parent": _chain(num_sequences, num_tokens, device)},
            lambda ops, i: ops.tree_mask(i["parent"]),
        ),
        basic_case(
            "verify_greedy",
            lambda device, dtype: {
                k: v for k, v in tree(device, dtype).items() if k in ("token", "parent", "target")
            },
            lambda ops, i: ops.verify_greedy(i["token"], i["parent"], i["target"]),
        ),
        basic_case(
            "verify_sampling",
            tree,
            lambda ops, i: ops.verify_sampling(
                i["token"], i["parent"], None, i["p"], i["uniform_BT"], i["uniform_B"]
            ),
        ),
        basic_case("sample", logits, lambda ops, i: ops.sample(i["logits"], 0.8, i["uniform"])),
    ]
