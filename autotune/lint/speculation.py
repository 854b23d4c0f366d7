"""The speculation that a server makes of its options: defaults filled in, overrides applied.

Source: sglang 0.4.6 to 0.5.23 (server_args.py, arg_groups/speculative_hook.py) and vllm 0.16 and
0.33 (config/speculative.py), read; facts only. ``draft_tokens`` counts the root.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.lint.command import Command

#: algorithms that build a tree or chain from steps, topk and draft tokens
EAGLE_FAMILY = ("EAGLE", "EAGLE3", "STANDALONE")
#: vLLM methods that draft with a model of their own
VLLM_MODEL_METHODS = ("eagle", "eagle3", "draft_model", "medusa", "mlp_speculator", "dflash")
_SGLANG_SIZES = {
    "steps": "--speculative-num-steps",
    "topk": "--speculative-eagle-topk",
    "draft_tokens": "--speculative-num-draft-tokens",
}
#: families for which SGLang picks a tree by itself; all others get a chain of 3
_DEFAULT_TREE = re.compile(r"llama|grok|vicuna", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What was asked (``given``) and what the server runs."""

    #: "EAGLE3", "NGRAM", ... in capitals
    algorithm: str
    #: sizes that were given, by short name
    given: Mapping[str, int]
    steps: int | None
    topk: int | None
    draft_tokens: int | None
    draft_model: str | None

    @property
    def verify_tokens(self) -> int | None:
        """Tokens per request in one verify, root included."""
        return self.draft_tokens

    @property
    def largest_tree(self) -> int | None:
        """Most draft tokens that steps and topk can fill, root included."""
        if self.steps is None or self.topk is None:
            return None
        return 1 + self.topk + max(self.steps - 1, 0) * self.topk**2

    def text(self) -> str:
        """For a message."""
        sizes = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in (
                ("steps", self.steps),
                ("topk", self.topk),
                ("draft_tokens", self.draft_tokens),
            )
            if value is not None
        ]
        return f"{self.algorithm} ({', '.join(sizes)})" if sizes else self.algorithm


def resolve(command: Command, target_name: str | None) -> Speculation | None:
    """The speculation of a SGLang or vLLM command; None without."""
    if command.engine == "vllm":
        return _vllm(command.config("--speculative-config"))
    return _sglang(command, target_name)


def _sglang(command: Command, target_name: str | None) -> Speculation | None:
    algorithm = command.text("--speculative-algorithm")
    if not algorithm or algorithm.lower() == "none":
        return None
    algorithm = algorithm.upper().replace("NEXTN", "EAGLE")
    given = {
        name: value
        for name, flag in _SGLANG_SIZES.items()
        if (value := command.number(flag)) is not None
    }
    steps, topk = given.get("steps"), given.get("topk")
    draft_tokens = given.get("draft_tokens")
    if algorithm in EAGLE_FAMILY and not given:
        tree = target_name is not None and _DEFAULT_TREE.search(target_name) is not None
        steps, topk, draft_tokens = (5, 4, 8) if tree else (3, 1, 4)
    if topk == 1 and steps is not None and algorithm in EAGLE_FAMILY:
        draft_tokens = steps + 1
    return Speculation(
        algorithm=algorithm,
        given=given,
        steps=steps,
        topk=topk,
        draft_tokens=draft_tokens,
        draft_model=command.text("--speculative-draft-model-path") or None,
    )


def _vllm(config: Mapping[str, Any]) -> Speculation | None:
    if not config:
        return None
    k = config.get("num_speculative_tokens")
    k = k if isinstance(k, int) else None
    method = config.get("method")
    model = config.get("model")
    if method is None:
        # vLLM reads the method from the draft's own config; a path says most of it
        named = str(model or "").lower()
        method = next(
            (m for m in ("eagle3", "eagle", "mtp", "dflash") if m in named), "draft_model"
        )
    return Speculation(
        algorithm=str(method).upper(),
        given={} if k is None else {"steps": k},
        steps=k,
        topk=1,
        draft_tokens=None if k is None else k + 1,
        draft_model=str(model) if model else None,
    )
