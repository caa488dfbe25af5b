"""The command line: thin wrappers that parse, call one public function, and print."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import nn

import fp8kit
from fp8kit import model_io
from fp8kit.bench import linear, operands, tuning
from fp8kit.checkpoint.inspection import inspect as inspect_checkpoint
from fp8kit.formats import SCHEMES, Scheme
from fp8kit.settings import DISABLED_BACKENDS

_EXPECTED = (ValueError, TypeError, OSError, ImportError, fp8kit.UnsupportedError)
_F = TypeVar("_F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turn expected failures into one sentence on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except _EXPECTED as error:
            raise click.ClickException(str(error)) from error


def _selection(command: _F) -> _F:
    options = (
        click.option(
            "--scheme",
            default="FP8_DYNAMIC",
            show_default=True,
            metavar="NAME",
            help=f"One of {', '.join(SCHEMES)}.",
        ),
        click.option("--include", multiple=True, metavar="PATTERN", help="Only these layers."),
        click.option(
            "--exclude", multiple=True, metavar="PATTERN", help="Not these, beside the defaults."
        ),
        click.option("--no-default-exclude", is_flag=True, help="Switch the safe defaults off."),
        click.option("--strict", is_flag=True, help="Fail if a layer cannot be converted."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _known_device(_: click.Context, __: click.Parameter, name: str) -> str:
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise click.BadParameter(f"{name!r} is no device; use cpu, cuda or cuda:N.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(f"{name!r}: this machine has no CUDA device; use cpu.")
    return name


_target = click.option(
    "--target", default="vllm", show_default=True, help="vllm, sglang or transformers."
)
_device = click.option(
    "--device",
    default="cpu",
    show_default=True,
    callback=_known_device,
    help="Where to run: cpu, cuda or cuda:N.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
_source = click.argument("source", type=click.Path(path_type=Path))


def _row_counts(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    try:
        rows = None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of row counts such as 1,64.") from error
    if rows is not None and min(rows) < 1:
        raise click.BadParameter(f"{text!r}: row counts are positive.")
    return rows


def _measured(command: _F) -> _F:
    options = (
        click.argument("source", type=click.Path(path_type=Path), required=False),
        click.option("--shapes", help="NxK or names such as 'Llama 8B', separated by commas."),
        click.option(
            "-m",
            "--rows",
            default="1,16,64,256,1024,4096",
            show_default=True,
            callback=_row_counts,
            help="Tokens in a call, separated by commas.",
        ),
        click.option("--accum", default="precise", type=click.Choice(["precise", "fast"])),
        click.option("--device", default="cuda", show_default=True, callback=_known_device),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fp8kit.__version__)
def main() -> None:
    """FP8 (W8A8) for any PyTorch model: quantize, inspect and explain checkpoints."""


@main.command()
@_source
@click.argument("destination", type=click.Path(path_type=Path))
@_selection
@_target
@_device
@click.option("--overwrite", is_flag=True, help="Replace an existing destination.")
@_json
def quantize(
    source: Path,
    destination: Path,
    scheme: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_default_exclude: bool,
    strict: bool,
    target: str,
    device: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantize the checkpoint SOURCE into the new folder DESTINATION."""
    model_io.check_request(source, destination, scheme, target, overwrite)
    model = model_io.load(
        source,
        scheme=scheme,
        device=device,
        strict=strict,
        include=_patterns(include),
        exclude=_exclusions(exclude, no_default_exclude),
    )
    model_io.save(model, destination, target=target, source=source, overwrite=overwrite)
    result = inspect_checkpoint(destination)
    _print(result.to_dict() if as_json else f"{result}\nwritten to {destination}", as_json)


@main.command()
@_source
@_json
def inspect(source: Path, as_json: bool) -> None:
    """Tell the dialect, scheme, layers, sizes and damage of the checkpoint SOURCE."""
    found = inspect_checkpoint(source)
    _print(found.to_dict() if as_json else str(found), as_json)
    if found.problems:
        sys.exit(1)


@main.command()
@_source
@_selection
@_target
@click.option(
    "-m",
    "--rows",
    callback=_row_counts,
    help="Tokens in a call, separated by commas: leave out layers that bf16 serves faster.",
)
@_json
def plan(
    source: Path,
    scheme: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_default_exclude: bool,
    strict: bool,
    target: str,
    rows: list[int] | None,
    as_json: bool,
) -> None:
    """Show what `quantize` would do to the Transformers model SOURCE, reading no weights."""
    model_io.check_scheme(scheme, target)
    decided = fp8kit.plan(
        model_io.skeleton(source),
        scheme,
        include=_patterns(include),
        exclude=_exclusions(exclude, no_default_exclude),
        strict=strict,
        m=rows,
    )
    _print(decided.report.to_dict() if as_json else str(decided), as_json)


@main.command()
@_source
@click.option("-m", "--rows", default=16, show_default=True, help="Tokens in a call.")
@_device
@_json
def explain(source: Path, rows: int, device: str, as_json: bool) -> None:
    """Say which backend runs each layer of the FP8 checkpoint SOURCE, and why not the others."""
    model: nn.Module = model_io.load(source, device=device)
    found = fp8kit.explain(model, rows)
    _print(found.to_dict() if as_json else str(found), as_json)


@main.command()
@_measured
@click.option("--scheme", default="FP8_DYNAMIC", show_default=True, metavar="NAME")
@_json
def bench(
    source: Path | None,
    shapes: str | None,
    rows: list[int],
    accum: str,
    device: str,
    scheme: str,
    as_json: bool,
) -> None:
    """Time the layers of the Transformers model SOURCE, or of --shapes, against bf16."""
    kind = Scheme.of(scheme)
    found = linear.bench(
        _layer_shapes(source, shapes, kind), rows, kind, torch.device(device), accum=accum
    )
    _print(linear.to_dicts(found) if as_json else linear.render(found), as_json)


@main.command()
@_measured
@click.option("--scheme", multiple=True, default=("FP8_DYNAMIC",), metavar="NAME", help="Repeat.")
@click.option("--shipped-shapes", is_flag=True, help="Measure what the tables in the wheel hold.")
@click.option("--seconds", type=float, help="Start no further shape after this time.")
@click.option("--output", type=click.Path(path_type=Path), help="Write a table, store nothing.")
@_json
def tune(
    source: Path | None,
    shapes: str | None,
    rows: list[int],
    accum: str,
    device: str,
    scheme: tuple[str, ...],
    shipped_shapes: bool,
    seconds: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure which backend is fastest for the layers of SOURCE, and remember it.

    The times are kept below FP8KIT_CACHE_DIR for this device, driver and versions.
    """
    if torch.device(device).type != "cuda":
        raise click.BadParameter(f"{device!r} has no backends to choose among; use cuda or cuda:N.")
    if shipped_shapes:
        wishes = tuning.shipped_wishes()
    else:
        kinds = [Scheme.of(name) for name in scheme]
        wishes = [
            tuning.Wish(_layer_shapes(source, shapes, kind), rows, [kind], accum) for kind in kinds
        ]
    said = None if as_json else (lambda text: click.echo(text, err=True))
    where = torch.device(device)
    with torch.cuda.device(where):
        outcome = tuning.tune(wishes, where, seconds=seconds, progress=said)
    tuning.keep(outcome.table) if output is None else outcome.table.write(output)
    facts = {"table": json.loads(outcome.table.to_json()), "faults": outcome.faults}
    _print({**facts, "left": outcome.left} if as_json else str(outcome), as_json)


@main.command()
@_json
def env(as_json: bool) -> None:
    """Describe this machine, as a bug report needs it."""
    facts = {
        "fp8kit": fp8kit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in ("torch", "triton", "safetensors", "transformers")},
        "compressed-tensors": _version("compressed-tensors"),
        "cuda": torch.version.cuda or "none",
        "devices": [
            "{} sm{}{}".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
            for i in range(torch.cuda.device_count())
        ],
        "disabled backends": sorted(DISABLED_BACKENDS),
    }
    text = "\n".join(f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in facts.items())
    _print(facts if as_json else text, as_json)


def _layer_shapes(source: Path | None, shapes: str | None, scheme: Scheme) -> list[tuple[int, int]]:
    if (source is None) == (shapes is None):
        raise click.UsageError("Name a model directory, or --shapes, and not both.")
    if source is None:
        return operands.parse_shapes(shapes or "")
    decided = fp8kit.plan(model_io.skeleton(source), scheme)
    return operands.unique((r.shape[0], r.shape[1]) for r in decided.report.converted)


def _patterns(patterns: tuple[str, ...]) -> list[str] | None:
    return list(patterns) or None


def _exclusions(patterns: tuple[str, ...], no_defaults: bool) -> list[str] | None:
    if no_defaults and patterns:
        raise click.UsageError(
            "--no-default-exclude and --exclude contradict each other: patterns are added to the "
            "defaults. Use --include to name the layers that you want instead."
        )
    return [] if no_defaults else _patterns(patterns)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _print(content: object, as_json: bool) -> None:
    click.echo(json.dumps(content, indent=2) if as_json else content)
