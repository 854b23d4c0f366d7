"""Defaults made small enough for every supported GPU."""

from kernels.shared_memory import estimated_shared_bytes
from kernels.tuning import Config

#: shared memory a block may use on the smallest supported GPU (sm_89, sm_120)
SMALLEST_BYTES = 99 * 1024
#: what may be halved, in this order, and down to what
_HALVED = (("block_k", 16), ("block_l", 16), ("block_r", 16), ("block_o", 16))


def fitted(
    op: str, config: Config, element_bytes: int, head_size: int = 0, num_experts: int = 0
) -> Config:
    """``config`` with fewer stages, then smaller tiles, until it fits ``SMALLEST_BYTES``.

    Returned as it is where it fits already or where nothing is left to take away.
    """
    found = dict(config)
    while estimated_shared_bytes(op, found, element_bytes, head_size, num_experts) > SMALLEST_BYTES:
        if found["stages"] > 2:
            found["stages"] -= 1
            continue
        name = next((n for n, least in _HALVED if found.get(n, 0) > least), None)
        if name is None:
            break
        found[name] //= 2
    return found
