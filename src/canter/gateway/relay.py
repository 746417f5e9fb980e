"""Between a dialect and an OpenAI-compatible server behind the gateway: what is sent there and what is made of its
reply.

Chat and text completions are the server's own protocols: the harness's JSON goes on with the run's sampling in place of
its own, and the reply comes back with our ids. Requests of any other dialect are sent as the chat that they are.
"""

from __future__ import annotations

from typing import Any

from canter.engine.openai import Completion, Route
from canter.gateway.dialects.canonical import Answer, Asked, Chat
from canter.gateway.dialects.chat import ChatCompletions, wire_messages, wire_tools
from canter.gateway.source import Ticket
from canter.gateway.stops import cut_text, first_stop
from canter.tokens.messages import Message, ToolCall, new_tool_call_id
from canter.types import Sampling

_NATIVE: dict[str, Route] = {"chat": "/chat/completions", "completions": "/completions"}
_REPLACED = (
    "stream", "stream_options", "max_completion_tokens", "n", "top_logprobs", "logit_bias", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Fields of a request that do not reach the server: the run decides, or the gateway does it itself."""
_CHAT = ChatCompletions()


def route_of(asked: Asked) -> Route:
    return _NATIVE.get(asked.dialect, "/chat/completions")


def upstream_body(asked: Asked, sampling: Sampling) -> dict[str, Any]:
    """The request as the server gets it."""
    body = {name: value for name, value in asked.body.items() if name not in _REPLACED}
    if asked.dialect not in _NATIVE:
        assert isinstance(asked.prompt, Chat), "what is no chat has a route of its own"
        body = {"messages": wire_messages(asked.prompt.messages)}
        if asked.prompt.tools:
            body["tools"] = wire_tools(asked.prompt.tools)
        if asked.stop:
            body["stop"] = list(asked.stop)
    body |= {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }
    body.pop("top_k", None)
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    return body


def relayed(ticket: Ticket, completion: Completion) -> dict[str, Any]:
    """The reply for the harness. Raises KeyError, TypeError, `BadRequest` where the server's is no completion."""
    if ticket.asked.dialect in _NATIVE:
        return _with_our_ids(ticket, completion)
    return ticket.dialect.reply(ticket.asked, _answer(ticket, completion))


def _answer(ticket: Ticket, completion: Completion) -> Answer:
    asked, usage = ticket.asked, completion.reply.get("usage") or {}
    said = _CHAT.message(completion.reply)
    prefix = ticket.dialect.tool_call_prefix
    message = Message(
        "assistant",
        cut_text(said.content, asked.stop),
        reasoning=said.reasoning,
        tool_calls=tuple(ToolCall(new_tool_call_id(prefix), c.name, c.arguments) for c in said.tool_calls),
    )
    stop = completion.reply["choices"][0].get("stop_reason")  # vLLM names the string that ended the reply
    return Answer(
        start=ticket.start,
        model=asked.model,
        fingerprint=str(completion.reply.get("system_fingerprint") or "upstream"),
        message=message,
        finish_reason=completion.generation.finish_reason,
        prompt_tokens=int(usage.get("prompt_tokens") or len(completion.prompt)),
        completion_tokens=int(usage.get("completion_tokens") or len(completion.generation.ids)),
        stop=stop if stop in asked.stop else first_stop(said.content, asked.stop),
    )


def _with_our_ids(ticket: Ticket, completion: Completion) -> dict[str, Any]:
    """The server's reply with our ids and the run's model name, and without what the harness did not ask for."""
    reply = completion.reply
    choice = reply["choices"][0]
    for name in ("prompt_logprobs", "kv_transfer_params"):
        reply.pop(name, None)
    reply.setdefault("system_fingerprint", None)
    reply |= {"id": ticket.call_id, "model": ticket.asked.model, "choices": [choice]}
    if not ticket.asked.logprobs:
        choice["logprobs"] = None
    if ticket.asked.dialect == _CHAT.name:
        _CHAT.message(reply)  # fails on what its own stream could not be made of
    message = choice.get("message")
    if message is not None:
        message.setdefault("refusal", None)
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [{**call, "id": new_tool_call_id()} for call in calls]
    return reply
