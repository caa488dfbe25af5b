"""The zoo's models of timm, one per family, and of torchvision."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.architecture import Architecture

# each family of timm is represented by its first small model, in this order of words
_SMALL = ("atto", "femto", "pico", "nano", "xxs", "xs", "tiny", "small", "s", "050", "18", "b0", "")
# more models whose code reads the weight of a layer
TIMM = ("beitv2_base_patch16_224", "swinv2_tiny_window8_256")
_MOST_PARAMETERS = 40_000_000
TORCHVISION = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mvit_v1_b",
    "r3d_18",
    "regnet_x_400mf",
    "resnet18",
    "resnet50",
    "s3d",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin3d_t",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_32",
)


def install_stand_ins() -> bool:
    """Declare two operators of torchvision, which its package needs to be imported.

    torchvision's package on PyPI is built for CUDA, so its operators do not load with a CPU build
    of torch; nothing here calls them.

    Returns:
        Whether torchvision is installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    if torch.version.cuda is None and not _DECLARED:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
    return True


_DECLARED: list[torch.library.Library] = []


def architectures() -> list[Architecture]:
    """Return a small model of every module of timm, and those of torchvision that are listed."""
    if not install_stand_ins() or importlib.util.find_spec("timm") is None:
        return []
    import timm
    import torchvision

    families = (timm.list_models(module=family) for family in sorted(timm.list_modules()))
    smallest = [min(names, key=_size_by_name) for names in families if names]
    found = [
        Architecture(f"timm/{name}", partial(_timm, name), _timm_image)
        for name in dict.fromkeys((*smallest, *TIMM))
    ]
    for name in TORCHVISION:
        build = partial(torchvision.models.get_model, name, weights=None)
        found.append(Architecture(f"torchvision/{name}", build, _torchvision_image))
    return found


def _size_by_name(name: str) -> tuple[int, int, str]:
    words = re.split(r"[_\d]*_[_\d]*", name)
    rank = next((i for i, word in enumerate(_SMALL) if word in words), len(_SMALL))
    return rank, len(name), name


def _timm(name: str) -> nn.Module:
    import timm

    for fewer in ({}, {"depth": 2}, {"depths": (1, 1, 1, 1)}):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name, **fewer).parameters())
        except TypeError:  # the model has no such argument
            continue
        if size <= _MOST_PARAMETERS:
            return timm.create_model(name, **fewer)
    raise ValueError(f"{name} has {size / 1e6:.0f} million parameters")


def _timm_image(model: Any) -> list[dict[str, Any]]:
    channels, height, width = model.default_cfg["input_size"]
    return [{"": (torch.randn(1, channels, height, width),)}]


def _torchvision_image(model: nn.Module) -> list[dict[str, Any]]:
    names = ("Inception3",)
    side = 299 if type(model).__name__ in names else 224
    still, film = torch.randn(1, 3, side, side), torch.randn(1, 3, 16, side, side)
    return [{"": (still,)}, {"": (film,)}]
