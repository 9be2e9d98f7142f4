"""A pool's page states as a picture for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.errors import GeometryError
from kvxfer.ledger import PageState
from kvxfer.pool import PagePool

if TYPE_CHECKING:
    from rich.text import Text

_MARKS = {PageState.FREE: "·", PageState.RESERVED: "▒", PageState.READY: "█", PageState.QUARANTINED: "✖"}
_STYLES = {
    PageState.FREE: "dim",
    PageState.RESERVED: "yellow",
    PageState.READY: "green",
    PageState.QUARANTINED: "bold red",
}
# Where one mark stands for several pages it shows the one to worry about most.
_WORST_LAST = (PageState.FREE, PageState.READY, PageState.RESERVED, PageState.QUARANTINED)


def render(pool: PagePool, *, width: int = 64, max_rows: int = 8) -> str:
    """One block a page numbering: a mark a page (or a mark for several, if they are many), and the counts.

    Args:
        width: marks in a row, above 0.
        max_rows: rows of a block, above 0.
    """
    if width <= 0 or max_rows <= 0:
        raise GeometryError("a page map needs a width and rows above 0", width=width, max_rows=max_rows)
    lines = []
    for space in range(len(pool.ledger.sizes)):
        names = ", ".join(group.name for group in pool.geometry.groups if group.id_space == space)
        states = pool.ledger.states(space)
        per_mark = -(-len(states) // (width * max_rows))
        scale = "" if per_mark == 1 else f", a mark is {per_mark} pages"
        lines.append(f"{names}: {len(states)} pages{scale}")
        marks = "".join(_MARKS[_WORST_LAST[rank]] for rank in _ranks(states, per_mark).tolist())
        lines.extend(f"  {marks[at : at + width]}" for at in range(0, len(marks), width))
    counts = pool.ledger.counts()
    lines.append("  ".join(f"{_MARKS[state]} {state.name.lower()} {counts[state]}" for state in PageState))
    return "\n".join(lines)


def styled(pool: PagePool, *, width: int = 64, max_rows: int = 8) -> Text:
    """The same in colour, for ``rich``."""
    from rich.text import Text

    text = Text(render(pool, width=width, max_rows=max_rows))
    for state, mark in _MARKS.items():
        text.highlight_regex(f"{mark}+", _STYLES[state])
    return text


def _ranks(states: npt.NDArray[np.uint8], per_mark: int) -> npt.NDArray[np.uint8]:
    rank = np.zeros(len(PageState), np.uint8)
    for at, state in enumerate(_WORST_LAST):
        rank[state] = at
    ranks: npt.NDArray[np.uint8] = np.maximum.reduceat(rank[states], np.arange(0, len(states), per_mark))
    return ranks
