"""Reads NCCL's own logs (NCCL_DEBUG=INFO, versions 2.18 to 2.32), as a stream.

``parse_nccl_logs(paths)`` takes the files of all ranks, or one file into which several ranks wrote.
Lines are judged as bytes first; equal choice lines are only counted, so a log of 100 MB takes
seconds and little memory. Whatever is cut, interleaved or no text is passed over.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from autotune.errors import UserError
from autotune.nccl_log_build import HANDLERS, ProcessBuilder, by_first_character
from autotune.nccl_log_clean import unwrap, wrapped
from autotune.nccl_log_comm import enabled_row
from autotune.nccl_log_open import DAMAGED, chunk, log_files, opened
from autotune.nccl_log_types import Evidence, NcclLog

CHUNK_BYTES = 4 << 20
#: longer "lines" are no text
MAX_LINE_BYTES = 1 << 16
#: distinct choice lines kept before they are folded by size, and distinct prefixes
MAX_DISTINCT = 50_000

_PREFIX = re.compile(rb"([\w.\-]{1,255}):(\d{1,10}):(\d{1,10}) \[(-?\d{1,6})\] ")
_FULL_PREFIX = re.compile(
    rb"(?:\[[\d:., TZ\-]{8,40}\] ?)?([\w.\-]{1,255}):\d{1,10}:\d{1,10} \[-?\d{1,6}\] "
    rb"(?:\S+:\d+ (?:\(\S*\) )?)?NCCL (?:INFO|WARN) "
)
_CHOICE_WORDS = frozenset(
    name + colon
    for name in (b"AllReduce", b"Broadcast", b"Reduce", b"AllGather", b"ReduceScatter")
    for colon in (b"", b":")
)
_WORDS = frozenset(word.encode() for word in (*HANDLERS, "Enabled"))
#: first bytes of further messages of interest: counts, NCCL_..., topology, tables, init
_FIRST = frozenset(bytes((code,)) for code in b"0123456789N+ C=n[")
_BYTES = b" Bytes -> "
_MATRIX = "Enabled NCCL Func/Proto/Algo Matrix"


def parse_nccl_logs(paths: Iterable[Path | str]) -> NcclLog:
    """All processes and communicators in log files.

    A folder stands for the logs in it and below, "-" for standard input; compressed files are
    read as they are. Raises ``UserError`` for a path that does not exist or cannot be read.
    """
    reader = _Reader()
    names: list[str] = []
    num_lines = num_bytes = 0
    for path in log_files(paths):
        names.append(str(path))
        try:
            with opened(path) as file:
                lines, size = reader.read(file, str(path))
        except OSError as error:
            raise UserError(f"cannot read the NCCL log {path}: {error.strerror or error}") from None
        num_lines, num_bytes = num_lines + lines, num_bytes + size
    return reader.result(tuple(names), num_lines, num_bytes)


def parse_nccl_stream(file: IO[bytes], name: str = "<stream>") -> NcclLog:
    """The same for one open binary file."""
    reader = _Reader()
    return reader.result((name,), *reader.read(file, name))


@dataclass
class _Reader:
    """State while reading; ``processes`` outlives a file, the rest starts anew with each."""

    processes: dict[tuple[str | None, int | None], ProcessBuilder] = field(default_factory=dict)
    #: processes of this file that bear the host and id of another one: containers on one host
    namesakes: dict[tuple[str | None, int | None], ProcessBuilder] = field(default_factory=dict)
    all_namesakes: list[ProcessBuilder] = field(default_factory=list)
    bare_version: str | None = None
    file: str = ""
    prefixes: dict[bytes, tuple[ProcessBuilder, int]] = field(default_factory=dict)
    #: line -> [how often, number of the first]
    choices: dict[bytes, list[int]] = field(default_factory=dict)
    #: whose matrix is being printed (its lines have no prefix), rows left, heads
    matrix: tuple[ProcessBuilder, int] | None = None
    matrix_left: int = 0
    matrix_heads: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    notes: list[str] = field(default_factory=list)

    def read(self, file: IO[bytes], name: str) -> tuple[int, int]:
        """Read one file to its end; returns lines and bytes."""
        self.file, self.prefixes, self.matrix, self.namesakes = name, {}, None, {}
        number = num_bytes = 0
        rest = b""
        while chunk := self._chunk(file):
            num_bytes += len(chunk)
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > MAX_LINE_BYTES:
                # no line end in sight: what follows cannot be a log line either
                rest = rest[:MAX_LINE_BYTES]
            number = self._feed(lines, number)
        if rest:
            number = self._feed([rest], number)
        self._flush()
        return number, num_bytes

    def _chunk(self, file: IO[bytes]) -> bytes:
        try:
            return chunk(file, CHUNK_BYTES)
        except DAMAGED as error:
            self.notes.append(f"{self.file} is damaged: what was readable counts ({error})")
            return b""

    def result(self, files: tuple[str, ...], num_lines: int, num_bytes: int) -> NcclLog:
        """What was found, frozen."""
        found = (*self.processes.values(), *self.all_namesakes)
        for process in found:
            process.version = process.version or self.bare_version
        built = tuple(process.build() for process in found)
        return NcclLog(files, num_lines, num_bytes, built, self.bare_version, tuple(self.notes))

    def _feed(self, lines: Iterable[bytes], number: int) -> int:
        """Take in lines; ``number`` is that of the line before. Returns the last number."""
        choices, words, firsts, choice_words = self.choices, _WORDS, _FIRST, _CHOICE_WORDS
        for line in lines:
            number += 1
            known = choices.get(line)
            if known is not None:
                # most of a long log repeats lines that it has shown before
                known[0] += 1
                continue
            start = line.find(b"NCCL ")
            if start < 0:
                if self.matrix is not None:
                    self._matrix_line(line, number)
                continue
            begin = start + 10
            word = line[begin : line.find(b" ", begin)]
            if line.find(b" NCCL ", begin) >= 0:
                for part in self._split(line):
                    self._message(part, number)
            elif word in choice_words:
                if line.find(_BYTES, begin) > 0:
                    # a time in front makes every line another one
                    key = _without_envelope(line, start)
                    known = choices.get(key)
                    if known is not None:
                        known[0] += 1
                        continue
                    choices[key] = [1, number]
                    if len(choices) > MAX_DISTINCT:
                        self._flush()
                elif line.find(b"|", begin) > 0:
                    self._message(line, number)
            elif (
                word in words
                or line[begin : begin + 1] in firsts
                or line[start + 5 : begin] != b"INFO "
            ):
                self._message(line, number)
        return number

    def _message(self, line: bytes, number: int) -> None:
        """One message that may be of interest."""
        if len(line) > MAX_LINE_BYTES:
            return
        num_folded = 0
        if wrapped(line):
            line, num_folded = unwrap(line)
        start = line.find(b"NCCL ")
        if start < 0:
            return
        level, tail = line[start + 5 : start + 10], line[start + 10 :]
        evidence = Evidence(self.file, number)
        if level == b"WARN ":
            process, _ = self._process(line[:start])
            process.warn(_text(tail), evidence)
            return
        if level != b"INFO ":
            match = re.match(rb"NCCL version (\d+\.\d+\.\d+\S*)", line[start:])
            if match is not None and self.bare_version is None:
                self.bare_version = _text(match[1])
            return
        if _BYTES in tail:
            self.choices.setdefault(line, [0, number])[0] += 1
            return
        if b"- Init " in tail:
            # choices up to here belong to the communicators known so far
            self._flush()
        process, tid = self._process(line[:start])
        if b"- Init START" in tail and process.is_another(_text(tail), self.file):
            process = self._namesake(process)
        process.num_folded += num_folded
        process.folding = num_folded
        text = _text(tail)
        if text.startswith(_MATRIX):
            self.matrix, self.matrix_left, self.matrix_heads = (process, tid), 24, None
            return
        handler = HANDLERS.get(text.split(" ", 1)[0], by_first_character)
        handler(process, tid, text, evidence)

    def _split(self, line: bytes) -> Iterator[bytes]:
        """The messages of a line into which several processes wrote at once."""
        hosts = {host.encode() for host, _ in self.processes if host is not None}
        starts = [0]
        for match in _FULL_PREFIX.finditer(line):
            host, start = match[1], match.start()
            # without a space between, the last message's end looks like part of the host
            known = [name for name in hosts if host.endswith(name) and host not in hosts]
            if known:
                start = match.end(1) - len(max(known, key=len))
            hosts.add(host if not known else line[start : match.end(1)])
            if start > starts[-1]:
                starts.append(start)
        for begin, end in zip(starts, [*starts[1:], len(line)], strict=True):
            yield line[begin:end]

    def _process(self, prefix: bytes) -> tuple[ProcessBuilder, int]:
        """Whose message it is: process and thread of a line's beginning."""
        known = self.prefixes.get(prefix)
        if known is not None:
            return known
        host: str | None = None
        pid: int | None = None
        tid = 0
        match = None
        for match in _PREFIX.finditer(unwrap(prefix)[0] if b"\x1b" in prefix else prefix):  # noqa: B007 (the last one counts)
            pass
        if match is not None:
            host, pid, tid = _text(match[1]), int(match[2]), int(match[3])
            if (host, pid) not in self.processes:
                # the beginning may carry the end of a message that was cut into
                for other, same in self.processes:
                    if same == pid and other is not None and host.endswith(other):
                        host = other
        process = self.namesakes.get((host, pid)) or self.processes.get((host, pid))
        if process is None:
            process = self.processes[host, pid] = ProcessBuilder(host, pid)
        if len(self.prefixes) > MAX_DISTINCT:
            self.prefixes.clear()
        self.prefixes[prefix] = process, tid
        return process, tid

    def _namesake(self, process: ProcessBuilder) -> ProcessBuilder:
        """From here on this file tells of another process with the same host and id."""
        other = ProcessBuilder(process.host, process.pid, process.version)
        self.namesakes[process.host, process.pid] = other
        self.all_namesakes.append(other)
        self.prefixes.clear()
        return other

    def _matrix_line(self, line: bytes, number: int) -> None:
        """A line without prefix while an "Enabled" matrix is open."""
        assert self.matrix is not None
        self.matrix_left -= 1
        text = _text(unwrap(line)[0])
        if not text.strip() or self.matrix_left <= 0:
            self.matrix = None
            return
        # in front may stand what a collector of logs adds ("worker-0  | ")
        parts = [tuple(part.split()) for part in text.split("|")[-3:]]
        if len(parts) == 3 and parts[0][-1:] == ("Function",):
            self.matrix_heads = parts[1], parts[2]
        elif self.matrix_heads is not None:
            process, tid = self.matrix
            row = enabled_row(text, *self.matrix_heads, Evidence(self.file, number))
            if row is not None:
                process.current(tid, row.evidence).enabled[row.function] = row

    def _flush(self) -> None:
        """Fold the counted choice lines into their processes."""
        for line, (count, number) in self.choices.items():
            num_folded = 0
            if wrapped(line):
                line, num_folded = unwrap(line)
            start = line.find(b"NCCL INFO ")
            if start >= 0 and len(line) <= MAX_LINE_BYTES:
                process, _ = self._process(line[:start])
                process.num_folded += num_folded
                process.choice(_text(line[start + 10 :]), count, Evidence(self.file, number))
        self.choices.clear()


def _without_envelope(line: bytes, start: int) -> bytes:
    """A choice line from its host on, without the time or JSON around; ``start``: of "NCCL "."""
    device = line.rfind(b" [", 0, start)
    if device < 0:
        return line
    begin = max(line.rfind(b" ", 0, device), line.rfind(b'"', 0, device)) + 1
    if line[:1] != b"{":
        return line[begin:]
    ends = [end for end in (line.find(b"\\n", start), line.find(b'"', start)) if end > 0]
    return line[begin : min(ends, default=len(line))]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").rstrip("\r\n")
