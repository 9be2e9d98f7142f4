"""How long a commit record for one pool can be at most: bounds what a lane reads before it is believed (S7)."""

from __future__ import annotations

from kvxfer.geometry import PoolGeometry

MAX_AUX_BYTES = 16 << 20
_HEADER_BYTES = 4096


def max_record_bytes(geometry: PoolGeometry) -> int:
    """Upper bound in bytes of any leg's record: a bitmap of every chunk, a fold for every page, the largest aux."""
    total = _HEADER_BYTES + MAX_AUX_BYTES
    for group in geometry.groups:
        units = max(1, group.shard_stop - group.shard_start)
        chunks = group.n_pages * len(group.regions) * units
        total += chunks // 8 + 8 * group.n_pages + 64
    return total
