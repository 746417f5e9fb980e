"""A reply as a Response object of the Responses API: its items, its status and what it says about the request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from canter.gateway.dialects.canonical import Answer, Asked, Start, TokenLogprob
from canter.gateway.dialects.chat import finite_logprob
from canter.gateway.dialects.responses_input import (
    CUSTOM,
    CUSTOM_RAW,
    FUNCTION,
    MESSAGE,
    REASONING,
    item_id,
    items_of,
    seal,
)
from canter.gateway.dialects.responses_tools import Tools, custom_input, read_tools, wire_choice, wire_tools
from canter.tokens.messages import ToolCall
from canter.types import FinishReason

SEALED_REASONING = "reasoning.encrypted_content"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_LEVELS = ("low", "medium", "high")
_RETENTIONS = ("in_memory", "24h")


def skeleton(asked: Asked, start: Start, tools: Tools | None = None) -> dict[str, Any]:
    """A Response before there is anything to say: in progress, without items.

    What it repeats of the request is what is understood here, so that clients who check replies against their types
    can read it. The run imposes the sampling: `temperature` and `top_p` are not told.
    """
    body = asked.body
    tools = tools or read_tools(body, items_of(body))
    reasoning = body.get("reasoning") or {}
    return {
        "id": start.id,
        "object": "response",
        "created_at": start.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "prompt_cache_retention": _one_of(body.get("prompt_cache_retention"), _RETENTIONS),
        "reasoning": {
            "effort": _one_of(reasoning.get("effort"), _EFFORTS),
            "summary": _one_of(reasoning.get("summary"), _SUMMARIES),
        },
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": None,
        "text": _text_config(body.get("text") or {}),
        "tool_choice": wire_choice(body),
        "tools": wire_tools(tools.all),
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
    }


def response(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The whole Response."""
    tools = read_tools(asked.body, items_of(asked.body))
    cut = answer.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    made = skeleton(asked, answer.start, tools)
    made["output"] = list(_items(asked, answer, tools, cut))
    made["status"] = "incomplete" if cut else "completed"
    if answer.finish_reason is FinishReason.LENGTH:
        made["incomplete_details"] = {"reason": "max_output_tokens"}
    made["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return made


def failed(asked: Asked, start: Start, error: Mapping[str, Any]) -> dict[str, Any]:
    """A Response that failed with an error of OpenAI's shape. Of its codes only those are kept that clients act on:
    what lies in the request is final, what lies here may be tried again."""
    told = error["error"]
    code = "server_error"
    if told["type"] == "invalid_request_error":
        overflow = told["code"] == "context_length_exceeded"
        code = "context_length_exceeded" if overflow else "invalid_prompt"
    return skeleton(asked, start) | {"status": "failed", "error": {"code": code, "message": told["message"]}}


def _items(asked: Asked, answer: Answer, tools: Tools, cut: bool) -> Iterator[dict[str, Any]]:
    """The output items. A finished reply without calls has a message, even an empty one: clients look for it."""
    message, index = answer.message, 0
    said = bool(message.content) or not (message.tool_calls or (cut and message.reasoning))
    if message.reasoning is not None:
        ends_here = cut and not said and not message.tool_calls
        yield _reasoning(asked, item_id(REASONING, answer.start.id, index), message.reasoning, _status(ends_here))
        index += 1
    if said:
        ends_here = cut and not message.tool_calls
        yield {
            "id": item_id(MESSAGE, answer.start.id, index),
            "type": "message",
            "status": _status(ends_here),
            "role": "assistant",
            "content": [
                {
                    "type": "output_text",
                    "text": message.content,
                    "annotations": [],
                    "logprobs": _logprobs(answer) if answer.logprobs is not None else [],
                }
            ],
        }
        index += 1
    for place, call in enumerate(message.tool_calls, start=index):
        yield _call(call, tools, answer.start.id, place)


def _status(cut: bool) -> str:
    return "incomplete" if cut else "completed"


def _reasoning(asked: Asked, id_: str, text: str, status: str) -> dict[str, Any]:
    """The reasoning in full as `content`; as its summary, too, where one was asked for; sealed where that was."""
    wants = asked.body.get("reasoning") or {}
    summarised = bool(wants.get("summary") or wants.get("generate_summary"))
    return {
        "id": id_,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if summarised else [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": seal(text) if SEALED_REASONING in (asked.body.get("include") or ()) else None,
        "status": status,
    }


def _call(call: ToolCall, tools: Tools, response_id: str, index: int) -> dict[str, Any]:
    tool = tools.named(call.name)
    wire: dict[str, Any]
    if tool is not None and tool.custom:
        text = custom_input(call.arguments)
        kind = CUSTOM if text is not None else CUSTOM_RAW
        wire = {"type": "custom_tool_call", "input": call.arguments if text is None else text}
    else:
        kind, wire = FUNCTION, {"type": "function_call", "arguments": call.arguments}
    wire |= {
        "id": item_id(kind, response_id, index),
        "call_id": call.id,
        "name": call.name if tool is None else tool.name,
        "status": "completed",
    }
    if tool is not None and tool.namespace is not None:
        wire["namespace"] = tool.namespace
    return wire


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Those of the message's tokens; of all sampled tokens where the text cannot be found in theirs (a character that
    is spread over tokens). `top_logprobs` stays empty: the engine gives the sampled token's only."""
    return [
        {
            "token": t.token,
            "logprob": finite_logprob(t.logprob),
            "bytes": [] if t.utf8 is None else list(t.utf8),
            "top_logprobs": [],
        }
        for t in _of_content(answer)
    ]


def _of_content(answer: Answer) -> tuple[TokenLogprob, ...]:
    tokens, message = answer.logprobs or (), answer.message
    whole = "".join(t.token for t in tokens)
    behind = max(whole.find(message.reasoning), 0) + len(message.reasoning) if message.reasoning else 0
    first = whole.find(message.content, behind)
    if first < 0:
        return tokens
    end, at, found = first + len(message.content), 0, []
    for token in tokens:
        if at < end and at + len(token.token) > first:
            found.append(token)
        at += len(token.token)
    return tuple(found)


def _text_config(text: Mapping[str, Any]) -> dict[str, Any]:
    format_ = text.get("format") or {}
    told: dict[str, Any] = {"type": "text"}
    if format_.get("type") == "json_object":
        told = {"type": "json_object"}
    elif format_.get("type") == "json_schema":
        told = {name: format_[name] for name in ("type", "name", "schema", "description", "strict") if name in format_}
    verbosity = _one_of(text.get("verbosity"), _LEVELS)
    return {"format": told} | ({"verbosity": verbosity} if verbosity else {})


def _one_of(value: object, known: tuple[str, ...]) -> str | None:
    return value if isinstance(value, str) and value in known else None
