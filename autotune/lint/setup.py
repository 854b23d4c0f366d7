"""Everything a rule may ask: the command, environment, host, model and log, None where unknown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from autotune.lint.command import Command
from autotune.lint.pasted import Pasted
from autotune.lint.speculation import Speculation
from autotune.lint.versions import Version, parse_version

if TYPE_CHECKING:
    from autotune.lint.log_facts import LogFacts
    from autotune.lint.nccl_effects import Effects
    from model.machine import Machine
    from model.shapes import ModelShape

#: families with multi-head latent attention, by name, where no shape is given
_MLA_NAMES = re.compile(r"deepseek[-_ ]?(v[2-9]|r1)|kimi[-_ ]?(k\d|linear)|glm[-_ ]?5|longcat",
                        re.IGNORECASE)  # fmt: skip
#: bytes of an activation that is reduced: bf16
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One case to judge."""

    engine: str
    command: Command
    version: Version | None = None
    #: the text as given, taken apart; empty for our own engine
    pasted: Pasted = field(default_factory=Pasted)
    #: what reaches the server
    env: Mapping[str, str] = field(default_factory=dict)
    #: variables that do not: name -> what drops them
    lost: Mapping[str, str] = field(default_factory=dict)
    speculation: Speculation | None = None
    machine: "Machine | None" = None
    target: "ModelShape | None" = None
    target_name: str | None = None
    #: requests at once that the user wants served, where said
    load: int | None = None
    nccl_version: str | None = None
    accept_length: float | None = None
    baseline_tokens_per_s: float | None = None
    log: "LogFacts | None" = None

    def before(self, version: str) -> bool | None:
        """Whether the server is older than ``version``; None where its version is unknown."""
        return None if self.version is None else self.version < parse_version(version)

    def nccl_before(self, version: str) -> bool | None:
        """The same for its NCCL."""
        if self.nccl_version is None:
            return None
        return parse_version(self.nccl_version) < parse_version(version)

    @property
    def tp(self) -> int | None:
        """Tensor-parallel ranks; 1 is both servers' default."""
        names = ("--tp-size", "--tensor-parallel-size", "parallel.tp")
        if self.command.option(*names) is None:
            return 1 if self.command.options else None
        return self.command.number(*names)

    @property
    def local_ranks(self) -> int | None:
        """GPUs that the server takes on this host; None for several hosts or unknown numbers."""
        if self.tp is None or self.engine == "engine" or not self.command.options:
            return None
        hosts = self.command.number("--nnodes") or 1
        ray = self.command.text("--distributed-executor-backend") == "ray"
        local = self.command.option("--data-parallel-size-local", "--data-parallel-address")
        if hosts > 1 or ray or local is not None:
            return None
        sizes = [size for _, size in self._parallel()]
        total = 1
        for size in sizes:
            total *= size
        return total + (self.command.number("--base-gpu-id") or 0)

    def _parallel(self) -> list[tuple[str, int]]:
        """Kinds of parallelism that multiply the GPUs; DP attention shares those of TP."""
        command = self.command
        sizes = [("tensor", self.tp or 1)]
        for name, kind in (("--pp-size", "pipeline"), ("--pipeline-parallel-size", "pipeline")):
            sizes.append((kind, command.number(name) or 1))
        if not command.has("--enable-dp-attention") and command.option("--attn-dp-size") is None:
            for name in ("--dp-size", "--data-parallel-size"):
                sizes.append(("data", command.number(name) or 1))
        return [(kind, size) for kind, size in sizes if size > 1 or kind == "tensor"]

    def ranks_text(self) -> str:
        """ "tensor 4 x data 2", with the first GPU where it is not 0."""
        text = " x ".join(f"{kind} {size}" for kind, size in self._parallel())
        first = self.command.number("--base-gpu-id") or 0
        return f"{text}, from GPU {first} on" if first else text

    @property
    def server_limit(self) -> int | None:
        """Requests that the server runs at once at most, where the command says it."""
        limit = self.command.number("--max-running-requests", "--max-num-seqs", "max_concurrency")
        if limit is None and self.engine == "sglang" and self.speculation is not None:
            return 48
        return limit

    @property
    def concurrency(self) -> int | None:
        """Requests at once: what the user wants, else the server's own limit."""
        if self.load is not None:
            return self.load if self.server_limit is None else min(self.load, self.server_limit)
        return self.server_limit

    @property
    def verify_tokens(self) -> int:
        """Tokens per request and forward."""
        spec = self.speculation
        return 1 if spec is None or spec.verify_tokens is None else spec.verify_tokens

    @property
    def nvlink(self) -> bool | None:
        """Whether NCCL reaches every pair of GPUs in use by NVLink; None without a machine."""
        machine = self.machine
        if machine is None or machine.gpu is None:
            return None
        if machine.p2p.forced_through_host:
            return False
        ranks = range(min(self.tp or machine.num_gpus, machine.num_gpus))
        pairs = [(a, b) for a in ranks for b in ranks if a < b]
        return all(machine.path_type(a, b) in ("LOC", "NVL") for a, b in pairs)

    @property
    def cc(self) -> int | None:
        """Compute capability, 120 for 12.0; None without a machine."""
        machine = self.machine
        return None if machine is None or machine.gpu is None else machine.gpu.cc

    @property
    def mla(self) -> bool | None:
        """Whether the target has latent attention: by its shape, else by its name."""
        if self.target is not None:
            return self.target.mla is not None
        if self.target_name is None:
            return None
        return True if _MLA_NAMES.search(self.target_name) else None

    @property
    def translated(self) -> str | None:
        """Why peer traffic on this host can hang (IOMMU, ACS), or None."""
        machine = self.machine
        if machine is None:
            return None
        causes = []
        if machine.software.iommu == "on":
            causes.append("the IOMMU translates")
        if machine.software.acs_redirect:
            causes.append("ACS redirects peer traffic to the root complex")
        return " and ".join(causes) or None

    @cached_property
    def nccl_effects(self) -> "Effects | None":
        """What each NCCL variable changes here; None where that cannot be predicted."""
        from autotune.lint.nccl_effects import nccl_effects

        return nccl_effects(self)

    def message_bytes(self, tokens: int) -> int | None:
        """Bytes of one all-reduce of a forward of ``tokens`` tokens."""
        return None if self.target is None else tokens * self.target.hidden * _ACTIVATION_BYTES

    @property
    def path_types(self) -> frozenset[str]:
        """Kinds of path between the GPUs in use; empty without a machine."""
        machine = self.machine
        if machine is None or machine.gpu is None:
            return frozenset()
        ranks = range(min(self.tp or machine.num_gpus, machine.num_gpus))
        return frozenset(machine.path_type(a, b) for a in ranks for b in ranks if a < b)
