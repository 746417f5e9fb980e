"""OpenAI completions, the legacy protocol: a text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.gateway.dialects.canonical import Answer, Asked, Start, Text, TokenLogprob, Tokens
from canter.gateway.dialects.chat import KEEP_ALIVE, event, finite_logprob, usage
from canter.gateway.problems import Shape
from canter.gateway.sampling import requested
from canter.tokens.messages import Message

_MAX_ID = 2**31 - 1


class Completions:
    """`POST /v1/completions`."""

    name = "completions"
    id_prefix = "cmpl-"
    shape: Shape = "openai"
    tool_call_prefix = "call"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        _refuse_unsupported(body)
        fields.check_sampling(body)
        return Asked(
            dialect=self.name,
            model=fields.string(body, "model"),
            prompt=_prompt(body.get("prompt")),
            max_tokens=fields.integer(body, "max_tokens", low=1),
            stop=fields.stop_strings(body),
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(fields.mapping(body, "stream_options"), "include_usage"),
            logprobs=fields.integer(body, "logprobs", low=0, high=20) is not None,
            body=body,
            requested=requested(body),
        )

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": answer.message.content,
            "logprobs": None if answer.logprobs is None else _logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason.value,
        }
        return {
            "id": answer.start.id,
            "object": "text_completion",
            "created": answer.start.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [choice],
            "usage": usage(answer),
        }

    def keep_alive(self, asked: Asked, start: Start, number: int) -> bytes:
        return KEEP_ALIVE

    def events(self, asked: Asked, reply: Mapping[str, Any], signs: int) -> Iterator[bytes]:
        choice = reply["choices"][0]
        base = {name: reply[name] for name in ("id", "object", "created", "model", "system_fingerprint")}
        yield event({**base, "choices": [choice]})  # one event: OpenAI's own client refuses any without finish_reason
        if asked.include_usage:
            yield event({**base, "choices": [], "usage": reply["usage"]})
        yield b"data: [DONE]\n\n"

    def message(self, reply: Mapping[str, Any]) -> Message:
        return Message("assistant", reply["choices"][0]["text"])

    def failure(self, asked: Asked, start: Start, error: Mapping[str, Any], signs: int) -> bytes:
        return event(error)


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [finite_logprob(token.logprob) for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if fields.boolean(body, "echo"):
        raise fields.unsupported("echo", "echo is not supported; the prompt is what you sent")
    if fields.optional_string(body, "suffix"):
        raise fields.unsupported("suffix", "suffix is not supported: the policy writes from left to right")
    best_of = fields.integer(body, "best_of")
    if best_of is not None and best_of != 1:
        raise fields.unsupported("best_of", f"best_of must be 1, got {best_of}: each call is one sample of the policy")


def _prompt(prompt: object) -> Text | Tokens:
    """A text, token ids, or a list of just one of those."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt and (prompt is None or isinstance(prompt, str | list)):
        raise BadRequest("prompt is missing or empty", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, str):
        return Text(prompt)
    if not isinstance(prompt, list):
        raise fields.wrong("prompt", "a string or an array of token ids", prompt)
    if any(isinstance(item, str | list) for item in prompt):
        raise fields.unsupported(
            "prompt", f"one prompt a call, got {len(prompt)}: each call is one sample of the policy"
        )
    if not all(type(item) is int and 0 <= item <= _MAX_ID for item in prompt):
        raise BadRequest("prompt must hold token ids, integers from 0 up", param="prompt", code="invalid_value")
    return Tokens(np.array(prompt, np.int32))
