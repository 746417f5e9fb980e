"""What the server that was recorded answered, and how ids of its replies become ids of ours.

It was stateless: reasoning, text and tool calls follow from the turn, with JSON spelled as no serialiser would. What a
reply's tool calls were is read off the history that came back, where it did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_traffic import Recorded, Said, calls_of, echo_of, is_reply, scenarios, text_of

from canter.tokens.messages import Message, arguments_agree

TURN_OF_ID = {
    "call_dbe7853a670c1ba31a36": 1,
    "call_43be108fdf3e0bc2222d": 1,
    "toolu_a6199dde4fa53958afd3": 1,
    "call_4a843e3e5f254647a560": 2,
    "call_4a3dd4166e6c67ff4117": 2,
    "toolu_ed10dcdcd46a3bb3aa82": 2,
    "call_6584dbdacdcc6e7a2ca2": 3,
    "call_38d93f90a9d5a733cae9": 3,
    "call_c6ad4d44ae06345cc1b5": 3,
    "call_327399803be2a0d5e688": 3,
    "toolu_82c9c9416b231a01e19a": 3,
    "toolu_d311388ee32653ad9032": 3,
}
REASONING = {1: "Let me look.\n  (step 1) café", 3: "Let me look.\n  (step 3) café", 4: "Wrapping up."}
TEXT = {0: "Short title", 1: "I'll look around first.\n\n  - trailing blanks: café ✓  \n", 4: "\nAll done: café ✓.  \n"}
BROKEN, WHOLE = '{"command": "echo broken', "echo broken"
"""Arguments that are no JSON never leave the gateway as a tool call: where the recorded server sent some, ours sends a
whole command, and what the harness made of it stays as it was recorded."""
REFUSED = ("400", "400ctx")


@dataclass(frozen=True, slots=True)
class Line:
    """One reply. `calls` are (recorded id, name, arguments as sampled); `cut`: it ran into the token limit."""

    turn: int
    reasoning: str | None
    text: str
    calls: tuple[Said, ...] = ()
    cut: bool = False


def line_for(harness: str, scenario: str, asked: Recorded) -> Line:
    """What the model says to a recorded request."""
    requests = scenarios(harness)[scenario]
    turn = asked.turn
    if asked.fault == "empty":
        return Line(turn, None, "")
    if asked.fault == "trunc":
        return Line(turn, REASONING.get(turn), "I was cut of", cut=True)
    echo = echo_of(requests, asked) or []
    said = [call for item in echo for call in calls_of(item)]
    if said and said[0].id not in TURN_OF_ID:  # delegation, or ids that were not unique
        text = "".join(text_of(item) for item in echo)
        return Line(turn, None, text, tuple(_spelled(turn, call) for call in said))
    if not asked.body.get("tools") and turn > 0:
        return Line(turn, None, text_of(echo[0]) if echo else TEXT[4])
    calls = _calls(harness, scenario, asked) if turn in (1, 2, 3) else ()
    return Line(turn, REASONING.get(turn), TEXT.get(turn, ""), calls)


def _calls(harness: str, scenario: str, asked: Recorded) -> tuple[Said, ...]:
    """The calls of a turn with tools, as this scenario, else the harness's others, show them."""
    found: dict[str, Said] = {}
    everything = scenarios(harness)
    for requests in (everything[scenario], *everything.values()):
        for request in requests:
            for call in (call for item in request.items if is_reply(item) for call in calls_of(item)):
                same = TURN_OF_ID.get(call.id) == asked.turn and request.dialect == asked.dialect
                if same and call.id not in found and _is_object(call.arguments) and call.name != "invalid":
                    found[call.id] = call
        if found:
            break
    if scenario == "bad-json-args" and asked.turn == 1:
        [call] = found.values()
        name = next(name for name in json.loads(call.arguments) if name in ("command", "cmd"))
        return (Said(call.id, call.name, json.dumps({name: WHOLE})),)
    return tuple(_spelled(asked.turn, _as_sampled(scenario, call)) for call in found.values())


def _as_sampled(scenario: str, call: Said) -> Said:
    """A call before the harness rewrote it."""
    arguments = json.loads(call.arguments)
    if call.name == "Edit":
        arguments.pop("replace_all", None)
    if scenario == "bash-cd-prefix" and arguments.get("command", "").startswith("echo hi"):
        arguments["command"] = "cd /path && " + arguments["command"]
    return Said(call.id, call.name, json.dumps(arguments, ensure_ascii=False))


def _spelled(turn: int, call: Said) -> Said:
    """Arguments in the spelling of a turn: with blanks and escapes, compact with `\\/`, or on several lines."""
    members = json.loads(call.arguments)
    match turn:
        case 1:
            text = "{ " + ",  ".join(f"{json.dumps(n)}:  {json.dumps(v)}" for n, v in members.items()) + " }"
        case 2:
            text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).replace("/", "\\/")
        case _:
            text = json.dumps(members, indent=2, ensure_ascii=False)
    return Said(call.id, call.name, text)


def _is_object(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and not {"__unparsedToolInput", "_openhands_malformed_tool_call"} & value.keys()


@dataclass
class Ids:
    """Which ids of ours stand for the recorded ones. One agent's replies, in their order. A model that does not think
    (`thinks`) has no reasoning that could come back."""

    thinks: bool = True
    replies: list[tuple[Line, Message]] = field(default_factory=list)
    plain: dict[str, str] = field(default_factory=dict)

    def learn(self, line: Line, message: Message, reply: Mapping[str, Any]) -> None:
        """Takes in the gateway's reply: its message, and its JSON."""
        self.replies.append((line, message))
        self.plain.update(_other_ids(line.turn, reply))
        for call in message.tool_calls:
            if WHOLE in call.arguments:
                self.plain[BROKEN] = call.arguments

    def translate(self, items: Sequence[Mapping[str, Any]]) -> list[Any]:
        """A recorded history with our ids in place of the recorded ones."""
        current: dict[str, str] = {}
        translated = []
        for at, item in enumerate(items):
            if not self.thinks and item.get("type") == "reasoning":
                continue
            if is_reply(item):
                for call in calls_of(item):
                    current[call.id] = self._issued(items, at, call)
            ours = _replaced(item, {**self.plain, **current})
            translated.append(ours if self.thinks else _without_reasoning(ours))
        return translated

    def _issued(self, items: Sequence[Mapping[str, Any]], at: int, call: Said) -> str:
        """Our id for a call: of the replies that said so, the last ones, in the order of the history."""
        told = [
            (issued.id, said)
            for line, message in self.replies
            for said, issued in zip(line.calls, message.tool_calls, strict=True)
            if said.id == call.id
        ]
        alike = [i for i, said in told if arguments_agree(said.arguments, call.arguments)] or [i for i, _ in told]
        same = [
            (place, other)
            for place, item in enumerate(items)
            if is_reply(item)
            for other in calls_of(item)
            if other.id == call.id and arguments_agree(other.arguments, call.arguments)
        ]
        before = sum(place < at for place, _ in same)
        assert alike, f"the history has a call {call.id} that no reply of this agent made"
        return alike[max(0, len(alike) - len(same)) + before]


def _other_ids(turn: int, reply: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of recorded and issued ids besides those of tool calls: opaque things that come back."""
    if str(reply.get("id", "")).startswith("resp"):
        yield f"resp_stub000{turn}", reply["id"]
    place = 0
    for item in reply.get("output") or ():
        if item["type"] == "reasoning":
            yield f"rs_stub{turn}", item["id"]
            yield f"ENC{turn}==opaque", item.get("encrypted_content") or "none"
        elif item["type"] == "message":
            yield f"msg_stub{turn}", item["id"]
        else:
            yield f"fc_stub{turn}{place}", item["id"]
            place += 1
    for block in reply.get("content") or ():
        if block.get("type") == "thinking":
            yield f"U0lHTkFUVVJF{turn}", block["signature"]


def _without_reasoning(item: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: member for name, member in item.items() if name != "reasoning_content"}
    if isinstance(plain.get("content"), list):
        plain["content"] = [block for block in plain["content"] if block.get("type") != "thinking"]
    return plain


def _replaced(value: Any, ids: Mapping[str, str]) -> Any:
    match value:
        case Mapping():
            return {name: _replaced(member, ids) for name, member in value.items()}
        case list():
            return [_replaced(member, ids) for member in value]
        case str() if value in ids:
            return ids[value]
        case _:
            return value
