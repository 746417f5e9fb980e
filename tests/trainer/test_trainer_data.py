import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.errors import ConfigError
from canter.trainer.data import TaskOrder, fingerprint, read_tasks
from canter.trainer.plan import evaluation_rollouts, step_rollouts
from canter.trainer.seeds import seed_of
from canter.types import Split, Task
from tiny_policy import tiny_config

TASKS = [Task(id=f"t{n}", prompt="p") for n in range(7)]


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_become_tasks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl", {"id": "a", "prompt": "é", "hidden": {"answer": 1}}, "", {"id": "b", "prompt": "y"}
    )
    assert read_tasks(file) == [Task("a", "é", {}, {"answer": 1}), Task("b", "y")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"id": "b", ', "t.jsonl:2: not JSON: "),
        (["b"], "t.jsonl:2: a task is a JSON object, got list"),
        ({"id": "b"}, "t.jsonl:2: field 'prompt' is missing or empty"),
        ({"id": 3, "prompt": "x"}, "t.jsonl:2: field 'id' must be str, got int"),
        ({"id": "b", "prompt": "x", "hidden": "no"}, "t.jsonl:2: field 'hidden' must be dict, got str"),
        (
            {"id": "b", "prompt": "x", "answer": 1},
            "t.jsonl:2: unknown field 'answer'; a task has id, prompt",
        ),
        ({"id": "a", "prompt": "x"}, "t.jsonl:2: id 'a' was used in line 1"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(tmp_path: Path, row: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_tasks(write(tmp_path / "t.jsonl", {"id": "a", "prompt": "x"}, row))
    assert complaint in str(raised.value)


def test_a_missing_an_empty_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tasks in .*none\.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no tasks"):
        read_tasks(write(tmp_path / "t.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_tasks(tmp_path / "b.jsonl")


def test_the_fingerprint_sees_every_change() -> None:
    changed = [TASKS[1], TASKS[0], *TASKS[2:]]
    assert len({fingerprint(TASKS), fingerprint(changed), fingerprint([*TASKS[:-1], Task("t6", "q")])}) == 3


@given(seed=st.integers(0, 9), start=st.integers(0, 30), count=st.integers(1, 20), shuffle=st.booleans())
def test_every_pass_visits_every_task_once(seed: int, start: int, count: int, shuffle: bool) -> None:
    order = TaskOrder(TASKS, seed, shuffle)
    everything = order.take(0, 56)
    assert order.take(start, count) == everything[start : start + count]
    for at in range(0, 56, 7):
        assert {task.id for task in everything[at : at + 7]} == {task.id for task in TASKS}
    assert (everything[:7] == TASKS) == (everything[7:14] == TASKS) == (not shuffle)


def test_ids_seeds_and_tasks_of_a_step_depend_on_nothing_but_its_number() -> None:
    config = tiny_config("trainer.groups=3", "trainer.rollouts_per_group=2", "run.seed=5")
    order = TaskOrder(TASKS, 5)
    step = step_rollouts(config, order, 4)
    assert step == step_rollouts(config, TaskOrder(TASKS, 5), 4)
    assert [r.id for r in step[:3]] == ["s00004-g000-r00", "s00004-g000-r01", "s00004-g001-r00"]
    assert [r.task for r in step[::2]] == order.take(9, 3)
    assert len({r.seed for r in step}) == 6
    assert step[0].seed == 725435421, "seeds of recorded runs must stay what they were"
    assert all(r.split is Split.TRAIN and r.step == 4 and 0 <= r.seed < 2**31 for r in step)


def test_both_evaluations_have_the_same_seeds_and_none_of_training() -> None:
    config = tiny_config("evaluate.rollouts_per_task=2")
    before, after = (evaluation_rollouts(config, TASKS[:2], name) for name in ("before", "after"))
    assert [r.seed for r in before] == [r.seed for r in after]
    assert {r.id for r in before}.isdisjoint(r.id for r in after)
    assert all(r.split is Split.EVAL for r in before)
    assert seed_of(0, "eval", 1, 1) == before[3].seed != seed_of(0, 1, 1, 1)
