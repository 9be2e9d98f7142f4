"""What kvxfer needs to know of a tensor, whoever made it. PyTorch is recognised, never imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.dtypes import itemsize_of, name_of
from kvxfer.errors import GeometryError
from kvxfer.memory import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """A strided block of memory in this process.

    Attributes:
        ptr: address of element 0 on all axes.
        shape: elements on each axis, all above 0.
        strides: bytes from one element to the next on each axis, 0 or more.
        dtype: canonical name.
        keepalive: the object that owns the memory.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    keepalive: object


def describe(tensor: Any) -> Strided:
    """Describes a CPU torch tensor, a NumPy array (or anything with ``__array_interface__``) or a ``Memory``.

    Raises:
        GeometryError: another type, another device, an empty or read-only tensor, a negative stride.
    """
    if isinstance(tensor, Memory):
        found = _from_memory(tensor)
    elif _is_torch(tensor):
        found = _from_torch(tensor)
    elif isinstance(tensor, np.ndarray) or hasattr(tensor, "__array_interface__"):
        found = _from_numpy(tensor)
    elif hasattr(tensor, "__cuda_array_interface__"):
        raise _not_yet("cuda")
    else:
        raise GeometryError(
            f"a region must be a torch tensor, a NumPy array or kvxfer.Memory, not {type(tensor).__name__}; "
            "wrap raw pointers in kvxfer.Memory"
        )
    if any(size == 0 for size in found.shape) or not found.shape:
        raise GeometryError("a region needs at least one axis and one element", shape=found.shape)
    if any(stride < 0 for stride in found.strides):
        raise GeometryError("a region has a negative stride; pass the tensor unflipped", strides=found.strides)
    return found


def _is_torch(tensor: Any) -> bool:
    return any(kind.__name__ == "Tensor" and kind.__module__ == "torch" for kind in type(tensor).__mro__)


def _not_yet(device: str) -> GeometryError:
    return GeometryError(
        f"memory on {device!r} is not supported yet: only CPU memory is; keep the pool in host memory", device=device
    )


def _from_memory(memory: Memory) -> Strided:
    if memory.device != "cpu":
        raise _not_yet(memory.device)
    itemsize = itemsize_of(memory.dtype)
    page_shape = (memory.page_bytes // itemsize,) if memory.page_shape is None else memory.page_shape
    strides: list[int] = []
    step = itemsize
    for size in reversed(page_shape):
        strides.insert(0, step)
        step *= size
    return Strided(
        memory.ptr,
        (memory.n_pages, *page_shape),
        (memory.stride, *strides),
        itemsize,
        name_of(memory.dtype),
        memory,
    )


def _from_torch(tensor: Any) -> Strided:
    if tensor.device.type != "cpu":
        raise _not_yet(str(tensor.device))
    if str(tensor.layout) != "torch.strided":
        raise GeometryError(f"a region must be a dense strided tensor, not {tensor.layout}")
    itemsize = int(tensor.element_size())
    return Strided(
        int(tensor.data_ptr()),
        tuple(int(size) for size in tensor.shape),
        tuple(int(stride) * itemsize for stride in tensor.stride()),
        itemsize,
        name_of(tensor.dtype),
        tensor,
    )


def _from_numpy(tensor: Any) -> Strided:
    array = tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor)
    if not array.flags.writeable:
        raise GeometryError("a region must be writable; this array is read-only, copy it or map it read-write")
    return Strided(
        int(array.__array_interface__["data"][0]),
        array.shape,
        array.strides,
        array.itemsize,
        name_of(array.dtype),
        (tensor, array),
    )
