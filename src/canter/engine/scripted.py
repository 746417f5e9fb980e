"""A policy that plays a part: it makes any agent take three turns with its shell tool and then end.

It holds no state. What it says follows from the prompt alone (ChatML, with the tools as JSON between `<tools>` marks;
`tokens/byte_level.py` writes such prompts): which tools there are and how many results have come back. So it answers
retries, resumed conversations and several agents at once, each by itself.

| the prompt | the reply |
| --- | --- |
| no tool result yet | reasoning, text with blank ends, one call whose JSON is oddly spelled |
| one | no text, one call with escaped slashes |
| two | reasoning, no text, two parallel calls with pretty-printed JSON |
| more | a final text with blank ends, or the command by which the agent wants to be told |
| asks for a title, a summary, or anything else without tools | a text |

Each call writes a file `canter-N.txt` into the working folder, so that one can see what was really executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from canter.engine.fake import Encode, FakeEngine, Fault
from canter.types import Ids, Sampling

Decode = Callable[[Ids], str]

STEPS = 3
"""Turns with tool calls; the last of them has two."""
FILES = tuple(f"canter-{number}.txt" for number in range(1, STEPS + 2))
"""What the calls write, in their order."""
SUB_FILE = "canter-sub.txt"
"""What the call of a sub-agent writes."""
DELEGATE = "Delegate one part to a sub-agent."
"""A task that says so makes the second call one of the tool that starts a sub-agent, where there is one."""
BULKY = "Let the commands print a lot."
"""A task that says so makes each command print some 19 kB, so that a small context overflows."""
SUB_TASK = "Canter's sub-task: make one file."
_SUB_AGENT = {"prompt": SUB_TASK, "message": SUB_TASK}
FINAL = "\nAll done: café ✓.  \n"
SUMMARY = "Summary of the work so far, by the scripted policy. Finished steps: "
TITLE = "Check of a harness"

_SHELLS = (
    "bash",
    "shell",
    "exec_command",
    "terminal",
    "execute_bash",
    "run_shell_command",
    "shell_command",
    "local_shell",
    "execute_command",
    "run_command",
)
"""Names of tools that run a shell command, the likeliest first; compared without their case."""
_COMMANDS = ("command", "cmd", "commands", "script", "code")
"""Names of the parameter that holds the command."""
_DELEGATES = re.compile(r"(.*\W|.*__)?(task|agent|spawn_agent)")
_WAITS = re.compile(r"(.*\W|.*__)?wait_agent")
_STARTED = re.compile(r'"agent_id": ?"([^"]+)"')
_BEFORE_WAITING = STEPS + 1
"""Tool results when all else is done."""
_ENDS = ("final_answer", "final_result")
"""Tools with which an agent wants to be told its answer: a text would not end it."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""mini-SWE-agent ends at a command that prints this."""
_COMPACTS = re.compile(
    r"context checkpoint compaction|detailed summary of|context summari[sz]ation|"
    r"summari[sz]e (the|our|this) conversation",
    re.I,
)
"""How agents ask for the summary that a new context begins with."""
_NAMES = re.compile(r"\btitle\b", re.I)
_BLOCK = re.compile(r"^```(\w*(?:bash|shell)\w*|sh)[ \t]*$", re.M)
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.S)
_FINISHED = re.compile(re.escape(SUMMARY) + r"(\d+)")


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt shows: its turns as (role, text), and the tools on offer as functions of the OpenAI envelope."""

    turns: tuple[tuple[str, str], ...]
    tools: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, prompt: str) -> Scene:
        turns = tuple((role, text) for role, text in _TURN.findall(prompt))
        block = next((text for role, text in turns if role == "system" and "<tools>\n" in text), "")
        lines = block.partition("<tools>\n")[2].rpartition("\n</tools>")[0].splitlines()
        return cls(
            turns[:-1] if turns and turns[-1] == ("assistant", "") else turns, tuple(_function(x) for x in lines)
        )

    @property
    def results(self) -> int:
        """Tool results so far."""
        return _results(self.turns)

    @property
    def finished(self) -> int:
        """Steps that are done: by the results in this context, on top of what the last summary in it says."""
        for at in range(len(self.turns) - 1, -1, -1):
            if found := _FINISHED.search(self.turns[at][1]):
                return min(STEPS, int(found[1]) + _results(self.turns[at + 1 :]))
        return min(STEPS, self.results)

    @property
    def language(self) -> str | None:
        """Of the code blocks in which an agent without tools wants its commands; it shows one before it asks."""
        if self.tools:
            return None
        for role, text in self.turns:
            if role != "assistant" and (found := _BLOCK.search(text)):
                return found[1]
        return None

    def says(self, words: str) -> bool:
        """Whether anyone but the policy says so."""
        return any(words in text for role, text in self.turns if role != "assistant")

    @property
    def system(self) -> str:
        return "\n".join(text for role, text in self.turns if role == "system")

    @property
    def last(self) -> str:
        return self.turns[-1][1] if self.turns else ""


def _results(turns: Sequence[tuple[str, str]]) -> int:
    """Tool results: a turn each, blocks in a turn of the user's, or such a turn that says what was observed (agents
    that tell the model of its calls and their results in words)."""
    blocks = (
        text.count("<tool_response>\n") for role, text in turns if role == "user" and text.startswith("<tool_resp")
    )
    observed = sum(role == "user" and text.startswith("Observation:") for role, text in turns)
    return sum(role == "tool" for role, _ in turns) + sum(blocks) + observed


def _function(line: str) -> Mapping[str, Any]:
    try:
        tool = json.loads(line)
    except ValueError:
        return {}
    found = tool.get("function", tool) if isinstance(tool, dict) else {}
    return found if isinstance(found, dict) else {}


def reply(prompt: str) -> str:
    """What the scripted policy says to a prompt."""
    scene = Scene.read(prompt)
    if _COMPACTS.search(scene.last) or (not scene.tools and _COMPACTS.search(scene.system)):
        return f"<summary>\n{SUMMARY}{scene.finished}\n</summary>"  # some agents want it between these marks
    if scene.says(SUB_TASK) and not scene.says(DELEGATE):
        return FINAL if scene.results or not scene.tools else _call(scene, _writes(SUB_FILE, scene), _wide)
    if language := scene.language:
        return _in_blocks(scene, language)
    if not scene.tools:
        return TITLE if _NAMES.search(scene.system) else FINAL
    return _in_tools(scene)


def _in_tools(scene: Scene) -> str:
    match scene.finished:
        case 0:
            return "<think>\nLet me look.\n  (step 1) café\n</think>\n\nFirst a file.\n\nIt is small.  \n" + _call(
                scene, _writes(FILES[0], scene), _wide
            )
        case 1 if scene.says(DELEGATE) and (tool := _delegate(scene)) is not None:
            return _written(tool, _filled(tool, {**_SUB_AGENT, "subagent_type": _kind_of(tool)}), _escaped)
        case 1:
            return _call(scene, _writes(FILES[1], scene), _escaped)
        case 2:
            calls = "\n".join(_call(scene, _writes(name, scene), _pretty) for name in FILES[2:])
            return f"<think>\nTwo at once.\n</think>\n\n{calls}"
    if scene.results == _BEFORE_WAITING and scene.says(DELEGATE) and (call := _wait(scene)) is not None:
        return call
    if (tool := _named(scene, _ENDS)) is not None:
        return _written(tool, _filled(tool, {}), _wide)
    return _call(scene, f"echo {_SUBMIT}", _wide) if scene.says(_SUBMIT) else FINAL


def _in_blocks(scene: Scene, language: str) -> str:
    """For agents that read commands from code blocks: one a turn, and what they print comes back as the user's."""
    done = sum(role == "assistant" for role, _ in scene.turns)
    if done < len(FILES):
        command = _writes(FILES[done], scene)
    elif scene.says(_SUBMIT):
        command = f"echo {_SUBMIT}"
    else:
        return FINAL
    return f"THOUGHT: step {done + 1}, café.\n\n```{language}\n{command}\n```\n"


def _writes(name: str, scene: Scene) -> str:
    bulk = "; seq 1 4000 | xargs -n 40" if scene.says(BULKY) else ""
    return f"printf '%s\\n' 'café /1' > ./{name}; cat ./{name}{bulk}"


# -- tools --


def _call(scene: Scene, command: str, spelt: Callable[[dict[str, Any]], str]) -> str:
    """A call of the tool that runs commands; where there is none, of the first tool, with values of the right types."""
    tool = _shell(scene)
    if tool is not None:
        return _written(tool, _filled(tool, {_command_of(tool) or "": command}), spelt)
    return _written(scene.tools[0], _filled(scene.tools[0], {}), spelt)


def _shell(scene: Scene) -> Mapping[str, Any] | None:
    found = _named(scene, _SHELLS)
    if found is not None and _command_of(found):
        return found
    return next((tool for tool in scene.tools if _command_of(tool)), None)


def _named(scene: Scene, names: Sequence[str]) -> Mapping[str, Any] | None:
    by_name = {str(tool.get("name", "")).lower(): tool for tool in scene.tools}
    return next((by_name[name] for name in names if name in by_name), None)


def _delegate(scene: Scene) -> Mapping[str, Any] | None:
    """The tool that starts a sub-agent with a text."""
    return next(
        (
            tool
            for tool in scene.tools
            if _DELEGATES.fullmatch(str(tool.get("name", "")).lower()) and _SUB_AGENT.keys() & _properties(tool).keys()
        ),
        None,
    )


def _wait(scene: Scene) -> str | None:
    """Waits for a sub-agent that goes on by itself, and would be ended with its parent."""
    tool = next((tool for tool in scene.tools if _WAITS.fullmatch(str(tool.get("name", "")))), None)
    started = next(
        (found[1] for role, text in scene.turns if role == "tool" and (found := _STARTED.search(text))), None
    )
    if tool is None or started is None:
        return None
    return _written(tool, {"targets": [started], "timeout_ms": 60_000}, _escaped)


def _kind_of(tool: Mapping[str, Any]) -> str:
    """The general kind of sub-agent, by the name that the tool's description has for it."""
    described = str(tool.get("description", "")) + json.dumps(_properties(tool).get("subagent_type", {}))
    return "general-purpose" if "general-purpose" in described else "general"


def _command_of(tool: Mapping[str, Any]) -> str | None:
    """The parameter of a tool that holds a command: a string, or an argv."""
    properties = _properties(tool)
    return next((n for n in _COMMANDS if n in properties and _type(properties[n]) in ("string", "array")), None)


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool.get("parameters")
    found = parameters.get("properties") if isinstance(parameters, dict) else None
    return found if isinstance(found, dict) else {}


def _filled(tool: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Arguments: `values` for the parameters of these names, something of the right type for what else is required.
    A time-out comes first, in another order than the schema's."""
    properties = _properties(tool)
    parameters = tool.get("parameters")
    required = parameters.get("required") if isinstance(parameters, dict) else None
    arguments: dict[str, Any] = {}
    if _type(properties.get("timeout")) in ("integer", "number"):
        arguments["timeout"] = 20000
    for name in dict.fromkeys((*(required if isinstance(required, list) else ()), *values)):
        schema = properties.get(name)
        if name in values and schema is not None:
            arguments[name] = ["bash", "-c", values[name]] if _type(schema) == "array" else values[name]
        elif name not in values and name not in arguments:
            arguments[str(name)] = _some(schema)
    return arguments


def _type(schema: Any) -> str:
    """The first type that a schema allows."""
    if not isinstance(schema, dict):
        return ""
    found = schema.get("type")
    if isinstance(found, list):
        found = next((t for t in found if t != "null"), "")
    if found is None:
        options = schema.get("anyOf") or schema.get("oneOf") or []
        found = next((t for t in map(_type, options) if t not in ("", "null")), "")
    return str(found)


def _some(schema: Any) -> Any:
    """A value that a schema allows, as far as a type and a list of choices say it."""
    if isinstance(schema, dict):
        if isinstance(choices := schema.get("enum"), list) and choices:
            return choices[0]
        if "const" in schema:
            return schema["const"]
    plain: dict[str, Any] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    return plain.get(_type(schema), "canter")


def _written(tool: Mapping[str, Any], arguments: dict[str, Any], spelt: Callable[[dict[str, Any]], str]) -> str:
    name = json.dumps(tool.get("name", ""), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {spelt(arguments)}}}\n</tool_call>'


def _wide(arguments: dict[str, Any]) -> str:
    """Blanks and `\\u` escapes."""
    inside = json.dumps(arguments, separators=(",  ", ":  "))[1:-1]
    return f"{{ {inside} }}"


def _escaped(arguments: dict[str, Any]) -> str:
    """Compact, with `\\/`."""
    return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False).replace("/", "\\/")


def _pretty(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, indent=2, ensure_ascii=False)


# -- the engine --


@dataclass(slots=True)
class Faults:
    """What goes wrong, by the turn that is asked for (tool results in the prompt): each entry happens once, in order.
    Requests without tools (titles) have no faults."""

    decode: Decode
    turns: dict[int, list[Fault]] = field(default_factory=dict)

    def __call__(self, prompt: Ids, number: int) -> Fault | None:
        scene = Scene.read(self.decode(prompt))
        if not scene.tools and scene.language is None:
            return None
        done = scene.results or (sum(r == "assistant" for r, _ in scene.turns) if scene.language else 0)
        left = self.turns.get(done)
        return left.pop(0) if left else None


def scripted_engine(
    encode: Encode,
    decode: Decode,
    *,
    stop_id: int,
    vocab: int,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    token_delay_s: float = 0.0,
    context_tokens: int = 2**20,
) -> FakeEngine:
    """An engine that says what `reply` says. `faults` is what goes wrong at which turn (see `Faults`); a token of a
    byte-level tokenizer is a byte, so `context_tokens` is large enough for what real agents send."""

    def script(prompt: Ids, sampling: Sampling, number: int) -> str:
        return reply(decode(prompt))

    return FakeEngine(
        script,
        encode=encode,
        model="scripted",
        stop_id=stop_id,
        vocab=vocab,
        token_delay_s=token_delay_s,
        context_tokens=context_tokens,
        faults=Faults(decode, {turn: list(found) for turn, found in (faults or {}).items()}),
    )
