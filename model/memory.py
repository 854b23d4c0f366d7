"""What a configuration takes on each GPU: weights, KV cache, captured graphs, work space."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.compute import Device
from model.formats import bytes_per_weight
from model.shapes import DraftShape, ModelShape

Array = NDArray[Any]

#: CUDA context, NCCL buffers and allocator slack of one rank, GiB
RUNTIME_GIB = 1.5
#: private pool of one captured graph, GiB (SGLang logs 0.1-0.4 per captured batch size)
GRAPH_GIB = 0.25
#: usable share of the memory that the driver reports
USABLE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes per rank, [U] each."""

    weights: Array
    kv_cache: Array
    activations: Array
    graphs: Array
    runtime: float

    @property
    def total(self) -> Array:
        """All parts together."""
        total: Array = self.weights + self.kv_cache + self.activations + self.graphs + self.runtime
        return total

    def problem(self, index: int, device: Device) -> str | None:
        """Why configuration ``index`` does not fit a GPU, or None."""
        total = float(self.total[index])
        limit = device.memory_bytes * USABLE
        if total <= limit:
            return None
        parts = {
            name: float(np.broadcast_to(getattr(self, name), self.total.shape)[index]) / 2**30
            for name in ("weights", "kv_cache", "activations", "graphs", "runtime")
        }
        listing = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
        return (
            f"needs {total / 2**30:.1f} GiB per GPU ({listing}), {limit / 2**30:.1f} GiB are usable"
        )


def memory_use(
    shape: ModelShape,
    draft: DraftShape | None,
    *,
    tp: Array,
    speculative: Array,
    draft_tokens: Array,
    num_graphs: Array,
    requests: int,
    max_context: int,
    device: Device,
) -> MemoryUse:
    """Memory of each configuration; contexts hold ``max_context`` tokens plus a draft tree.

    KV heads are split over ranks (repeated when there are fewer than ranks); an MLA cache is whole
    on every rank. Activations: logits and MLP rows of one forward.
    """
    other = bytes_per_weight(shape.other_format)
    routed = shape.routed_params * bytes_per_weight(shape.expert_format) / tp
    dense = shape.other_params * other / tp
    spec = np.where(speculative, 1.0, 0.0)
    weights = routed + dense
    rows = requests * (max_context + np.where(speculative, draft_tokens, 1))
    full_layers = shape.layers - shape.linear_attention_layers - shape.sliding_layers
    kv_share = 1.0 if shape.mla else np.maximum(shape.kv_heads / tp, 1.0) / shape.kv_heads
    kv_row = shape.kv_elements_per_token_layer * shape.kv_bytes * kv_share
    window = requests * min(max_context, shape.sliding_window) * shape.sliding_layers
    kv = kv_row * (rows * full_layers + window)
    if draft is not None:
        weights = weights + spec * draft.weight_bytes / tp
        kv = kv + spec * rows * draft.kv_elements_per_token * 2.0 / tp
    forward_rows = requests * np.where(speculative, draft_tokens, 1)
    mlp = max(shape.dense_intermediate, shape.moe_intermediate * max(shape.experts_per_token, 1))
    activations = forward_rows * (shape.vocab * 4.0 + 8.0 * (shape.hidden + mlp / tp))
    gpu = 1.0 if device.is_gpu else 0.0
    return MemoryUse(
        weights=weights,
        kv_cache=kv,
        activations=activations,
        graphs=num_graphs * GRAPH_GIB * 2**30 * gpu,
        runtime=RUNTIME_GIB * 2**30 * gpu,
    )
