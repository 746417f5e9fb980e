"""Which agent of a harness a call belongs to, and what kind of request it is: told by headers, tools and known marks.

Labels are recorded with the call; which of them train is the recipe's choice (`harness.train_labels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from canter.gateway.dialects.canonical import Asked
from canter.types import ForkCause


@dataclass(frozen=True, slots=True)
class Label:
    """`name` is recorded; `hint` tells the tree why a call that shares no turn with any other begins a conversation of
    its own."""

    name: str
    hint: ForkCause | None = None


MAIN = Label("main")


def classify(headers: Mapping[bytes, bytes], asked: Asked, *, tools_seen: bool) -> Label:
    """The label of a request. `headers` have lower-case names; `tools_seen` says whether any earlier call of the
    attempt offered tools."""
    return MAIN
