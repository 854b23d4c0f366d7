"""Which options a server version knows: names, renames, removals.

SGLang's names are those of seven wheels (data/sglang_flags.json), so an unknown name is known to be
unknown. Of vLLM only the options that were renamed or removed are listed.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from autotune.lint.versions import Version, parse_version

#: removed option -> what took its place; "" where nothing did
SGLANG_SUCCESSORS = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--enable-piecewise-cuda-graph": "--cuda-graph-backend-prefill breakable",
    "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
    "--enable-flashinfer-mla": "--attention-backend flashinfer",
    "--enable-flashmla": "--attention-backend flashmla",
    "--enable-ep-moe": "--ep-size",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-triton-kernel-moe": "--moe-runner-backend triton_kernel",
}
#: still accepted, but on the way out: option -> (first version, successor)
SGLANG_DEPRECATED = {
    "--disable-cuda-graph": ("0.5.23", "--cuda-graph-backend-decode disabled"),
    "--enable-dp-attention": ("0.5.23", "--attn-dp-size"),
    "--enable-flashinfer-allreduce-fusion": (
        "0.5.23",
        "--flashinfer-allreduce-fusion-backend auto",
    ),
}
#: short for an option; the first name is the canonical one
SGLANG_ALIASES = {
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
    "--model": "--model-path",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-algo": "--speculative-algorithm",
}
VLLM_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--compilation-config",
    "-ac": "--attention-config",
    "-q": "--quantization",
}
_SPEC = "--speculative-config '{…}'"
#: vLLM option -> (a version by which it is gone, what took its place)
VLLM_REMOVED = {
    "--speculative-model": ("0.16", f'{_SPEC} with "model"'),
    "--num-speculative-tokens": ("0.16", f'{_SPEC} with "num_speculative_tokens"'),
    "--speculative-draft-tensor-parallel-size": (
        "0.9",
        f'{_SPEC} with "draft_tensor_parallel_size"',
    ),
    "--speculative-disable-by-batch-size": ("0.16", ""),
    "--ngram-prompt-lookup-max": ("0.16", f'{_SPEC} with "prompt_lookup_max"'),
    "--ngram-prompt-lookup-min": ("0.16", f'{_SPEC} with "prompt_lookup_min"'),
    "--spec-decoding-acceptance-method": ("0.16", f'{_SPEC} with "rejection_sample_method"'),
    "--num-scheduler-steps": ("0.16", ""),
    "--max-seq-len-to-capture": ("0.16", "--max-cudagraph-capture-size (in tokens)"),
}
#: vLLM speculative_config key -> (newest version known to lack it yet, a version by which it is
#: gone); None where there is none
VLLM_SPEC_KEYS: dict[str, tuple[str | None, str | None]] = {
    "speculative_token_tree": (None, "0.32"),
    "disable_by_batch_size": (None, "0.32"),
    "num_speculative_tokens_per_batch_size": ("0.16", None),
    "synthetic_acceptance_length": ("0.16", None),
    "synthetic_acceptance_rates": ("0.16", None),
    "draft_sample_method": ("0.16", None),
    "use_local_argmax_reduction": ("0.16", None),
    "attention_backend": ("0.16", None),
}

Status = Literal["known", "ambiguous", "removed", "not_yet", "unknown"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a version makes of an option: its full name, or why not."""

    status: Status
    name: str
    #: other names: the candidates of an ambiguous prefix, or what to write instead
    others: tuple[str, ...] = ()
    #: the sampled version where it was first or last seen
    version: str = ""


@cache
def _sglang_table() -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    values = json.loads((Path(__file__).parent / "data" / "sglang_flags.json").read_text())
    table = {name: (first, last) for name, (first, last) in values["flags"].items()}
    return tuple(values["versions"]), table


def sglang_option(name: str, version: Version | None) -> Resolved:
    """As SGLang's argparse resolves an option: exact, alias, unique prefix, or an error.

    Between two sampled versions the earlier one counts. Without a version a name is unknown only
    if no version knew it.
    """
    versions, table = _sglang_table()
    index = None
    if version is not None:
        older = [i for i, text in enumerate(versions) if parse_version(text) <= version]
        index = older[-1] if older else 0

    def known(flag: str) -> bool:
        first, last = table[flag]
        return index is None or first <= index <= last

    if name in table and known(name):
        return Resolved("known", SGLANG_ALIASES.get(name, name))
    candidates = tuple(flag for flag in table if flag.startswith(name) and known(flag))
    if len(candidates) == 1:
        return Resolved("known", SGLANG_ALIASES.get(candidates[0], candidates[0]))
    if name in table:
        first, last = table[name]
        assert index is not None
        successor = SGLANG_SUCCESSORS.get(name, "")
        if index > last:
            return Resolved("removed", name, (successor,) if successor else candidates,
                            versions[last])  # fmt: skip
        return Resolved("not_yet", name, version=versions[first])
    if candidates:
        whole = {SGLANG_ALIASES.get(flag, flag) for flag in candidates}
        return Resolved("ambiguous", name, tuple(sorted(whole)))
    near = get_close_matches(name, [flag for flag in table if known(flag)], n=1, cutoff=0.75)
    return Resolved("unknown", name, tuple(near))
