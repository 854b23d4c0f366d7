"""NCCL releases that the selector knows, with the constants and rules that differ between them.

Source: NVIDIA/nccl tags v2.27.3-1 to v2.30.7-1, src/graph/tuning.cc, search.cc, connect.cc and
src/enqueue.cc (read, facts only). Tables are indexed by GPU generation (Volta, Ampere and Ada,
Hopper, Blackwell) and by number of nodes (1, 2, more); GB/s = 10^9 bytes per second.
"""

import re
from dataclasses import dataclass, replace

VOLTA, AMPERE, HOPPER, BLACKWELL = range(4)
ByNodes = tuple[float, float, float]

#: protocol order everywhere: LL, LL128, Simple; latencies in us
TREE_BASE_US = (6.8, 14.0, 8.4)
RING_BASE_US = (6.6, 14.0, 8.4)
TREE_HOP_US = {"nvlink": (0.6, 1.25, 4.0), "pci": (1.0, 1.9, 4.0), "net": (5.0, 8.5, 14.0)}
RING_HOP_US = {"nvlink": (0.6, 1.9, 3.4), "pci": (1.0, 2.5, 5.7), "net": (2.7, 4.0, 14.0)}
#: latency of NVLink SHARP (Simple only)
NVLS_HOP_US = {"nvlink": 25.0, "pci": 0.0, "net": 18.0}
NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)

#: on several nodes the row is the CPU vendor: Intel (0), AMD or mixed (1)
LL_MAX: tuple[ByNodes, ...] = (
    (39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0),
)  # fmt: skip

#: share of the tree's bandwidth reached at 64 B, 128 B, ... 256 MiB
TREE_CORRECTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
     0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
     0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
     0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)  # fmt: skip

MAX_CHANNELS = 64
WARP = 32
MAX_THREADS = 640
LL_MAX_THREADS = SIMPLE_MAX_THREADS = 512
LL128_MAX_THREADS = 640
#: bytes that a thread should have before more threads or channels are used (LL, LL128, Simple)
THREAD_THRESHOLDS = (8, 8, 64)

#: bandwidths tried by the search within one node, by GPU generation
SPEEDS_OLD = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
SPEEDS_SM90 = (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What one release of NCCL assumes and does, where releases differ."""

    version: tuple[int, int, int]
    per_channel_ring_ll128: tuple[ByNodes, ...]
    per_channel_tree_ll128: tuple[ByNodes, ...]
    per_channel_tree: tuple[ByNodes, ...]
    speeds_sm100: tuple[float, ...]
    #: traffic under which a channel is not worth having, bytes
    min_traffic_bytes: int
    #: the minimum also binds the share of a channel (before 2.29.2)
    min_traffic_per_channel: bool
    #: LL128 may join GPUs of different capability from Hopper on
    ll128_mixed: bool
    #: NVLS bandwidth counts efficiency and two pipelined operations (from 2.28)
    nvls_efficiency: bool
    #: NVLS channels raise the number of ring channels (before 2.28)
    nvls_raises_channels: bool
    #: fewest GPUs for which NVLS is tried
    nvls_min_gpus: int

    @property
    def name(self) -> str:
        """As written: "2.28.9"."""
        return ".".join(map(str, self.version))

    def speeds(self, min_cc: int) -> tuple[float, ...]:
        """Bandwidths that the search tries, highest first, GB/s."""
        if min_cc >= 100:
            return self.speeds_sm100
        return SPEEDS_SM90 if min_cc >= 90 else SPEEDS_OLD


def generation(compute_capability: int) -> int:
    """Row of the tables for a GPU: 80 and 89 are Ampere, 120 is Blackwell."""
    if compute_capability >= 100:
        return BLACKWELL
    if compute_capability >= 90:
        return HOPPER
    return AMPERE if compute_capability >= 80 else VOLTA


_OLD = (20.0, 20.0, 20.0)
_H_LL128 = (36.7, 36.7, 36.7)
_TREE_ROWS: tuple[ByNodes, ...] = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0))
_BLACKWELL_2X = (73.4, 73.4, 73.4)
_SPEEDS_SM100 = (90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0)
_SPEEDS_SM100_229 = (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0)

_2_27_3 = Release(
    version=(2, 27, 3),
    per_channel_ring_ll128=(_OLD, _OLD, _H_LL128, _BLACKWELL_2X),
    per_channel_tree_ll128=(_OLD, _OLD, (36.7, 36.7, 29.0), (73.4, 73.4, 58.0)),
    per_channel_tree=(*_TREE_ROWS, (77.4, 82.8, 72.0)),
    speeds_sm100=_SPEEDS_SM100,
    min_traffic_bytes=16 << 10,
    min_traffic_per_channel=True,
    ll128_mixed=False,
    nvls_efficiency=False,
    nvls_raises_channels=True,
    nvls_min_gpus=3,
)
_2_28_3 = replace(
    _2_27_3,
    version=(2, 28, 3),
    per_channel_tree_ll128=(_OLD, _OLD, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0)),
    per_channel_tree=(*_TREE_ROWS, (70.0, 42.8, 24.0)),
    nvls_efficiency=True,
    nvls_raises_channels=False,
)
_2_28_7 = replace(
    _2_28_3,
    version=(2, 28, 7),
    per_channel_ring_ll128=(_OLD, _OLD, _H_LL128, (73.4, 34.6, 73.4)),
    nvls_min_gpus=2,
)
_2_29_2 = replace(
    _2_28_7,
    version=(2, 29, 2),
    per_channel_ring_ll128=(_OLD, _OLD, _H_LL128, (34.5, 34.6, 34.5)),
    speeds_sm100=_SPEEDS_SM100_229,
    min_traffic_bytes=32 << 10,
    min_traffic_per_channel=False,
)
_2_29_7 = replace(
    _2_29_2,
    version=(2, 29, 7),
    per_channel_ring_ll128=(_OLD, _OLD, _H_LL128, (40.0, 40.0, 40.0)),
)
_2_30_3 = replace(_2_29_7, version=(2, 30, 3), ll128_mixed=True)

#: releases at which something changed, oldest first; patches between follow the one before
RELEASES = (
    _2_27_3,
    replace(_2_27_3, version=(2, 27, 5)),
    replace(_2_27_3, version=(2, 27, 6)),
    replace(_2_27_3, version=(2, 27, 7)),
    _2_28_3,
    _2_28_7,
    replace(_2_28_7, version=(2, 28, 9)),
    _2_29_2,
    replace(_2_29_2, version=(2, 29, 3)),
    _2_29_7,
    _2_30_3,
    replace(_2_30_3, version=(2, 30, 4)),
    replace(_2_30_3, version=(2, 30, 7)),
)
KNOWN_VERSIONS = tuple(release.name for release in RELEASES)


def release_for(version: str) -> Release:
    """The rules of a version such as "2.28.9" or "2.28.9+cuda13.0".

    A patch that lies between known ones follows the one before it. Raises ``ValueError`` naming
    an unknown version and the known ones.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:[+-].*)?", version.strip())
    if match is not None:
        wanted = tuple(map(int, match.groups()))
        family = [r for r in RELEASES if r.version[:2] == wanted[:2] and r.version <= wanted]
        if family:
            return family[-1]
    raise ValueError(
        f"NCCL version {version!r} is unknown to the selector; known: {', '.join(KNOWN_VERSIONS)}"
    )
