"""Checks of devices and patterns, which ``load`` and others make before they open a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp8kit.conversion.patterns import check_expression
from fp8kit.errors import InvalidType, InvalidValue


def as_device(value: object) -> torch.device | None:
    """Return the device that ``value`` names; ``None`` for ``None``.

    Raises ``ValueError`` unless the device is on this machine and can hold data.
    """
    if value is None:
        return None
    required = "It must be a device of this machine that can hold data, such as 'cpu' or 'cuda:0'."
    try:
        if isinstance(value, bool):
            raise TypeError("torch takes True for the device 1")
        found: torch.device = torch.device(value)  # type: ignore[call-overload]
        count = torch.get_device_module(found).device_count()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidValue(f"Got device={value!r:.80}.", required, "Pass one of these.") from error
    if found.type != "cpu" and (found.index or 0) >= count:
        raise InvalidValue(
            f"Got device={value!r:.80}, but torch {torch.__version__} finds {count} {found.type} "
            "devices here.",
            required,
            "Name another, or run this where the GPU is; fp8kit env shows what is found.",
        )
    return found


def as_devices(value: object) -> list[torch.device]:
    """Return a list of devices, one or more; raises ``TypeError`` or ``ValueError`` otherwise."""
    if not isinstance(value, list | tuple) or None in value:
        raise InvalidType(
            f"Got devices={value!r:.80}.",
            "It must be a list with a device for each worker.",
            "Pass ['cpu'], or ['cuda:0', 'cuda:1'].",
        )
    if not value:
        raise InvalidValue("Got no devices.", "Each one is a worker.", "Pass at least 'cpu'.")
    return [found for each in value if (found := as_device(each)) is not None]


def check_missing(missing: object, no_model: bool) -> None:
    """Raise ``ValueError`` unless ``missing`` lists patterns; patterns need a model."""
    if (
        not isinstance(missing, Sequence)
        or isinstance(missing, str)
        or not all(isinstance(pattern, str) for pattern in missing)
        or (missing and no_model)
    ):
        raise InvalidValue(
            f"Got missing={missing!r:.80}{' and no model' if no_model else ''}.",
            "It lists patterns of layers that keep the values they have in a model.",
            "Build the model, and pass it: fp8kit.load(dir, model, missing=['score']).",
        )
    for pattern in missing:
        check_expression("missing", pattern)


def check_widths(widths: object) -> None:
    """Raise ``TypeError`` unless ``widths`` maps patterns to rows of parts, or is ``None``."""
    if widths is None:
        return
    for pattern, rows in widths.items() if isinstance(widths, Mapping) else [(widths, ())]:
        whole = isinstance(rows, Sequence) and all(isinstance(n, int) for n in rows)
        if not isinstance(widths, Mapping) or not isinstance(pattern, str) or not whole:
            raise InvalidType(
                f"Got widths={widths!r:.80}.",
                "It must map patterns of fused layers to the rows of each of their parts.",
                "Pass {'*.in_proj': (256, 256, 64)}, for example.",
            )
        check_expression("widths", pattern)
