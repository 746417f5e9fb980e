"""Which dialect a path speaks."""

from __future__ import annotations

from canter.gateway.dialects import Dialect
from canter.gateway.dialects.chat import ChatCompletions
from canter.gateway.dialects.completions import Completions

BY_PATH: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
}

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in BY_PATH.values()}
"""By the name that a recorded call carries."""
