"""The command line: ``kvxfer demo``, ``kvxfer bench``, ``kvxfer keygen``. Nothing in the library imports it."""

from __future__ import annotations

from kvxfer.cli.app import main

__all__ = ["main"]
