"""How much text a token can stand for at most, and so how many tokens a text needs at least: without encoding it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models, pre_tokenizers

from canter.tokens.tokenizer import ChatTokenizer

_COMPOSES = 4
"""Canonical composition (NFC) makes a text at most 3.5 times shorter; ASCII stays as it is."""
_KEEP_ALL = frozenset({"ByteLevel", "Digits"})
"""Pre-tokenizers that only split. (`Split` and `Punctuation` may also remove what they split at.)"""


@dataclass(frozen=True, slots=True)
class Reach:
    """`token_bytes` is the length of the longest token in UTF-8; `composes` says that text is composed (NFC) first."""

    token_bytes: int
    composes: bool

    def fewest_tokens(self, text_bytes: int) -> int:
        """Fewer tokens than these cannot stand for so many bytes that stay as they are."""
        return -(-text_bytes // self.token_bytes)

    def fewest_tokens_of(self, text: str) -> int:
        """Fewer tokens than these cannot stand for a text."""
        size = len(text.encode("utf-8", "replace"))
        shrinks = self.composes and not text.isascii()
        return self.fewest_tokens(-(-size // _COMPOSES) if shrinks else size)


def reach_of(tokenizer: ChatTokenizer) -> Reach | None:
    """The reach of a byte-level BPE tokenizer's tokens, added ones included. `None` for any other kind, and where text
    could vanish: then no number of bytes needs any number of tokens."""
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().values()
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    proven = (
        isinstance(backend.model, models.BPE)
        and backend.truncation is None
        and all(step["type"] == "NFC" for step in normalizers)
        and any(step["type"] == "ByteLevel" for step in splitters)
        and all(step["type"] in _KEEP_ALL or step.get("behavior", "Removed") != "Removed" for step in splitters)
        and all(character in vocabulary for character in pre_tokenizers.ByteLevel.alphabet())
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not proven:
        return None
    # the vocabulary spells each byte as one character; added tokens are spelled as they are
    longest = max(map(len, vocabulary))
    return Reach(max([longest, *(len(token.content.encode()) for token in added)]), bool(normalizers))


def _steps(stage: Any, members: str) -> Iterator[Mapping[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of each one in a sequence of them."""
    if stage is None:
        return
    pending = [json.loads(stage.__getstate__())]
    while pending:
        settings = pending.pop(0)
        if settings["type"] == "Sequence":
            pending += settings[members]
        else:
            yield settings
