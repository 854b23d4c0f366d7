"""Judges a command line that was not run: which settings reach the workers, and could they matter.

What a launch cannot show stays "unknown"; `--run` or a log decides it.
"""

from collections.abc import Mapping, Sequence

from autotune.effect.by_size import DEFAULT_SIZES
from autotune.effect.judge import MODELLED
from autotune.effect.launch import Launch
from autotune.effect.ranges import sizes_in_words
from autotune.effect.scene import scene_of_machine
from autotune.effect.verdicts import Judgement, KnobVerdict
from autotune.errors import UserError
from model.machine import Machine
from model.nccl.settings import NcclSettings


def judge_launch(
    launch: Launch,
    expected: Mapping[str, str],
    *,
    machine: Machine | None = None,
    num_ranks: int | None = None,
    nccl_version: str | None = None,
    sizes: Sequence[int] = (),
) -> Judgement:
    """Judge ``expected`` and every NCCL variable that the user or a file sets."""
    wanted = {n: v for n, v in launch.asked.items() if n.startswith("NCCL_") or n in launch.lost}
    shown = {n: v for n, v in wanted.items() if n.startswith(("NCCL_", "CUDA_"))}
    # the shell hands them on in no order of meaning
    asked = {**dict(sorted(shown.items())), **expected}
    for name, setting in launch.files.items():
        asked.setdefault(name, setting.value)
    knobs = [_judge(launch, name, value) for name, value in asked.items()]
    if machine is not None:
        knobs = _with_predictions(launch, knobs, machine, num_ranks, nccl_version, sizes)
    return Judgement(
        files=(),
        num_lines=0,
        versions=() if nccl_version is None else (nccl_version,),
        comms=(),
        knobs=tuple(knobs),
        notes=("way: " + " -> ".join(launch.steps), *launch.notes),
    )


def in_force(launch: Launch) -> dict[str, str]:
    """Variables that NCCL will see: the workers' environment over the files."""
    files = {name: setting.value for name, setting in launch.files.items()}
    return {**files, **launch.env}


def _judge(launch: Launch, name: str, asked: str) -> KnobVerdict:
    found = launch.env.get(name)
    setting = launch.files.get(name)
    if found == asked and launch.unsure is not None and name not in launch.sure:
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="unknown",
            lost_at=f"{_daemon(launch)}, perhaps",
            reason=f"in this shell's environment, but {launch.unsure}: look into the workers, or "
            "set it in NCCL's configuration file",
        )  # fmt: skip
    if found == asked:
        method = {"unknown": "its children, as far as they inherit"}.get(
            launch.start_method, f"workers by {launch.start_method}"
        )
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="unknown",
            reason=f"arrives: {' -> '.join(launch.steps[:-1])} -> {method}; whether NCCL uses it "
            "shows in its log (--run SECONDS, or the logs)",
        )  # fmt: skip
    if found is None and setting is not None and setting.value == asked:
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="unknown", evidence=(setting.evidence,),
            reason="arrives by NCCL's configuration file: NCCL loads it itself, os.environ and "
            "/proc/<pid>/environ never show it",
        )  # fmt: skip
    where = launch.lost.get(name)
    if where is None and setting is not None and found is None:
        reason = f"the configuration file says {setting.value}"
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="not effective", reason=reason,
            evidence=(setting.evidence,), lost_at="config file",
        )  # fmt: skip
    if found is not None:
        reason = f"the workers get {name}={found}"
        reason = f"{where}; {reason}" if where else f"{reason}, not {asked}"
        lost_at = "overwritten by the server" if where and "server" in where else where or "parent"
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="not effective", reason=reason,
            lost_at=lost_at,
        )  # fmt: skip
    if where is None:
        where = "not set in this shell or command"
        return KnobVerdict(
            name=name, asked=asked, read=None, verdict="not effective", reason=where,
            lost_at="parent",
        )  # fmt: skip
    return KnobVerdict(
        name=name, asked=asked, read=None, verdict="not effective",
        reason=f"dropped by {where}", lost_at=where,
    )  # fmt: skip


def _daemon(launch: Launch) -> str:
    """The step whose process was there before."""
    known = ("Ray", "tmux", "screen", "docker compose", "docker-compose", "podman compose")
    return next((step for step in launch.steps if step in known), launch.steps[-2])


def _with_predictions(
    launch: Launch,
    knobs: Sequence[KnobVerdict],
    machine: Machine,
    num_ranks: int | None,
    nccl_version: str | None,
    sizes: Sequence[int],
) -> list[KnobVerdict]:
    """What arrives, judged by the machine's own NCCL choices: inert or effective, predicted."""
    ranks = num_ranks or _ranks(launch) or machine.num_gpus
    version = nccl_version or machine.software.nccl_version
    if version is None or ranks < 2:
        return list(knobs)
    env = in_force(launch)
    try:
        scene = scene_of_machine(machine, min(ranks, machine.num_gpus), version)
        ours = NcclSettings.from_env(env)
    except ValueError as error:
        raise UserError(f"machine {machine.name}: {error}") from None
    found = []
    for knob in knobs:
        if knob.verdict != "unknown" or knob.name not in MODELLED or env.get(knob.name) is None:
            found.append(knob)
            continue
        rest = {name: value for name, value in env.items() if name != knob.name}
        effects = scene.compare(ours, NcclSettings.from_env(rest), sizes or DEFAULT_SIZES)
        inert = all(effect.outcome == "inert" for effect in effects)
        words = (
            f"predicted for {machine.name}: the same kernels without it at all {len(effects)} sizes"
            if inert
            else f"predicted for {machine.name}: {sizes_in_words(effects)}"
        )
        found.append(
            KnobVerdict(
                name=knob.name,
                asked=knob.asked,
                read=None,
                verdict="inert" if inert else "effective",
                reason=f"{words} (it {knob.reason.split(';')[0]})",
                evidence=knob.evidence,
                sizes=effects,
            )
        )
    return found


def _ranks(launch: Launch) -> int | None:
    command = launch.command
    return None if command is None else command.number("--tp-size", "--tensor-parallel-size")
