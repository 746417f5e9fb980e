import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from canter.trainer.metrics import MetricsFile, TensorBoard, Terminal, Trackers, describe, read_metrics, sparkline


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "reward_mean": step / 10, "loss": 0.5, "collect_s": 1.25, "dropped": {}} | values


def test_each_step_is_one_line_on_the_disk_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.record(row(1, loss=math.nan))
    assert json.loads((tmp_path / "m.jsonl").read_text()) == row(1, loss=None)
    file.close()


def test_replayed_steps_are_not_written_again_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)) + "\n" + '{"step": 3, "lo')
    file = MetricsFile(path)
    for step in (2, 3, 4):
        file.record(row(step, loss=9.0))
    file.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 0.5), (2, 0.5), (3, 9.0), (4, 9.0)]
    assert list(file.rows) == [1, 2, 3, 4]


def test_a_terminal_that_cannot_be_redrawn_gets_a_line_a_step() -> None:
    output = io.StringIO()
    terminal = Terminal(Console(file=output), steps=3)
    for step in (1, 2):
        terminal.record(row(step, dropped={"no_spread": 8}))
    terminal.close()
    lines = output.getvalue().splitlines()
    assert lines == [
        "step 1 · reward 0.100 · loss 0.5000 · collect 1.2 s · dropped no_spread 8",
        "step 2 · reward 0.200 · loss 0.5000 · collect 1.2 s · dropped no_spread 8",
    ]


def test_a_terminal_shows_progress_and_the_curve_of_earlier_steps_too() -> None:
    output = io.StringIO()
    terminal = Terminal(Console(file=output, force_terminal=True, width=100), 4, [row(1), row(2)])
    terminal.record(row(3))
    terminal.close()
    assert "3/4" in output.getvalue()
    assert "reward 0.10 ▁▅█ 0.30" in output.getvalue()


def test_a_row_without_a_reward_or_an_update_can_be_described() -> None:
    assert describe({"step": 3, "reward_mean": None, "dropped": {"too_long": 2}}) == "step 3 · dropped too_long 2"


def test_the_curve_shows_the_last_values() -> None:
    assert sparkline([5, 0, 1, 2, 3], 4) == "0.00 ▁▃▆█ 3.00"
    assert sparkline([1, 1], 10) == "1.00 ▁▁ 1.00"
    assert sparkline([], 10) == ""


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        board = TensorBoard(tmp_path)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    trackers = Trackers([board])
    trackers.record(row(7, dropped={"stale": 2}))
    trackers.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    values = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert values["dropped/stale"] == [(7, 2.0)]
    assert values["loss"] == [(7, 0.5)]
    assert set(values) == {"reward_mean", "loss", "collect_s", "dropped/stale"}
