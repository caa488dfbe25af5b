"""Options that several commands share, checks of their values, and printing of results."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fp8kit.errors import as_path
from fp8kit.io.arguments import as_device

_F = TypeVar("_F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def path_of(_: click.Context, parameter: click.Parameter, text: str | None) -> Path | None:
    """Turn an argument into a path, and refuse an empty one."""
    return None if text is None else as_path(text, (parameter.name or "").upper())


def known_device(_: click.Context, __: click.Parameter, name: str) -> str:
    """Refuse a device that is not here."""
    as_device(name)
    return name


def byte_count(_: click.Context, __: click.Parameter, text: str) -> int:
    """Read a size such as ``5GB``, in powers of a thousand."""
    match = re.fullmatch(r"([0-9.]+) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        count = (
            int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
        )
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise click.BadParameter(f"{text!r} is not a size; write it like 5GB or 500MB.")
    return count


def row_counts(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    """Read positive row counts, separated by commas."""
    try:
        rows = None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of row counts such as 1,64.") from error
    if rows is not None and min(rows) < 1:
        raise click.BadParameter(f"{text!r}: row counts must be positive.")
    return rows


def rows_option(default: str) -> Callable[[_F], _F]:
    """Return the option ``-m``: row counts to look at, separated by commas."""
    said = "Row counts (tokens in a call), separated by commas."
    return click.option(
        "-m", "--rows", default=default, show_default=True, callback=row_counts, help=said
    )


def together(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Combine decorators into one; the help lists their options in this order."""
    return lambda command: functools.reduce(lambda c, option: option(c), options[::-1], command)


def print_result(content: object, as_json: bool) -> None:
    """Print a text, or plain data as JSON."""
    try:
        click.echo(json.dumps(content, indent=2) if as_json else content)
    except OSError as error:
        error.filename = "Standard output"
        raise
