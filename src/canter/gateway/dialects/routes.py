"""Which dialect a path speaks."""

from __future__ import annotations

from canter.gateway.dialects import Dialect
from canter.gateway.dialects.chat import ChatCompletions
from canter.gateway.dialects.completions import Completions
from canter.gateway.dialects.messages import CountTokens, Messages
from canter.gateway.dialects.responses import Responses

BY_PATH: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in BY_PATH.values()}
"""By the name that a recorded call carries."""

COUNTS: dict[str, Dialect] = {
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses/input_tokens": BY_PATH["/v1/responses"],
}
"""Paths that count the tokens of a request's prompt, and what they read."""
