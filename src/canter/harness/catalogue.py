"""The recipes that have a name, one line each."""

from __future__ import annotations

import difflib

from canter.errors import ConfigError
from canter.harness import Entry, agents_sdk, claude_code, codex, mini_swe_agent, opencode, openhands

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        mini_swe_agent.ENTRY,
        codex.ENTRY,
        claude_code.ENTRY,
        opencode.ENTRY,
        openhands.ENTRY,
        agents_sdk.ENTRY,
    )
}  # fmt: skip


def entry(name: str) -> Entry:
    """The entry of a recipe. Raises ConfigError for a name that does not exist."""
    if name in ENTRIES:
        return ENTRIES[name]
    close = difflib.get_close_matches(name, ENTRIES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(ENTRIES)}; any other is a harness.command"
    raise ConfigError(f"there is no recipe {name!r} (harness.use); {hint}")
