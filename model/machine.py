"""One host: GPUs, CPU, topology, peer-to-peer rules, and what a probe measured there.

A machine file (YAML) states each value with its source. Rates are GB/s = 10^9 bytes per second
per direction, sizes MiB and GiB, times us. A host without GPUs (ranks are CPU processes joined by
gloo) has ``gpu: null``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from model.topology import PathType, Schema, Topology, check_unit

Vendor = Literal["amd", "intel", "arm", "other"]


class Gpu(Schema):
    """The GPUs of the host, all alike."""

    name: str
    count: int
    #: as NVIDIA writes it: "9.0", "12.0"
    compute_capability: str
    num_sms: int
    dram_gb_per_s: float
    l2_mib: float
    memory_gib: float
    #: dense, no sparsity, fp32 accumulate
    bf16_tflops: float
    smem_per_block_kib: float

    @field_validator("compute_capability")
    @classmethod
    def _capability(cls, text: str) -> str:
        major, dot, minor = text.partition(".")
        if not (major.isdigit() and dot and minor.isdigit()):
            raise ValueError(f"{text!r} is no compute capability; write it like '12.0' (quoted)")
        return text

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        check_unit("gpu.count", self.count, 1, 64, "GPUs")
        check_unit("gpu.num_sms", self.num_sms, 1, 1024, "SMs")
        check_unit("gpu.dram_gb_per_s", self.dram_gb_per_s, 50, 50_000, "GB/s (10^9 bytes/s)")
        check_unit("gpu.l2_mib", self.l2_mib, 0.25, 4096, "MiB")
        check_unit("gpu.memory_gib", self.memory_gib, 1, 4096, "GiB")
        check_unit("gpu.bf16_tflops", self.bf16_tflops, 1, 100_000, "TFLOP/s (10^12)")
        check_unit("gpu.smem_per_block_kib", self.smem_per_block_kib, 16, 2048, "KiB")
        return self

    @property
    def cc(self) -> int:
        """Compute capability as NCCL counts it: 90 for 9.0, 120 for 12.0."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major) * 10 + int(minor)


class Cpu(Schema):
    """The host processors."""

    vendor: Vendor
    model: str
    #: microarchitecture as NCCL distinguishes it ("SPR", "EMR", "Turin"), null if unknown
    generation: str | None = None
    sockets: int
    cores_per_socket: int

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        check_unit("cpu.sockets", self.sockets, 1, 16, "sockets")
        check_unit("cpu.cores_per_socket", self.cores_per_socket, 1, 1024, "cores")
        return self


class P2p(Schema):
    """Whether GPUs may write each other's memory over PCIe or NVLink."""

    #: the driver lets GPUs reach each other (cudaDeviceCanAccessPeer)
    possible: bool
    #: peer traffic is forced through host memory (NCCL_P2P_DISABLE=1, or a VM that forbids it)
    forced_through_host: bool = False
    #: in-flight posted writes collapse when one switch's GPUs write to several root ports:
    #: least number of source GPUs that triggers it, null where it was not seen
    posted_write_collapse_sources: int | None = None
    #: rate left per uplink when it happens, GB/s
    posted_write_collapse_gb_per_s: float | None = None

    @model_validator(mode="after")
    def _collapse_is_whole(self) -> Self:
        sources, rate = self.posted_write_collapse_sources, self.posted_write_collapse_gb_per_s
        if (sources is None) != (rate is None):
            raise ValueError("p2p.posted_write_collapse_sources and _gb_per_s (GB/s) go together")
        if sources is not None and rate is not None:
            check_unit("p2p.posted_write_collapse_sources", sources, 2, 64, "GPUs")
            check_unit("p2p.posted_write_collapse_gb_per_s", rate, 0.05, 256, "GB/s")
        return self


class Software(Schema):
    """Versions and switches of the host that change communication; null where unknown."""

    nccl_version: str | None
    driver: str | None = None
    iommu: Literal["off", "pt", "on"] | None = None
    acs_redirect: bool | None = None
    #: NICs that NCCL sees change its search (see reference: nodes of kind nic are explicit)
    has_nic: bool = False


class Spread(Schema):
    """A measured quantity in us: median, 5th and 95th percentile, number of samples."""

    median_us: float = Field(gt=0)
    p05_us: float = Field(gt=0)
    p95_us: float = Field(gt=0)
    n: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.p05_us <= self.median_us <= self.p95_us:
            raise ValueError(
                f"p05_us {self.p05_us:g} <= median_us {self.median_us:g} <= p95_us "
                f"{self.p95_us:g} must hold (us)"
            )
        return self


class AllreduceRow(Schema):
    """One measured all-reduce: ``mode`` is how it was launched, ``env`` its NCCL variables."""

    backend: Literal["nccl", "gloo", "one_shot", "two_shot"]
    num_ranks: int = Field(ge=2)
    size_bytes: int = Field(ge=1)
    mode: Literal["eager", "graph"]
    time_us: float = Field(gt=0)
    env: Mapping[str, str] = Field(default_factory=dict)


class Measured(Schema):
    """What ``autotune probe`` measured on the host; null where it could not."""

    dram_gb_per_s: float | None = None
    #: us per tiny kernel launched one by one by torch; on a CPU host per torch call
    launch_eager: Spread | None = None
    #: us per tiny kernel of a replayed CUDA graph
    launch_graph: Spread | None = None
    allreduce: tuple[AllreduceRow, ...] = ()

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if self.dram_gb_per_s is not None:
            check_unit("measured.dram_gb_per_s", self.dram_gb_per_s, 1, 50_000, "GB/s (10^9)")
        return self


class Machine(Schema):
    """One host. Build with ``load_machine(path)`` or ``Machine.from_dict(mapping)``."""

    name: str
    gpu: Gpu | None
    cpu: Cpu
    topology: Topology
    p2p: P2p
    software: Software
    #: where each value is from, by dotted field; the longest prefix counts
    #: ("gpu", "gpu.l2_mib", "topology.links.pcie")
    sources: Mapping[str, str]
    measured: Measured = Measured()
    #: the fingerprint that the engine computes on the host which a probe described; null for a
    #: host that was written down from data sheets or reports, and was never probed
    host_fingerprint: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        num_gpus = 0 if self.gpu is None else self.gpu.count
        if num_gpus != self.topology.num_gpus:
            raise ValueError(
                f"gpu.count {num_gpus} GPUs, but the topology has {self.topology.num_gpus}"
            )
        sockets = sum(node.kind == "socket" for node in self.topology.nodes)
        if sockets != self.cpu.sockets:
            raise ValueError(f"cpu.sockets {self.cpu.sockets}, but the topology has {sockets}")
        for key, text in self.sources.items():
            if not text.strip():
                raise ValueError(f"sources[{key!r}] is empty: name where the value is from")
        for field in self.sourced_fields():
            if self.source_of(field) is None:
                raise ValueError(
                    f"{field} has no source: add it (or a prefix of it) under sources:"
                )
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "machine") -> "Machine":
        """Build from plain values; raises ``ValueError``, one line, naming field and unit."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(f"{where}: {_one_line(error)}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML; ``Machine.from_dict(machine.to_dict()) == machine``."""
        return self.model_dump(mode="json")

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, 0 on a CPU-only host."""
        return self.topology.num_gpus

    def path_type(self, gpu_a: int, gpu_b: int) -> PathType:
        """The path between two GPUs in NCCL's terms: LOC, NVL, PIX, PXB, PHB or SYS."""
        return self.topology.path_type(gpu_a, gpu_b)

    def sourced_fields(self) -> Iterator[str]:
        """Dotted names of all values that need a source."""
        for section in ("gpu", "cpu", "p2p", "software"):
            values = getattr(self, section)
            for field in () if values is None else type(values).model_fields:
                if getattr(values, field) is not None:
                    yield f"{section}.{field}"
        for kind in sorted({link.kind for link in self.topology.links}):
            yield f"topology.links.{kind}"
        yield "topology.nodes"

    def source_of(self, field: str) -> str | None:
        """The source of a dotted field: the longest prefix in ``sources``, None without."""
        parts = field.split(".")
        for end in range(len(parts), 0, -1):
            text = self.sources.get(".".join(parts[:end]))
            if text is not None:
                return text
        return None

    @property
    def fingerprint(self) -> str:
        """12 hex digits that name this description: GPUs, CPU and topology, not rates or versions.

        Measured rates and installed versions differ from day to day on one host, so they are not
        part of it; whether peer traffic is forced through host memory is. Calibrations and caches
        go by it. Which host measurements were taken on is ``host_fingerprint``, and that is what
        provenance and best-config files carry.
        """
        gpu = None
        if self.gpu is not None:
            keys = {"name", "count", "compute_capability", "num_sms"}
            gpu = self.gpu.model_dump(include=keys)
        links = sorted(
            (*sorted((k.a, k.b)), k.kind, k.pcie_gen or 0, k.pcie_width or 0)
            for k in self.topology.links
        )
        nodes = sorted((n.id, n.kind) for n in self.topology.nodes)
        cpu = self.cpu.model_dump(include={"vendor", "model", "sockets"})
        forced = self.p2p.forced_through_host or not self.p2p.possible
        text = json.dumps([gpu, cpu, nodes, links, forced], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def is_named_by(self, machine_fingerprint: str) -> bool:
        """Whether a ``machine_fingerprint`` of provenance or of a best-config file is this one.

        Real measurements carry the host's; simulated ones ``sim:`` and the description's.
        """
        simulated = f"sim:{self.fingerprint}"
        return machine_fingerprint in (self.host_fingerprint, simulated, self.fingerprint)


def load_machine(path: str | Path) -> Machine:
    """Read a machine file; raises ``ValueError``, one line, naming file, field and unit."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"machine file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"machine file {path}: no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"machine file {path}: no YAML: nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"machine file {path}: a mapping is expected, not {type(values).__name__}")
    return Machine.from_dict(values, where=f"machine file {path}")


def _one_line(error: ValidationError) -> str:
    """The first problem of a pydantic error, with its field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    value = first["input"]
    if isinstance(value, str | int | float | bool) and repr(value) not in message:
        message = f"{message} (got {value!r})"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{field}: {message}{more}" if field else f"{message}{more}"
