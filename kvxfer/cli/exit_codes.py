"""What a command's exit status says."""

from __future__ import annotations

OK = 0
NOT_AS_PROMISED = 1  # it ran, and a check failed: tokens differ, bytes differ, the incident was accepted
USAGE = 2  # an option or its value is wrong
ENVIRONMENT = 3  # something is missing or taken: a package, a model path, a port
HANDOFF_FAILED = 4  # kvxfer refused or failed; the error says why
INTERRUPTED = 130
