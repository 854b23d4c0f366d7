"""Steps to be timed as columns: what the analytic model reads of knobs and load."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.collectives import CollectiveKey
from model.spec import Knobs, Workload

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Knobs and load of the steps to be timed, one entry each, [U]; ``keys`` by index."""

    speculative: NDArray[np.bool_]
    steps: Array
    topk: Array
    draft_tokens: Array
    key_index: NDArray[np.int64]
    keys: tuple[CollectiveKey, ...]
    tp: Array
    numa: NDArray[np.bool_]
    graph_decode: NDArray[np.bool_]
    graph_draft: NDArray[np.bool_]
    graph_verify: NDArray[np.bool_]
    graph_extend: NDArray[np.bool_]
    requests: Array
    context: Array

    @classmethod
    def of(cls, knobs: Sequence[Knobs], workloads: Sequence[Workload]) -> "StepRows":
        """One row per pair."""
        keys: dict[CollectiveKey, int] = {}
        index = [keys.setdefault(CollectiveKey.of(k), len(keys)) for k in knobs]
        return cls(
            speculative=np.array([k.method != "off" for k in knobs], dtype=bool),
            steps=np.array([k.steps for k in knobs], dtype=float),
            topk=np.array([k.topk for k in knobs], dtype=float),
            draft_tokens=np.array([k.draft_tokens for k in knobs], dtype=float),
            key_index=np.array(index, dtype=np.int64),
            keys=tuple(keys),
            tp=np.array([k.tp for k in knobs], dtype=float),
            numa=np.array([k.numa_bind for k in knobs], dtype=bool),
            graph_decode=np.array([k.graph_decode for k in knobs], dtype=bool),
            graph_draft=np.array([k.graph_draft for k in knobs], dtype=bool),
            graph_verify=np.array([k.graph_verify for k in knobs], dtype=bool),
            graph_extend=np.array([k.graph_extend for k in knobs], dtype=bool),
            requests=np.array([w.concurrency for w in workloads], dtype=float),
            context=np.array([w.context for w in workloads], dtype=float),
        )

    def take(self, index: NDArray[np.intp]) -> "StepRows":
        """Some of the rows."""
        picked = {
            f.name: getattr(self, f.name) if f.name == "keys" else getattr(self, f.name)[index]
            for f in fields(self)
        }
        return StepRows(**picked)
