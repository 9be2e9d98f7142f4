"""Prints the requirements of a pyproject.toml and of some of its extras, one a line, for `pip install -r`.

usage: requirements.py PYPROJECT [EXTRA ...]
"""

from __future__ import annotations

import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

SELF_REFERENCE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\[(?P<extras>[^\]]+)\]$")


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Direct requirements, with ``name[extra]`` references to the project itself resolved."""
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            match = SELF_REFERENCE.match(requirement)
            if match and match["name"] == project["name"]:
                found += requirements({**project, "dependencies": []}, match["extras"].split(","))
            else:
                found.append(requirement)
    return list(dict.fromkeys(found))


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        project = tomllib.load(file)["project"]
    print("\n".join(requirements(project, sys.argv[2:])))


if __name__ == "__main__":
    main()
