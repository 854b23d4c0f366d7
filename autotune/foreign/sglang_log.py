"""SGLang's server log: resolved arguments, graphs, all-reduce, decode lines.

Formats: servers reference A.2, A.4, A.7 (0.5.9 and 0.5.23). ``gen throughput`` is over the last
``decode_log_interval`` forwards; the first decode line after a prefill or after idle time holds
that gap and is left out.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from autotune.foreign.literals import balanced, keyword_values
from autotune.foreign.run import ForeignRun, Sample
from autotune.foreign.servers import sglang_knobs
from autotune.foreign.sglang_decode import read_decode_line

MARKS = (
    "server_args=ServerArgs(",
    "Decode batch",
    "Prefill batch",
    "Capture draft",
    "#running-req",
)

#: decides only where no mark is there: containers and folders bear it too
NAMES = ("sglang",)

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*?( TP\d+| DP\d+[^\]]*)?\]")
_FIELD = re.compile(r"#?([a-zA-Z][a-zA-Z0-9 ()/_-]*?): ([A-Za-z0-9.+-]+)")
_ENVIRONMENT = re.compile(r"\b((?:NCCL|SGLANG|CUDA|TORCH|VLLM)_[A-Z0-9_]+)[=:] ?'?([^\s',;]+)")
_VERSION = re.compile(r"\bsglang(?: version|==|:)?[ =:]+v?(\d+\.\d+\.\d+\S*)", re.I)
_CUSTOM_ALLREDUCE = re.compile(r"Custom ?all ?reduce\w* is disabled because (.+)", re.I)
_PCIE_IPC = re.compile(r"PCIe-IPC all-reduce enabled")
_DIED = re.compile(
    r"(torch\.(?:cuda\.)?OutOfMemoryError: .+|Scheduler hit an exception.*|"
    r"(?:RuntimeError|AssertionError|ValueError): .+|Received sigquit from a child process.*)"
)
#: arguments that say where and as whom a server ran, not how fast it is
_IRRELEVANT = re.compile(
    r"^(host|port|api_key|admin_api_key|log_|served_model_name|dist_init_addr|nccl_port|"
    r"random_seed|tokenizer_path|file_storage|grpc_|ssl_|gc_|crash_dump|show_time_cost|"
    r"enable_metrics|bucket_|watchdog|weight_version|chat_template)"
)


def read_sglang_log(lines: Iterable[str], path: str) -> ForeignRun:
    """Everything of interest in a log, whole or cut off anywhere."""
    reader = _Reader()
    count = 0
    for line in lines:
        count += 1
        reader.feed(line)
    return reader.result(path, count)


class _Reader:
    def __init__(self) -> None:
        self.args: dict[str, Any] = {}
        self.effective: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.version: str | None = None
        self.failure: str | None = None
        #: the next decode line's interval holds more than decoding
        self._gap = True
        self._last: datetime | None = None
        self._dropped = 0
        self._prefill_tokens: list[int] = []

    def feed(self, line: str) -> None:
        if "Decode batch" in line:
            self._decode(line)
        elif "Prefill batch" in line:
            self._gap = True
            fields = _fields(line)
            new, cached = _integer(fields.get("new-token")), _integer(fields.get("cached-token"))
            if new is not None and fields.get("new-seq") == "1":
                self._prefill_tokens.append(new + (cached or 0))
        elif "ServerArgs(" in line and not self.args:
            text, _ = balanced(line, line.index("ServerArgs(") + len("ServerArgs"))
            self.args = keyword_values(text)
        elif "apture" in line and "graph" in line:
            self._graphs(line)
        else:
            self._other(line)

    def _decode(self, line: str) -> None:
        found = read_decode_line(line)
        # a line from another scheduler of a data-parallel server is its own batch
        if found is None or found.tokens_per_s is None:
            return
        running, speed = found.running, found.tokens_per_s
        stamp = _time(line)
        idle = (
            self._last is not None
            and stamp is not None
            and (stamp - self._last).total_seconds() > 60
        )
        self._last = stamp or self._last
        if self._gap or idle or running == 0:
            self._gap = running == 0
            self._dropped += 1
            return
        accept = found.accept_length
        tokens = accept if accept is not None else 1.0
        self.samples.append(
            Sample(
                running=running,
                tokens_per_s=speed,
                step_ms=1e3 * running * tokens / speed if speed > 0 else None,
                accept_length=accept,
                cuda_graph=found.cuda_graph,
            )
        )

    def _graphs(self, line: str) -> None:
        lowered = line.lower()
        if "draft extend" in lowered:
            self.effective["draft-extend graph"] = "captured"
        elif "draft" in lowered:
            self.effective["draft graph"] = "captured"
        else:
            sizes = re.search(r"bs (\[[^\]]*\])", line)
            if sizes:
                self.effective["captured batch sizes"] = sizes[1]
            self.effective["decode/verify graph"] = "captured"

    def _other(self, line: str) -> None:
        if match := _CUSTOM_ALLREDUCE.search(line):
            self.effective["custom all-reduce"] = "disabled: " + match[1].split(". ")[0].strip()
        elif _PCIE_IPC.search(line):
            self.effective["all-reduce"] = "FlashInfer PCIe-IPC"
        if self.version is None and (match := _VERSION.search(line)):
            self.version = match[1].rstrip(",)'\"")
        for name, value in _ENVIRONMENT.findall(line):
            self.environment.setdefault(name, value)
        if match := _DIED.search(line):
            self.failure = match[1].strip()[:300]

    def result(self, path: str, count: int) -> ForeignRun:
        knobs = sglang_knobs(self.args)
        if knobs.get("speculation.method") == "eagle3":
            if "draft graph" in self.effective:
                knobs["cuda_graph.draft"] = True
            if "draft-extend graph" in self.effective:
                knobs["cuda_graph.extend"] = True
        notes = []
        seen = {s.cuda_graph for s in self.samples if s.cuda_graph is not None}
        spec = knobs.get("speculation.method") == "eagle3" or any(
            s.accept_length is not None for s in self.samples
        )
        if seen:
            term = "verify" if spec else "decode"
            off = sum(s.cuda_graph is False for s in self.samples)
            if seen == {True, False}:
                self.effective[f"{term} runs in a CUDA graph"] = "sometimes"
                notes.append(f"{off} of {len(self.samples)} decode lines ran without a CUDA graph")
            if len(seen) == 1:
                # the log line tells what ran, the argument only what was allowed
                knobs[f"cuda_graph.{term}"] = seen.pop()
        if self._dropped:
            lines = "line" if self._dropped == 1 else "lines"
            notes.append(
                f"{self._dropped} decode {lines} after a prefill or idle time left out: the "
                f"interval is not decoding only"
            )
        lengths = [s.accept_length for s in self.samples if s.accept_length is not None]
        workload: dict[str, Any] = {}
        if self._prefill_tokens:
            workload["input_len"] = sorted(self._prefill_tokens)[len(self._prefill_tokens) // 2]
        return ForeignRun(
            path=path,
            format="SGLang server log",
            version=self.version,
            model=_text(self.args.get("model_path")),
            draft=_text(self.args.get("speculative_draft_model_path")),
            args={k: v for k, v in self.args.items() if not _IRRELEVANT.match(k)},
            knobs=knobs,
            effective=self.effective,
            environment=self.environment,
            packages={} if self.version is None else {"sglang": self.version},
            workload=workload,
            samples=tuple(self.samples),
            definition="server interval" if self.samples else None,
            accept_length=sum(lengths) / len(lengths) if lengths else None,
            failure=self.failure,
            notes=tuple(notes),
            num_lines=count,
        )


def _fields(line: str) -> dict[str, str]:
    start = line.find(" batch")
    return {name.strip(): value for name, value in _FIELD.findall(line[start + 6 :])}


def _time(line: str) -> datetime | None:
    match = _STAMP.match(line)
    try:
        return None if match is None else datetime.fromisoformat(match[1])
    except ValueError:
        # a damaged line
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _integer(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else int(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
