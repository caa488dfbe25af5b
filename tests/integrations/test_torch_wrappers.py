"""torch's wrappers around converted models give the model's results, or raise a clear error."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8kit
import fresh
from fp8kit import CheckpointError, UnsupportedError
from fp8kit.integrations.torch_wrappers import patch
from fp8kit.modules.fused_producers import FusedNorm
from fp8kit.modules.shared_input import SharedInput
from fp8kit.runtime.weight_hazards import MARK, mark_synchronized
from numerics import assert_bits_equal, assert_same_tensors

SCHEMES = ["FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8"]


class Adapted(nn.Module):
    """A converted model with adapters beside it, like LoRA's."""

    def __init__(self, scheme: str = "FP8_DYNAMIC", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.base.requires_grad_(False)
        fp8kit.convert(self.base, scheme)
        self.adapters = nn.Sequential(nn.Linear(128, 8, bias=False), nn.Linear(8, 128, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.adapters(x)
        return y


def llama() -> Any:
    transformers = pytest.importorskip("transformers")  # which two processes need not load
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=160, num_hidden_layers=1, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def inputs() -> Tensor:
    return torch.randn(3, 128, generator=torch.Generator().manual_seed(1))


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ddp_trains_adapters(scheme: str, tmp_path: Path) -> None:
    model = Adapted(scheme)
    alone, names = copy.deepcopy(model), list(model.state_dict())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["nothing"])
    wrapped = DistributedDataParallel(model)
    assert model._ddp_params_and_buffers_to_ignore == ["nothing"]
    x = inputs()
    for m in (wrapped, alone):
        y = m(x)
        y.sum().backward()
    assert_bits_equal(wrapped(x), alone(x))
    assert_bits_equal(model.adapters[0].weight.grad, alone.adapters[0].weight.grad)
    assert list(wrapped.state_dict()) == [f"module.{n}" for n in names]
    fp8kit.save(wrapped.module.base, tmp_path / "saved")
    wrapped.load_state_dict(wrapped.state_dict())


@pytest.mark.usefixtures("mesh")
def test_ddp_in_mixed_precision_casts_no_codes() -> None:
    model, x = Adapted(), inputs()
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    try:
        wrapped = DistributedDataParallel(model, mixed_precision=half)
    except RuntimeError as error:
        pytest.skip(f"mixed precision of this torch wants a GPU: {str(error).splitlines()[0]}")
    with contextlib.suppress(RuntimeError):  # the CPU has no events, which come after the casts
        wrapped(x)
    cast = [n for n, p in model.named_parameters() if hasattr(p, "_mp_param")]
    assert {"adapters.0.weight", "base.0.bias"} <= set(cast)
    assert not any("base" in n and "weight" in n for n in cast)


def of_two(rank: int, store: str) -> None:
    """Train, shard and average in one of two processes whose codes differ at first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x, first = inputs(), Adapted(seed=0)
    model = Adapted(seed=rank)
    wrapped = DistributedDataParallel(model)
    (wrapped(x) * (rank + 1)).sum().backward()
    assert_bits_equal(wrapped(x), first(x))
    (first(x) * 1.5).sum().backward()
    torch.testing.assert_close(model.adapters[0].weight.grad, first.adapters[0].weight.grad)
    apart = Adapted(seed=rank)
    DistributedDataParallel(apart, init_sync=False)
    assert torch.equal(bits(apart.base[0].codes), bits(first.base[0].codes)) == (rank == 0)
    mesh = init_device_mesh("cpu", (2,))
    # torch 2.11 makes a Parameter with gradients of each part first, which E8M0 cannot have
    old = torch.__version__ < (2, 12)
    for scheme in SCHEMES[: -1 if old else None]:
        model = Adapted(scheme)
        expected = model(x)
        fully_shard(model.base[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert_bits_equal(model(x), expected)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from integrations.test_torch_wrappers import of_two\n"
        "child = os.fork()\n"
        "of_two(int(not child), sys.argv[1])\n"
        "assert not child or os.waitpid(child, 0)[1] == 0\n"
        "print('done')\n"
    )
    done = fresh.run(code, tmp_path / "store", first=Path(__file__).parents[1])
    assert done.stdout.split() == ["done", "done"]


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings(
    "ignore:FSDP is switching", "ignore:.*NO_SHARD", "ignore:.*FSDP.state_dict_type"
)
def test_fsdp1_is_refused_until_it_ignores_what_is_frozen() -> None:
    model, x, cpu = Adapted(), inputs(), torch.device("cpu")
    expected = model(x)
    with pytest.raises(UnsupportedError, match=r"FP8 layers of Adapted: .*ignored_states=\[p for"):
        FullyShardedDataParallel(copy.deepcopy(model), device_id=cpu)
    ignored = frozen(model)
    wrapped = FullyShardedDataParallel(
        model, device_id=cpu, use_orig_params=True, ignored_states=ignored
    )
    wrapped(x).sum().backward()
    assert_bits_equal(wrapped(x), expected)
    assert wrapped.state_dict()["base.0.weight"].dtype == torch.float8_e4m3fn
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match="dtype"):  # what is not about codes stays torch's own
        FullyShardedDataParallel(mixed, device_id=cpu)


@pytest.mark.usefixtures("mesh", "fuses_on_cpu")
@pytest.mark.filterwarnings(
    "ignore:FSDP is switching", "ignore:.*NO_SHARD", "ignore:.*FSDP.state_dict_type"
)
def test_fsdp1_flattens_the_weights_of_fused_norms() -> None:
    torch.manual_seed(0)
    model, ids = llama(), torch.arange(6)[None]
    fp8kit.convert(model)
    assert isinstance(model.model.layers[0].input_layernorm, FusedNorm)
    with torch.no_grad():
        expected = model(ids).logits
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), ignored_states=frozen(model)
    )
    assert_bits_equal(wrapped(ids).logits.detach(), expected)


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:.*NO_SHARD", "ignore:.*FSDP")
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_wrapped_already_stays_dense(whole: bool) -> None:
    for wrap, said in (
        (
            lambda m: FullyShardedDataParallel(
                m, use_orig_params=whole, device_id=torch.device("cpu")
            ),
            "fully_shard or FullyShardedDataParallel has split its weight; convert the",
        ),
        (fully_shard, "fully_shard or FullyShardedDataParallel has split its weight; convert the"),
        (nn.parallel.DistributedDataParallel, "which stays dense; convert the model before it is"),
    ):
        model = nn.Sequential(nn.Linear(128, 128))
        wrapped: Any = wrap(model)
        with pytest.warns(UserWarning, match=said):
            fp8kit.convert(wrapped)
        assert wrapped(torch.ones(2, 128)).isfinite().all()


def test_fully_shard_gathers_codes(mesh: Any, tmp_path: Path) -> None:
    model, x = Adapted().base, inputs()
    expected, layer = model(x), model[0]
    fully_shard(layer, mesh=mesh)
    for _ in range(2):
        layer.unshard()
        assert_bits_equal(model(x), expected)
        mark_synchronized(layer.codes)
        layer.reshard()
    layer.unshard()
    assert not hasattr(layer.codes, MARK)  # gathered again, unseen by the counter of changes
    with pytest.raises(CheckpointError, match="sharded over several"):
        fp8kit.save(model, tmp_path / "saved")


def test_what_is_sharded_is_not_loaded_into(mesh: Any, tmp_path: Path) -> None:
    model = Adapted().base
    whole = copy.deepcopy(model.state_dict())
    fp8kit.save(model, tmp_path / "saved")
    fully_shard(model, mesh=mesh)
    for load in (fp8kit.load, lambda _, model: fp8kit.load_weights(model, whole)):
        with pytest.raises(
            CheckpointError, match=r"0\.bias, .* are sharded over several proc.*Load"
        ):
            load(tmp_path / "saved", model)


def test_what_was_gathered_of_fully_shard_is_saved(mesh: Any, tmp_path: Path) -> None:
    model = llama()
    fp8kit.convert(model)
    whole = copy.deepcopy(model.state_dict())
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    model.save_pretrained(tmp_path, state_dict=whole)
    assert all(p is sharded[n] for n, p in model.named_parameters())
    assert_same_tensors(fp8kit.load(tmp_path), whole)
    with pytest.raises(CheckpointError, match="sharded over several"):
        model.save_pretrained(tmp_path)


def test_rows_of_several_processes_are_not_quantized(mesh: Any) -> None:
    x = distribute_tensor(inputs(), mesh, [Shard(0)])
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(128, 64))
    for call in (layer, fp8kit.quantize, lambda x: fp8kit.linear(x, layer.quantized_weight())):
        with pytest.raises(TypeError, match=r"Got x as a DTensor\..*Pass x\.to_local\(\)"):
            call(x)


def test_weights_of_several_processes_are_neither_multiplied_nor_decoded(mesh: Any) -> None:
    model = nn.Sequential(fp8kit.Fp8Linear.from_linear(nn.Linear(128, 64)))
    layer: Any = model[0]
    whole = layer.to_linear().weight
    fully_shard(model, mesh=mesh)
    for read in (lambda: layer(inputs()), layer.to_linear):
        with pytest.raises(TypeError, match=r"as a DTensor\..*fully_shard.*unshard\(\)"):
            read()
    model.unshard()  # type: ignore[operator]
    assert_bits_equal(layer.to_linear().weight, whole)


def test_siblings_stay_in_the_memory_of_fully_shard(mesh: Any) -> None:
    layers = [
        fp8kit.Fp8Linear.from_linear(nn.Linear(64, n)).requires_grad_(False) for n in (64, 32)
    ]
    SharedInput(layers, unchanging=True)
    model, x = nn.Sequential(*layers), torch.randn(4, 64)
    expected = [layer(x) for layer in layers]
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for factor in (1, 2):
        model.unshard()
        for layer, y in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), factor * (y - layer.bias) + layer.bias)
        model.reshard()
        for layer in layers:
            layer.weight_scale.to_local().mul_(2)


def test_fully_shard_casts_no_codes(mesh: Any) -> None:
    model, x = Adapted(), inputs()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ignoring = copy.deepcopy(model)
    fully_shard(model.base[0], mesh=mesh, mp_policy=half)
    with pytest.raises(ValueError, match=r"float8_e4m3fn codes.*needs ignored_params= with"):
        model(x)
    fully_shard(ignoring, mesh=mesh, mp_policy=half, ignored_params=set(frozen(ignoring)))
    ignoring(x).sum().backward()
    experts = fp8kit.Fp8Experts.from_dense(torch.randn(2, 64, 128), torch.randn(2, 128, 32))
    fully_shard(experts, mesh=mesh, mp_policy=half)
    with pytest.raises(ValueError, match=r"gate_up_proj of FSDPFp8Experts.*ignored_params= with"):
        experts(x, *fp8kit.moe.route(torch.randn(3, 2), 1))


@pytest.mark.parametrize("how", ["mean", "ema", "one by one", "buffers"])
def test_averages_leave_codes_as_they_are(how: str) -> None:
    model, x = Adapted(), inputs()
    options: dict[str, Any] = {
        "mean": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        "one by one": {"avg_fn": lambda a, b, _: 0.9 * a + 0.1 * b},
        "buffers": {"use_buffers": True},
    }[how]
    average = AveragedModel(model, **options)
    scale = model.base[0].weight_scale.detach().clone()
    average.update_parameters(model)
    with torch.no_grad():
        model.adapters[1].weight.zero_()
    average.update_parameters(model=model)
    kept = 0.9 if how == "one by one" else 0.5
    trained = Adapted().adapters[1].weight
    torch.testing.assert_close(average.module.adapters[1].weight, kept * trained)
    torch.testing.assert_close(average.module.base(x), model.base(x))  # biases are averaged, too
    assert_bits_equal(average.module.base[0].weight_scale.detach(), scale)


def test_averages_of_other_codes_are_refused() -> None:
    model, other, dense = Adapted(), Adapted(seed=1), nn.Sequential(nn.Linear(128, 256))
    average = AveragedModel(model)
    average.update_parameters(model)
    with pytest.raises(
        UnsupportedError, match=r"got a model with other FP8 .* convert the average"
    ):
        average.update_parameters(other)
    assert_bits_equal(average.module(inputs()), model(inputs()))
    average = AveragedModel(dense)
    fp8kit.convert(dense)
    with pytest.raises(UnsupportedError, match="got a model with other FP8 weights"):
        average.update_parameters(dense)


def test_wrappers_are_told_once() -> None:
    patch()
    patch()
    assert "_fp8kit" not in vars(DistributedDataParallel.__init__.__wrapped__)


@pytest.mark.usefixtures("mesh")
def test_ddp_leaves_no_name_behind() -> None:
    model = Adapted()
    DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
