"""The command line: thin wrappers that parse, call one public function, and print."""

from __future__ import annotations

import logging
import platform
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import fp8kit
from fp8kit.checkpoint.inspection import inspect as inspect_checkpoint
from fp8kit.checkpoint.schema.targets import TARGETS
from fp8kit.checkpoint.storage.headers import printable
from fp8kit.cli.measure import bench, evaluate, tune
from fp8kit.cli.options import (
    byte_count,
    json_option,
    path_of,
    print_result,
    row_counts,
    rows_option,
    together,
)
from fp8kit.conversion import slower_layers
from fp8kit.dispatch import timings
from fp8kit.formats import SCHEMES
from fp8kit.io import checkpoints, models, translation
from fp8kit.io.translation import UNFIT
from fp8kit.runtime.settings import DISABLED_BACKENDS

# packages whose versions `env` prints for a bug report
_NAMED = "torch triton cuda-bindings deep_gemm safetensors transformers compressed-tensors".split()
_EXPECTED = (ValueError, TypeError, OSError, ImportError, fp8kit.UnsupportedError)
# when Transformers imports these, they warn about parts of theirs that no command uses
_TALKATIVE = ("torchao", "torch.utils._pytree")


class _Group(click.Group):
    """Turn expected failures into one sentence on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output closed it: no failure
            raise
        except _EXPECTED as error:
            text = str(error)
            if isinstance(error, OSError) and error.strerror:
                text = f"{error.filename or 'A file'}: {error.strerror}."
            raise click.ClickException(printable(_in_shell_words(text))) from error


# a Python argument as errors write it: scheme='FP8', strict=True, exclude=["a", "b"]
_ARGUMENT = re.compile(
    r"\b(scheme|target|dialect|include|exclude|device|overwrite|strict|unfit)="
    r"(?:(?P<flag>True)\b|(?P<list>\[[^\]]*\])|''|(?P<quote>['\"]?)(?P<word>[\w.*:-]+)(?P=quote))"
)


def _in_shell_words(text: str) -> str:
    """Rewrite the Python arguments in an error text as options of the command line."""

    def option(found: re.Match[str]) -> str:
        name, values = f"--{found[1]}", found["word"] or ""
        if found["list"]:
            items = re.findall(r"['\"]([^'\"]*)['\"]", found["list"])
            return " ".join(f"{name} {shlex.quote(item)}" for item in items) or name
        return name if found["flag"] else f"{name} {shlex.quote(values)}"

    calls = re.split(r"(fp8kit\.\w+\([^)]*\)+)", text)  # whole calls stay Python
    return "".join(c if i % 2 else _ARGUMENT.sub(option, c) for i, c in enumerate(calls))


_selection = together(
    click.option(
        "--scheme",
        default="FP8_DYNAMIC",
        show_default=True,
        metavar="NAME",
        help=f"One of {', '.join(SCHEMES)}.",
    ),
    click.option(
        "--include", multiple=True, metavar="PATTERN", help="Only these layers; repeatable."
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave these layers dense too; repeatable.",
    ),
    click.option("--no-default-exclude", is_flag=True, help="Switch the default exclusions off."),
    click.option("--strict", is_flag=True, help="Fail if a layer cannot be converted."),
)
_target = click.option(
    "--target", default="vllm", show_default=True, help=f"What will load it: {', '.join(TARGETS)}."
)
_device = click.option(
    "--device",
    default=lambda: "cuda" if torch.cuda.is_available() else "cpu",
    show_default="cuda, or cpu without a GPU",
    help="Where to run: cpu, cuda or cuda:N.",
)
_source = click.argument("source", type=click.Path(), callback=path_of)


@click.group("fp8kit", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fp8kit.__version__)
def main() -> None:
    """FP8 (W8A8) for any PyTorch model: quantize, inspect and explain checkpoints."""
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)


main.add_command(bench)
main.add_command(tune)
main.add_command(evaluate)


@main.command()
@_source
@click.argument("destination", type=click.Path(), callback=path_of)
@_selection
@_target
@click.option(
    "--device",
    "devices",
    multiple=True,
    default=("cpu",),
    show_default=True,
    help="Where to run: cpu, cuda:N, or cuda for every GPU; repeatable.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Threads per device.  [default: one per processor; 8 per GPU]",
)
@click.option(
    "--dtype",
    type=click.Choice(("bfloat16", "float16", "float32")),
    help="Cast what stays in high precision; by default it stays as it is.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    callback=byte_count,
    help="Start a new file before this size.",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="ADDRESS",
    help="Spread the files over a Ray cluster: the running one that is found, that at ADDRESS, or, "
    "with local, a new one on this machine.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing destination.")
@json_option
def quantize(
    source: Path,
    destination: Path,
    devices: tuple[str, ...],
    workers: int | None,
    dtype: str | None,
    max_shard_size: int,
    ray: str | None,
    overwrite: bool,
    as_json: bool,
    **selection: Any,
) -> None:
    """Quantize a checkpoint of any size.

    Reads SOURCE and writes the new folder DESTINATION. The model is never held in memory. After an
    interruption, the same command continues.
    """
    high = getattr(torch, dtype) if dtype else None
    recipe = replace(_recipe(**selection), dtype=high, max_shard_bytes=max_shard_size)
    if ray and (workers is not None or len(devices) > 1):
        raise click.UsageError(
            "--workers and a second --device are for this machine, and Ray chooses where a file is "
            "written. Leave them out; --device cuda takes a GPU for each file."
        )
    runner = checkpoints.ray_runner(ray, device=devices[0]) if ray else None
    try:
        fp8kit.quantize_checkpoint(
            source,
            destination,
            recipe,
            overwrite=overwrite,
            devices=None if ray else checkpoints.workers_on(devices, workers),
            runner=runner,
            progress=True,
        )
    except KeyboardInterrupt as error:
        raise click.ClickException(
            "Interrupted. Complete files are kept; the same command continues."
        ) from error
    result = inspect_checkpoint(destination)
    print_result(result.to_dict() if as_json else f"{result}\nwritten to {destination}", as_json)


@main.command("convert-checkpoint")
@_source
@click.argument("destination", type=click.Path(), callback=path_of)
@click.option("--target", help=f"What will load it: {', '.join(TARGETS)}.  [default: vllm]")
@click.option("--dialect", help="The dialect to write, if not the target's own.")
@click.option("--scheme", help="What MX weights become, e.g. FP8_DYNAMIC.  [default: they stay MX]")
@click.option(
    "--unfit",
    default=UNFIT[0],
    show_default=True,
    help=f"What to do with layers that the target cannot load: {' or '.join(UNFIT)}.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing destination.")
@json_option
def convert_checkpoint(
    source: Path,
    destination: Path,
    target: str | None,
    dialect: str | None,
    scheme: str | None,
    unfit: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write an FP8 checkpoint in another dialect.

    The codes and scales of SOURCE go into the new folder DESTINATION bit for bit.
    """
    translation.convert_checkpoint(
        source,
        destination,
        target=target,
        dialect=dialect,
        scheme=scheme,
        unfit=unfit,
        overwrite=overwrite,
    )
    result = inspect_checkpoint(destination)
    print_result(result.to_dict() if as_json else f"{result}\nwritten to {destination}", as_json)


@main.command()
@_source
@click.argument("result", type=click.Path(), callback=path_of)
@click.option("--workers", type=click.IntRange(1), help="Threads.  [default: one per processor]")
@json_option
def verify(source: Path, result: Path, workers: int | None, as_json: bool) -> None:
    """Measure the error of every tensor.

    Compares the FP8 checkpoint RESULT with its high-precision SOURCE.
    """
    found = fp8kit.verify_checkpoint(source, result, workers=workers, progress=True)
    print_result(found.to_dict() if as_json else str(found), as_json)
    if found.problems:
        sys.exit(1)


@main.command()
@_source
@json_option
def inspect(source: Path, as_json: bool) -> None:
    """Show dialect, scheme, layers, sizes and damage."""
    found = inspect_checkpoint(source)
    print_result(found.to_dict() if as_json else str(found), as_json)
    if found.problems:
        sys.exit(1)


@main.command()
@_source
@_selection
@_target
@click.option(
    "-m",
    "--rows",
    callback=row_counts,
    help="Row counts (tokens in a call), separated by commas: also name the layers that bf16 runs "
    "faster. They are rounded up to powers of two, for which times are measured.",
)
@json_option
def plan(source: Path, rows: list[int] | None, as_json: bool, **selection: Any) -> None:
    """Show what `quantize` would do, reading no weights."""
    recipe = _recipe(**selection)
    report = checkpoints.decide(checkpoints.high_precision(source), recipe).report
    if rows is not None and torch.cuda.is_available():
        slower_layers.leave_slower_by_name(report, recipe.resolved, tuple(rows))
    elif rows is not None:
        report.notes.append(
            f"Whether FP8 is faster than bf16 at m={', '.join(map(str, rows))} depends on the GPU, "
            "and there is none here: run `fp8kit plan -m` on the machine that will serve."
        )
    print_result(report.to_dict() if as_json else str(report), as_json)


@main.command()
@_source
@rows_option("16")
@_device
@json_option
def explain(source: Path, rows: list[int], device: str, as_json: bool) -> None:
    """Show which backend runs each layer, and why.

    It also says why the other backends do not run it. SOURCE is an FP8 checkpoint.
    """
    model: nn.Module = models.load(models.require_fp8(source), device=device)
    found = [fp8kit.explain(model, m) for m in rows]
    if as_json:
        print_result([entry for one in found for entry in one.to_dict()], as_json)
    else:
        print_result("\n\n".join(map(str, found)), as_json)


@main.command()
@json_option
def env(as_json: bool) -> None:
    """Describe this machine for a bug report."""
    facts = {
        "fp8kit": fp8kit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: timings.version(name) for name in _NAMED},
        "cuda": torch.version.cuda or "none",
        "devices": [
            "{} sm{}{}".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
            for i in range(torch.cuda.device_count())
        ],
        "disabled backends": sorted(DISABLED_BACKENDS),
    }
    said = {k: ", ".join(v) or "none" if isinstance(v, list) else v for k, v in facts.items()}
    text = "\n".join(f"{name}: {value}" for name, value in said.items())
    print_result(facts if as_json else text, as_json)


def _recipe(
    scheme: str,
    target: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_default_exclude: bool,
    strict: bool,
) -> fp8kit.Recipe:
    """Return what the options of ``_selection`` and ``_target`` ask for."""
    if no_default_exclude and exclude:
        raise click.UsageError(
            "--no-default-exclude and --exclude contradict each other: patterns are added to the "
            "defaults. Use --include to name the layers that you want instead."
        )
    excluded = [] if no_default_exclude else list(exclude) or None
    return fp8kit.Recipe(scheme, target, list(include) or None, excluded, strict)
