"""A model's tokenizer and chat template, without transformers.

Text is encoded as inference servers encode a rendered chat: no special token is added, and every special token
*written in the text* becomes its id. That includes one that a user or a tool wrote (`<|im_end|>` in a file that the
agent reads): vLLM, SGLang and `apply_chat_template` do the same, so a policy trained here meets in training exactly
what it will meet when it is served. Canter never cuts a conversation at such tokens; its turn boundaries come from
the recorded ids and from where it put a placeholder in the template, not from a search for `<|im_end|>` in content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from canter.errors import ConfigError, TemplateError
from canter.tokens.messages import Message, ToolSpec
from canter.types import Ids, as_ids
from canter.wire import is_too_nested

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LONG_TEXT = 64 * 2**10


class ChatTokenizer:
    """Text to ids and back, and messages to text.

    `chat_template` is the template's text, `named_tokens` the special tokens that templates refer to by name
    (`bos_token`, …), `stop_token_ids` further ids that end a turn besides the eos token.
    """

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: str,
        *,
        name: str = "",
        named_tokens: Mapping[str, str] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self.name = name
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.unk_token_id = self._named_id("unk_token")
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos, *stop_token_ids)))
        self._template = _compile(chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> Ids:
        """Ids of a text, int32[T]. Nothing is added; lone surrogates, which no tokenizer takes, become `?`."""
        return as_ids(self.encode_list(text))

    def encode_list(self, text: str) -> list[int]:
        """`encode` as a plain list."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace").decode()
        ids: list[int]
        if len(text) < _LONG_TEXT:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        else:  # lets other threads run, and makes no offsets
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str = self.backend.decode(plain, skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a whole token, `None` where the vocabulary has none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """Text of an added token, or the vocabulary's spelling of another one."""
        found: str | None = self.backend.id_to_token(token_id)
        return found

    def is_added(self, token_id: int) -> bool:
        """Whether a token is matched in the text before it is split (all special tokens are)."""
        return token_id in self.backend.get_added_tokens_decoder()

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> str:
        """The chat as text. Raises `TemplateError` where the template refuses these messages."""
        return self.render_plain([self.plain(m) for m in messages], plain_tools(tools), add_generation_prompt)

    def render_plain(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """`apply_chat_template` for messages and tools that are already what templates see."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.named_tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateError(
                f"the chat template of {self.name or 'this model'} cannot render these {len(messages)} messages "
                f"(roles {', '.join(str(m['role']) for m in messages[:8])}): {error}"
            ) from error

    def plain(self, message: Message) -> dict[str, Any]:
        """A message as templates see it: arguments parsed, `developer` as `system` for templates without that role."""
        role = "system" if message.role == "developer" and "developer" not in self.chat_template else message.role
        plain: dict[str, Any] = {"role": role, "content": message.content}
        if message.reasoning is not None:
            plain["reasoning_content"] = plain["reasoning"] = plain["thinking"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": _arguments(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            plain["name"] = message.name
        return plain

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.token_id(token)


def load_tokenizer(folder: str | Path, *, chat_template: str | None = None) -> ChatTokenizer:
    """The tokenizer in a model folder (`tokenizer.json`); `chat_template` is the text of a template to use instead.

    Raises `ConfigError` where the folder has no `tokenizer.json` or no chat template, `TemplateError` where the
    template does not compile.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; model.path must be a folder with a fast tokenizer")
    settings = _read_json(folder / "tokenizer_config.json")
    template = chat_template or _own_template(folder, settings)
    if template is None:
        raise ConfigError(f"{folder} has no chat template; set model.chat_template to a Jinja file")
    special = {**_read_json(folder / "special_tokens_map.json"), **settings}
    named = {name: _token_text(special[name]) for name in _NAMED_TOKENS if special.get(name)}
    stops = _read_json(folder / "generation_config.json").get("eos_token_id")
    return ChatTokenizer(
        Tokenizer.from_file(str(path)),
        template,
        name=str(folder),
        named_tokens=named,
        stop_token_ids=[stops] if isinstance(stops, int) else stops or [],
    )


class PlainTool(dict[str, Any]):
    """A tool as templates see it, in the OpenAI envelope. Its JSON is made once: templates write it at every call."""

    def __init__(self, tool: ToolSpec) -> None:
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        super().__init__(type="function", function=function)

    @cached_property
    def json(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def plain_tools(tools: Sequence[ToolSpec]) -> list[PlainTool]:
    return [PlainTool(tool) for tool in tools]


def _arguments(text: str) -> Any:
    """Arguments as an object, as servers hand them to templates; text that is no JSON object, or one that is nested too
    deeply to be written again, stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not is_too_nested(value) else text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which only marks what the model wrote."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(text: str) -> jinja2.Template:
    """Compiles a chat template in the environment that templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template does not compile: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    if isinstance(value, PlainTool) and (ensure_ascii, indent, separators, sort_keys) == (False, None, None, False):
        return value.json
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
