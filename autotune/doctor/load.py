"""Reads the links once more while the GPUs copy, because an idle GPU lowers its link on purpose."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.doctor.smi import parse_smi
from autotune.doctor.system import parse_packages

#: starting CUDA on eight GPUs takes a while
_READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, or why there is nothing."""

    text: str | None
    problem: str = ""


RunTool = Callable[[Sequence[str]], Answer]


def link_under_load(smi: str | None, packages: str, run: RunTool) -> Answer:
    """``nvidia-smi -q -x`` while every GPU copies, where an idle GPU shows a lowered link."""
    if smi is None or not _lowered(smi):
        return Answer(None, "not needed: no idle GPU shows a lowered link")
    if parse_packages(packages).torch_cuda in (None, "cpu"):
        return Answer(None, "no torch with CUDA in this environment to make the GPUs work")
    command = [sys.executable, "-m", "autotune.probe.worker", "gpu-load"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        said: list[str] = []
        reader = threading.Thread(
            target=lambda stream: said.append(stream.readline()),
            args=(process.stdout,),
            daemon=True,
        )
        reader.start()
        reader.join(_READY_S)
        if said != ["copying\n"]:
            return Answer(None, "the GPUs could not be made to copy")
        return run(("nvidia-smi", "-q", "-x"))
    finally:
        process.kill()
        process.wait()


def _lowered(smi: str) -> bool:
    """Whether a GPU that may be idle runs below its generation."""
    try:
        gpus = parse_smi(smi).gpus
    except ValueError:
        return False
    return any(
        gpu.link is not None
        and gpu.link_max is not None
        and gpu.link.gen < gpu.link_max.gen
        and gpu.idle is not False
        for gpu in gpus
    )
