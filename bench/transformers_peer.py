"""The same slice in Hugging Face transformers: one forward of T tokens, eager and captured.

T tokens are a decode step of T sequences, or a verify of T tokens of one sequence; both stand in
the table, because both are "one forward of T tokens". The library's own ``StaticCache`` is not what
a server would use at a fixed length: it is longer than its contents, so that the attention gets a
mask, and with a mask every key and value is copied for each of its query heads first.
``FixedCache`` ends with the new tokens: decoding needs no mask then, and the attention reads
grouped heads as they are.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CONTEXT, STEPS, REPEATS = 1024, 20, 3
#: how the experts are computed, and from how many tokens on it is not worth a try: ``batched_mm``
#: gathers the weights of every pair
EXPERTS = {"grouped_mm": 1 << 30, "batched_mm": 4}


class FixedCache:
    """Keys and values of a fixed number of tokens, of which every forward rewrites the last ones.

    What the model asks a cache for, and no more.
    """

    is_compileable = False

    def __init__(self, config: Any, batch: int, new: int, device: torch.device) -> None:
        self.layers: list[None] = []
        self._new = new
        size = (batch, config.num_key_value_heads, CONTEXT + new, config.head_dim)
        kind: dict[str, Any] = {"device": device, "dtype": config.dtype}
        self._pairs = [
            (torch.randn(size, **kind), torch.randn(size, **kind))
            for _ in range(config.num_hidden_layers)
        ]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens; all of the layer's keys and values."""
        keys, values = self._pairs[layer_idx]
        keys[:, :, CONTEXT:].copy_(key)
        values[:, :, CONTEXT:].copy_(value)
        return keys, values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Tokens before the new ones."""
        return CONTEXT

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Position of the first new token."""
        return CONTEXT

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Length and offset of what a mask must cover."""
        return CONTEXT + self._new, 0


def build(layers: int, experts: str, device: torch.device, **changes: Any) -> Any:
    """Qwen3-30B-A3B's shape with random bf16 weights, spread as the engine's random weights are."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "experts_implementation": experts,
        "dtype": torch.bfloat16,
    }
    config = Qwen3MoeConfig(**(values | changes))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = Qwen3MoeForCausalLM(config)
            model.eval()
    finally:
        torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            spread = 1.0 if "embed_tokens" in name else 0.02
            spread = 0.02 / layers if "o_proj" in name else spread
            parameter.data.normal_(0.0, spread)
    return model


def step_of(model: Any, batch: int, new: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """One forward of ``batch`` sequences of ``new`` tokens each after CONTEXT cached ones."""
    cache = FixedCache(model.config, batch, new, device)
    token = torch.randint(1, model.config.vocab_size, (batch, new), device=device)
    position = torch.arange(CONTEXT, CONTEXT + new, device=device).repeat(batch, 1)

    def step() -> torch.Tensor:
        out = model(
            input_ids=token,
            past_key_values=cache,
            position_ids=position,
            use_cache=True,
        )
        best: torch.Tensor = out.logits.argmax(-1)
        return best

    return step


def distinct_experts(model: Any, step: Callable[[], Any]) -> float:
    """Mean over layers of how many experts a forward touches."""
    found: list[int] = []

    def note(_: Any, __: Any, output: Any) -> None:
        chosen = output[-1] if isinstance(output, tuple) else output.topk(8, dim=-1).indices
        found.append(int(chosen.unique().numel()))

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    step()
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)


def timed(step: Callable[[], Any]) -> list[float]:
    """Mean ms of STEPS steps, each repeat."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / STEPS * 1e3)
    return times


def measured(step: Callable[[], Any]) -> dict[str, Any]:
    """Eager and captured medians with their ranges; an error where one of them fails."""
    row: dict[str, Any] = {}
    try:
        for _ in range(3):
            step()
        eager = timed(step)
        row |= {"eager_ms": statistics.median(eager), "eager_range_ms": [min(eager), max(eager)]}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        captured = timed(graph.replay)
        row |= {
            "captured_ms": statistics.median(captured),
            "captured_range_ms": [min(captured), max(captured)],
        }
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # other sizes are still worth measuring
        row["error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.synchronize()
    return row


def peer_rows(emit: Callable[..., None], layers: int, sizes: Sequence[int]) -> None:
    """Both implementations of the experts, both forms of T tokens."""
    import transformers

    device = torch.device("cuda")
    version = transformers.__version__
    with torch.inference_mode():
        for experts, most in EXPERTS.items():
            model = build(layers, experts, device)
            for size in sizes:
                for batch, new in {(size, 1), (1, size)}:
                    if size > most:
                        continue
                    row: dict[str, Any] = {"batch": batch, "new": new, "version": version}
                    step = step_of(model, batch, new, device)
                    row |= measured(step)
                    row["distinct_experts"] = distinct_experts(model, step)
                    form = "decode of" if new == 1 else "verify of"
                    name = f"transformers {experts}, {form} {size}"
                    emit(row="peer", name=name, layers=layers, tokens=size, **row)
                    torch.cuda.empty_cache()
            del model
            torch.cuda.empty_cache()
