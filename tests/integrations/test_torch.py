"""torch's own tools on a model of FP8 layers, beyond the tests of the operators."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fp8kit
from fp8kit.errors import UnsupportedError
from fp8kit.formats import SCHEMES, GroupShape, Scheme
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal, relative_error

SIZE = 128
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def model(scheme: str = "FP8_DYNAMIC") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(SIZE, 256), nn.SiLU(), nn.Linear(256, SIZE)).bfloat16().eval()
    fp8kit.convert(made, scheme, calibrate=lambda m: m(inputs()))
    return made


def inputs(rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, SIZE, generator=generator).bfloat16()


@COMPILER
@pytest.mark.filterwarnings("ignore")  # what inductor warns about is not ours to fix
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_the_compiler(mode: str) -> None:
    torch._dynamo.reset()
    made = model()
    compiled = torch.compile(made, mode=mode, fullgraph=True)
    with torch.no_grad():
        # fused activations round differently, and an ulp can move a code by one step
        assert relative_error(compiled(inputs()), made(inputs())) < 5e-3


@COMPILER
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_ahead_of_time_code(tmp_path: Path) -> None:
    made = model()[:1]  # the C++ compiler takes seconds for each further kernel
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(made, (inputs(),), dynamic_shapes=({0: rows},))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        packed = torch._inductor.aoti_load_package(package)
        for m in (2, 33):
            assert relative_error(packed(inputs(m)), made(inputs(m))) == 0


def saved(content: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_state_dict_is_weights_only(scheme: str) -> None:
    made = model(scheme)
    loaded = torch.load(saved(made.state_dict()), weights_only=True)
    for name, tensor in made.state_dict().items():
        assert_bits_equal(loaded[name], tensor)


def test_a_whole_model_is_weights_only_with_its_classes_named() -> None:
    made = model()
    file = saved(made)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
    file.seek(0)
    classes = [nn.Sequential, nn.SiLU, Fp8Linear, Scheme, GroupShape]
    with torch.serialization.safe_globals(classes):
        loaded = torch.load(file, weights_only=True)
    assert_bits_equal(loaded(inputs()), made(inputs()))


def test_functional_call_takes_codes_and_scales_from_elsewhere() -> None:
    made, other = model(), model()
    other[0].load_state_dict({"weight": torch.randn(256, SIZE), "bias": torch.zeros(256)})
    found = functional_call(made, dict(other.named_parameters()), (inputs(),))
    assert_bits_equal(found, other(inputs()))
    assert relative_error(found, made(inputs())) > 0.1


def test_inference_mode_and_no_grad_agree() -> None:
    made = model()
    with torch.inference_mode():
        y = made(inputs())
    with torch.no_grad():
        assert_bits_equal(y.clone(), made(inputs()))


def test_autocast_decides_the_dtype_of_the_model() -> None:
    made = model()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_bits_equal(made(inputs().float()), made(inputs()))


def test_scripting_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script.*Use torch\.compile"):
        torch.jit.script(model())
