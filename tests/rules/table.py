"""All breakages, rule by rule."""

from __future__ import annotations

from . import s1_accept, s2_release, s3_source, s4_capacity, s5_owner, s6_waits, s7_hostile, s8_silent
from .model import Breakage

BREAKAGES: tuple[Breakage, ...] = (
    *s1_accept.BREAKAGES,
    *s2_release.BREAKAGES,
    *s3_source.BREAKAGES,
    *s4_capacity.BREAKAGES,
    *s5_owner.BREAKAGES,
    *s6_waits.BREAKAGES,
    *s7_hostile.BREAKAGES,
    *s8_silent.BREAKAGES,
)
