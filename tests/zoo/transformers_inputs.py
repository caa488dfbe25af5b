"""Inputs for a model of Transformers, from the parameters of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

GRIDS = ("grid_thw", "image_grid_thw", "pixel_position_ids", "spatial_shapes", "target_sizes")


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Return candidates for the inputs of a model, the likeliest first.

    The usual candidates are a text, an image, a sound, or two of these. They are followed by
    unusual ones (patches, stacks, other descriptions), and by all of them with further arguments.
    """
    usual = _usual(model)
    asked = inspect.signature(model.forward).parameters
    named = {name: value for name, value in _by_name(model).items() if name in asked}
    others = [*_unusual(model), *usual, _usual_text(asked)]
    return usual + [{**given, **named} for given in others]


def _usual_text(asked: Mapping[str, Any]) -> dict[str, Any]:
    ids = {
        "input_ids": torch.randint(5, 200, (1, 16)),
        "attention_mask": torch.ones(1, 16, dtype=torch.long),
        "bbox": torch.tensor([[[1, 1, 20, 20]] * 16]),
    }
    given = {name: value for name, value in ids.items() if name in asked}
    return given if "input_ids" in asked else {}


def _senses(asked: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of a model's parameters for an image and a sound; empty if it has none."""
    sees = next((n for n in ("pixel_values", "pixel_values_videos", "images") if n in asked), "")
    hears = next((n for n in ("input_features", "input_values", "audio_mel") if n in asked), "")
    return sees, hears


def _common(asked: Mapping[str, Any]) -> dict[str, Any]:
    common: dict[str, Any] = {"use_cache": False} if "use_cache" in asked else {}
    if "decoder_input_ids" in asked:
        common["decoder_input_ids"] = torch.randint(5, 30, (1, 8))
    return common


def _usual(model: Any) -> list[dict[str, Any]]:
    config = model.config
    asked = inspect.signature(model.forward).parameters
    main = model.main_input_name
    text, (sees, hears), common = _usual_text(asked), _senses(asked), _common(asked)
    found: list[dict[str, Any]] = [text] if text else []
    images = [{sees: torch.randn(shape)} for shape in _images(config, main)] if sees else []
    sounds = [{hears: sound} for sound in _sounds(config)] if hears else []
    if f"{hears}_mask" in asked:
        sounds += [{**given, f"{hears}_mask": _whole(given[hears])} for given in sounds]
    found += images + sounds
    if text:
        found += [{**text, **other} for other in images + sounds]
    if "grid_thw" in asked:
        patch = _size(config, "patch_size") or 14
        channels = _size(config, "in_channels", "num_channels") or 3
        patches = torch.randn(16, channels * (_size(config, "temporal_patch_size") or 1) * patch**2)
        grid = torch.tensor([[1, 4, 4]])
        for name in ("hidden_states", "pixel_values"):
            found += [{name: patches, "grid_thw": grid}] if name in asked else []
    if "past_values" in asked:
        length, width = (
            config.to_dict().get("context_length", 64),
            _size(config, "num_input_channels"),
        )
        found += [{"past_values": torch.randn(1, length, width)}] if width else []
        found += [{"past_values": [torch.randn(64)], "freq": [0]}]
    if "inputs_embeds" in asked:
        found += [{"inputs_embeds": torch.randn(1, 16, _size(config, "hidden_size") or 128)}]
    if "hidden_states" in asked:
        found += [{"hidden_states": torch.randn(1, 16, _size(config, "hidden_size") or 128)}]
    if main in ("pixel_values", "input_features", "input_values"):
        found.sort(key=lambda given: main not in given)
    return [{**given, **common} for given in found]


def _unusual(model: Any) -> list[dict[str, Any]]:
    config = model.config
    asked = inspect.signature(model.forward).parameters
    text, (sees, hears) = _usual_text(asked), _senses(asked)
    images = [{sees: torch.randn(shape)} for shape in _images(config, "")] if sees else []
    found = [{sees: torch.randn(1, 2, *_images(config, "")[0][1:])}] if sees else []  # a pair
    found += _patches(model) if any(name in asked for name in GRIDS) else []
    for sound in _wide_sounds(model) if hears else ():
        found.append({hears: sound})
        if f"{hears}_mask" in asked:  # time is this axis or that
            masks = (torch.ones(1, n, dtype=torch.bool) for n in sound.shape[:0:-1])
            found += [{hears: sound, f"{hears}_mask": mask} for mask in masks]
    if hears and sees:
        waves = (torch.randn(1, 1, 4000), torch.randn(1, 4000))
        found += [{**image, hears: wave} for image in images for wave in waves]
    if "input_values" in asked and "input_features" in asked:
        wave, sounds = torch.randn(1, 1, 6400), (*_sounds(config), *_wide_sounds(model))
        found += [{"input_values": wave, "input_features": sound} for sound in sounds]
    if "hidden_states" in asked:
        first = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d)), 1)
        found += [{"hidden_states": torch.randn(1, first, n)} for n in (16, 6400)]
    found += [{**text, **given} for given in found] if text else []
    places = _size(config, "num_query_tokens")
    token = getattr(config, "image_token_id", getattr(config, "video_token_id", None))
    if text and places and token is not None:
        for frames in (1, 8):
            marks = torch.full((1, places * frames), token)
            seen = {"input_ids": torch.cat([marks, text["input_ids"]], 1)}
            found += [{**seen, **image} for image in images]
    return [{**given, **_common(asked)} for given in found]


def _by_name(model: Any) -> dict[str, Any]:
    """Return further arguments, beside text, image and sound, whose names tell their meaning."""
    config, (width, *_) = model.config, _widths(model)

    def of(name: str, default: int) -> int:
        return _size(config, name) or default

    hidden = of("hidden_size", 128)
    steps = of("context_length", 16) + max(getattr(config, "lags_sequence", None) or [0])
    times, ahead = getattr(config, "num_time_features", 0), of("prediction_length", 8)
    side = _images(config, "")[0][-1:] * 2
    ids = torch.randint(5, 30, (2, 8))
    corners = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    found = {
        "grid_thw": torch.tensor([[1, 4, 4]]),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "merge_sizes": torch.tensor([2]),
        "pixel_position_ids": corners[None],
        "spatial_shapes": torch.tensor([[4, 4]]),
        "target_sizes": torch.tensor([[4, 4]]),
        "qformer_input_ids": ids[:1],
        "classes_input_ids": ids,
        "classes_attention_mask": torch.ones_like(ids),
        "classes_structure": torch.tensor([2]),
        "tasks_input_ids": ids[:1],
        "tasks_attention_mask": torch.ones_like(ids[:1]),
        "task_inputs": torch.randn(1, of("task_seq_len", 77)),
        "state": torch.randn(1, of("max_state_dim", 32)),
        "states": torch.randn(1, 4, of("state_dim", 17)),
        "rewards": torch.randn(1, 4, 1),
        "returns_to_go": torch.randn(1, 4, 1),
        "timesteps": torch.arange(4)[None],
        "visual_feats": torch.randn(1, 4, of("visual_feat_dim", 2048)),
        "visual_pos": torch.rand(1, 4, 4),
        "prompt_pixel_values": torch.randn(1, 3, *side),
        "prompt_masks": torch.randn(1, 3, *side),
        "flattened_patches": torch.cat([corners[None] + 1.0, torch.randn(1, 16, width)], 2),
        "query_embeds": torch.randn(1, 4, hidden),
        "encoder_hidden_states": torch.randn(1, 8, of("encoder_hidden_size", hidden)),
        "noise_embeds": torch.randn(1, 4, hidden),
        "context_hidden_states": torch.randn(1, 8, max(_widths(model))),
        "latents": torch.randn(1, hidden, 8),
        "image_attention_mask": torch.ones(1, 16, 8, dtype=torch.long),
        "image_embeds_position_mask": torch.arange(16)[None] < of("latent_query_num", 4),
        "is_longer": torch.tensor([[True]]),
        "past_values": torch.randn(1, steps),
        "past_observed_mask": torch.ones(1, steps),
        "past_time_features": torch.randn(1, steps, times),
        "future_values": torch.randn(1, ahead),
        "future_time_features": torch.randn(1, ahead, times),
    }
    asked = inspect.signature(model.forward).parameters
    streams = getattr(getattr(config, "decoder_config", None), "num_channels", None)
    if streams:
        found["decoder_input_ids"] = torch.randint(5, 30, (1, 4, streams))
    if "rewards" in asked:
        found["actions"] = torch.randn(1, 4, of("act_dim", 4))
    if "spatial_shapes" in asked:
        found["pixel_attention_mask"] = torch.ones(1, 16, dtype=torch.long)
    return found


def _widths(model: nn.Module) -> list[int]:
    """Return the input widths of the first layers: that of a patch, or of a frame."""
    found = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    return list(dict.fromkeys(found))[:4] or [128]


def _patches(model: Any) -> list[dict[str, Any]]:
    """Return 16 patches of an image and their grid, for models that take patches."""
    patch = _size(model.config, "patch_size") or 14
    patch = patch if isinstance(patch, int) else patch[-1]
    channels, merged = _size(model.config, "in_channels", "num_channels") or 3, 2 * patch
    shapes = [(16, width) for width in _widths(model)] + [(1, 16, w) for w in _widths(model)]
    shapes += [(16, channels, patch, patch), (16, merged, merged, channels)]
    shapes += [(1, channels, patch, 16 * patch)]
    return [{"pixel_values": torch.randn(shape)} for shape in shapes]


def _wide_sounds(model: Any) -> list[torch.Tensor]:
    bins = _size(model.config, "num_mel_bins") or 64
    shapes = [(1, 64, width) for width in _widths(model)] + [(1, bins, 200), (1, 1, 1001, bins)]
    return [torch.randn(shape) for shape in (*shapes, (1, 3840), (1, 1, 6400))]


def _size(config: Any, *names: str) -> Any:
    parts = ("vision_config", "backbone_config", "audio_config", "encoder_config")
    for name in names:
        for part in (config, *(getattr(config, p, None) for p in parts)):
            value = (part if isinstance(part, dict) else vars(part)).get(name) if part else None
            if value is not None:
                return value
    return None


def _images(config: Any, main: str) -> list[tuple[int, ...]]:
    size = _size(config, "image_size", "img_size", "input_size") or 64
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    sides = (*size,) if isinstance(size, (list, tuple)) else (size, size)
    channels = _size(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _size(config, "num_frames", "frames_per_clip") or 8
    sizes = dict.fromkeys((sides[-2:], (64, 64), (224, 224)))
    shapes = [(1, channels, *side) for side in sizes] + [(1, frames, channels, *sides[-2:])]
    return shapes if main != "pixel_values_videos" else shapes[::-1]


def _whole(sound: torch.Tensor) -> torch.Tensor:
    """Return the mask of a sound without padding; the longer axis is time."""
    return torch.ones(1, max(sound.shape[1:]), dtype=torch.bool)


def _sounds(config: Any) -> list[torch.Tensor]:
    names = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim")
    bins = _size(config, *names) or 80
    length = 2 * (_size(config, "max_source_positions") or 64)
    shapes = [(1, bins, length), (1, length, bins), (1, 64, bins), (1, 4000), (1, 1, 4000)]
    return [torch.randn(*shape) for shape in shapes]
