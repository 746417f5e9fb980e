"""A tokenizer that needs no model: one token a byte, with a chat template that shows everything.

For checks of a harness without a model. The template is ChatML with tools, tool results and the reasoning of every
turn; tool calls are written `<tool_call>{"name", "arguments"}</tool_call>`, as the Hermes and Qwen families do.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from canter.tokens.tokenizer import ChatTokenizer

TURN, STOP = "<|im_start|>", "<|im_end|>"
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TEMPLATE = """{%- if tools -%}
<|im_start|>system
You can call these functions, one JSON description a line.
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools><|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'tool' -%}
<tool_response>
{{ m.content }}
</tool_response>
{%- else -%}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{- ('' if loop.first and not m.content else '\\n') + '<tool_call>\\n{"name": ' + (call.function.name | tojson) -}}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def byte_level_tokenizer() -> ChatTokenizer:
    """256 byte tokens, the two of ChatML (`<|im_end|>` ends a turn) and the marks of reasoning, calls and results."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (TURN, STOP)])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    return ChatTokenizer(backend, TEMPLATE, name="bytes", named_tokens={"eos_token": STOP})
