"""Keeps secrets out of logs and error messages: what looks like a key is masked before a text leaves."""

from __future__ import annotations

import re

_LONGEST = 500

_SECRETS = re.compile(
    r"""(?xi)
    (?P<lead> \b bearer \s+ | \b (?: api [-_]? key | password | authorization ) ["']? \s* [:=] \s* ["']? )
    (?P<value> [^\s"',;&]+ )
    | ck- (?: agent | grader | service | admin ) [A-Za-z0-9_\-]*
    | \b (?: sk | ck | canter ) [-_] [A-Za-z0-9_\-]{12,}
    """
)


def redact(text: str) -> str:
    """`text` with everything that looks like a key replaced by `***`."""
    return _SECRETS.sub(lambda match: f"{match['lead'] or ''}***", text)


def loggable(text: str) -> str:
    """`text` from a client as it may stand in a log: redacted, on one line, at most 500 characters long. What does not
    print is escaped, so that nobody forges a line."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in redact(text)[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"
