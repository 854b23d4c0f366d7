"""Size of the memory that CPU ranks share; apart from its use, which needs torch."""

#: bytes of one rank's part; longer messages go in pieces
PART_BYTES = 1 << 18
FLAG_BYTES = 4096


def region_bytes(tp: int) -> int:
    """Size of the shared region for ``tp`` ranks."""
    return FLAG_BYTES + 2 * tp * PART_BYTES
