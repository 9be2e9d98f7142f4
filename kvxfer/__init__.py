"""kvxfer moves KV-cache pages from prefill to decode, and lets decode read only what was proven to be written."""

from __future__ import annotations

import logging

from kvxfer import errors
from kvxfer._version import __version__
from kvxfer.allocation import GroupSpec
from kvxfer.control.keys import Keys
from kvxfer.decode import DecodeEndpoint
from kvxfer.errors import KvxferError
from kvxfer.events import Event
from kvxfer.geometry import Shard
from kvxfer.grant import Grant, Plan
from kvxfer.handoff import Handoff, Ready
from kvxfer.memory import Memory
from kvxfer.page_group import PageGroup
from kvxfer.pages import Pages
from kvxfer.pool import PagePool
from kvxfer.prefill import PrefillEndpoint

logging.getLogger("kvxfer").addHandler(logging.NullHandler())

__all__ = [
    "DecodeEndpoint",
    "Event",
    "Grant",
    "GroupSpec",
    "Handoff",
    "Keys",
    "KvxferError",
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
