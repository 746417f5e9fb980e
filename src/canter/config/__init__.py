"""One frozen tree of settings, read from a TOML file and `section.key=value` overrides."""

from canter.config.load import load, resolve, to_toml
from canter.config.tree import Config

__all__ = ["Config", "load", "resolve", "to_toml"]
