"""``python -m kvxfer.cli`` is the same as ``kvxfer``."""

from __future__ import annotations

from kvxfer.cli.app import main

if __name__ == "__main__":
    main()
