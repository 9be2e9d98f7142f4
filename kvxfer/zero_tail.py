"""Which bytes of a handoff's last pages lie past its last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.pool import PagePool
from kvxfer.protocol.messages import ReserveGroup


def tail_runs(
    pool: PagePool, n_tokens: int, groups: Sequence[ReserveGroup]
) -> Iterator[tuple[npt.NDArray[np.uint64], int, int, int]]:
    """Yields (base addresses u64, runs, stride in bytes, bytes a run) for ``_native.zero_runs``: the token slots past
    ``n_tokens`` (counted from token 0) in each group's last page, where the group's token axis is known."""
    for wanted in groups:
        group = pool.geometry.groups[wanted.group]
        used = n_tokens % group.tokens_per_page if group.tokens_per_page else 0
        if used == 0:
            continue
        logical = np.frombuffer(wanted.logical, np.uint64)
        at = int(np.searchsorted(logical, n_tokens // group.tokens_per_page))
        if at == len(logical) or int(logical[at]) != n_tokens // group.tokens_per_page:
            continue
        page = int(np.frombuffer(wanted.pool_pages, np.uint64)[at])
        for region, memory in zip(group.regions, pool.region_memory[wanted.group], strict=True):
            if region.token_rows == 0:
                continue
            base = memory.ptr + page * region.page_stride + used * region.token_bytes
            row_bytes = group.tokens_per_page * region.token_bytes
            yield (
                np.array([base], np.uint64),
                region.token_rows,
                row_bytes,
                (group.tokens_per_page - used) * region.token_bytes,
            )
