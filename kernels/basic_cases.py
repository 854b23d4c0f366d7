"""The basic ops (one mathematical step each) as cases; see ``catalog``."""

from typing import Any

import torch

from kernels.catalog import Case, Dims, Inputs
from kernels.exchange import Exchange, box_words, num_counters
from kernels.opset import OpSet


def _case(
    name: str,
    make: Any,
    run: Any,
    weights: tuple[str, ...] = (),
) -> Case:
    def min_bytes(inputs: Inputs) -> int:
        tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    return Case(name=name, tuned=(), make=make, run=run, weights=weights, min_bytes=min_bytes)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
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
            "x": _random(device, dtype, rows, dims.hidden),
            "residual": _random(device, dtype, rows, dims.hidden),
            "w": _random(device, dtype, dims.hidden),
        }

    def heads(device: torch.device, dtype: torch.dtype) -> Inputs:
        angle = torch.rand(context + num_tokens, dims.head_size // 2, device=device).repeat(1, 2)
        return {
            "q": _random(device, dtype, rows, dims.heads, dims.head_size),
            "k": _random(device, dtype, rows, dims.kv_heads, dims.head_size),
            "q_norm": _random(device, dtype, dims.head_size),
            "k_norm": _random(device, dtype, dims.head_size),
            "position": torch.arange(rows, device=device) % (context + num_tokens),
            "cos": angle.cos(),
            "sin": angle.sin(),
        }

    def kv(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "q": _random(device, dtype, *batch, dims.heads, dims.head_size),
            "k": _random(device, dtype, *batch, dims.kv_heads, dims.head_size),
            "v": _random(device, dtype, *batch, dims.kv_heads, dims.head_size),
            "k_cache": _random(device, dtype, *cache),
            "v_cache": _random(device, dtype, *cache),
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
            "logits": _random(device, dtype, rows, dims.vocab),
            "uniform": torch.rand(rows, device=device),
        }

    def attention(ops: OpSet, i: Inputs) -> Any:
        scale = dims.head_size**-0.5
        return ops.tree_attention(
            i["q"], i["k_cache"], i["v_cache"], i["slot"], i["prefix"], None, scale
        )

    return [
        _case("rms_norm", norm, lambda ops, i: ops.rms_norm(i["x"], i["w"], 1e-6)),
        _case(
            "add_rms_norm",
            norm,
            lambda ops, i: ops.add_rms_norm(i["x"], i["residual"], i["w"], 1e-6),
        ),
        _case(
            "qk_norm_rope",
            heads,
            lambda ops, i: ops.qk_norm_rope(
                i["q"], i["k"], i["q_norm"], i["k_norm"], 1e-6, i["position"], i["cos"], i["sin"]
            ),
        ),
        _case(
            "route",
            lambda device, dtype: {"logits": _random(device, dtype, rows, dims.experts)},
            lambda ops, i: ops.route(i["logits"], dims.top_k),
        ),
        _case(
            "store_kv",
            lambda device, dtype: {k: v for k, v in kv(device, dtype).items() if k != "q"},
            lambda ops, i: ops.store_kv(
                i["k"], i["v"], i["k_cache"], i["v_cache"], i["slot"], i["prefix"]
            ),
        ),
        _case("tree_attention", kv, attention),
        _case(
            "kv_compact",
            compact,
            lambda ops, i: ops.kv_compact(
                i["cache"], i["slot"], i["start"], i["source"], i["count"]
            ),
        ),
        _case(
            "tree_mask",
            lambda device, dtype: {"parent": _chain(num_sequences, num_tokens, device)},
            lambda ops, i: ops.tree_mask(i["parent"]),
        ),
        _case(
            "verify_greedy",
            lambda device, dtype: {
                k: v for k, v in tree(device, dtype).items() if k in ("token", "parent", "target")
            },
            lambda ops, i: ops.verify_greedy(i["token"], i["parent"], i["target"]),
        ),
        _case(
            "verify_sampling",
            tree,
            lambda ops, i: ops.verify_sampling(
                i["token"], i["parent"], None, i["p"], i["uniform_BT"], i["uniform_B"]
            ),
        ),
        _case("sample", logits, lambda ops, i: ops.sample(i["logits"], 0.8, i["uniform"])),
    ]


def rank_case(num_ranks: int, num_rows: int, hidden: int = 2048) -> Case:
    """The best token over ranks, for compiling."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "token": torch.zeros(num_rows, dtype=torch.int64, device=device),
            "value": torch.zeros(num_rows, device=device),
            "pairs": torch.zeros(num_ranks, 2, num_rows, device=device),
            "state": torch.zeros(4, num_rows, dtype=torch.int64, device=device),
            "record": torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            "embed": _random(device, dtype, 100, hidden),
            "next": _random(device, dtype, num_rows, hidden),
        }

    def run(ops: OpSet, i: Inputs) -> Any:
        ops.finish_ranks(i["pairs"], i["state"], i["record"], i["embed"], i["next"])
        return ops.pair_best(i["token"], i["value"], 3), ops.best_of_ranks(i["pairs"])

    return _case(f"best of {num_ranks} ranks", make, run)


def draw_case(num_rows: int, vocabulary: int) -> Case:
    """Drawing tokens, for compiling."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        numbers = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return {
            "logits": _random(device, dtype, num_rows, vocabulary),
            "heat": torch.ones(num_rows, device=device),
            "seed": numbers,
            "position": numbers + 1,
        }

    return _case(
        "draw", make, lambda ops, i: ops.draw(i["logits"], i["heat"], i["seed"], i["position"], 7)
    )


def exchange_case(num_ranks: int, message_bytes: int = 1 << 18) -> Case:
    """A sum and a gather over ranks, for compiling: no rank can run it alone."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        words = (box_words(num_ranks, message_bytes), num_counters(message_bytes))
        return {
            "x": _random(device, dtype, 4, 2048),
            "box": torch.zeros(words[0], dtype=torch.int64, device=device),
            "counters": torch.zeros(words[1], dtype=torch.int32, device=device),
        }

    def run(_: OpSet, inputs: Inputs) -> Any:
        exchange = Exchange(
            inputs["box"],
            inputs["counters"],
            rank=1,
            num_ranks=num_ranks,
            message_bytes=message_bytes,
        )
        exchange.all_reduce(inputs["x"])
        return exchange.all_gather(inputs["x"])

    return _case(f"exchange of {num_ranks} ranks", make, run)
