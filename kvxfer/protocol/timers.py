"""Deadlines by key: one each, set again and again, looked up by the earliest."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Timers:
    """One deadline for each integer key. Setting costs O(log n); entries that were replaced are dropped lazily."""

    __slots__ = ("_heap", "_when")

    def __init__(self) -> None:
        self._when: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, key: int, when: float | None) -> None:
        """Replaces the key's deadline; None removes it."""
        if when is None:
            self._when.pop(key, None)
        elif self._when.get(key) != when:
            self._when[key] = when
            heappush(self._heap, (when, key))
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [(when, key) for key, when in self._when.items()]
            heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        heap = self._heap
        while heap and self._when.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> list[int]:
        """Removes and returns the keys whose deadline has come, earliest first."""
        due = []
        while (when := self.next()) is not None and when <= now:
            key = heappop(self._heap)[1]
            del self._when[key]
            due.append(key)
        return due
