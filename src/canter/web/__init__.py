"""Read-only pages: for now the static report of a run."""

from canter.web.examples import Example, choose, conversation
from canter.web.report import render_report

__all__ = ["Example", "choose", "conversation", "render_report"]
