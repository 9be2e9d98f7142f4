"""Which regions a layer's name or number selects, looked up once for a pool."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from kvxfer.pool import PagePool

RegionsByLayer = dict[str | int | None, npt.NDArray[np.uint32]]
"""Region indices of one group, ascending, by layer name, region name and layer number; None: all of them."""


def regions_by_layer(pool: PagePool, group: int) -> RegionsByLayer:
    """Says what ``PagePool.regions_of`` says, without a search at each write."""
    regions = pool.geometry.groups[group].regions
    indices: defaultdict[str | int | None, list[int]] = defaultdict(list)
    for index, layer in enumerate(pool.groups[group].layer_of):
        indices[layer].append(index)
    for index, region in enumerate(regions):
        indices.setdefault(region.layer, [index])  # after the layers: their names come first
    for number, layer in enumerate(pool.layers_of(group)):
        indices[number] = indices[layer]
    indices[None] = list(range(len(regions)))
    return {name: np.array(found, np.uint32) for name, found in indices.items()}
