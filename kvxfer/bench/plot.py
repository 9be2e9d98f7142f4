"""A picture of a sweep over page sizes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_sweep(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws speed over page size, with memcpy and, where measured, the C stream. ``path`` names the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    documents = sorted(documents, key=lambda document: int(document["page_bytes"]))
    sizes = [document["page_bytes"] for document in documents]
    lines = [("gbps_median", f"{documents[0]['lane']}, {documents[0]['verify']}"), ("memcpy_gbps", "memcpy")]
    if all(document.get("c_stream_gbps") for document in documents):
        lines.append(("c_stream_gbps", "plain C stream"))
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for key, label in lines:
        axes.plot(sizes, [document[key] for document in documents], marker="o", label=label)
    speeds = [(document["gbps_worst"], document["gbps_best"]) for document in documents]
    axes.fill_between(sizes, [low for low, _ in speeds], [high for _, high in speeds], alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a page")
    axes.set_ylabel("GB/s (median; band: worst to best)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
