"""Draw with a diffusion pipeline whose transformer is FP8: load, compare, save, load again.

    python examples/image_pipeline.py [PIPELINE] [--prompt TEXT] [--steps 4] [--out FOLDER]

PIPELINE is a directory with a pipeline of diffusers, such as FLUX.1. The default is a tiny pipeline
with random weights, which draws noise and goes through every step in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import numpy as np
import torch

import fp8kit
from fp8kit.integrations.diffusers import Fp8KitConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Draw the same image with dense weights, with FP8 ones, and with FP8 ones loaded from disk."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pipeline", nargs="?")
    parser.add_argument("--prompt", default="a lighthouse in the rain")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        source = given.pipeline or tiny_pipeline(Path(folder) / "tiny")
        out = given.out or Path(folder) / "fp8"
        choice = diffusers.PipelineQuantizationConfig(
            quant_mapping={"transformer": Fp8KitConfig("FP8_DYNAMIC")}
        )
        dense = load(source)
        quantized = load(source, quantization_config=choice)
        print(quantized.transformer.hf_quantizer.report.summary())
        print(f"transformer: {mebibytes(dense):.1f} MiB dense, {mebibytes(quantized):.1f} in FP8")
        before, after = (draw(p, given.prompt, given.steps) for p in (dense, quantized))
        print(f"mean difference of a pixel: {np.abs(before - after).mean():.4f} of 1")

        quantized.save_pretrained(out)
        again = draw(load(out), given.prompt, given.steps)
        assert np.array_equal(again, after), "what was saved draws the same image"
        print("saved, loaded, and drawn again to the bit")
        if given.out:
            print(f"kept in {out}")
            diffusers.image_processor.VaeImageProcessor.numpy_to_pil(after)[0].save(
                out / "image.png"
            )
            print(f"image: {out / 'image.png'}")


def load(source: str | Path, **options: Any) -> Any:
    """Load a pipeline in bf16."""
    found = diffusers.DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16, **options)
    found.set_progress_bar_config(disable=True)
    return found.to(DEVICE)


def draw(pipeline: Any, prompt: str, steps: int) -> np.ndarray:
    """Draw an image ``[1, height, width, 3]`` with values in [0, 1], always from the same noise."""
    asked: dict[str, Any] = {"prompt": prompt}
    if "class_labels" in inspect.signature(pipeline.__call__).parameters:
        asked = {"class_labels": [1]}
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": steps, "generator": generator, "output_type": "np"}
    image: np.ndarray = pipeline(**asked, **options).images
    return image


def mebibytes(pipeline: Any) -> float:
    """Return the size of the transformer's weights in MiB."""
    return sum(p.nbytes for p in pipeline.transformer.parameters()) / 2**20


def tiny_pipeline(folder: Path) -> Path:
    """Write a pipeline with random weights."""
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    parts = (transformer.bfloat16(), vae.bfloat16(), diffusers.DDIMScheduler())
    diffusers.DiTPipeline(*parts).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(f"fp8kit {fp8kit.__version__} on {DEVICE}")
    main()
