"""Memory: pages that an engine hands out as a raw pointer instead of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvxfer.dtypes import itemsize_of
from kvxfer.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages at a fixed stride from ``ptr``. The caller keeps the memory alive as long as the pool.

    Attributes:
        ptr: address of page 0.
        nbytes: size of the whole stretch in bytes: a multiple of ``stride``, or the last page's padding may be missing.
        stride: bytes from one page to the next.
        device: ``cpu``.
        dtype: element type by name; both sides of a handoff must use the same.
        page_shape: shape of one page in elements; page axis 0 comes before it. None: the whole stride is one flat page.
    """

    ptr: int
    nbytes: int
    stride: int
    device: str = "cpu"
    dtype: str = "uint8"
    page_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ptr <= 0 or self.nbytes <= 0 or self.stride <= 0:
            raise GeometryError(
                "Memory needs a pointer, a size and a stride above 0",
                ptr=self.ptr,
                nbytes=self.nbytes,
                stride=self.stride,
            )
        if self.ptr + self.nbytes > 1 << 64:
            raise GeometryError("Memory ends beyond the address space", ptr=self.ptr, nbytes=self.nbytes)
        if self.page_bytes <= 0 or self.page_bytes > self.stride or self.stride % itemsize_of(self.dtype):
            raise GeometryError(
                "Memory: a page of page_shape must fit its stride, which must be whole elements",
                page_bytes=self.page_bytes,
                stride=self.stride,
                dtype=self.dtype,
            )
        if self.nbytes % self.stride not in (0, self.page_bytes):
            raise GeometryError(
                "Memory must hold whole pages: nbytes is neither a multiple of stride nor one page more than that",
                nbytes=self.nbytes,
                stride=self.stride,
                page_bytes=self.page_bytes,
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page without padding."""
        return self.stride if self.page_shape is None else prod(self.page_shape) * itemsize_of(self.dtype)

    @property
    def n_pages(self) -> int:
        """Number of pages."""
        return self.nbytes // self.stride + (1 if self.nbytes % self.stride else 0)
