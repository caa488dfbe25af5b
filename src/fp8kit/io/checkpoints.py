"""``quantize_checkpoint`` and ``verify_checkpoint``: on directories, without a model in memory."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8kit.checkpoint.storage import directory
from fp8kit.checkpoint.storage.headers import check_unchanged
from fp8kit.checkpoint.storage.reader import Checkpoint, open_checkpoint
from fp8kit.checkpoint.storage.refusals import check_source
from fp8kit.checkpoint.streaming import executor, journal
from fp8kit.checkpoint.streaming.known_decoders import facts_of_decoder
from fp8kit.checkpoint.streaming.layer_selection import (
    Facts,
    Selection,
    facts_by_name,
    select_layers,
)
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.checkpoint.streaming.verify import Verification, verify
from fp8kit.checkpoint.streaming.work_plan import Work, plan_work
from fp8kit.conversion.report import Report
from fp8kit.errors import (
    CheckpointError,
    InvalidType,
    InvalidValue,
    UnsupportedError,
    as_path,
    check_choice,
    check_switch,
    counted,
    is_integer,
    teach,
)
from fp8kit.formats import Scheme
from fp8kit.io.arguments import as_devices
from fp8kit.io.models import accepted

THREADS_PER_GPU = 8
_MOST_WORKERS = 1024
# quicker work shows no bar; without a terminal, lines are LINE_SECONDS apart
QUIET_SECONDS, LINE_SECONDS = 1, 10.0
_LINE = (
    "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} [{elapsed}, {remaining} left, {rate_fmt}]"
)
# (work, indices of files, source, folder, progress) -> None
Runner = Callable[[Work, Sequence[int], Path, Path, Callable[[int], object]], None]


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    recipe: Recipe | Scheme | str = "FP8_DYNAMIC",
    *,
    overwrite: bool = False,
    devices: Sequence[torch.device | str] | None = None,
    runner: Runner | None = None,
    progress: bool | None = None,
) -> Report:
    """Quantize a checkpoint of any size; the model is never built.

    Tensors flow from the source files through a quantizer into new files; memory holds a few
    megabytes for each worker, whatever the size of the model or of its largest tensor. The rules of
    ``fp8kit.plan`` decide what becomes FP8; experts do too, one matrix each. Where
    ``fp8kit.load(source, scheme=...)`` and ``fp8kit.save`` can do the same, they write the same
    weights, byte for byte, except for the few values that rebasing an MXFP8 weight changes.

    The destination appears when it is complete. An interrupted run leaves ``.<name>.partial``
    beside it, and the same call continues there.

    Args:
        source: a directory with a high-precision checkpoint, or one safetensors file; it is never
            written to.
        destination: directory to make.
        recipe: all options of the result, or only its scheme.
        overwrite: replace a destination that is a checkpoint.
        devices: one for each worker thread; by default the CPU, once for each processor.
        runner: carries out the work instead of threads of this process, e.g. ``ray_runner``.
        progress: ``True`` shows a bar on a terminal, and lines now and then elsewhere; by default a
            bar on a terminal and nothing elsewhere.

    Returns:
        What was converted, what was not, and why.

    Raises:
        TypeError: if a path, switch, device or ``runner`` is of another type.
        ValueError: as ``Recipe`` raises it; for a device that is not here, or ``devices`` beside a
            ``runner``.
        ConversionError: if a pattern matches nothing, a weight is not finite, or nothing would
            become FP8.
        CheckpointError: if the source is damaged or FP8 already, the target cannot load the result,
            the destination exists and may not be replaced, the disk is full, the source changes
            during the run, or a different run to this destination was interrupted.

    Example:
        >>> report = fp8kit.quantize_checkpoint("bf16-dir", "fp8-dir", "FP8_BLOCK")
        >>> print(report.summary())
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
    _check_progress(progress)
    check_source(source)
    if runner is not None and not callable(runner):
        raise InvalidType(
            f"Got runner={runner!r:.80}.",
            "It must be a function that carries out the work.",
            "Pass fp8kit.ray_runner(), or leave it out for threads of this process.",
        )
    if runner is not None and devices is not None:
        raise InvalidValue(
            "Got devices beside a runner.",
            "Devices are those of this process; a runner knows its own.",
            "Leave one of them out; fp8kit.ray_runner(device='cuda') takes a GPU for each task.",
        )
    destination = as_path(destination, "the destination")
    origin, goal = directory.resolved(source), Path(os.path.realpath(destination))
    checkpoint, partial = high_precision(origin), journal.UnfinishedConversion(goal)
    if not partial.installed():
        partial.sweep()
        directory.check_destination(goal, origin, overwrite)
    directory.check_side_files(origin)
    choice = decide(checkpoint, recipe)
    work = plan_work(checkpoint, recipe, choice)
    if recipe.target == "transformers" and not facts_of_decoder(checkpoint):
        held = accepted(checkpoint, work.config["quantization_config"], work.layout)
        work = replace(work, config={**work.config, "quantization_config": held})
    report = _sized(choice, work)
    threads = workers_on(["cpu"]) if devices is None else devices
    runner = runner or functools.partial(executor.write_shards, devices=as_devices(threads))
    run = {"source": journal.fingerprint(checkpoint), "plan": work.digest(), **recipe.to_dict()}
    with directory.disk_errors(goal, lambda: _kept(work, partial)), partial.locked():
        if partial.installed():
            if partial.is_of(run):
                partial.forget()
                return report
            partial.clear()
        # another process may have finished here since the first check
        directory.check_destination(goal, origin, overwrite)
        partial.begin(run)
        _carry_out(work, checkpoint.path, partial, runner, progress)
        check_unchanged(checkpoint.path, checkpoint.tensors.values())
        directory.complete(partial.folder, work.shards, work.layout, work.config, source=origin)
        partial.install()
    return report


def verify_checkpoint(
    source: str | Path,
    result: str | Path,
    *,
    workers: int | None = None,
    progress: bool | None = None,
) -> Verification:
    """Compare an FP8 checkpoint with the one it was made from, tensor by tensor.

    Args:
        source: the directory in high precision.
        result: the FP8 directory, in any dialect that this package reads.
        workers: threads; by default one for each processor.
        progress: ``True`` shows a bar on a terminal, and lines now and then elsewhere; by default a
            bar on a terminal and nothing elsewhere.

    Returns:
        The error of every tensor, and what is missing, extra or wrong.

    Raises:
        CheckpointError: if either is damaged, the source is FP8, or the result is not FP8.
        TypeError: if a path or ``progress`` is of another type.
        ValueError: if ``workers`` is not a number from 1 to 1024.

    Example:
        >>> found = fp8kit.verify_checkpoint("bf16-dir", "fp8-dir")
        >>> assert not found.problems
    """
    _check_progress(progress)
    dense, coded = open_checkpoint(source), open_checkpoint(result)
    threads = len(workers_on(["cpu"], workers))
    with _bar("verify", sum(i.nbytes for i in dense.tensors.values()), 0, progress) as bar:
        return verify(dense, coded, workers=threads, progress=bar.update)


def high_precision(source: str | Path) -> Checkpoint:
    """Open a checkpoint to quantize; raises ``CheckpointError`` if damaged, or FP8 already."""
    checkpoint = open_checkpoint(source)
    if checkpoint.announced_but_dense:
        raise CheckpointError(checkpoint.announced_but_dense)
    if checkpoint.spec is not None:
        raise CheckpointError(
            f"{checkpoint.path} is {checkpoint.spec.scheme} already.",
            "Only a checkpoint in high precision can be quantized.",
            "Start from the original, or turn it into another form: fp8kit convert-checkpoint.",
        )
    return checkpoint


def decide(checkpoint: Checkpoint, recipe: Recipe) -> Selection:
    """Decide which tensors become FP8: by the model's class if Transformers knows it, else by name.

    Raises ``ConversionError`` as ``quantize_checkpoint`` does, and ``CheckpointError`` if the
    target could not load the result.
    """
    choice = select_layers(checkpoint, recipe, _facts(checkpoint, recipe))
    if checkpoint.nameless:
        choice.report.notes.append(checkpoint.nameless)
    return choice


def workers_on(devices: Sequence[str], count: int | None = None) -> list[torch.device]:
    """List a device for each worker thread.

    ``"cuda"`` stands for every GPU there is. ``count`` is the number of threads per device. By
    default a GPU has eight, so that reading, computing and writing overlap, and another device one
    for each processor that this process may use. Raises ``ValueError`` if ``count`` is not from 1
    to 1024, or a device is not here.
    """
    if count is not None and not (is_integer(count) and 0 < count <= _MOST_WORKERS):
        raise InvalidValue(
            f"Got {count!r:.80} workers.",
            f"1 to {_MOST_WORKERS} do the work.",
            "Leave it out for one for each processor.",
        )
    found = []
    for device in as_devices(devices):
        every = device.type == "cuda" and device.index is None
        here = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        usual = THREADS_PER_GPU if device.type == "cuda" else _processors()
        found += (here if every else [device]) * (count or usual)
    return found


def ray_runner(address: str | None = None, *, device: str = "cpu") -> Runner:
    """Return a runner that spreads the files of a checkpoint over the machines of a Ray cluster.

    Args:
        address: of the cluster, or ``"local"`` for a new one on this machine; by default a running
            one that Ray finds, else a new one.
        device: ``"cpu"``, or ``"cuda"`` for one GPU per task.

    Returns:
        A ``runner`` for ``quantize_checkpoint``; nothing is connected before it is used.

    Raises:
        ImportError: if Ray is not installed.
        TypeError, ValueError: for another address or device.

    Example:
        >>> fp8kit.quantize_checkpoint(source, destination, runner=ray_runner("auto"))
    """
    try:
        module = importlib.import_module("fp8kit.integrations.ray")
    except ImportError as error:
        raise ImportError(
            teach(
                "Ray is not installed.",
                "Spreading the work over machines needs it.",
                "Run pip install 'fp8kit[ray]', or leave it to this machine.",
            ),
            name=error.name,
        ) from error
    if address is not None and not isinstance(address, str):
        raise InvalidType(
            f"Got address={address!r:.80}.",
            "It must be the address of a Ray cluster, a str.",
            "Pass 'auto' for one that runs on this machine, or leave it out.",
        )
    check_choice("device", device, ("cpu", "cuda"), "Ray chooses the GPU of a task: pass 'cuda'.")
    return module.Runner(address, device)


def _carry_out(
    work: Work,
    source: Path,
    partial: journal.UnfinishedConversion,
    runner: Runner,
    progress: bool | None,
) -> None:
    every = range(len(work.shards))
    whole = [i for i in every if executor.is_whole(partial.folder, work.shards[i])]
    missing = [i for i in every if i not in set(whole)]
    partial.keep({work.shards[i].file for i in whole})
    directory.check_space(partial.folder, sum(work.shards[i].size for i in missing))
    total = sum(work.source_bytes(i) for i in every)
    done = sum(work.source_bytes(i) for i in whole)
    with _bar("quantize", total, done, progress) as bar:
        runner(work, missing, source, partial.folder, bar.update)
        partial.keep({s.file for s in work.shards})  # removes what lost workers left


def _kept(work: Work, partial: journal.UnfinishedConversion) -> str:
    count = sum(executor.is_whole(partial.folder, s) for s in work.shards)
    return (
        f"{count} of {len(work.shards)} files are complete and kept in {partial.home}. "
        "Make room, and run the same command again: it continues."
    )


def _check_progress(progress: object) -> None:
    if progress is not None:
        check_switch("progress", progress)


def _bar(what: str, total: int, done: int, progress: bool | None) -> Any:
    """Show bytes, rate and the time that is left: a bar, or lines where nothing can be redrawn."""
    from tqdm import tqdm  # imported here: it takes a tenth of this package's import

    progress = False if sys.stderr is None else progress  # stderr was closed before Python started
    lines = bool(progress) and not sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        unit="B",
        unit_scale=True,
        desc=what,
        disable=None if progress is None else not progress,
        file=_Lines() if lines else None,
        bar_format=_LINE if lines else None,
        delay=QUIET_SECONDS,
        mininterval=LINE_SECONDS if lines else 0.1,
        maxinterval=LINE_SECONDS if lines else 10,
    )


class _Lines:
    """Writes each redrawing of a progress bar as a line of its own, for a file or a pipe."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _facts(checkpoint: Checkpoint, recipe: Recipe) -> Facts:
    if not checkpoint.config.get("architectures"):
        return facts_by_name(checkpoint)
    if known := facts_of_decoder(checkpoint):
        return known
    try:
        module = importlib.import_module("fp8kit.integrations.transformers_facts")
        return module.facts(checkpoint, recipe.resolved)
    except (ImportError, CheckpointError, UnsupportedError) as error:
        found = facts_by_name(checkpoint)
        found.source += f", because of this: {error}"
        return found


def _sized(choice: Selection, work: Work) -> Report:
    """Add the size of the result: the recipe's dtype changes tensors that no record counts."""
    written = sum(s.size - len(s.header) for s in work.shards)
    choice.report.notes.append(
        f"{counted(len(work.layout), 'tensor')}, {directory.size(written)}, to be written into "
        f"{counted(len(work.shards), 'file')}."
    )
    return choice.report


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
