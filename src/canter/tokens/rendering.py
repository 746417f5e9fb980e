"""Messages to token ids and back: the protocol, and the choice between its two implementations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from canter.errors import ConfigError
from canter.tokens.messages import Message, ToolSpec
from canter.tokens.parsing import Parsed
from canter.tokens.template import TemplateRendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.types import NO_IDS, Ids

logger = logging.getLogger(__name__)

__all__ = ["Parsed", "Rendering", "make_rendering"]


class Rendering(Protocol):
    """How one model's conversations become token ids."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the model's turn."""
        ...

    def full(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
        """The prompt for the next assistant turn, generation prompt included. Raises `TemplateError`."""
        ...

    def bridge(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: Ids, sampled: Ids, new_from: int
    ) -> Ids | None:
        """What to append to `prompt + sampled` so that the whole is the prompt for the turn after `messages`.

        `messages[new_from - 1]` is the reply that `sampled` is, `messages[new_from:]` are new. A turn without its stop
        token (cut by length or by a stop string) is closed first; that close is part of what is returned, and so never
        trained. `None` where it cannot be proven that the template would go on exactly so, for instance because it
        would now leave out the reasoning of an earlier turn.
        """
        ...

    def parse(self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt: Ids = NO_IDS) -> Parsed:
        """A sampled reply as a message. `prompt`, where given, tells whether it has opened the reasoning already."""
        ...


def make_rendering(
    tokenizer: ChatTokenizer, renderer: str = "auto", tool_format: Literal["auto", "hermes"] = "auto"
) -> Rendering:
    """The rendering of a model.

    `renderer` is a family of the library `renderers`, `template` for the model's own chat template, or `auto`: the
    first family that renders a set of probe conversations to exactly the ids of the chat template, else the template.
    `tool_format = "hermes"` makes sampled tool calls be read so whatever family renders. Raises `ConfigError`.
    """
    if renderer == "template":
        return TemplateRendering(tokenizer)
    # imported late: the library costs half a second
    from canter.tokens.families import FamilyRendering, find_family, make_family

    found = find_family(tokenizer) if renderer == "auto" else make_family(tokenizer, renderer)
    if found is None and renderer != "auto":
        raise ConfigError(
            f"model.renderer = {renderer!r} does not fit {tokenizer.name or 'this model'}: there is no such family, or "
            "its special tokens are missing; use 'auto' or 'template'"
        )
    if found is None:
        logger.info("no renderer family matches the chat template of %s; using the template", tokenizer.name)
        return TemplateRendering(tokenizer)
    return FamilyRendering(tokenizer, found, hermes=tool_format == "hermes")
