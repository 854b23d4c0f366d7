"""The model card of the tiny pair, written from a training run's measured results."""

import argparse
import importlib.metadata
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autotune.prompts import HELD_OUT_MODULES, HELD_OUT_TOPICS

HEADS = ("prompts", "n", "prompt loss, nats", "accept length", "verifies", "accepted by depth")
HEADS += ("conditional", "distinct 4-grams", "varied: accept length (n)")


def environment(args: argparse.Namespace) -> dict[str, str]:
    """What the run ran on, and its command."""
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "command": "PYTHONPATH=. python studies/models/train_tiny.py " + shlex.join(sys.argv[1:]),
        "device": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def write_card(path: Path, results: dict[str, Any], sizes: Any) -> None:
    """Write README.md: data, held-out names, command, losses and acceptance per prompt set."""
    env, target, head = results["environment"], results["target"], results["head"]
    corpus, config = results["corpus"], sizes.config
    rows = []
    for name, r in results["acceptance"].items():
        chain, varied = r["chain3"], r["varied_chain3"]
        by_depth = " / ".join(map(str, chain["accepted_by_depth"]))
        conditional = " / ".join(
            "-" if x is None else f"{x:.3f}" for x in chain["conditional_by_depth"]
        )
        rows.append(
            f"| `{name}` | {r['prompts']} | {r['prompt_loss_nats']:.3f} | "
            f"**{chain['accept_length']:.3f}** | {chain['num_verifies']} | {by_depth} | "
            f"{conditional} | {r['distinct_4gram_share']:.2f} | "
            f"{varied['accept_length']:.3f} ({r['varied_prompts']}) |"
        )
    first = next(iter(results["acceptance"].values()))
    agrees = all(r["naive_loop_agrees"] for r in results["acceptance"].values())
    modules = ", ".join(f"`{m}`" for m in HELD_OUT_MODULES)
    topics = ", ".join(f"`{t}`" for t in HELD_OUT_TOPICS)
    size_mib = sum(results["bytes"].values()) / 2**20
    samples = "\n\n".join(
        f"`{name}`, a prompt's end, then (after `>>>`) its continuation:\n\n"
        + "\n".join("    " + line for line in (a[-160:] + ">>>" + b).splitlines())
        for name, r in results["acceptance"].items()
        for a, b in r["samples"][:1]
    )
    # a head trained later keeps the target of an earlier command
    earlier = results.get("target_command")
    target_command = f"{earlier}\n" if earlier else ""
    path.write_text(
        f"""---
language: en
library_name: transformers
---
# tiny-moe and tiny-moe-eagle3

A small Qwen3-MoE target and its EAGLE-3 head, trained for this repository, so that speculative
decoding can be studied on any machine. They are for measuring engines; they know nothing.

- Target: {config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads
  ({config.num_kv_heads} key-value) of {config.head_dim}, {config.num_experts} experts of width
  {config.expert_width}, top-{config.experts_per_token}, vocabulary {config.vocab_size}
  (byte-level BPE), {results["target_check"]["num_parameters"]:,} parameters, bf16. Trained at
  sequences of {sizes.sequences[0]} and, at the end, {sizes.sequences[1]} tokens.
- Head: `LlamaForCausalLMEagle3`, reads the hidden states that enter the target layers
  {results["aux_layers"]} (vLLM's numbering: state i is the residual stream after i layers, 0 is
  the embedding; in SGLang's numbering, one less); draft vocabulary {sizes.draft_vocab_size};
  embedding shared with the target.
- Together {size_mib:.2f} MiB.

## Data
The Python standard library's source ({corpus["modules"]} modules, tests included,
{corpus["tokens_code"]:,} tokens), and its docstrings and pydoc topics ({corpus["tokens_text"]:,}
tokens); nothing else. {results["note"]}

Left out: the modules and topics below, the tests of those modules, and
{corpus["dropped_paragraphs"]} paragraphs that training documents share with them. Prompts of
`builtin:code` and `builtin:text` come only from what was left out.

Held-out modules: {modules}.

Held-out pydoc topics: {topics}.

Licence note: trained only on text of the Python standard library, which is distributed under the
PSF License Version 2.

## Training
```
{target_command}{env["command"]}
```
{env["device"]}, Python {env["python"]}, torch {env["torch"]}, transformers {env["transformers"]},
tokenizers {env["tokenizers"]}; {results["seconds"]} s in all, seed {results["seed"]}. Budgets are
wall-clock, so another machine trains more or fewer steps.

- Target: {target["steps"]} steps, {target["tokens_seen"]:,} tokens; validation loss
  {target["valid_loss_nats"]:.3f} nats a token. Curve (share of time, loss):
  {target["valid_curve"]}.
- Logits against `transformers` (fp32, the saved weights): relative error
  {results["target_check"]["relative_error"]:.1e}.
- Head: {head["steps"]} steps, {head["tokens_seen"]:,} tokens, of them three quarters the target's
  own continuations of training text; {sizes.unroll_steps} unrolled steps. Last batch: loss
  {head["last_loss"]:.3f}, agreement with the target by step {head["last_agreement_by_step"]}. The
  draft vocabulary covers {100 * head["draft_vocab_coverage"]:.2f} % of generated tokens.

## Acceptance on held-out prompts
Greedy chain of 3, {first["input_len"]} prompt tokens, {first["new_tokens"]} new ones, fp32
arithmetic on the saved bf16 weights. Accept length includes the bonus token. "Varied" counts only
prompts whose continuation has more than 80 % distinct 4-grams (a model this small likes to repeat
itself, and repeated text is easy to draft).

| {" | ".join(HEADS)} |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

A second implementation (one prompt at a time, real draft-verify loop, no caches) counts the same on
4 prompts of each set: {"yes" if agrees else "NO"}.

{samples}

Sizes of the run: `{asdict(sizes)}`
""",
        encoding="utf-8",
    )
