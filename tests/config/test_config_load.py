"""Settings: what is refused and how it is said, overrides, and the round trip through TOML."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.config import Config, load, resolve, to_toml
from canter.errors import ConfigError

MINIMAL = {
    "model": {"path": "m"},
    "tasks": {"train": "t.jsonl"},
    "harness": {"command": ["agent"]},
    "grader": {"use": "exact"},
}


def with_setting(section: str, key: str, value: object) -> dict[str, object]:
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (with_setting("trainer", "step", 3), "unknown setting 'trainer.step'; did you mean 'trainer.steps'"),
        (with_setting("model", "pth", "x"), "did you mean 'model.path'"),
        ({**MINIMAL, "trainr": {}}, "did you mean 'trainer'"),
        (with_setting("model", "steps", 3), "did you mean 'trainer.steps'"),
        ({k: v for k, v in MINIMAL.items() if k != "tasks"}, "tasks is missing"),
        (with_setting("trainer", "steps", 0), "trainer.steps: Input should be greater than or equal to 1 (got 0)"),
        (with_setting("trainer", "steps", "many"), "trainer.steps"),
        (with_setting("harness", "use", "mini-swe-agent"), "exactly one of harness.use"),
        (with_setting("harness", "args", {"x": {"a": 1}}), "harness.args: x = {'a': 1} is neither text, a number"),
        (with_setting("harness", "args", {"x": ["a", 1]}), "harness.args: x = ['a', 1] is neither text, a number"),
        (with_setting("harness", "args", {"x": float("inf")}), "harness.args: x = inf is neither text, a number"),
        (with_setting("harness", "train_labels", []), "harness.train_labels"),
        (with_setting("sampling", "top_p", 0.9), "top_p must be 1"),
        (with_setting("sampling", "temperature", 0), "greedy"),
        (with_setting("sampling", "temperature", float("nan")), "sampling.temperature"),
        (with_setting("evaluate", "after", True), "need tasks.eval"),
        (with_setting("engine", "use", "openai"), "needs engine.url"),
        ({**MINIMAL, "base": "/"}, "unknown setting 'base'"),
        ({**MINIMAL, "model": "m"}, "model"),
    ],
)
def test_refuses_and_says_why(tree: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(tree)
    assert says in str(refused.value)


@pytest.mark.parametrize("override", ["trainer", "trainer.steps", "=3", "steps=3", "trainer.=3", "model.path.x=1", ""])
def test_malformed_overrides_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        resolve(MINIMAL, [override])


def test_overrides_take_toml_values_and_bare_text() -> None:
    config = resolve(
        MINIMAL,
        [
            "trainer.steps=7",
            "model.path=/a b/c",
            "model.name=7",
            "harness.env.A=x",
            'harness.command=["a", "b"]',
            "trainer.dual_clip=none",
        ],
    )
    assert (config.trainer.steps, config.model.path, config.model.name) == (7, "/a b/c", "7")
    assert (config.harness.env, config.harness.command, config.trainer.dual_clip) == ({"A": "x"}, ["a", "b"], None)


def test_none_unsets_what_the_file_sets() -> None:
    tree = with_setting("model", "chat_template", "template.jinja")
    assert resolve(tree, ["model.chat_template=none"]).model.chat_template is None


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve({**MINIMAL, "trainer": {"steps": 0, "lr": -1}})
    assert "trainer.steps" in str(refused.value)
    assert "trainer.lr" in str(refused.value)


def test_unreadable_files(tmp_path: Path) -> None:
    for name, content in {
        "broken.toml": b"[model\n",
        "binary.toml": b"\xff\xfe",
        "deep.toml": b"a = " + b"[" * 5000,
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.toml")


def test_the_arguments_of_a_recipe_may_be_lists() -> None:
    config = resolve(MINIMAL, ['harness.args.tools=["Bash", "Edit"]', "harness.args.bare=true"])
    assert config.harness.args == {"tools": ["Bash", "Edit"], "bare": True}
    assert resolve(tomllib.loads(to_toml(config))).harness.args == config.harness.args


def test_paths_start_at_the_toml_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(resolve(MINIMAL)))
    assert load(tmp_path / "run.toml").path("t.jsonl") == tmp_path / "t.jsonl"


def test_the_tree_is_frozen() -> None:
    config = resolve(MINIMAL)
    with pytest.raises(Exception, match="frozen"):
        config.trainer.steps = 3  # type: ignore[misc]


def test_no_setting_holds_a_secret() -> None:
    """Secrets come from the environment: a setting has the variable's name only."""
    names = [f"{section}.{key}" for section, model in Config.model_fields.items() for key in fields(model.annotation)]
    assert [name for name in names if name.endswith(("_key", "password", "secret"))] == ["gateway.tls_key"]


def fields(kind: object) -> list[str]:
    return list(getattr(kind, "model_fields", {}))


@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    env=st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"))),
    lr=st.floats(1e-9, 1, allow_subnormal=False),
    dual=st.none() | st.floats(1.5, 10),
    keep=st.booleans(),
)
def test_toml_round_trip(name: str, env: dict[str, str], lr: float, dual: float | None, keep: bool) -> None:
    tree = {
        **MINIMAL,
        "model": {"path": "m", "name": name},
        "harness": {"command": ["a", name], "env": env},
        "trainer": {"lr": lr, "dual_clip": dual, "keep_flat_groups": keep},
    }
    config = Config.model_validate(tree)
    assert resolve(tomllib.loads(to_toml(config))) == config
