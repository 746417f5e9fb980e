"""Where harnesses call the model: every call is recorded, token for token, before its reply leaves.

`app` is the ASGI application, `serve` listens, `calls` answers one model request, `policy` and `passthrough` are where
replies come from, `dialects` the wire formats, `api` the lifecycle routes of controller and trainer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from canter.errors import ConfigError

if TYPE_CHECKING:
    from canter.config import Config
    from canter.gateway.source import Source


def open_source(config: Config, model: Path | None) -> Source:
    """The source of replies that the settings ask for; `model` is the folder whose tokenizer and template it uses.

    Raises ConfigError, TemplateError.
    """
    if config.engine.use == "openai":
        return _upstream(config)
    from canter.engine.http import HttpEngine
    from canter.gateway.engines import Engines
    from canter.gateway.policy import PolicySource
    from canter.tokens.rendering import make_rendering
    from canter.tokens.tokenizer import load_tokenizer

    if model is None:
        raise ValueError("the policy's source needs the model's folder")
    tokenizer = load_tokenizer(model, chat_template=chat_template(config))
    rendering = make_rendering(tokenizer, config.model.renderer, config.model.tool_format)
    engines = Engines(lambda url, key: HttpEngine(url, key, timeout_s=config.engine.timeout_s))
    return PolicySource(config, rendering, tokenizer, engines)


def chat_template(config: Config) -> str | None:
    """The text of `model.chat_template`, which may also name a file."""
    file = config.chat_template_file
    return config.model.chat_template if file is None else file.read_text(encoding="utf-8")


def _upstream(config: Config) -> Source:
    from canter.engine.openai import OpenAIEngine
    from canter.gateway.passthrough import UpstreamSource

    name = config.gateway.upstream_key_env
    if name and not os.environ.get(name):
        raise ConfigError(f"gateway.upstream_key_env names {name}, which is not set in this environment")
    assert config.engine.url is not None  # the settings require it
    engine = OpenAIEngine(
        config.engine.url,
        os.environ[name] if name else "",
        model=config.model.name,
        timeout_s=config.engine.timeout_s,
    )
    return UpstreamSource(config, engine)
