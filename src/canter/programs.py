"""Where a program may be that could not be started. Standard library only: every worker has this in its memory."""

from __future__ import annotations

import os


def not_found(name: str, base: str) -> str:
    """What to write instead of `name`, which is no program on `PATH`; `base` is the folder of the TOML file."""
    inside = os.path.normpath(name)
    if not os.path.isabs(name) and os.path.exists(os.path.join(base, inside)):
        return f"it lies beside the TOML file, which is not searched: write '{{base}}/{inside}'"
    return "install it, or give its full path ({base}/NAME for a file beside the TOML file)"
