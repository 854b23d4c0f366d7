"""Messages of servers and NCCL that have one known meaning: what broke, and the way out."""

import re
from dataclasses import dataclass

from autotune.lint.findings import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A message, by a pattern that matches nothing else."""

    id: str
    pattern: re.Pattern[str]
    severity: Severity
    reason: str
    fix: str
    source: str

    def matches(self, line: str) -> bool:
        """Whether the line carries the message."""
        return self.pattern.search(line) is not None


def _signature(
    id: str, pattern: str, severity: Severity, reason: str, fix: str, source: str
) -> Signature:
    return Signature(
        id=id, pattern=re.compile(pattern), severity=severity, reason=reason, fix=fix, source=source
    )


SIGNATURES = (
    _signature(
        "log-tree-too-large", r"selected index k out of range", "error",
        "draft tokens exceed what steps and topk can draft",
        "num_draft_tokens <= 1 + topk + (steps - 1) x topk^2", "sgl-project/sglang#5160",
    ),
    _signature(
        "log-spec-v2-tree", r"Sizes of tensors must match.*size \d+ but got",
        "error",
        "tensors of a verify differ in width; with spec v2 (0.5.9 and older) that is topk above 1",
        "topk 1, or SGLANG_ENABLE_SPEC_V2=0", "sgl-project/sglang#13352",
    ),
    _signature(
        "log-draft-shares-arguments", r"AssertionError.*disable_chunked_prefix_cache|"
        r"assert.*disable_chunked_prefix_cache", "error",
        "the draft worker changed process-wide arguments of the target: what is in force differs "
        "from the command line",
        "--disable-chunked-prefix-cache for both, or a newer version; read back GET /server_info",
        "sgl-project/sglang#22780",
    ),
    _signature(
        "log-nccl-no-algorithm", r"[Nn]o algorithm/protocol .*available for function", "error",
        "the lists in NCCL_ALGO and NCCL_PROTO leave a collective nothing to run; from 2.31 on "
        "naming one collective clears the others",
        "write NCCL_ALGO='ring,tree;allreduce:ring'", "vllm-project/vllm#58179",
    ),
    _signature(
        "log-flag-ambiguous", r"error: ambiguous option:|error: unrecognized arguments:", "error",
        "the server does not know an option as written: renamed or removed in this version",
        "see flag-removed for the command line", "servers.md 0.9",
    ),
    _signature(
        "log-topology-fallback", r"Could not find a path for pattern|falling back to simple order",
        "warning",
        "NCCL's graph search found nothing: one channel at 0.1 GB/s in its model, so it switches "
        "to Simple from 4 KiB on",
        "NCCL_GRAPH_FILE with an explicit graph, or NCCL_PROTO=LL for small messages",
        "NVIDIA/nccl PR 2127, local-inference-lab/rtx6kpro optimization/nccl-tuning",
    ),
    _signature(
        "log-unknown-spec-key",
        r"speculative_config\S*.*\bextra_forbidden\b|Unexpected keyword argument.*speculat|"
        r"(?:^|\s)speculative_token_tree\s*$",
        "error", "vLLM refuses a key of speculative_config that this version does not have",
        "drop the key", "server-recordings/serve-bad-spec-key.log",
    ),
    _signature(
        "log-oom", r"torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory", "error",
        "a GPU ran out of memory; speculation needs room for the draft, its KV cache and more "
        "graphs",
        "lower --mem-fraction-static or --gpu-memory-utilization, the graphs captured, or the "
        "context",
        "sgl-project/sglang PR #21898",
    ),
)  # fmt: skip

#: a line without any of these words matches no signature
MAY_MATCH = re.compile(
    r"[Ee]rror|out of range|must match|assert|algorithm/protocol|path for pattern|simple order|"
    r"speculat|out of memory|Unexpected"
)
