"""The draft model: is there one, does it belong to this target, does this server know it?"""

import re
from collections.abc import Iterator

from autotune.lint.findings import Hit, error, rule, warning
from autotune.lint.setup import Setup
from autotune.lint.speculation import VLLM_MODEL_METHODS

#: target architectures that hold a draft layer of their own: (name, what)
_OWN_DRAFT = re.compile(
    r"deepseek[-_ ]?(v[3-9]|r1)|glm[-_ ]?(4\.[5-9]|5)|bailing|\bling\b|mistral[-_ ]?large[-_ ]?3|"
    r"mimo",
    re.IGNORECASE,
)
#: target family -> first SGLang version whose model file has EAGLE-3 hooks (sampled wheels)
_EAGLE3_SINCE = ((re.compile(r"kimi[-_ ]?k2\.?[56]", re.IGNORECASE), "0.5.10"),)


@rule("spec-draft-missing", "sgl-project/sglang#36528")
def no_draft_model(setup: Setup) -> Iterator[Hit]:
    """A method that drafts with a model, without one: the target is loaded as its own draft."""
    spec = setup.speculation
    if spec is None:
        return
    if spec.draft_model is not None:
        same = setup.target_name is not None and spec.draft_model == setup.target_name
        if spec.algorithm == "EAGLE3" and same:
            yield error(
                f"draft {spec.draft_model}",
                "the draft path is the target's: EAGLE-3 needs a head of its own, and the target "
                "would be loaded twice",
                "give the path of the EAGLE-3 head",
            )
        return
    if setup.engine == "sglang":
        if spec.algorithm in ("EAGLE3", "STANDALONE", "DFLASH"):
            yield error(
                f"--speculative-algorithm {spec.algorithm}",
                f"{spec.algorithm} needs a draft model and no --speculative-draft-model-path is "
                "given: SGLang loads the target a second time as its draft and crashes",
                "add --speculative-draft-model-path",
            )
        own = setup.target_name is None or _OWN_DRAFT.search(setup.target_name) is not None
        if spec.algorithm == "EAGLE" and not own:
            yield warning(
                "--speculative-algorithm EAGLE",
                f"no draft path, and {setup.target_name} is not among the families whose "
                "checkpoint holds its own draft layer (DeepSeek V3, GLM-4.5, Bailing, ...)",
                "add --speculative-draft-model-path",
            )
    elif setup.engine == "vllm" and spec.algorithm.lower() in VLLM_MODEL_METHODS:
        yield error(
            f'"method": "{spec.algorithm.lower()}"',
            "this method needs a draft model and speculative_config has no \"model\"",
            'add "model": "…" to --speculative-config',
        )  # fmt: skip


@rule("spec-draft-tp", "vllm/config/speculative.py", "vllm")
def draft_ranks(setup: Setup) -> Iterator[Hit]:
    """The draft runs on one rank or on all."""
    ranks = setup.command.config("--speculative-config").get("draft_tensor_parallel_size")
    if isinstance(ranks, int) and setup.tp is not None and ranks not in (1, setup.tp):
        yield error(
            f"draft_tensor_parallel_size {ranks}",
            f"vLLM takes 1 or the target's {setup.tp}",
            f"write 1 or {setup.tp}",
        )


@rule("spec-target-hooks", "sgl-project/sglang#19689, #25673", "sglang")
def target_without_hooks(setup: Setup) -> Iterator[Hit]:
    """EAGLE-3 needs hooks in the target's model file; some families got them later."""
    spec = setup.speculation
    if spec is None or spec.algorithm != "EAGLE3" or setup.target_name is None:
        return
    for family, since in _EAGLE3_SINCE:
        if family.search(setup.target_name) and setup.before(since):
            yield error(
                f"EAGLE3 on {setup.target_name}",
                "SGLang 0.5.9 and older have no EAGLE-3 hooks in models/kimi_k25.py (merged "
                "2026-03-02): if it runs, the tree is patched",
                f"{since} or newer, or record the hash of the patched source with every number",
            )


@rule("draft-of-another-version", "local-inference-lab/rtx6kpro#10")
def draft_version_differs(setup: Setup) -> Iterator[Hit]:
    """A draft whose name says another version of the target's family."""
    spec = setup.speculation
    if spec is None or spec.draft_model is None or setup.target_name is None:
        return
    target = _family_versions(setup.target_name)
    draft = _family_versions(spec.draft_model)
    for family, versions in draft.items():
        if family in target and not versions & target[family]:
            yield warning(
                f"draft {_base(spec.draft_model)}",
                f"it is named for {family} {'/'.join(sorted(versions))}, the target is "
                f"{_base(setup.target_name)}: a head trained on another version accepts less (2.2 "
                "where its own got more; real prompts then lost)",
                "use the head of this version, or measure the accept length on your own prompts "
                "first",
            )


def _base(path: str) -> str:
    return path.rstrip("/").split("/")[-1]


def _family_versions(path: str) -> dict[str, set[str]]:
    """ "MiniMax-M2.7-NVFP4" -> {"minimax-m": {"2.7"}}; sizes ("70b") are no versions."""
    found: dict[str, set[str]] = {}
    name = _base(path).lower()
    for match in re.finditer(
        r"(kimi|minimax|deepseek|glm|qwen|llama|gemma|mistral|mixtral|step|longcat|hunyuan|ernie)"
        r"[-_ ]?([kmvr]?)[-_ ]?(\d+(?:\.\d+)?)(?![\d.]*[bt]\b)", name,
    ):  # fmt: skip
        found.setdefault(match[1] + (f"-{match[2]}" if match[2] else ""), set()).add(match[3])
    return found
