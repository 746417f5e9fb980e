"""Learning from recorded rollouts. Read `loop.py` first; `backend.py` says what it needs of the machinery below it.

Importing this package loads no torch: only `run`, `model`, `torch_backend`, `loss` and `prefix` do.
"""
