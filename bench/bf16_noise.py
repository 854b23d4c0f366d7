"""How far bf16 moves the shipped tiny model's top-2 margin from fp32: what a check must allow.

python bench/bf16_noise.py [--prompts N] [--new-tokens N]

Greedy fp32 outputs of ``transformers`` are forced through the same weights in bf16; prints
quantiles of the change of (best - second best) log-probability, in nats, and where it was largest.
"""

import argparse
import statistics
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from autotune.prompts import load_prompts

MODEL = Path(__file__).parents[1] / "studies/models/tiny-moe"
INPUT_LEN = 64


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    given = parser.parse_args()
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = load_prompts(
        "builtin:code", tokenizer, input_len=INPUT_LEN, count=given.prompts, seed=0
    )
    moved: list[tuple[float, float, int, int]] = []
    for number, ids in enumerate(prompts.token_ids):
        with torch.no_grad():
            text = exact.generate(
                torch.tensor([ids]), max_new_tokens=given.new_tokens, do_sample=False
            )
            rows_VT = [
                model(text).logits[0, INPUT_LEN - 1 : -1].float().log_softmax(-1)
                for model in (exact, rounded)
            ]
        best_T2 = rows_VT[0].topk(2).indices
        margins = [row.gather(1, best_T2).diff(dim=1)[:, 0].neg() for row in rows_VT]
        change = (margins[1] - margins[0]).abs()
        moved += [
            (float(c), float(m), number, place)
            for place, (c, m) in enumerate(zip(change, margins[0], strict=True))
        ]
    moved.sort(reverse=True)
    changes = [c for c, *_ in moved]
    print(
        f"{len(moved)} tokens: change of the margin, nats: median "
        f"{statistics.median(changes):.3f}, 99 % {changes[len(changes) // 100]:.3f}, "
        f"most {changes[0]:.3f}"
    )
    for change, margin, number, place in moved[:5]:
        print(f"  prompt {number}, token {place}: margin {margin:.3f} in fp32, moved {change:.3f}")


if __name__ == "__main__":
    main()
