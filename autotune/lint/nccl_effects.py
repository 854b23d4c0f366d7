"""NCCL's own choice on a machine with and without each variable, at the sizes of a load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.lint.setup import Setup
from model.nccl.settings import NcclSettings

if TYPE_CHECKING:
    from autotune.effect.by_size import Scene, SizeEffect

#: variables whose effect on an all-reduce the selector knows
MODELLED = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
)  # fmt: skip
#: the prefill chunk that both servers reduce at once
_PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What each variable that is set changes, by size; the last size is a prefill chunk."""

    scene: "Scene"
    env: Mapping[str, str]
    sizes: tuple[int, ...]
    by_name: Mapping[str, tuple["SizeEffect", ...]]
    #: whether the last size is a prefill chunk, none of decoding's
    has_prefill: bool

    def decoding(self, effects: Sequence["SizeEffect"]) -> Sequence["SizeEffect"]:
        """Without the prefill chunk."""
        return effects[:-1] if self.has_prefill else effects

    def without(self, names: Sequence[str]) -> tuple["SizeEffect", ...]:
        """All of ``names`` away at once."""
        rest = {key: value for key, value in self.env.items() if key not in names}
        return self.scene.compare(
            NcclSettings.from_env(self.env), NcclSettings.from_env(rest), self.sizes
        )

    def channels_without(self, name: str) -> int:
        """Channels that NCCL has without one variable."""
        rest = {key: value for key, value in self.env.items() if key != name}
        return self.scene.selector(NcclSettings.from_env(rest)).comm.num_channels


def nccl_effects(setup: Setup) -> Effects | None:
    """None without a machine, a version or a variable, or where NCCL refuses one of them."""
    asked = [name for name in MODELLED if name in setup.env]
    scene = _scene(setup) if asked else None
    if scene is None:
        return None
    from autotune.effect.by_size import DEFAULT_SIZES

    sizes = _sizes(setup) or DEFAULT_SIZES
    try:
        found = Effects(
            scene=scene, env=setup.env, sizes=sizes, by_name={},
            has_prefill=setup.target is not None,
        )  # fmt: skip
        return replace(found, by_name={name: found.without([name]) for name in asked})
    except ValueError:
        # another rule names what NCCL refuses
        return None


def across_releases(setup: Setup) -> tuple[tuple[str, ...], dict[str, set[str]]] | None:
    """What variables change in decoding by the known releases, where the one in use is not known.

    Returns the releases asked (the first and last patch of each family) and, by variable, the
    outcomes over sizes and releases. None where the release is known or nothing can be predicted.
    """
    from model.nccl.versions import KNOWN_VERSIONS, release_for

    machine = setup.machine
    version = setup.nccl_version or (machine.software.nccl_version if machine is not None else None)
    if version is None:
        return None
    try:
        release_for(version)
    except ValueError:
        families: dict[str, list[str]] = {}
        for known in KNOWN_VERSIONS:
            families.setdefault(known.rpartition(".")[0], []).append(known)
        asked = tuple(dict.fromkeys(v for one in families.values() for v in (one[0], one[-1])))
    else:
        return None
    outcomes: dict[str, set[str]] = {}
    for release in asked:
        found = nccl_effects(replace(setup, nccl_version=release))
        if found is None:
            return None
        for name, effects in found.by_name.items():
            outcomes.setdefault(name, set()).update(e.outcome for e in found.decoding(effects))
    return asked, outcomes


def forward_cost(setup: Setup) -> str:
    """Predicted all-reduce time of a verify, as a clause; empty where it is not known."""
    size = setup.message_bytes(max(setup.concurrency or 1, 1) * setup.verify_tokens)
    if size is None or setup.target is None or setup.machine is None:
        return ""
    scene = _scene(setup)
    if scene is None:
        return ""
    try:
        ours = NcclSettings.from_env(setup.env)
        (effect,) = scene.compare(ours, ours, [size])
    except ValueError:
        return ""
    calls = 2 * setup.target.layers
    total = calls * (effect.present_us or 0.0) / 1e3
    return f" (predicted {effect.present_us:.0f} us x {calls} calls = {total:.1f} ms a forward)"


def _scene(setup: Setup) -> "Scene | None":
    """The communicator of this machine, or None where the model cannot tell."""
    from autotune.effect.scene import scene_of_machine

    machine, version = setup.machine, setup.nccl_version
    if machine is None or machine.gpu is None or (setup.tp or 0) < 2:
        return None
    try:
        known = version or machine.software.nccl_version
        if known is None:
            return None
        return scene_of_machine(machine, min(setup.tp or 0, machine.gpu.count), known)
    except ValueError:
        return None


def _sizes(setup: Setup) -> tuple[int, ...]:
    """All-reduce sizes of this load: one token, a verify, the full batch, a prefill chunk."""
    if setup.target is None:
        return ()
    width = setup.verify_tokens
    batch = max(setup.concurrency or 1, 1)
    tokens = sorted({1, width, 4 * width, batch * width, _PREFILL_TOKENS})
    return tuple(token * setup.target.hidden * 2 for token in tokens)
