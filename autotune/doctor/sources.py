"""The raw texts that the doctor reads: taken from this host, or from a folder of recorded outputs.

Every text has a fixed file name, so that ``autotune doctor --save FOLDER`` on one machine and
``--from FOLDER`` on another give the same findings. A folder may also be filled by hand: see
``RECORDED`` for the command behind each file and the other names that are accepted.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.doctor.findings import Missing
from autotune.doctor.load import Answer, RunTool, link_under_load
from autotune.doctor.system import host_facts, package_facts
from autotune.errors import UserError

COMMAND_TIMEOUT_S = 60.0
#: larger files are no recordings of ours
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """One text: the file it is recorded in, and what makes it."""

    file: str
    #: command, or None when Python collects it
    command: tuple[str, ...] | None
    #: shown to a person who records by hand
    recipe: str
    #: further file names accepted in a folder (globs)
    patterns: tuple[str, ...]
    #: what to install or do when the command is not there
    fix: str = ""


RECORDED: Mapping[str, Source] = {
    "lspci": Source(
        "lspci-vv.txt",
        ("lspci", "-vvD"),
        "sudo lspci -vvD > lspci-vv.txt",
        ("lspci*",),
        "apt-get install pciutils, then run as root",
    ),
    "smi_load": Source(
        "nvidia-smi-load.xml",
        None,
        "nvidia-smi -q -x > nvidia-smi-load.xml (while the GPUs work)",
        (),
        "run the GPUs while recording",
    ),
    "smi": Source(
        "nvidia-smi.xml",
        ("nvidia-smi", "-q", "-x"),
        "nvidia-smi -q -x > nvidia-smi.xml",
        ("*smi*.xml", "*.xml"),
        "install the NVIDIA driver (nvidia-smi comes with it)",
    ),
    "topo": Source(
        "topo-m.txt",
        ("nvidia-smi", "topo", "-m"),
        "nvidia-smi topo -m > topo-m.txt",
        ("*topo-m*", "*topo_m*", "topo.txt", "*topology*"),
        "install the NVIDIA driver",
    ),
    "p2p": Source(
        "topo-p2p-r.txt",
        ("nvidia-smi", "topo", "-p2p", "r"),
        "nvidia-smi topo -p2p r > topo-p2p-r.txt",
        ("*p2p*",),
        "install the NVIDIA driver",
    ),
    "cmdline": Source(
        "cmdline.txt", None, "cat /proc/cmdline > cmdline.txt", ("*cmdline*",), "mount /proc"
    ),
    "system": Source(
        "sys.txt",
        None,
        "autotune doctor --save FOLDER",
        ("sys*.txt",),
        "record it with `autotune doctor --save FOLDER` on that host",
    ),
    "packages": Source(
        "packages.txt",
        None,
        "pip freeze > packages.txt",
        ("packages*", "*freeze*", "pip-list*"),
        "record it with `pip freeze > packages.txt` in the environment that serves",
    ),
}


@dataclass(frozen=True)
class Recording:
    """The texts that are there, why the others are not, and files nobody knows."""

    texts: Mapping[str, str]
    missing: Mapping[str, Missing]
    #: "this host" or the folder
    origin: str
    live: bool
    ignored: tuple[str, ...] = field(default=())

    def save(self, folder: Path) -> None:
        """Write every text under its own name. Raises ``UserError`` when the folder can't be."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.texts.items():
                (folder / RECORDED[name].file).write_text(text, encoding="utf-8")
            for name, why in self.missing.items():
                # what the tool said instead is evidence as well
                if RECORDED[name].command is not None:
                    (folder / RECORDED[name].file).write_text(why.reason + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--save {folder}: {error.strerror}") from None


def run_tool(command: Sequence[str]) -> Answer:
    """Run a command in the C locale; a failing one explains itself in its first line."""
    path = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    shown = " ".join(command)
    if path is None:
        return Answer(None, f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            (path, *command[1:]),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"`{shown}` did not end within {COMMAND_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Answer(None, f"`{shown}`: {error.strerror}")
    if done.returncode != 0 or not done.stdout.strip():
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        return Answer(None, f"`{shown}` failed (exit code {done.returncode}): {lines[0].strip()}")
    return Answer(done.stdout)


def record_host(run: RunTool = run_tool) -> Recording:
    """Take every text from this host."""
    texts: dict[str, str] = {}
    missing: dict[str, Missing] = {}
    for name, source in RECORDED.items():
        if source.command is None:
            continue
        answer = run(source.command)
        if answer.text is None:
            fix = source.fix if "not installed" in answer.problem else ""
            missing[name] = Missing(answer.problem, fix)
        else:
            texts[name] = answer.text
    try:
        texts["cmdline"] = Path("/proc/cmdline").read_text()
    except OSError as error:
        missing["cmdline"] = Missing(f"/proc/cmdline: {error.strerror}", RECORDED["cmdline"].fix)
    texts["system"] = host_facts()
    texts["packages"] = package_facts()
    answer = link_under_load(texts.get("smi"), texts["packages"], run)
    if answer.text is None:
        missing["smi_load"] = Missing(answer.problem)
    else:
        texts["smi_load"] = answer.text
    return Recording(texts, missing, "this host", live=True)


def read_folder(folder: Path) -> Recording:
    """Read recorded outputs.

    Raises ``UserError`` when the folder is not there or holds nothing that is known.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UserError(f"--from {folder}: {what}; give a folder of recorded outputs")
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    texts: dict[str, str] = {}
    missing: dict[str, Missing] = {}
    used: set[str] = set()
    for name, source in RECORDED.items():
        path = _find(files, source, used)
        if path is None:
            missing[name] = Missing(
                f"{source.file} is not in {folder}", f"record it: {source.recipe}"
            )
            continue
        used.add(path.name)
        text = _read(path)
        if text.strip():
            texts[name] = text
        else:
            missing[name] = Missing(f"{path.name} is empty", f"record it: {source.recipe}")
    if not texts:
        known = ", ".join(source.file for source in RECORDED.values())
        raise UserError(
            f"--from {folder}: no recorded output there; known files: {known} "
            f"(made by `autotune doctor --save FOLDER`)"
        )
    ignored = tuple(name for name in files if name not in used)
    return Recording(texts, missing, str(folder), live=False, ignored=ignored)


def _find(files: Mapping[str, Path], source: Source, used: set[str]) -> Path | None:
    """Its own name first, then the other patterns, shortest name first."""
    if source.file in files:
        return files[source.file]
    for pattern in source.patterns:
        fitting = [p for n, p in files.items() if n not in used and p.match(pattern)]
        if fitting:
            return min(fitting, key=lambda path: len(path.name))
    return None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; no recorded output")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
