"""Runs the simulator over code with a rule taken out: ``python broken.py SEEDS BREAKAGE`` (an id of tests/rules).

The edits are made while the modules are imported; nothing is written. Prints the seed and the kind of what was found.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rules.model import Edit  # noqa: E402
from rules.table import BREAKAGES  # noqa: E402


def install(edits: tuple[Edit, ...]) -> None:
    """Makes the edits in what is imported from now on."""
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(str(ROOT / edit.file), []).append(edit)

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            path = self.get_filename(fullname)
            if path not in by_file:
                return super().get_code(fullname)
            text = Path(path).read_text(encoding="utf-8")
            for edit in by_file[path]:
                assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"
                text = text.replace(edit.old, edit.new)
            return compile(text, path, "exec", dont_inherit=True)

    hook = importlib.machinery.FileFinder.path_hook(
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES), (Loader, [".py"])
    )
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def main(seeds: int, breakage: str) -> None:
    (found,) = (one for one in BREAKAGES if one.id == breakage)
    install(found.edits)

    from kvxfer.sim.scenario import scenario
    from kvxfer.sim.simulation import run

    for seed in range(seeds):
        result = run(scenario(seed))
        if result.kind is not None:
            print(f"{seed} {result.kind} {result.violation}")
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
