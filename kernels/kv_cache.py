"""Writing new keys and values into a slotted cache, and closing the gaps a rejected tree leaves.

B sequences, T new tokens each, S slots, C rows a slot, G key heads, D head size, X caches (one for
the keys and one for the values of every layer), A longest accepted path.
"""

import torch


def store_kv_ref(
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
) -> None:
    """Write token t of sequence b to row ``start_b + t`` of slot ``slot_b``."""
    num_tokens = k_BTGD.shape[1]
    if slot_B.shape[0] == 1:
        slot, start = int(slot_B), int(start_B)
        k_cache_SCGD[slot, start : start + num_tokens] = k_BTGD[0]
        v_cache_SCGD[slot, start : start + num_tokens] = v_BTGD[0]
        return
    row_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
    k_cache_SCGD[slot_B[:, None], row_BT] = k_BTGD
    v_cache_SCGD[slot_B[:, None], row_BT] = v_BTGD


def kv_compact_ref(
    cache_XSCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
    src_BA: torch.Tensor,
    count_B: torch.Tensor,
) -> None:
    """Move row ``start_b + src_bi`` of slot ``slot_b`` to ``start_b + i`` for i < ``count_b``.

    ``src_b`` ascends and ``src_bi >= i`` (node indices of an accepted path); entries past
    ``count_b`` are ignored. Applies to each of the X caches.
    """
    slots, starts, counts = slot_B.tolist(), start_B.tolist(), count_B.tolist()
    for b, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        src_A = src_BA[b, :count]
        rows = cache_XSCGD[:, slot]
        rows[:, start : start + count] = rows[:, start + src_A]
