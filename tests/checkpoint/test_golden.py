"""The golden checkpoint of every dialect is read to the known values and written bit for bit."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fp8kit.checkpoint.dialects import DIALECTS
from fp8kit.checkpoint.inspection import inspect
from fp8kit.checkpoint.storage.reader import Checkpoint, open_checkpoint
from fp8kit.formats import QTensor, scale_dtype, scale_shape
from fp8kit.functional import dequantize
from fp8kit.io.models import load
from fp8kit.io.translation import convert_checkpoint
from fp8kit.modules.linear import Fp8Linear
from golden.generate import FOLDER, goldens
from golden.layout import Golden, value_of, write
from numerics import assert_bits_equal

GOLDENS = goldens()
names = pytest.mark.parametrize("name", GOLDENS)


def place(name: str) -> Path:
    """Return the path of a golden checkpoint: a file if the dialect has no folder."""
    folder = FOLDER / name
    return folder / GOLDENS[name].file if name.startswith("comfyui") else folder


def decoded(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in checkpoint.layers.items():
        codes, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
        assert codes.dtype == torch.float8_e4m3fn
        assert tuple(codes.shape) == layer.shape
        assert scale.dtype == scale_dtype(layer.group)
        assert tuple(scale.shape) == scale_shape(layer.shape, layer.group)
        found[name] = dequantize(QTensor(codes.contiguous(), scale, layer.group))
    return found


def test_the_files_are_those_of_the_generator(tmp_path: Path) -> None:
    for name, golden in GOLDENS.items():
        write(golden, tmp_path / name)
        files = sorted(p.name for p in (tmp_path / name).iterdir())
        assert files == sorted(p.name for p in (FOLDER / name).iterdir())
        same, *_ = filecmp.cmpfiles(tmp_path / name, FOLDER / name, files, shallow=False)
        assert same == files
    folders = {p.name for p in FOLDER.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(GOLDENS)
    assert max(p.stat().st_size for name in folders for p in (FOLDER / name).iterdir()) < 10_000


def test_every_dialect_has_a_golden_checkpoint() -> None:
    assert {g.dialect for g in GOLDENS.values()} == {d.name for d in DIALECTS}
    assert {g.dialect for g in GOLDENS.values() if g.writable} == {
        d.name for d in DIALECTS if d.writable
    }


def test_the_generator_knows_the_codes() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    known = torch.tensor([value_of(b) for b in range(256)])
    numbers = ~every.isnan()
    assert numbers.sum() == 254
    assert_bits_equal(known[numbers], every[numbers])


@names
def test_safetensors_reads_what_the_generator_writes(name: str) -> None:
    golden = GOLDENS[name]
    found = load_file(FOLDER / name / golden.file)
    assert found.keys() == golden.tensors.keys()
    for key, tensor in golden.tensors.items():
        assert_bits_equal(found[key], tensor)
    with safe_open(FOLDER / name / golden.file, "pt") as file:
        assert file.metadata() == {"format": "pt", **golden.metadata}


@names
def test_the_values_are_the_known_ones(name: str) -> None:
    golden, checkpoint = GOLDENS[name], open_checkpoint(place(name))
    assert checkpoint.dialect is not None
    assert checkpoint.dialect.name == golden.dialect
    found = decoded(checkpoint)
    assert found.keys() == golden.truth.keys()
    for layer, values in golden.truth.items():
        assert values.abs().sum() > 0
        assert_bits_equal(found[layer], values.contiguous())


@names
def test_schemes_and_other_scales(name: str) -> None:
    golden, checkpoint = GOLDENS[name], open_checkpoint(place(name))
    schemes = {n: layer.scheme.name for n, layer in checkpoint.layers.items()}
    if isinstance(golden.schemes, str):
        assert set(schemes.values()) == {golden.schemes}
    else:
        assert schemes == golden.schemes
    inputs = {n: x.input_scale for n, x in checkpoint.layers.items() if x.input_scale}
    assert {n: checkpoint.read(s).tolist() for n, s in inputs.items()} == {
        n: torch.tensor([[v]]).tolist() for n, v in golden.inputs.items()
    }
    cache = {n: checkpoint.read(n) for n in checkpoint.kv_scales}
    assert {n: t.tolist() for n, t in cache.items()} == {n: [v] for n, v in golden.cache.items()}


@names
def test_the_rest_is_untouched(name: str) -> None:
    golden, checkpoint = GOLDENS[name], open_checkpoint(place(name))
    plain = [n for n, t in golden.tensors.items() if t.dtype == torch.bfloat16]
    plain = [n for n in plain if "scale" not in n]
    owned = {layer.weight for layer in checkpoint.layers.values()}
    rest = {n for n in checkpoint.tensors if n not in owned and not checkpoint.is_scale(n)}
    assert rest == set(plain)
    for key in plain:
        assert_bits_equal(checkpoint.read(key), golden.tensors[key])


def module_of(golden: Golden) -> nn.Module:
    """Build a module on the meta device that has the linear layers and the rest of a checkpoint."""
    root = nn.Module()
    shapes = {layer: tuple(v.shape) for layer, v in golden.truth.items()}
    shapes |= {
        name.removesuffix(".weight"): tuple(t.shape)
        for name, t in golden.tensors.items()
        if t.dtype == torch.bfloat16 and name.endswith(".weight")
    }
    for name, shape in shapes.items():
        *parents, last = name.split(".")
        holder = root
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, nn.Module())
            holder = holder.get_submodule(parent)
        linear = nn.Linear(shape[-1], shape[0], bias=False, device="meta", dtype=torch.bfloat16)
        norm = nn.LayerNorm(shape[0], bias=False, device="meta", dtype=torch.bfloat16)
        holder.add_module(last, linear if len(shape) == 2 else norm)
    return root


FLAT = [n for n, g in GOLDENS.items() if all(v.dim() == 2 for v in g.truth.values())]


@pytest.mark.filterwarnings("ignore:.*tensors that the model does not use")
@pytest.mark.filterwarnings("ignore:The config quantizes the KV cache")
@pytest.mark.filterwarnings("ignore:Layers have Mistral's own names")
@pytest.mark.parametrize("name", FLAT)
def test_every_dialect_loads_into_a_module(name: str) -> None:
    golden = GOLDENS[name]
    as_held = "MXFP8_EMULATED" if golden.schemes == "MXFP8" else None
    model = load(place(name), module_of(golden), scheme=as_held)
    for layer, values in golden.truth.items():
        module = model.get_submodule(layer)
        assert isinstance(module, Fp8Linear)
        assert_bits_equal(module.to_linear(torch.float32).weight.detach(), values)
        wanted = golden.inputs.get(layer)
        held = None if module.input_scale is None else module.input_scale.item()
        assert held == (None if wanted is None else torch.tensor(wanted).item())


@names
def test_inspect_finds_no_damage(name: str) -> None:
    found = inspect(place(name))
    assert found.problems == []
    assert found.dialect == GOLDENS[name].dialect


@pytest.mark.parametrize("name", [n for n, g in GOLDENS.items() if g.writable])
def test_writing_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    convert_checkpoint(FOLDER / name, tmp_path / "c", dialect=golden.dialect)
    for file in (golden.file, "config.json"):
        assert (tmp_path / "c" / file).read_bytes() == (FOLDER / name / file).read_bytes()


def writable_from(golden: Golden) -> str:
    """Return a dialect that can hold the values of a golden checkpoint."""
    schemes = golden.schemes if isinstance(golden.schemes, str) else ""
    return {"FP8_BLOCK_UE8M0": "fp8", "MXFP8": "mxfp8"}.get(schemes, "compressed-tensors")


@pytest.mark.filterwarnings("ignore:activation_scale_ub = 1200.0 is not kept:UserWarning")
@names
def test_translating_keeps_every_value(name: str, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    convert_checkpoint(place(name), tmp_path / "c", dialect=writable_from(golden))
    checkpoint = open_checkpoint(tmp_path / "c")
    found = decoded(checkpoint)
    for layer, values in golden.truth.items():
        if values.dim() == 2:
            assert_bits_equal(found.pop(layer), values)
            continue
        parent, _, last = layer.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert, matrix in enumerate(values):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                assert_bits_equal(found.pop(f"{parent}.{expert}.{part}"), rows.contiguous())
    assert found == {}
    cache = {n: checkpoint.read(n).item() for n in checkpoint.kv_scales}
    assert cache == golden.cache
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    left = config.get("ignore") or config["ignored_layers"]
    assert "lm_head" in left
    assert ("model.layers.0.mlp.gate" in left) == ("model.norm.weight" in golden.tensors)
