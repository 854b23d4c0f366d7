"""The same slice in Hugging Face transformers: one decode step, eager and captured."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CONTEXT, STEPS, REPEATS = 1024, 20, 3


def build(layers: int, experts: str) -> Any:
    """Qwen3-30B-A3B's shape with random bf16 weights on the GPU."""
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
    }
    config = Qwen3MoeConfig(**values)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = Qwen3MoeForCausalLM(config)
            model.eval()
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.02)
    return model


def step_of(model: Any, batch: int) -> Callable[[], torch.Tensor]:
    """One forward of ``batch`` sequences of one new token after CONTEXT cached ones."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 64)
    token = torch.randint(1, 100_000, (batch, 1), device="cuda")
    position = torch.full((batch, 1), CONTEXT, device="cuda")
    place = torch.tensor([CONTEXT], device="cuda")

    def step() -> torch.Tensor:
        out = model(
            input_ids=token,
            past_key_values=cache,
            position_ids=position,
            cache_position=place,
            use_cache=True,
        )
        best: torch.Tensor = out.logits[:, -1].argmax(-1)
        return best

    return step


def timed(step: Callable[[], Any]) -> float:
    """Median over repeats of the mean ms of STEPS steps."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / STEPS * 1e3)
    return statistics.median(times)


def peer_rows(emit: Callable[..., None], layers: int, batches: Sequence[int]) -> None:
    """Eager and captured, with the implementation of experts that can be captured."""
    import transformers

    version = transformers.__version__
    with torch.inference_mode():
        for experts in ("grouped_mm", "batched_mm"):
            model = build(layers, experts)
            for batch in batches:
                row: dict[str, Any] = {"batch": batch, "version": version}
                name = f"transformers {experts}"
                try:
                    step = step_of(model, batch)
                    for _ in range(3):
                        step()
                    row["eager_ms"] = timed(step)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step()
                    graph.replay()
                    row["captured_ms"] = timed(graph.replay)
                except Exception as error:  # noqa: BLE001 - other sizes are still worth measuring
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                    torch.cuda.synchronize()
                emit(row="peer", name=name, layers=layers, **row)
            del model
            torch.cuda.empty_cache()
