"""When two requests are one: the same canonical request, however it is spelled and however its reply travels."""

from __future__ import annotations

import hashlib

import numpy as np
import orjson

from canter.gateway.dialects.canonical import Asked, Chat, Text
from canter.tokens.messages import exact_key, tools_key


def request_digest(asked: Asked) -> bytes:
    """Names a request. What only says how the reply travels (`stream`) or is not looked at (metadata, cache marks) does
    not count, nor does the reasoning that a history may carry."""
    fields = [asked.dialect, asked.model, asked.max_tokens, asked.logprobs, asked.stop, asked.requested]
    digest = hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))
    match asked.prompt:
        case Chat(messages, tools):
            digest.update(tools_key(tools))
            for message in messages:
                digest.update(exact_key(message))
        case Text(text):
            digest.update(b"text" + text.encode("utf-8", "surrogatepass"))
        case tokens:
            digest.update(b"tokens" + np.ascontiguousarray(tokens.ids, "<i4").tobytes())
    return digest.digest()
