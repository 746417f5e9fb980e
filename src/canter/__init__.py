"""Canter: reinforcement learning for LLM agents inside the harness they ship with.

Importing this package loads neither torch nor a web framework; each part is imported from its own
module (`canter.types`, `canter.client`, `canter.samples`, `canter.trainer`, …).
"""

__version__ = "0.1.0"
