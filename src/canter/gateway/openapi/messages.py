"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from canter.gateway.openapi.shapes import (
    RECORDED,
    STREAM,
    Schema,
    array,
    boolean,
    choice,
    either,
    integer,
    null,
    nullable,
    number,
    record,
    ref,
    text,
    typed,
)

_TEXT = typed("text", {"text": text(), "cache_control": nullable(record(about="Ignored."))}, ["text"])
_SEARCH_RESULT = typed(
    "search_result", {"title": text(), "source": text(), "content": array(_TEXT)}, ["title", "source", "content"]
)
_TOOL_REFERENCE = typed("tool_reference", {"tool_name": text()}, ["tool_name"])
_TOOL_RESULT = typed(
    "tool_result",
    {
        "tool_use_id": text(),
        "content": either(null(), text(), array(either(_TEXT, _SEARCH_RESULT, _TOOL_REFERENCE))),
        "is_error": nullable(boolean()),
    },
    ["tool_use_id"],
)
_TOOL_USE = typed(
    "tool_use",
    {
        "id": text("As the gateway gave it: by its ids a turn is found again."),
        "name": text(),
        "input": record(about="The arguments. What is no object is taken, too."),
    },
    ["id", "name", "input"],
)
_THINKING = typed("thinking", {"thinking": text(), "signature": text("Not looked at.")}, ["thinking"])
_REDACTED = typed("redacted_thinking", {"data": text("Not looked at.")})
_HOSTED = record(
    {"type": {"type": "string", "pattern": "^(server_tool_use|mcp_tool_use|[a-z_]{1,20}_tool_result)$"}},
    ["type"],
    "What tools of Anthropic's own did is kept out of the prompt, and recorded as such.",
)
_CONTENT = either(text(), array(either(_TEXT, _SEARCH_RESULT, _TOOL_RESULT)))

_MESSAGE = either(
    record({"role": choice("user"), "content": _CONTENT}, ["role", "content"]),
    record(
        {
            "role": choice("assistant"),
            "content": either(text(), array(either(_TEXT, _TOOL_USE, _THINKING, _REDACTED, _HOSTED))),
        },
        ["role", "content"],
    ),
    record({"role": choice("system"), "content": either(text(), array(_TEXT))}, ["role", "content"]),
)
_TOOL = record(
    {
        "type": nullable(choice("custom")),
        "name": text(at_least=1),
        "description": nullable(text()),
        "input_schema": record(about="A JSON schema. It is shown to the policy, not enforced."),
        "defer_loading": nullable(boolean("Whether the prompt leaves the tool out until a `tool_reference` names it.")),
    },
    ["name", "input_schema"],
)
_HOSTED_TOOL = record(
    {
        "type": {
            "type": "string",
            "not": {"enum": ["custom"]},
            "description": "A tool of Anthropic's own, or of a type that is not known here.",
        },
        "name": text("Kept out of the prompt, and recorded as such.", at_least=1),
    },
    ["type", "name"],
)
_TOOL_CHOICE = nullable(
    record(
        {
            "type": choice("auto", "any", "none", "tool"),
            "name": text("For `tool`: one of the tools."),
            "disable_parallel_tool_use": nullable(boolean()),
        },
        ["type"],
        "`none` leaves the tools out of the prompt; `any` and `tool` are recorded, not enforced.",
    )
)
_REQUEST: dict[str, Schema] = {
    "model": ref("ModelName"),
    "messages": array(
        _MESSAGE,
        "Neighbours of one role are one turn. The last one may not be the assistant's, except to count tokens.",
        minItems=1,
    ),
    "system": either(null(), text(), array(_TEXT)),
    "tools": nullable(array(either(_TOOL, _HOSTED_TOOL), "Names may not be given twice.")),
    "tool_choice": _TOOL_CHOICE,
    "temperature": nullable(number(0, 1, RECORDED)),
    "top_p": nullable(number(0, 1, RECORDED)),
    "top_k": nullable(integer(RECORDED, low=0)),
    "stop_sequences": nullable(array(text(at_least=1), maxItems=64)),
    "stream": STREAM,
}

SCHEMAS: dict[str, Schema] = {
    "MessagesRequest": record(
        {**_REQUEST, "max_tokens": integer("Where smaller than the run's own bound.", low=1)},
        ["model", "messages", "max_tokens"],
    ),
    "CountTokensRequest": record(
        {**_REQUEST, "max_tokens": nullable(integer(low=1))},
        ["model", "messages"],
    ),
    "TokenCount": record({"input_tokens": integer("Exactly what the engine would see.", low=0)}, ["input_tokens"]),
    "MessagesReply": record(
        {
            "id": text(),
            "type": choice("message"),
            "role": choice("assistant"),
            "model": text(),
            "content": array(
                either(
                    _THINKING,
                    _TEXT,
                    typed("tool_use", {"id": text(), "name": text(), "input": record()}, ["id", "name", "input"]),
                )
            ),
            "stop_reason": choice("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": nullable(text()),
            "usage": record(
                {"input_tokens": integer(low=0), "output_tokens": integer(low=0)}, ["input_tokens", "output_tokens"]
            ),
        },
        ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    ),
}
