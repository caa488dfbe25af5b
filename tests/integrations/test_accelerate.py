"""FP8 layers placed by accelerate: its hooks load weights from CPU or disk, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8kit
import fresh
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.formats import SCHEMES
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal, assert_same_tensors
from tiny_experts import tiny

accelerate = pytest.importorskip("accelerate")
from accelerate import hooks, utils  # noqa: E402
from accelerate.utils import compute_module_sizes, set_module_tensor_to_device  # noqa: E402

CPU = torch.device("cpu")
SIZE = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q_proj(x) * self.k_proj(x).sigmoid())
        return y


def model(scheme: str = "FP8_DYNAMIC") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block()).eval()
    report = fp8kit.convert(made, scheme, calibrate=lambda m: m(inputs()))
    assert len(report.converted) == 6
    return made


def inputs() -> Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))


def run(made: nn.Module) -> Tensor:
    with torch.no_grad():
        y: Tensor = made(inputs())
    return y


def weights(made: nn.Module) -> list[Tensor]:
    return [m._parameters["weight"] for m in made.modules() if isinstance(m, Fp8Linear)]


def to_cpu(made: nn.Module, _: Path) -> None:
    accelerate.cpu_offload(made, CPU, offload_buffers=True)


def to_disk(made: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(made, folder, CPU)


def dispatched(made: nn.Module, folder: Path) -> None:
    places = {"0": "cpu", "1.q_proj": "disk", "1.k_proj": "cpu", "1.out": "disk"}
    accelerate.dispatch_model(made, places, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [to_cpu, to_disk, dispatched])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_offloaded_layers_compute_the_same(
    scheme: str, offload: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    made = model(scheme)
    y, before = run(made), copy.deepcopy(made.state_dict())
    offload(made, tmp_path)
    for _ in range(2):
        assert_bits_equal(run(made), y)
        assert any(w.is_meta for w in weights(made))  # nothing stays behind
    hooks.remove_hook_from_submodules(made)
    assert not any(w.is_meta for w in weights(made))
    assert_same_tensors(made, before)
    assert_bits_equal(run(made), y)


@pytest.mark.parametrize("offload", [to_cpu, to_disk, dispatched])
def test_an_offloaded_model_is_saved_as_the_error_says(
    offload: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    made = model()
    before = copy.deepcopy(made.state_dict())
    offload(made, tmp_path / "offloaded")
    with pytest.raises(CheckpointError, match=r"remove_hook_from_module\(model, recurse=True\)"):
        fp8kit.save(made, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    hooks.remove_hook_from_module(made, recurse=True)
    fp8kit.save(made, tmp_path / "saved")
    assert_same_tensors(fp8kit.load(tmp_path / "saved", model()), before)


@pytest.mark.parametrize("offload", [to_cpu, to_disk, dispatched])
def test_a_dense_model_that_is_offloaded_is_refused_by_name(
    offload: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    made = nn.Sequential(Block(), Block()).eval()
    offload(made, tmp_path)
    with pytest.warns(UserWarning, match="No layer becomes FP8: accelerate dispatched the model"):
        report = fp8kit.convert(made, exclude=[])
    assert len(report.skipped) == 6
    assert not report.converted


def test_a_model_may_be_offloaded_again_and_again(tmp_path: Path) -> None:
    made = model()
    y = run(made)
    for offload in (to_cpu, to_disk, to_cpu):
        offload(made, tmp_path)
        assert_bits_equal(run(made), y)
        hooks.remove_hook_from_submodules(made)
        assert_bits_equal(run(made), y)


def test_models_take_turns_by_hooks() -> None:
    made = model()
    y = run(made)
    made, hook = accelerate.cpu_offload_with_hook(made, CPU)
    assert_bits_equal(run(made), y)
    hook.offload()
    assert_bits_equal(run(made), y)


def test_a_weight_moved_by_name_stays_a_plain_parameter() -> None:
    made = model()
    codes = made[0].out.weight.view(torch.uint8).clone()
    for user in (utils, hooks):
        user.set_module_tensor_to_device(made, "0.out.weight", "meta")
        assert type(made[0].out._parameters["weight"]) is nn.Parameter
    set_module_tensor_to_device(made, "0.out.weight", "cpu", value=codes.view(torch.float8_e4m3fn))
    assert_bits_equal(made[0].out.weight.view(torch.uint8), codes)


def test_names_that_were_imported_before_the_first_layer_quantize_too() -> None:
    code = (
        "import inspect, torch\n"
        "from accelerate.utils import set_module_tensor_to_device\n"
        "before = inspect.signature(set_module_tensor_to_device)\n"
        "import fp8kit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(128, 256))\n"
        "fp8kit.convert(model)\n"
        "x, w = torch.randn(4, 128), 3 * torch.randn(256, 128)\n"
        "set_module_tensor_to_device(model, '0.weight', 'cpu', value=w)\n"
        "wanted = torch.nn.functional.linear(x, w, model[0].bias)\n"
        "assert (model(x) - wanted).norm() < 0.1 * wanted.norm()\n"
        "assert inspect.signature(set_module_tensor_to_device) == before\n"
    )
    fresh.run(code)


class Empty(nn.Module):
    """A block of FP8 layers without tensors yet."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        for name, layer in dense.named_children():
            shape = layer.in_features, layer.out_features, layer.bias is not None
            self.add_module(name, Fp8Linear(*shape))

    forward = Block.forward


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_checkpoints_are_loaded_and_dispatched(place: str, tmp_path: Path) -> None:
    made = model()
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights():
        empty = nn.Sequential(*(Empty(block) for block in made))
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty,
        str(tmp_path / "model.safetensors"),
        device_map={"0": "cpu", "1": place},
        offload_folder=tmp_path / "offloaded",
    )
    assert_bits_equal(run(loaded.eval()), run(made))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8", "FP8_BLOCK"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_the_dtype_of_a_load_is_that_of_biases_alone(
    scheme: str, place: str, tmp_path: Path
) -> None:
    made = nn.Sequential(*(Fp8Linear.from_linear(nn.Linear(128, 128), scheme) for _ in "ab"))
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    loaded = accelerate.load_checkpoint_and_dispatch(
        nn.Sequential(*(Fp8Linear(128, 128, scheme=scheme, device="meta") for _ in "ab")),
        str(tmp_path / "model.safetensors"),
        device_map={"0": "cpu", "1": place},
        offload_folder=tmp_path / "offloaded",
        dtype=torch.float16,
    )
    wanted = {
        name: torch.float16 if name.endswith("bias") else p.dtype
        for name, p in made.named_parameters()
    }
    assert {name: p.dtype for name, p in loaded.named_parameters()} == wanted
    x = torch.randn(2, 128).half()
    torch.testing.assert_close(loaded(x), made(x), rtol=1e-2, atol=1e-2)


def other(made: nn.Module) -> dict[str, Tensor]:
    """Return new dense weights with the shapes of a model."""
    torch.manual_seed(1)
    return {
        name: 3 * torch.randn(p.shape)
        for name, p in made.named_parameters()
        if not name.endswith(("_scale", "_exponents"))
    }


def with_experts(_: str) -> nn.Module:
    made = tiny("Qwen3Moe", num_hidden_layers=1).eval()
    fp8kit.convert(made)
    assert any(isinstance(m, ExpertTensors) for m in made.modules())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("places", [None, {"": "cpu"}], ids=["all", "mapped"])
@pytest.mark.parametrize(
    ("make", "scheme"),
    [(model, "FP8_DYNAMIC"), (model, "FP8_BLOCK"), (model, "MXFP8_ROW"), (with_experts, "")],
)
def test_dense_checkpoints_are_quantized_with_scales_of_their_own(
    make: Callable[[str], nn.Module], scheme: str, places: dict[str, str] | None, tmp_path: Path
) -> None:
    made, expected = make(scheme), make(scheme)
    dense = other(made)
    save_file(dense, tmp_path / "model.safetensors", metadata={"format": "pt"})
    accelerate.load_checkpoint_in_model(made, str(tmp_path), device_map=places)
    expected.load_state_dict(dense)
    assert_same_tensors(made, expected)
    for name, tensor in made.state_dict().items():
        assert tensor.requires_grad == expected.state_dict()[name].requires_grad


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.inner = nn.Embedding(50, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 50, bias=False)
        self.head.weight = self.words.weight
        fp8kit.convert(self)
        assert isinstance(self.inner, Fp8Linear)


@pytest.mark.parametrize("name", ["words.weight", "head.weight"])
def test_a_checkpoint_fills_the_tensors_of_a_model_and_keeps_them_tied(
    name: str, tmp_path: Path
) -> None:
    made, wanted = Tied(1), Tied(2).state_dict()
    one = {n: t for n, t in wanted.items() if n in (name, "inner.bias") or "inner.weight" in n}
    save_file(one, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weight, bias = made.words.weight, made.inner.bias
    accelerate.load_checkpoint_in_model(made, str(tmp_path))
    assert_same_tensors(made, wanted)
    assert made.words.weight is made.head.weight is weight
    assert made.inner.bias is bias


@pytest.mark.parametrize("places", [None, {"": "cpu"}], ids=["all", "mapped"])
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "FP8_TENSOR"])
def test_codes_arrive_with_their_scales_or_are_refused(
    scheme: str, places: dict[str, str] | None, tmp_path: Path
) -> None:
    made, expected = model(scheme), model(scheme)
    expected.load_state_dict(other(expected))
    fp8kit.save(expected, tmp_path / "saved")
    if scheme == "FP8_TENSOR":  # whose scales are [1] in files
        accelerate.load_checkpoint_in_model(made, str(tmp_path / "saved"), device_map=places)
    else:  # theirs have other names there
        with pytest.raises(
            CheckpointError, match=r"0\.q_proj\.weight.*, and not both\..*fp8kit\.load"
        ):
            accelerate.load_checkpoint_in_model(made, str(tmp_path / "saved"), device_map=places)
        fp8kit.load(tmp_path / "saved", made)
    assert_same_tensors(made, expected)


def test_functions_that_were_imported_before_a_layer_existed_are_patched(tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text(
        "from accelerate import load_checkpoint_in_model as load\n"
        "from accelerate.utils import set_module_tensor_to_device as place\n"
    )
    code = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
import of_a_user, fp8kit
layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(128, 128))
weight = 3 * torch.randn(128, 128)
of_a_user.place(layer, "weight", "cpu", value=weight)
q = fp8kit.quantize(weight, fp8kit.ROW, role="weight")
assert torch.equal(layer.weight_scale, q.scale)
assert hasattr(of_a_user.load, "_fp8kit")
"""
    fresh.run(code)


def test_a_dense_weight_is_placed_on_meta_layers_and_has_to_fit() -> None:
    layer, weight = Fp8Linear(SIZE, 2 * SIZE, device="meta", bias=False), torch.randn(256, SIZE)
    utils.set_module_tensor_to_device(layer, "weight", "cpu", value=weight)
    q = fp8kit.quantize(weight, fp8kit.ROW, role="weight")
    assert_bits_equal(layer.codes, q.data)
    assert_bits_equal(layer.weight_scale, q.scale)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        utils.set_module_tensor_to_device(layer, "weight", "cpu", value=weight.t())
    with pytest.raises(RuntimeError, match="float"):
        utils.set_module_tensor_to_device(layer, "weight", "cpu", value=weight.int())


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_kept_weight_is_followed_where_its_codes_are_offloaded(
    to_disk: bool, tmp_path: Path
) -> None:
    made: Any = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())
    fp8kit.convert(made, weight_storage="keep")
    expected = copy.deepcopy(made)
    if to_disk:
        accelerate.disk_offload(made, tmp_path, CPU)
    else:
        accelerate.cpu_offload(made, CPU)
    layer = made[0]
    with torch.no_grad():
        layer.original_weight.mul_(-3.0)
    twin = copy.deepcopy(made)
    assert layer.weight.is_meta
    expected.load_state_dict({"0.weight": layer.original_weight}, strict=False)
    wanted = run(expected)
    for _ in range(2):
        assert_bits_equal(run(made), wanted)
        assert_bits_equal(run(twin), wanted)
    hooks.remove_hook_from_module(made, recurse=True)
    assert_bits_equal(layer.state_dict()["weight"], expected.state_dict()["0.weight"])
    assert_bits_equal(run(made), wanted)


def test_codes_that_are_offloaded_keep_their_bits_beside_a_kept_weight() -> None:
    made: Any = nn.Sequential(nn.Linear(SIZE, SIZE))
    fp8kit.convert(made, weight_storage="keep")
    made[0].original_weight = made[0].original_weight.half()
    run(made)
    made.load_state_dict({"0.weight": torch.randn(SIZE, SIZE)}, strict=False)  # kept as fp16
    wanted = run(made)
    accelerate.cpu_offload(made, CPU)
    for _ in range(2):
        assert_bits_equal(run(made), wanted)


def test_a_device_map_counts_codes_as_bytes(faked_cuda: Callable[..., None]) -> None:
    made = model()
    assert compute_module_sizes(made)["0.out.weight"] == SIZE * SIZE
    block = compute_module_sizes(made)["0"]
    room = {0: 2 * block + block // 2, 1: block, "cpu": 10 * block}
    faked_cuda()  # planned, and not run
    assert accelerate.infer_auto_device_map(
        nn.Sequential(*(copy.deepcopy(made[0]) for _ in range(4))),
        max_memory=room,
        no_split_module_classes=["Block"],
    ) == {"0": 0, "1": 1, "2": "cpu", "3": "cpu"}


def test_values_are_not_lost_while_accelerate_moves_to_meta(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 128))

    converted, dense = model(), model()
    fp8kit.convert(converted)
    fp8kit.save(converted, tmp_path / "c")
    with accelerate.init_empty_weights():
        with pytest.raises(ConversionError, match=r"every new parameter to the meta.*after the"):
            fp8kit.convert(dense)
        with pytest.raises(ConversionError, match="every new parameter to the meta"):
            fp8kit.load(tmp_path / "c", model())
    assert type(dense[0]) is nn.Linear
    assert len(fp8kit.convert(dense).converted) == 1


def test_an_accelerator_prepares_a_model() -> None:
    made = model()
    prepared: Any = accelerate.Accelerator(cpu=True).prepare(made)
    assert_bits_equal(run(prepared), run(made))
