"""Keeps secrets out of logs and error messages: what looks like a key is masked before a text leaves."""

from __future__ import annotations

import re

_SECRETS = re.compile(
    r"""(?xi)
    (?P<lead> \b bearer \s+ | \b (?: api [-_]? key | password | authorization ) ["']? \s* [:=] \s* ["']? )
    (?P<value> [^\s"',;&]+ )
    | \b (?: sk | ck | canter ) [-_] [A-Za-z0-9_\-]{12,}
    """
)


def redact(text: str) -> str:
    """`text` with everything that looks like a key replaced by `***`."""
    return _SECRETS.sub(lambda match: f"{match['lead'] or ''}***", text)
