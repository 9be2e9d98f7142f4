"""Between a model's K and V arrays and the pages of a pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.allocation import GroupSpec
from kvxfer.handoff import Ready
from kvxfer.pages import Pages
from kvxfer.pool import PagePool

F32 = npt.NDArray[np.float32]
GROUP = "kv"
TOKENS_PER_PAGE = 16


def make_pool(n_layers: int, heads: int, dim: int, pages: int) -> PagePool:
    """One group with a K and a V region for every layer; a page holds 16 tokens of all heads."""
    spec = GroupSpec(
        GROUP,
        layers=[f"layer{index}.{part}" for index in range(n_layers) for part in ("k", "v")],
        page_shape=(TOKENS_PER_PAGE, heads, dim),
        dtype="float32",
        tokens_per_page=TOKENS_PER_PAGE,
        token_axis=1,
    )
    return PagePool.allocate([spec], pages=pages)


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // TOKENS_PER_PAGE)


def page_bytes(pool: PagePool) -> int:
    """Bytes of one page over all layers."""
    return sum(region.page_bytes for region in pool.geometry.groups[0].regions)


def write_pages(pool: PagePool, layers: list[tuple[F32, F32]], pages: Pages) -> None:
    """Lays K and V, [tokens, heads, dim] for every layer, into the engine's own pages. Slots past the end are left."""
    for index, pair in enumerate(layers):
        for part, values in zip(("k", "v"), pair, strict=True):
            memory = pool.tensor(GROUP, f"layer{index}.{part}")
            for logical, page in zip(pages.logical.tolist(), pages.pool.tolist(), strict=True):
                tokens = values[logical * TOKENS_PER_PAGE : (logical + 1) * TOKENS_PER_PAGE]
                memory[page, : len(tokens)] = tokens


def read_pages(ready: Ready, n_layers: int, heads: int, dim: int) -> list[tuple[F32, F32]]:
    """K and V of every layer from verified pages, through the guarded view that only a READY handoff gives."""
    n_pages = len(ready.pages[GROUP])

    def region(name: str) -> F32:
        raw = np.concatenate([ready.page(GROUP, name, logical) for logical in range(n_pages)])
        tokens: F32 = raw.view(np.float32).reshape(n_pages * TOKENS_PER_PAGE, heads, dim)
        return tokens[: ready.n_tokens]

    return [(region(f"layer{index}.k"), region(f"layer{index}.v")) for index in range(n_layers)]


def tail_is_zero(ready: Ready, n_layers: int) -> bool:
    """True if every slot past the last token of the last page is zero, in every layer."""
    last = len(ready.pages[GROUP]) - 1
    used = ready.n_tokens - last * TOKENS_PER_PAGE

    def tail(name: str) -> Any:
        page = ready.page(GROUP, name, last)
        return page[used * (len(page) // TOKENS_PER_PAGE) :]

    return all(not tail(f"layer{index}.{part}").any() for index in range(n_layers) for part in ("k", "v"))
