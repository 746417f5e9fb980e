"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from canter.gateway.openapi.shapes import (
    SAMPLING,
    STOP,
    STREAM,
    STREAM_OPTIONS,
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

_MAX_TOKEN_ID = 2**31 - 1

_TEXT_PART = typed("text", {"text": text()}, ["text"])
_REFUSAL_PART = typed("refusal", {"refusal": text()}, ["refusal"])
_CONTENT = either(
    text(), array(either(text(), _TEXT_PART)), about="Text. Parts are joined with newlines; no other parts are read."
)
_TOOL_CALL = record(
    {
        "id": text("As the gateway gave it: by its ids a turn is found again."),
        "type": choice("function"),
        "function": record(
            {
                "name": text(),
                "arguments": either(text("JSON, as it was sampled."), record(about="The same, parsed."), null()),
            },
            ["name"],
        ),
    },
    ["id", "function"],
)
_MESSAGE = either(
    record(
        {"role": choice("system", "developer", "user"), "content": _CONTENT, "name": nullable(text())},
        ["role", "content"],
    ),
    record({"role": choice("tool"), "tool_call_id": text(), "content": nullable(_CONTENT)}, ["role", "tool_call_id"]),
    record(
        {
            "role": choice("assistant"),
            "content": either(null(), text(), array(either(text(), _TEXT_PART, _REFUSAL_PART))),
            "reasoning_content": nullable(text("Thoughts, where the harness sends them back.")),
            "refusal": nullable(text()),
            "tool_calls": nullable(array(_TOOL_CALL)),
            "name": nullable(text()),
            "function_call": null(),
            "audio": null(),
        },
        ["role"],
    ),
)
_FUNCTION = record(
    {
        "type": choice("function"),
        "function": record(
            {
                "name": text(at_least=1),
                "description": nullable(text()),
                "parameters": nullable(record(about="A JSON schema. It is shown to the policy, not enforced.")),
            },
            ["name"],
        ),
    },
    ["function"],
)
_TOOL = either(
    _FUNCTION,
    record(
        {"type": {"type": "string", "not": {"enum": ["function"]}}},
        ["type"],
        "Tools of other types (`custom`, those that a server runs) are kept out of the prompt, and recorded as such.",
    ),
)
_TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    typed("function", {"function": record({"name": text()}, ["name"])}, ["function"]),
    typed(
        "allowed_tools",
        {
            "allowed_tools": record(
                {
                    "mode": choice("auto", "required"),
                    "tools": nullable(array(record({"function": record({"name": text()}, ["name"])}, ["function"]))),
                },
                ["mode"],
            )
        },
        ["allowed_tools"],
    ),
    about="`none` and `allowed_tools` say which tools the prompt shows, and one that is named must be among `tools`; "
    "that one is called is recorded, not enforced.",
)
_FORMAT = either(
    null(),
    record({"type": choice("text", "json_object")}, ["type"]),
    typed(
        "json_schema",
        {"json_schema": record({"name": text(), "schema": nullable(record())}, ["name"])},
        ["json_schema"],
    ),
    about="Recorded, not enforced.",
)

_USAGE = record(
    {"prompt_tokens": integer(low=0), "completion_tokens": integer(low=0), "total_tokens": integer(low=0)},
    ["prompt_tokens", "completion_tokens", "total_tokens"],
)
_REPLY_HEAD: dict[str, Schema] = {
    "id": text(),
    "created": integer("Unix seconds."),
    "model": text(),
    "system_fingerprint": nullable(text("Names the policy version.")),
    "usage": _USAGE,
}

SCHEMAS: dict[str, Schema] = {
    "ChatRequest": record(
        {
            "model": ref("ModelName"),
            "messages": array(_MESSAGE, minItems=1),
            "tools": nullable(array(_TOOL)),
            "tool_choice": _TOOL_CHOICE,
            "functions": null("The legacy form of tools is not taken."),
            "function_call": null(),
            **SAMPLING,
            "max_tokens": nullable(integer("Where smaller than the run's own bound.", low=1)),
            "max_completion_tokens": nullable(integer("The same.", low=1)),
            "stop": STOP,
            "stream": STREAM,
            "stream_options": STREAM_OPTIONS,
            "logprobs": nullable(boolean("Whether the reply carries the logprobs of the sampled tokens.")),
            "top_logprobs": nullable(
                integer("Only the sampled token's is known; the list stays empty.", low=0, high=20)
            ),
            "response_format": _FORMAT,
            "modalities": nullable(array(choice("text"))),
        },
        ["model", "messages"],
    ),
    "ChatReply": record(
        {
            **_REPLY_HEAD,
            "object": choice("chat.completion"),
            "choices": array(
                record(
                    {
                        "index": integer(),
                        "finish_reason": choice("stop", "length", "tool_calls"),
                        "message": record(
                            {
                                "role": choice("assistant"),
                                "content": nullable(text()),
                                "reasoning_content": text(),
                                "refusal": null(),
                                "tool_calls": array(_TOOL_CALL),
                            },
                            ["role", "content"],
                        ),
                    },
                    ["index", "finish_reason", "message"],
                ),
                minItems=1,
                maxItems=1,
            ),
        },
        ["id", "object", "created", "model", "choices", "usage"],
    ),
    "CompletionRequest": record(
        {
            "model": ref("ModelName"),
            "prompt": either(
                text(at_least=1),
                array(
                    integer("Below the size of the vocabulary.", low=0, high=_MAX_TOKEN_ID),
                    "Token ids, sampled from exactly as they are.",
                    minItems=1,
                ),
                array(text(at_least=1), "Just one text.", minItems=1, maxItems=1),
            ),
            **SAMPLING,
            "max_tokens": nullable(integer("Where smaller than the run's own bound.", low=1)),
            "stop": STOP,
            "stream": STREAM,
            "stream_options": STREAM_OPTIONS,
            "logprobs": nullable(integer("Whether the reply carries logprobs.", low=0, high=20)),
            "echo": {"enum": [False, None]},
            "suffix": {"enum": ["", None]},
            "best_of": {"enum": [1, None]},
        },
        ["model", "prompt"],
    ),
    "CompletionReply": record(
        {
            **_REPLY_HEAD,
            "object": choice("text_completion"),
            "choices": array(
                record(
                    {"index": integer(), "text": text(), "finish_reason": choice("stop", "length")},
                    ["index", "text", "finish_reason"],
                ),
                minItems=1,
                maxItems=1,
            ),
        },
        ["id", "object", "created", "model", "choices", "usage"],
    ),
}
