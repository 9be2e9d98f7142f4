"""Element types by name: NumPy's, or PyTorch's where NumPy has none, so that both kinds of tensor agree."""

from __future__ import annotations

import numpy as np

from kvxfer.errors import GeometryError

_NOT_IN_NUMPY = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}


def itemsize_of(name: str) -> int:
    """Bytes of one element. Raises GeometryError for a name that neither NumPy nor PyTorch has."""
    return storage_dtype(name).itemsize


def storage_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype that stores ``name``: itself, or unsigned integers of its size. Raises GeometryError."""
    name = name.removeprefix("torch.")
    if name in _NOT_IN_NUMPY:
        return np.dtype(f"u{_NOT_IN_NUMPY[name]}")
    try:
        dtype: np.dtype[np.generic] = np.dtype(name)
    except TypeError:
        raise GeometryError(f"unknown dtype {name!r}; use a NumPy or PyTorch name, or 'uint8'") from None
    if dtype.itemsize == 0 or dtype.hasobject:
        raise GeometryError(f"dtype {name!r} cannot be a cache's element type", itemsize=dtype.itemsize)
    return dtype


def name_of(dtype: object) -> str:
    """Canonical name of a NumPy dtype, torch dtype or string."""
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            raise GeometryError("arrays of Python objects cannot be pages")
        # byte order is part of the bytes' meaning
        return dtype.name if dtype.isnative else dtype.str
    text = str(dtype).removeprefix("torch.")
    return text if text in _NOT_IN_NUMPY else name_of(storage_dtype(text))
