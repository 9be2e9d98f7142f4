"""What bytes are in the simulation: 64-bit numbers that say whose they are. Digests and folds over them.

``hash`` of a tuple of integers is the same in every process, and two different tuples practically never agree.
"""

from __future__ import annotations

from collections.abc import Sequence

MASK = (1 << 64) - 1


def page_content(serial: int, variant: int, group: int, layer: int, logical: int) -> int:
    """A page in one layer of one request. ``variant``: 0 for the prompt itself, else what came in its place."""
    return hash((serial, variant, group, layer, logical)) & MASK


def chunk_content(page: int, unit: int, units: int) -> int:
    """The part of a page that ``units`` shard units from ``unit`` on make up."""
    return hash((page, unit, units)) & MASK


def bound(content: int, reservation: int, epoch: int, leg: int, place: int) -> int:
    """A content digest bound to its place in one handoff; ``place`` numbers group, region, slice and logical page."""
    return hash((content, reservation, epoch, leg, place)) & MASK


def fold(digests: Sequence[int]) -> int:
    return hash(tuple(digests)) & MASK
