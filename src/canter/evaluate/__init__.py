"""How good a policy is, and whether it became better: shares with intervals, Pass@k, the paired comparison."""

from canter.evaluate.statistics import mean_pass_at_k, pass_at_k, wilson
from canter.evaluate.summary import Comparison, Summary, compare, evaluation, summarise

__all__ = [
    "Comparison",
    "Summary",
    "compare",
    "evaluation",
    "mean_pass_at_k",
    "pass_at_k",
    "summarise",
    "wilson",
]
