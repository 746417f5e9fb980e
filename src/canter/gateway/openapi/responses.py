"""`POST /v1/responses`, `POST /v1/responses/input_tokens` and `GET /v1/responses/{id}`."""

from __future__ import annotations

from canter.gateway.openapi.shapes import (
    SAMPLING,
    STOP,
    STREAM,
    Schema,
    array,
    boolean,
    choice,
    either,
    integer,
    null,
    nullable,
    record,
    ref,
    text,
    typed,
)

RECORDED_ONLY = "Recorded, not enforced."

_TEXT_PART = record({"type": choice("input_text", "output_text", "text"), "text": text()}, ["type", "text"])
_REFUSAL_PART = typed("refusal", {"refusal": text()}, ["refusal"])
_THOUGHT_PART = record({"type": choice("reasoning_text", "summary_text", "text"), "text": text()}, ["type", "text"])
_CONTENT = either(null(), text(), array(either(text(), _TEXT_PART)))
_CALL: dict[str, Schema] = {
    "call_id": text("As the gateway gave it: by its ids a turn is found again."),
    "name": text(),
    "namespace": nullable(text()),
}

_ITEM = either(
    record({"type": choice("message"), "role": choice("system", "developer", "user"), "content": _CONTENT}, ["role"]),
    record(
        {
            "type": choice("message"),
            "role": choice("assistant"),
            "content": either(null(), text(), array(either(text(), _TEXT_PART, _REFUSAL_PART))),
        },
        ["role"],
    ),
    typed(
        "reasoning",
        {
            "content": nullable(array(_THOUGHT_PART)),
            "summary": nullable(array(_THOUGHT_PART)),
            "encrypted_content": nullable(text("What the gateway has sealed is read again, anything else is not.")),
        },
    ),
    typed(
        "function_call",
        {**_CALL, "arguments": either(text("JSON, as it was sampled."), record(about="The same, parsed."), null())},
        ["call_id", "name"],
    ),
    typed("custom_tool_call", {**_CALL, "input": nullable(text())}, ["call_id", "name"]),
    record(
        {
            "type": choice("function_call_output", "custom_tool_call_output"),
            "call_id": text(),
            "output": _CONTENT,
        },
        ["type", "call_id"],
    ),
    record(
        {"type": choice("web_search_call", "file_search_call", "mcp_call", "local_shell_call")},
        ["type"],
        "Items of tools that OpenAI runs are kept out of the prompt.",
    ),
)
_FUNCTION = typed(
    "function",
    {
        "name": text(at_least=1),
        "description": nullable(text()),
        "parameters": nullable(record(about="A JSON schema. It is shown to the policy, not enforced.")),
    },
    ["name"],
)
_CUSTOM = typed(
    "custom",
    {
        "name": text("Shown as a function with one text, `input`.", at_least=1),
        "description": nullable(text()),
        "format": either(
            null(),
            typed("text"),
            typed("grammar", {"syntax": text(), "definition": text()}, ["syntax", "definition"]),
        ),
    },
    ["name"],
)
_TOOL = either(
    _FUNCTION,
    _CUSTOM,
    typed(
        "namespace",
        {
            "name": text("Comes before the names of its tools, with two underscores between.", at_least=1),
            "tools": nullable(array(either(_FUNCTION, _CUSTOM))),
        },
        ["name"],
    ),
    record(
        {"type": choice("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell")},
        ["type"],
        "Tools that OpenAI runs are kept out of the prompt, and recorded as such.",
    ),
)
_TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    record({"type": choice("function", "custom"), "name": text()}, ["type", "name"]),
    typed("allowed_tools", {"mode": choice("auto", "required"), "tools": nullable(array(record()))}, ["mode"]),
    about="`none` and `allowed_tools` say which tools the prompt shows; that one is called is recorded, not enforced.",
)
_FORMAT = either(
    null(),
    record({"type": choice("text", "json_object")}, ["type"]),
    typed(
        "json_schema",
        {"name": text(), "schema": record(), "description": nullable(text()), "strict": nullable(boolean())},
        ["name", "schema"],
    ),
    about="Recorded, not enforced.",
)

SCHEMAS: dict[str, Schema] = {
    "ResponsesRequest": record(
        {
            "model": ref("ModelName"),
            "input": either(text(), array(_ITEM, "At least one of them must reach the prompt.", minItems=1)),
            "instructions": nullable(text("Comes first, as a system message.")),
            "tools": nullable(array(_TOOL, "No two of them may have the same name in the prompt.")),
            "tool_choice": _TOOL_CHOICE,
            **SAMPLING,
            "max_output_tokens": nullable(integer("Where smaller than the run's own bound.", low=1)),
            "stop": STOP,
            "stream": STREAM,
            "stream_options": nullable(record({"include_obfuscation": nullable(boolean())})),
            "include": nullable(
                array(
                    text(),
                    "`reasoning.encrypted_content` and `message.output_text.logprobs` are heeded, others ignored.",
                )
            ),
            "top_logprobs": nullable(
                integer("Only the sampled token's is known; the list stays empty.", low=0, high=20)
            ),
            "previous_response_id": nullable(
                text("The id of a response of this attempt that was not made with store: false.")
            ),
            "store": nullable(boolean("Whether the response can be gone on from.")),
            "background": {"enum": [False, None]},
            "conversation": null(),
            "prompt": null(),
            "parallel_tool_calls": nullable(boolean(RECORDED_ONLY)),
            "max_tool_calls": nullable(integer(RECORDED_ONLY, low=1)),
            "reasoning": nullable(record(about=RECORDED_ONLY)),
            "text": nullable(record({"format": _FORMAT})),
            "metadata": nullable({**record(), "additionalProperties": {"type": "string"}}),
            "prompt_cache_key": nullable(text("Ignored.")),
            "safety_identifier": nullable(text("Ignored.")),
            "user": nullable(text("Ignored.")),
        },
        ["model", "input"],
    ),
    "ResponsesReply": record(
        {
            "id": text(),
            "object": choice("response"),
            "created_at": integer("Unix seconds."),
            "model": text(),
            "status": choice("completed", "incomplete"),
            "incomplete_details": nullable(record({"reason": choice("max_output_tokens")}, ["reason"])),
            "error": null(),
            "output": array(
                either(
                    typed("reasoning", {"id": text(), "summary": array(_THOUGHT_PART)}, ["id", "summary"]),
                    typed("message", {"id": text(), "role": choice("assistant")}, ["id", "role", "content"]),
                    typed(
                        "function_call", {"id": text(), **_CALL, "arguments": text()}, ["call_id", "name", "arguments"]
                    ),
                    typed("custom_tool_call", {"id": text(), **_CALL, "input": text()}, ["call_id", "name", "input"]),
                )
            ),
            "usage": record(
                {"input_tokens": integer(low=0), "output_tokens": integer(low=0), "total_tokens": integer(low=0)},
                ["input_tokens", "output_tokens", "total_tokens"],
            ),
        },
        ["id", "object", "created_at", "model", "status", "output", "usage"],
    ),
    "InputTokens": record(
        {
            "object": choice("response.input_tokens"),
            "input_tokens": integer("Exactly what the engine would see.", low=0),
        },
        ["object", "input_tokens"],
    ),
}
