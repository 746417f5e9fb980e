"""From recorded calls to training samples: pure functions over values, no I/O.

`build` is the door. Behind it: `mask` judges calls, `merge` makes chains of them, `advantages` and `weights` say
how much a token counts, `batch` puts it together, `report` counts it and `ledger` audits the result.
"""

from canter.samples.batch import Batch, build
from canter.samples.ledger import audit
from canter.samples.report import Report, Tokens

__all__ = ["Batch", "Report", "Tokens", "audit", "build"]
