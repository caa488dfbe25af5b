"""What several commands share: options, checks of their values, and how results are printed."""

from __future__ import annotations

import json

import click
import torch

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def known_device(_: click.Context, __: click.Parameter, name: str) -> str:
    """Refuse a device that torch does not know or this machine does not have."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise click.BadParameter(f"{name!r} is no device; use cpu, cuda or cuda:N.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(f"{name!r}: this machine has no CUDA device; use cpu.")
    return name


def row_counts(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    """Read positive row counts, separated by commas."""
    try:
        rows = None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of row counts such as 1,64.") from error
    if rows is not None and min(rows) < 1:
        raise click.BadParameter(f"{text!r}: row counts are positive.")
    return rows


def print_result(content: object, as_json: bool) -> None:
    """Print a text, or plain data as JSON."""
    click.echo(json.dumps(content, indent=2) if as_json else content)
