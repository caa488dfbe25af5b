"""The commands that measure: ``bench``, ``tune`` and ``eval``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import torch
from click.core import ParameterSource

from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.checkpoint.streaming.verify import check_pair
from fp8kit.cli.options import (
    json_option,
    known_device,
    path_of,
    print_result,
    rows_option,
    together,
)
from fp8kit.conversion.siblings import joined_shapes
from fp8kit.formats import Scheme
from fp8kit.io import checkpoints, models
from fp8kit.perf import bench as linear
from fp8kit.perf import operands
from fp8kit.perf import tune as tuning
from fp8kit.perf.evaluate import evaluate as compare

_measured = together(
    click.argument("source", type=click.Path(), callback=path_of, required=False),
    click.option("--shapes", help="NxK or names such as 'Llama 8B', separated by commas."),
    rows_option("1,16,64,256,1024,4096"),
    click.option(
        "--accum",
        default="precise",
        show_default=True,
        type=click.Choice(["precise", "fast"]),
        help="fast permits Hopper's short accumulator.",
    ),
    click.option(
        "--device",
        default="cuda",
        show_default=True,
        callback=known_device,
        help="The GPU: cuda or cuda:N.",
    ),
)


@click.command()
@_measured
@click.option(
    "--scheme", default="FP8_DYNAMIC", show_default=True, metavar="NAME", help="What is timed."
)
@json_option
def bench(
    source: Path | None,
    shapes: str | None,
    rows: list[int],
    accum: str,
    device: str,
    scheme: str,
    as_json: bool,
) -> None:
    """Time linear layers against bf16.

    The layers are those of the Transformers model SOURCE, or --shapes.
    """
    kind = Scheme.of(scheme)
    layers = list(dict.fromkeys(_layers(source, shapes).values()))
    found = linear.bench(layers, rows, kind, torch.device(device), accum=accum)
    print_result([asdict(t) for t in found] if as_json else linear.render(found), as_json)


@click.command("eval")
@click.argument("source", type=click.Path(), callback=path_of)
@click.argument("result", type=click.Path(), callback=path_of)
@click.option(
    "--text",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with text of the kind that the model will read.",
)
@click.option(
    "--tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(2),
    help="Read at most so many tokens of it.",
)
@click.option(
    "--length", default=512, show_default=True, type=click.IntRange(2), help="Tokens of a sequence."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    callback=known_device,
    help="Where to run: cpu, cuda or cuda:N.",
)
@json_option
def evaluate(
    source: Path, result: Path, text: Path, tokens: int, length: int, device: str, as_json: bool
) -> None:
    """Compare an FP8 language model with the dense one.

    Runs RESULT and its high-precision SOURCE on a text. Shows the error of each layer, the
    agreement of next tokens and both perplexities.
    """
    check_pair(open_checkpoint(source), open_checkpoint(result))
    language = models.integration("transformers_evaluation")
    # before the models, whose loading may take minutes
    batches = language.text_batches(source, text, tokens, length, device)
    quantized = models.load(result, device=device)
    found = compare(quantized, language.load_dense(source, device), batches)
    print_result(found.to_dict() if as_json else str(found), as_json)


@click.command()
@_measured
@click.option(
    "--scheme",
    multiple=True,
    default=("FP8_DYNAMIC",),
    show_default=True,
    metavar="NAME",
    help="Repeatable.",
)
@click.option("--shipped-shapes", is_flag=True, help="Measure what the tables in the wheel hold.")
@click.option("--seconds", type=float, help="Start no new shape after so many seconds.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the times into this file, and not into the cache.",
)
@json_option
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
    """Measure which backend is fastest for each layer.

    The layers are those of the Transformers model SOURCE, or --shapes. Siblings, such as q_proj and
    k_proj, are also measured as the one matrix that they run as. Row counts are rounded up to
    powers of two. The times are kept below FP8KIT_CACHE_DIR for this device, driver and versions.
    """
    if torch.device(device).type != "cuda":
        raise click.BadParameter(
            f"{device!r} has no backends to choose among. Run this on the machine with the GPU, "
            "with --device cuda or cuda:N."
        )
    if shipped_shapes:
        _refuse_what_is_shipped(click.get_current_context())
        requests = tuning.shipped_requests()
    else:
        kinds = [Scheme.of(name) for name in scheme]
        layers = _layers(source, shapes)
        requests = []
        for kind in kinds:
            joined = joined_shapes(layers, kind)
            requests += tuning.requests_of(layers.values(), joined, rows, kind, accum)
    said = None if as_json else (lambda text: click.echo(text, err=True))
    where = torch.device(device)
    with torch.cuda.device(where):
        store = tuning.keep if output is None else (lambda table: table.write(output))
        outcome = tuning.tune(requests, where, seconds=seconds, progress=said, store=store)
    facts = {"table": json.loads(outcome.table.to_json()), "faults": outcome.faults}
    print_result({**facts, "left": outcome.left} if as_json else str(outcome), as_json)


def _refuse_what_is_shipped(context: click.Context) -> None:
    given = [
        name
        for name in ("source", "shapes", "rows", "scheme", "accum")
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(
            "--shipped-shapes has shapes, rows and schemes of its own; leave out "
            f"{', '.join(given)}."
        )


def _layers(source: Path | None, shapes: str | None) -> dict[str, tuple[int, int]]:
    if (source is None) == (shapes is None):
        raise click.UsageError("Name a model directory, or --shapes, and not both.")
    if source is None:
        return {f"{n}x{k}": (n, k) for n, k in operands.parse_shapes(shapes or "")}
    checkpoint = open_checkpoint(source)
    if checkpoint.spec is None:
        decided = checkpoints.decide(checkpoint, Recipe())  # shapes are the same for every scheme
        found = {record.name: record.shape for record in decided.report.converted}
    else:
        found = {name: layer.shape for name, layer in checkpoint.layers.items()}
    return {name: (s[0], s[1]) for name, s in found.items() if len(s) == 2}
