"""Which options a server version knows: names, renames, removals.

Names come from the servers' own wheels (data/*_flags.json), so an unknown name is known to be
unknown. Between two wheels that were read, a name counts as known when either of them has it.
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
#: options gone before the oldest vLLM wheel that was read -> what took their place, "" for nothing
VLLM_SUCCESSORS = {
    "--speculative-model": f'{_SPEC} with "model"',
    "--num-speculative-tokens": f'{_SPEC} with "num_speculative_tokens"',
    "--speculative-draft-tensor-parallel-size": f'{_SPEC} with "draft_tensor_parallel_size"',
    "--speculative-disable-by-batch-size": "",
    "--ngram-prompt-lookup-max": f'{_SPEC} with "prompt_lookup_max"',
    "--ngram-prompt-lookup-min": f'{_SPEC} with "prompt_lookup_min"',
    "--spec-decoding-acceptance-method": f'{_SPEC} with "rejection_sample_method"',
    "--num-scheduler-steps": "",
    "--use-v2-block-manager": "",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size (in tokens)",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes (in tokens)",
    "--guided-decoding-backend": "--structured-outputs-config",
    "--disable-log-requests": "--no-enable-log-requests",
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


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names by version: name -> (first, last) index into the sampled versions."""

    versions: tuple[str, ...]
    names: dict[str, tuple[int, int]]

    def window(self, version: Version | None) -> tuple[int, int] | None:
        """Indices of the samples around ``version``; None if it is older than all or unknown."""
        if version is None:
            return None
        sampled = [parse_version(text) for text in self.versions]
        older = [i for i, one in enumerate(sampled) if one <= version]
        if not older:
            return None
        exact = sampled[older[-1]] == version
        return older[-1], older[-1] if exact else min(older[-1] + 1, len(sampled) - 1)

    def knows(self, name: str, version: Version | None) -> bool:
        """Whether ``version`` has the name; for no version, or one before all samples, any has."""
        if name not in self.names:
            return False
        window = self.window(version)
        first, last = self.names[name]
        return window is None or (first <= window[1] and last >= window[0])


@cache
def name_table(engine: str, section: str = "flags") -> NameTable:
    """Names of an engine's options ("flags") or of the keys of one of its JSON options."""
    path = Path(__file__).parent / "data" / f"{engine}_flags.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    names = {name: (first, last) for name, (first, last) in values[section].items()}
    return NameTable(tuple(values["versions"]), names)


def resolve_option(engine: str, name: str, version: Version | None) -> Resolved:
    """As the server's argparse resolves an option: exact, alias, unique prefix, or an error."""
    table = name_table(engine)
    aliases = SGLANG_ALIASES if engine == "sglang" else VLLM_ALIASES
    successors = SGLANG_SUCCESSORS if engine == "sglang" else VLLM_SUCCESSORS
    # vLLM's switches have a negative form each
    plain = name.replace("--no-", "--", 1) if engine == "vllm" else name
    if table.knows(name, version) or table.knows(plain, version):
        return Resolved("known", aliases.get(name, name))
    candidates = tuple(
        flag for flag in table.names if flag.startswith(name) and table.knows(flag, version)
    )
    if len(candidates) == 1 and name.startswith("--"):
        return Resolved("known", aliases.get(candidates[0], candidates[0]))
    window = table.window(version)
    successor = (successors[name],) if successors.get(name) else ()
    if name in table.names:
        first, last = table.names[name]
        assert window is not None
        if window[0] > last:
            return Resolved("removed", name, successor or candidates, table.versions[last])
        return Resolved("not_yet", name, version=table.versions[first])
    if name in successors:
        if version is not None and window is None:
            return Resolved("known", name)
        return Resolved("removed", name, successor, f"a version before {table.versions[0]}")
    if candidates:
        whole = {aliases.get(flag, flag) for flag in candidates}
        return Resolved("ambiguous", name, tuple(sorted(whole)))
    if version is not None and window is None:
        # older than every table: nothing is known to be unknown
        return Resolved("known", aliases.get(name, name))
    known = [flag for flag in table.names if table.knows(flag, version)]
    return Resolved("unknown", name, tuple(get_close_matches(name, known, n=1, cutoff=0.75)))
