"""Prefill's process of ``run_pair``: options as JSON in the first argument, the address as JSON on standard output.

Ends with its parent: when standard input closes, nobody is there to read what it would hand over.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from kvxfer.bench.options import BenchOptions
from kvxfer.bench.run import run_prefill
from kvxfer.errors import KvxferError

FINISH_S = 5.0


def _end_with_parent() -> None:
    sys.stdin.read()
    threading.Event().wait(FINISH_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    options = BenchOptions(**json.loads(sys.argv[1]))

    def tell(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)

    try:
        run_prefill(options, "127.0.0.1:0", listening=tell)
    except KvxferError as error:
        print(f"prefill: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone, with whoever would read why; an orderly exit would complain about the pipe


if __name__ == "__main__":
    main()
