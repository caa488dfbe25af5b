"""What several commands share: options, checks of their values, and how results are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import torch

from fp8kit.errors import as_path

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def path_of(_: click.Context, parameter: click.Parameter, text: str | None) -> Path | None:
    """Make a path of an argument, and refuse an empty one."""
    return None if text is None else as_path(text, (parameter.name or "").upper())


def known_device(context: click.Context, _: click.Parameter, name: str) -> str:
    """Refuse a device that torch does not know or this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise click.BadParameter(f"{name!r} is no device; use cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise click.BadParameter(f"{name!r}: fp8kit runs on cpu, cuda or cuda:N.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            why = "" if torch.version.cuda else f", and torch {torch.__version__} is built without"
            other = "" if context.command.name == "tune" else ", or name --device cpu"
            raise click.BadParameter(
                f"{name!r}: there is no CUDA device here{why}. Run this on the machine with the "
                f"GPU{other}."
            )
        if (device.index or 0) >= count:
            raise click.BadParameter(f"{name!r}: this machine has {count}, from cuda:0 on.")
    return name


def known_devices(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Check each device as ``known_device`` does."""
    return tuple(known_device(context, parameter, name) for name in names)


def byte_count(_: click.Context, __: click.Parameter, text: str) -> int:
    """Read a size such as ``5GB``, in powers of a thousand."""
    match = re.fullmatch(r"([0-9.]+) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0
    except ValueError:
        number = 0
    if match is None or number <= 0:
        raise click.BadParameter(f"{text!r} is no size; write it like 5GB or 500MB.")
    return int(number * 1000 ** " KMGT".index(match[2].upper() or " "))


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
    try:
        click.echo(json.dumps(content, indent=2) if as_json else content)
    except OSError as error:
        error.filename = "Standard output"
        raise
