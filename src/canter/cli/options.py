"""Options that several commands share."""

from __future__ import annotations

from typing import Any

import click
import orjson

overrides = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
run_argument = click.argument("run", metavar="RUN")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(
        orjson.dumps(
            value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=str
        ).decode()
    )
