"""kvxfer moves KV-cache pages from prefill to decode, and lets decode read only what was proven to be written.

The public names, loaded when they are first used: importing kvxfer alone costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer._version import __version__

if TYPE_CHECKING:
    from kvxfer import errors as errors
    from kvxfer.allocation import GroupSpec as GroupSpec
    from kvxfer.control.keys import Keys as Keys
    from kvxfer.decode import DecodeEndpoint as DecodeEndpoint
    from kvxfer.events import Event as Event
    from kvxfer.geometry import Shard as Shard
    from kvxfer.grant import Grant as Grant
    from kvxfer.grant import Plan as Plan
    from kvxfer.handoff import Handoff as Handoff
    from kvxfer.handoff import Ready as Ready
    from kvxfer.memory import Memory as Memory
    from kvxfer.page_group import PageGroup as PageGroup
    from kvxfer.pages import Pages as Pages
    from kvxfer.pool import PagePool as PagePool
    from kvxfer.prefill import PrefillEndpoint as PrefillEndpoint

__all__ = [
    "DecodeEndpoint",
    "Event",
    "Grant",
    "GroupSpec",
    "Handoff",
    "Keys",
    "Memory",
    "PageGroup",
    "PagePool",
    "Pages",
    "Plan",
    "PrefillEndpoint",
    "Ready",
    "Shard",
    "__version__",
    "errors",
]

_HOMES = {
    "DecodeEndpoint": "kvxfer.decode",
    "Event": "kvxfer.events",
    "Grant": "kvxfer.grant",
    "GroupSpec": "kvxfer.allocation",
    "Handoff": "kvxfer.handoff",
    "Keys": "kvxfer.control.keys",
    "Memory": "kvxfer.memory",
    "PageGroup": "kvxfer.page_group",
    "PagePool": "kvxfer.pool",
    "Pages": "kvxfer.pages",
    "Plan": "kvxfer.grant",
    "PrefillEndpoint": "kvxfer.prefill",
    "Ready": "kvxfer.handoff",
    "Shard": "kvxfer.geometry",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("kvxfer.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
