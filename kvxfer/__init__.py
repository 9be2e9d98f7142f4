"""kvxfer moves KV-cache pages from prefill to decode, and lets decode read only what was proven to be written."""

from __future__ import annotations

from kvxfer._version import __version__

__all__ = ["__version__"]
