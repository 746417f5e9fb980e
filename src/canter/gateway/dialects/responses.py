"""OpenAI Responses.

What the protocol keeps on its server is made part of the request before it comes here (`gateway/continuation.py`): the
history behind `previous_response_id`, and what an `item_reference` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start
from canter.gateway.dialects.responses_events import event, number_after, opening, reply_events
from canter.gateway.dialects.responses_input import items_of, read_items, set_aside
from canter.gateway.dialects.responses_output import failed, response, skeleton
from canter.gateway.dialects.responses_tools import read_tools
from canter.gateway.problems import Shape
from canter.gateway.sampling import requested
from canter.tokens.messages import Message

_LOGPROBS = "message.output_text.logprobs"
_FORMATS = ("text", "json_object", "json_schema")
_STRINGS = ("previous_response_id", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")


class Responses:
    """`POST /v1/responses`."""

    name = "responses"
    id_prefix = "resp_"
    shape: Shape = "openai"
    tool_call_prefix = "call"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        model = fields.string(body, "model")
        _refuse_unsupported(body)
        _check(body)
        items = items_of(body)
        tools = read_tools(body, items)
        said = requested(body)
        if kept_out := sorted({*tools.kept_out, *set_aside(items)}):
            said["kept_out"] = kept_out
        return Asked(
            dialect=self.name,
            model=model,
            prompt=Chat(_messages(body, items), tuple(tool.spec for tool in tools.shown)),
            max_tokens=fields.integer(body, "max_output_tokens", low=1),
            stop=fields.stop_strings(body),
            stream=fields.boolean(body, "stream"),
            logprobs=_LOGPROBS in _included(body) or bool(body.get("top_logprobs")),
            body=body,
            requested=said,
        )

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        return response(asked, answer)

    def keep_alive(self, asked: Asked, start: Start, number: int) -> bytes:
        """An event of its own: Codex does not count an event stream's comments."""
        if number == 0:
            return opening(skeleton(asked, start))
        return event("response.in_progress", number_after(number), {"response": skeleton(asked, start)})

    def events(self, asked: Asked, reply: Mapping[str, Any], signs: int) -> Iterator[bytes]:
        if signs == 0:
            start = Start(reply["id"], reply["created_at"])
            yield opening(skeleton(asked, start))
            signs = 1
        for number, (type_, values) in enumerate(reply_events(reply), start=number_after(signs)):
            yield event(type_, number, values)

    def message(self, reply: Mapping[str, Any]) -> Message:
        messages = read_items(reply["output"], "reply.output")
        return messages[0] if messages else Message("assistant")

    def failure(self, asked: Asked, start: Start, error: Mapping[str, Any], signs: int) -> bytes:
        before = b"" if signs else opening(skeleton(asked, start))
        return before + event("response.failed", number_after(signs or 1), {"response": failed(asked, start, error)})


def _messages(body: Mapping[str, Any], items: list[Any]) -> tuple[Message, ...]:
    messages = read_items(items)
    if not messages:
        raise BadRequest("input is missing or empty", param="input", code="missing_required_parameter")
    instructions = fields.optional_string(body, "instructions")
    return (Message("system", instructions), *messages) if instructions else messages


def _included(body: Mapping[str, Any]) -> list[Any]:
    """What the reply shall carry besides; what is not known is left out."""
    return [name for name in fields.array(body, "include") if isinstance(name, str)]


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if fields.boolean(body, "background"):
        raise fields.unsupported("background", "background must be false: replies are not computed without a client")
    for name, instead in (("conversation", "send input, or previous_response_id"), ("prompt", "send instructions")):
        if body.get(name) is not None:
            raise fields.unsupported(name, f"{name} is not supported: nothing of that kind is kept here; {instead}")


def _check(body: Mapping[str, Any]) -> None:
    """Refuses fields of a wrong type or range that are only recorded, or told again in the reply."""
    fields.check_sampling(body)
    for name in _STRINGS:
        fields.optional_string(body, name)
    for name in ("store", "parallel_tool_calls"):
        fields.boolean(body, name)
    fields.integer(body, "top_logprobs", low=0, high=20)
    fields.integer(body, "max_tool_calls", low=1)
    fields.boolean(fields.mapping(body, "stream_options"), "include_obfuscation")
    fields.mapping(body, "reasoning")
    for name, value in fields.mapping(body, "metadata").items():
        if not isinstance(value, str):
            raise fields.wrong(f"metadata.{name[:80]}", "a string", value)
    format_ = fields.mapping(fields.mapping(body, "text"), "format", at="text.")
    if format_:
        _check_format(format_)


def _check_format(format_: Mapping[str, Any]) -> None:
    type_ = fields.string(format_, "type", at="text.format.")
    if type_ not in _FORMATS:
        raise BadRequest(
            f"text.format.type {type_[:80]!r} is none of {', '.join(_FORMATS)}",
            param="text.format.type",
            code="invalid_value",
        )
    if type_ == "json_schema":
        fields.string(format_, "name", at="text.format.")
        if not isinstance(format_.get("schema"), Mapping):
            raise fields.wrong("text.format.schema", "an object", format_.get("schema"))
        fields.optional_string(format_, "description", at="text.format.")
        fields.boolean(format_, "strict")
