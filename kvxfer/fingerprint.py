"""What a pool's geometry amounts to: its fingerprint and the longest sequence it can hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from kvxfer.geometry import Group, PoolGeometry

_UNBOUNDED = 1 << 48


def fingerprint(groups: Iterable[Group]) -> str:
    """32 hexadecimal digits over everything that ``groups`` say: regions, strides, dtypes, tokens per page, shard, ...

    Equal fingerprints: equal geometry. Unequal ones may still be compatible (``compatibility.compatible`` decides).
    """
    described = json.dumps([asdict(group) for group in groups], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def pages_needed(group: Group, n_tokens: int) -> int:
    """Pages of ``group`` that one sequence of ``n_tokens`` takes."""
    if not group.tokens_per_page:
        return 1
    pages = -(-n_tokens // group.tokens_per_page)
    if group.window is None:
        return pages
    # A window that ends anywhere in a page touches one page more than its length fills.
    return min(pages, -(-(group.window - 1) // group.tokens_per_page) + 1)


def capacity_tokens(groups: Sequence[Group]) -> int:
    """The longest sequence whose pages of all groups fit at once.

    0: no group bounds it (none is indexed by token, or all of those keep only a window).
    """
    spaces: dict[int, list[Group]] = {}
    for group in groups:
        spaces.setdefault(group.id_space, []).append(group)

    def fits(n_tokens: int) -> bool:
        return all(
            sum(pages_needed(group, n_tokens) for group in sharing) <= min(group.n_pages for group in sharing)
            for sharing in spaces.values()
        )

    if fits(_UNBOUNDED):
        return 0
    low, high = 0, _UNBOUNDED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def geometry_of(groups: Sequence[Group]) -> PoolGeometry:
    """The pool that ``groups`` make."""
    return PoolGeometry(tuple(groups), capacity_tokens(groups), fingerprint(groups))
