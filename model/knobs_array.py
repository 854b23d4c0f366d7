"""Many knobs as columns of codes: built from a space without making one ``Knobs`` per point.

A point is four codes: which tree (method, steps, topk, draft_tokens), which communication (ranks,
backend, NCCL settings), which graphs, which host settings. Impossible trees and channel ranges are
left out and equivalent points occur once, by the same rules as ``Knobs.of``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from model.collectives import CollectiveKey
from model.spec import KNOB_FIELDS, Knobs, Scalar

Codes = NDArray[np.int32]
#: (method, steps, topk, draft_tokens)
Tree = tuple[str, int, int, int]
OFF: Tree = ("off", 0, 0, 0)
_GRAPHS = ("graph_decode", "graph_draft", "graph_verify", "graph_extend")
_NCCL = {
    "nccl.algo": "auto",
    "nccl.proto": "auto",
    "nccl.min_channels": None,
    "nccl.max_channels": None,
    "nccl.buffsize": None,
    "nccl.nthreads": None,
    "nccl.p2p_level": "auto",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobsArray:
    """N knobs: a code per part, and the table each code points into."""

    trees: tuple[Tree, ...]
    keys: tuple[CollectiveKey, ...]
    #: (numa_bind, extra)
    hosts: tuple[tuple[bool, tuple[tuple[str, Scalar], ...]], ...]
    tree_code: Codes
    key_code: Codes
    host_code: Codes
    #: bits: decode 1, draft 2, verify 4, extend 8
    graph_bits: Codes

    def __len__(self) -> int:
        return int(self.tree_code.size)

    def __getitem__(self, index: int) -> Knobs:
        """One point as ``Knobs``."""
        method, steps, topk, draft_tokens = self.trees[self.tree_code[index]]
        key = self.keys[self.key_code[index]]
        numa, extra = self.hosts[self.host_code[index]]
        bits = int(self.graph_bits[index])
        return Knobs(
            method=method,
            steps=steps,
            topk=topk,
            draft_tokens=draft_tokens,
            tp=key.tp,
            collectives_backend=key.backend,
            nccl_algo=key.algo,
            nccl_proto=key.proto,
            nccl_min_channels=key.min_channels,
            nccl_max_channels=key.max_channels,
            nccl_buffsize_bytes=key.buffsize_bytes,
            nccl_nthreads=key.nthreads,
            nccl_p2p_level=key.p2p_level,
            numa_bind=numa,
            extra=extra,
            **{name: bool(bits >> i & 1) for i, name in enumerate(_GRAPHS)},
        )

    def __iter__(self) -> Iterator[Knobs]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def of(cls, knobs: Sequence[Knobs]) -> "KnobsArray":
        """From knobs that exist already, order kept."""
        trees: dict[Tree, int] = {}
        keys: dict[CollectiveKey, int] = {}
        hosts: dict[tuple[bool, tuple[tuple[str, Scalar], ...]], int] = {}
        codes = np.zeros((4, len(knobs)), dtype=np.int32)
        for i, k in enumerate(knobs):
            tree = (k.method, k.steps, k.topk, k.draft_tokens)
            codes[0, i] = trees.setdefault(tree, len(trees))
            codes[1, i] = keys.setdefault(CollectiveKey.of(k), len(keys))
            codes[2, i] = hosts.setdefault((k.numa_bind, k.extra), len(hosts))
            codes[3, i] = sum(1 << b for b, name in enumerate(_GRAPHS) if getattr(k, name))
        return cls(
            trees=tuple(trees),
            keys=tuple(keys),
            hosts=tuple(hosts),
            tree_code=codes[0],
            key_code=codes[1],
            host_code=codes[2],
            graph_bits=codes[3],
        )

    def take(self, index: NDArray[np.intp]) -> "KnobsArray":
        """Some of the points; tables stay whole."""
        return KnobsArray(
            trees=self.trees,
            keys=self.keys,
            hosts=self.hosts,
            tree_code=self.tree_code[index],
            key_code=self.key_code[index],
            host_code=self.host_code[index],
            graph_bits=self.graph_bits[index],
        )


def enumerate_space(choices: Mapping[str, Sequence[Scalar | None]]) -> KnobsArray:
    """All different, possible knobs of a space given as dotted name -> values.

    Names that are left out take the defaults of ``Knobs.of``; ``None`` and "auto" mean unset for
    the numeric NCCL knobs. Raises ``ValueError`` naming an unknown knob, an empty list of values,
    or a space without a single possible point.
    """
    extra_names = sorted(
        n for n in choices if n.split(".")[0] in ("sglang", "vllm", "engine", "sim")
    )
    for name, values in choices.items():
        if name not in KNOB_FIELDS and name not in extra_names:
            raise ValueError(f"unknown knob {name!r}; known: {', '.join(KNOB_FIELDS)}")
        if len(values) == 0:
            raise ValueError(f"space.{name} has no values")
    trees = _trees(choices)
    keys = _keys(choices)
    extras = [
        tuple((n, v) for n, v in zip(extra_names, values, strict=True) if v is not None)
        for values in product(*(choices[n] for n in extra_names))
    ]
    hosts = tuple(
        dict.fromkeys(
            (bool(numa), extra)
            for numa, extra in product(choices.get("host.numa_bind", [False]), extras)
        )
    )
    blocks = []
    for speculative in (False, True):
        codes = [i for i, tree in enumerate(trees) if (tree != OFF) == speculative]
        bits = _graph_bits(choices, speculative)
        if codes:
            blocks.append(_cross(codes, len(keys), len(hosts), bits))
    if not blocks or not keys:
        raise ValueError("the space holds no possible knobs: check steps, topk and draft_tokens")
    columns = np.concatenate(blocks, axis=1)
    return KnobsArray(
        trees=trees,
        keys=keys,
        hosts=hosts,
        tree_code=columns[0],
        key_code=columns[1],
        host_code=columns[2],
        graph_bits=columns[3],
    )


def _trees(choices: Mapping[str, Sequence[Scalar | None]]) -> tuple[Tree, ...]:
    found: dict[Tree, None] = {}
    methods = [str(m) for m in choices.get("speculation.method", ["off"])]
    for method in methods:
        if method not in ("off", "eagle3"):
            raise ValueError(f"speculation.method {method!r} is unknown; known: off, eagle3")
    if "off" in methods:
        found[OFF] = None
    if "eagle3" in methods:
        steps_list = [_int(v, "speculation.steps") for v in choices.get("speculation.steps", [])]
        topk_list = [_int(v, "speculation.topk") for v in choices.get("speculation.topk", [1])]
        tokens_list = [
            _int(v, "speculation.draft_tokens") for v in choices.get("speculation.draft_tokens", [])
        ]
        for steps, topk in product(steps_list, topk_list):
            if steps < 1 or topk < 1:
                raise ValueError(f"speculation.steps {steps} and topk {topk} must be at least 1")
            if topk == 1:
                found[("eagle3", steps, 1, steps + 1)] = None
                continue
            most = 1 + topk + (steps - 1) * topk**2
            for tokens in tokens_list:
                if 2 <= tokens <= most:
                    found[("eagle3", steps, topk, tokens)] = None
    return tuple(found)


def _keys(choices: Mapping[str, Sequence[Scalar | None]]) -> tuple[CollectiveKey, ...]:
    found: dict[CollectiveKey, None] = {}
    nccl = [
        [None if default is None and v == "auto" else v for v in choices.get(name, [default])]
        for name, default in _NCCL.items()
    ]
    for tp, backend in product(
        choices.get("parallel.tp", [1]), choices.get("collectives.backend", ["nccl"])
    ):
        ranks = _int(tp, "parallel.tp")
        if ranks < 1:
            raise ValueError(f"parallel.tp {ranks} must be at least 1")
        if backend != "nccl":
            found[CollectiveKey(str(backend), ranks)] = None
            continue
        for values in product(*nccl):
            low, high = values[2], values[3]
            if isinstance(low, int) and isinstance(high, int) and low > high:
                continue
            found[CollectiveKey("nccl", ranks, *values)] = None  # type: ignore[arg-type]
    return tuple(found)


def _graph_bits(choices: Mapping[str, Sequence[Scalar | None]], speculative: bool) -> list[int]:
    """Different graph settings; with speculation off only decode has a graph."""
    names = ("decode", "draft", "verify", "extend")
    lists = [[bool(v) for v in choices.get(f"cuda_graph.{n}", [False])] for n in names]
    bits: dict[int, None] = {}
    for values in product(*lists):
        kept = values if speculative else (values[0], False, False, False)
        bits[sum(1 << i for i, v in enumerate(kept) if v)] = None
    return list(bits)


def _cross(codes: list[int], num_keys: int, num_hosts: int, bits: list[int]) -> Codes:
    """Cross product of the four parts as columns [4, N]."""
    shape = (len(codes), num_keys, num_hosts, len(bits))
    out = np.empty((4, *shape), dtype=np.int32)
    out[0] = np.asarray(codes, dtype=np.int32)[:, None, None, None]
    out[1] = np.arange(num_keys, dtype=np.int32)[None, :, None, None]
    out[2] = np.arange(num_hosts, dtype=np.int32)[None, None, :, None]
    out[3] = np.asarray(bits, dtype=np.int32)[None, None, None, :]
    return out.reshape(4, -1)


def _int(value: Scalar | None, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"space.{name}: {value!r} is not a whole number")
    return value
