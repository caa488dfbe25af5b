"""LoRA and similar adapters on FP8 layers: training, several at once, merging, swaps, refusals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.integrations.peft import MIN_PEFT_VERSION

import fp8kit
import fresh
import lora as lora_benchmark
from checkpoint_samples import NANO
from fp8kit.errors import UnsupportedError
from fp8kit.formats import SCHEMES
from fp8kit.modules.linear import Fp8Linear
from numerics import (
    ONE_OPERAND,
    assert_bits_equal,
    assert_same_tensors,
    assert_trains_alike,
    relative_error,
)
from tiny_experts import tiny

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap  # noqa: E402

from fp8kit.integrations import peft as plugin  # noqa: E402

# peft's warnings about its own adapters
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
SIZE, RANK = 128, 4


def pair(scheme: str = "FP8_DYNAMIC", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 256), nn.Linear(256, SIZE)).bfloat16()
    model[0].bias.data.normal_()
    report = fp8kit.convert(model, scheme, calibrate=lambda m: m(inputs()), **options)
    assert len(report.converted) == 2
    return model


def inputs(rows: int = 16) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()


def adapted(base: nn.Module, *names: str, **options: Any) -> Any:
    """Attach adapters that change results; the first one is active."""
    config = peft.LoraConfig(**{"target_modules": ["0"], "r": RANK, **options})
    first, *others = names or ("default",)
    model = peft.get_peft_model(base, config, adapter_name=first)
    for name in others:
        model.add_adapter(name, config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.eval()


def lora(model: Any) -> Any:
    return model.base_model.model[0]


def state(layer: Fp8Linear) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def assert_same_state(layer: Fp8Linear, before: dict[str, Tensor]) -> None:
    assert_same_tensors(layer, before)


def llama() -> Any:
    model = tiny("Llama")
    fp8kit.convert(model)
    return model


IDS = torch.arange(48).view(3, 16) * 37 % 160


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_start_off_the_fp8_grid(autocast: bool) -> None:
    config = peft.LoraConfig(target_modules=["0"], r=8)
    model = peft.get_peft_model(pair(), config, autocast_adapter_dtype=autocast)
    weight = lora(model).lora_A["default"].weight
    assert weight.dtype == (torch.float32 if autocast else torch.bfloat16)
    # all finite magnitudes of e4m3 are 127, and an even spread over [-a, a] hits few of them
    assert len(weight.detach().abs().unique()) > 127
    assert model(inputs()).dtype == torch.bfloat16


@pytest.mark.parametrize("dora", [False, True])
def test_training_moves_the_adapter_alone(dora: bool) -> None:
    base = llama()
    layers = {n: state(m) for n, m in base.named_modules() if isinstance(m, Fp8Linear)}
    config = peft.LoraConfig(target_modules="all-linear", r=RANK, lora_dropout=0.1, use_dora=dora)
    model = peft.get_peft_model(base, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses = []
    for _ in range(6):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    wrapped = {n: m.get_base_layer() for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert len(wrapped) == len(layers)
    for name, layer in wrapped.items():
        assert_same_state(layer, layers[name.removeprefix("base_model.model.")])
        assert layer.codes.grad is None


def test_adapters_of_a_converted_conv1d_merge() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(transformers.pytorch_utils.Conv1D(SIZE, SIZE))  # a square: no shape tells
    nn.init.normal_(model[0].weight, std=SIZE**-0.5)
    fp8kit.convert(model.bfloat16())
    tuned = adapted(model, fan_in_fan_out=True)
    x = inputs()
    before = tuned(x)
    tuned.merge_adapter()
    assert 0 < relative_error(tuned(x), before) < 2 * ONE_OPERAND
    tuned.unmerge_adapter()
    assert_bits_equal(tuned(x), before)


def test_training_follows_that_of_the_bf16_weights() -> None:
    tokens = lora_benchmark.training_tokens()[:4]
    losses = {
        kind: lora_benchmark.finetune(
            lora_benchmark.with_adapter(lora_benchmark.base(kind), 0), tokens, 12, 0
        )
        for kind in ("bf16", "fp8")
    }
    assert losses["fp8"] != losses["bf16"]
    assert_trains_alike(losses["fp8"], losses["bf16"])


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        NANO, dtype=torch.float32, quantization_config=fp8kit.Fp8KitConfig()
    )
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=2,
        activation_checkpointing=True,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(base, arguments)
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    converted = llama()
    codes = state(converted.model.layers[0].mlp.up_proj)
    embedded = converted.model.embed_tokens.weight.detach().clone()
    transformers.Trainer(converted, arguments, train_dataset=data).train()
    assert_same_state(converted.model.layers[0].mlp.up_proj, codes)
    assert relative_error(converted.model.embed_tokens.weight, embedded) > 0
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", r=RANK))
    before = lora_b(model)
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert relative_error(lora_b(model) + 1, before + 1) > 0


def lora_b(model: Any) -> Tensor:
    found = [p.detach().flatten() for n, p in model.named_parameters() if "lora_B" in n]
    return torch.cat(found).clone()


def test_preparing_for_training_leaves_codes_and_their_dtype_alone() -> None:
    base = llama()
    layers = {n: state(m) for n, m in base.named_modules() if isinstance(m, Fp8Linear)}
    base = peft.prepare_model_for_kbit_training(base)
    for name, before in layers.items():
        assert_same_state(base.get_submodule(name), before)
    model = adapted(base, target_modules="all-linear").train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def test_adapters_by_the_methods_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = llama()
    for name in ("a", "b"):
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=RANK), name)
    for name, parameter in model.named_parameters():
        if "lora_B.b" in name:
            parameter.data.normal_(std=0.1)
    model.set_adapter("b")
    with torch.no_grad():
        wanted = model(IDS).logits
        model.disable_adapters()
        assert relative_error(model(IDS).logits, wanted) > 0
        model.enable_adapters()
        model.save_pretrained(tmp_path)
        again = llama()
        again.load_adapter(tmp_path)
        assert_bits_equal(again(IDS).logits, wanted)


def test_a_model_with_adapters_is_converted_around_them() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, 256), nn.Linear(256, SIZE)).bfloat16()
    other = adapted(copy.deepcopy(plain), use_dora=True)
    model, x = adapted(plain), inputs(64)
    y = lora(model)(x)
    report = fp8kit.convert(model)
    assert len(report.converted) == 2
    assert 0 < relative_error(lora(model)(x), y) < 2 * ONE_OPERAND
    with pytest.raises(UnsupportedError, match=r"to_linear\(\)"):
        model.merge_adapter()
    fp8kit.convert(other)
    with pytest.raises(UnsupportedError, match=r"0\.base_layer"):
        other(x)


def test_the_adapter_adds_its_product_to_what_the_layer_computes() -> None:
    model, x = adapted(pair()), inputs()
    layer = lora(model)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.get_base_layer()(x) + x.float() @ a.t() @ b.t() * layer.scaling["default"]
    assert_bits_equal(layer(x), expected.bfloat16())


def test_adapters_of_a_batch() -> None:
    # without rounding of activations, which turns an ulp into a step
    model = adapted(pair("FP8_WEIGHT_ONLY"), "a", "b", target_modules=["0", "1"])
    x, unit = inputs(3), torch.finfo(torch.bfloat16).eps
    with torch.no_grad():
        mixed = model(x, adapter_names=["a", "__base__", "b"])
        for row, name in ((0, "a"), (2, "b")):
            model.set_adapter(name)
            assert relative_error(mixed[row], model(x)[row]) < unit
        with model.disable_adapter():
            plain = model(x)
        assert relative_error(mixed[1], plain[1]) < unit
        assert relative_error(mixed[::2], plain[::2]) > 2 * ONE_OPERAND


def test_a_model_without_its_adapters_is_the_one_before() -> None:
    base = llama()
    model = adapted(copy.deepcopy(base), target_modules="all-linear")
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=IDS).logits
    with torch.no_grad():
        assert relative_error(model(input_ids=IDS).logits, before) > 2 * ONE_OPERAND
        assert_bits_equal(model.unload()(input_ids=IDS).logits, before)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merging_adds_to_the_numbers_and_quantizes_once(scheme: str, safe: bool) -> None:
    model, x = adapted(pair(scheme), "a", "b"), inputs()
    layer = lora(model).get_base_layer()
    before, place, alone = state(layer), layer.codes.data_ptr(), layer(x)
    numbers = fp8kit.dequantize(layer.quantized_weight(), torch.float32)
    deltas = [lora(model).get_delta_weight(name).detach() for name in ("a", "b")]
    model.merge_adapter(["a"], safe_merge=safe)
    with pytest.warns(UserWarning, match="additionally merging b"):
        model.merge_adapter(["b"], safe_merge=safe)
    merged = dense(numbers + deltas[0] + deltas[1], layer.bias)
    wanted = Fp8Linear.from_linear(merged, layer.scheme, layer.input_scale)
    assert_bits_equal(layer.codes, wanted.codes)
    assert_bits_equal(layer.weight_scale, wanted.weight_scale)
    assert layer.codes.data_ptr() == place  # what captured graphs read
    assert_bits_equal(lora(model)(x), wanted(x))
    assert relative_error(lora(model)(x), alone) > 2 * ONE_OPERAND  # more than rounding
    model.unmerge_adapter()
    assert_same_state(layer, before)
    assert layer.codes.data_ptr() == place


def dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias.data
    return linear


def test_the_bias_of_an_adapter_is_merged_and_taken_out() -> None:
    model = adapted(pair(), lora_bias=True)
    layer = lora(model).get_base_layer()
    before = state(layer)
    added = lora(model).lora_B["default"].bias.detach() * lora(model).scaling["default"]
    model.merge_adapter()
    assert_bits_equal(layer.bias, (before["bias"].float() + added).bfloat16())
    model.unmerge_adapter()
    assert_same_state(layer, before)


@pytest.mark.parametrize("calls", [("a", "b", "c"), ("ab", "c"), ("b", "ca")])
def test_biases_of_some_adapters_are_taken_out_however_they_came(calls: tuple[str, ...]) -> None:
    model = adapted(pair(), "a")
    for name in ("b", "c"):  # have biases
        config = peft.LoraConfig(target_modules=["0"], r=RANK, lora_bias=True)
        model.add_adapter(name, config)
        lora(model).lora_B[name].bias.data.fill_(0.5)
    layer = lora(model).get_base_layer()
    before = state(layer)
    for names in calls:
        model.merge_adapter([*names])
    added = sum(lora(model).scaling[name] * 0.5 for name in ("b", "c"))
    assert_bits_equal(layer.bias, (before["bias"].float() + added).bfloat16())
    model.unmerge_adapter()
    assert_same_state(layer, before)


@pytest.mark.parametrize("to_disk", [False, True])
def test_offloaded_layers_are_merged_where_they_are_kept(to_disk: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    here, away, x = adapted(pair()), adapted(pair()), inputs()
    cpu, alone = torch.device("cpu"), here(x)
    if to_disk:
        accelerate.disk_offload(away, tmp_path, cpu)
    else:
        accelerate.cpu_offload(away, cpu)
    here.merge_adapter()
    away.merge_adapter()
    assert_bits_equal(away(x), here(x))
    away.unmerge_adapter()
    assert_bits_equal(away(x), alone)


def test_a_dense_weight_that_was_kept_is_merged_too() -> None:
    model = adapted(pair(weight_storage="keep"))
    layer = lora(model).get_base_layer()
    before, original = state(layer), layer.original_weight
    model.merge_adapter()
    delta = lora(model).get_delta_weight("default")
    wanted = (original.float() + delta).bfloat16()
    assert_bits_equal(layer.to_linear().weight, wanted)
    assert_bits_equal(layer.codes, Fp8Linear.from_linear(dense(wanted)).codes)
    model.unmerge_adapter()
    assert layer.original_weight is original
    assert_same_state(layer, before)


def test_a_kept_weight_that_changes_while_adapters_are_merged_is_quantized_behind() -> None:
    model = adapted(pair(weight_storage="keep"))
    layer = lora(model).get_base_layer()
    original = layer.original_weight
    model.merge_adapter()
    with torch.no_grad():
        original.mul_(-3.0)
    model.unmerge_adapter()
    model(inputs())
    assert_bits_equal(layer.codes, Fp8Linear.from_linear(dense(original)).codes)


def test_unmerging_quantizes_nothing_that_it_then_overwrites() -> None:
    model = adapted(pair(weight_storage="keep"))
    layer = lora(model).get_base_layer()
    before, original = state(layer), layer.original_weight
    model.merge_adapter()
    with torch.inference_mode():
        layer.original_weight = original.clone()  # cannot be quantized: its changes are not counted
    model.unmerge_adapter()
    assert layer.original_weight is original
    assert_same_state(layer, before)


class Full(torch.overrides.TorchFunctionMode):
    """Memory that is full when a tensor is copied into another for the ``room``-th time."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.room -= func is Tensor.copy_
        if func is Tensor.copy_ and self.room == 0:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("storage", ["discard", "keep"])
def test_a_merge_that_fails_can_be_unmerged_or_repeated(storage: str, room: int) -> None:
    model = adapted(pair(weight_storage=storage))
    layer, x = lora(model).get_base_layer(), inputs()
    before, original, y = state(layer), layer.original_weight, model(x)
    with Full(room) as memory:
        try:
            model.merge_adapter()
        except torch.OutOfMemoryError:
            assert memory.room == 0
    if lora(model).merged:
        model.unmerge_adapter()
    assert layer.original_weight is original
    assert_same_state(layer, before)
    assert_bits_equal(model(x), y)
    expected = adapted(pair(weight_storage=storage))
    expected.merge_adapter()
    model.merge_adapter()
    assert_same_state(layer, state(lora(expected).get_base_layer()))


def test_switching_adapters_off_takes_merged_ones_out() -> None:
    base, x = pair(), inputs()
    y = base(x)
    model = adapted(base)
    model.merge_adapter()
    assert relative_error(model(x), y) > 0.05
    with model.disable_adapter():
        assert_bits_equal(model(x), y)
    model.unmerge_adapter()


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_whole])
def test_a_copy_of_a_merged_model_can_be_unmerged(copied: Callable[[Any], Any]) -> None:
    model = adapted(pair())
    before = state(lora(model).get_base_layer())
    model.merge_adapter()
    twin = copied(model)
    assert_bits_equal(twin(inputs()), model(inputs()))
    twin.unmerge_adapter()
    assert_same_state(lora(twin).get_base_layer(), before)


def test_a_merged_model_takes_adapters_and_no_other_base() -> None:
    model, other = adapted(pair()), adapted(pair("FP8_DYNAMIC"))
    with torch.no_grad():
        lora(other).get_base_layer().weight_scale.mul_(2)
    layer, before = lora(model).get_base_layer(), state(lora(model).get_base_layer())
    model.merge_adapter()
    adapters = {n: t for n, t in other.state_dict().items() if "lora_" in n}
    model.load_state_dict(adapters, strict=False)
    with pytest.raises(
        RuntimeError, match=r"0\.base_layer\.weight arrives while default are merged"
    ):
        model.load_state_dict(other.state_dict())
    with pytest.raises(fp8kit.CheckpointError, match=r"weight arrives while default are merged"):
        fp8kit.load_weights(model, other.state_dict())
    model.unmerge_adapter()
    assert_same_state(layer, before)
    fp8kit.load_weights(model, other.state_dict())
    assert_same_state(layer, state(lora(other).get_base_layer()))
    model.load_state_dict(other.state_dict())
    assert_same_state(layer, state(lora(other).get_base_layer()))


@pytest.mark.parametrize("storage", ["discard", "keep"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8", "MXFP8"])
def test_a_merged_layer_may_change_its_encoding(scheme: str, storage: str) -> None:
    model, other = (adapted(pair(scheme, weight_storage=storage), "a", "b") for _ in range(2))
    layer, twin = lora(model).get_base_layer(), lora(other).get_base_layer()
    before = fp8kit.dequantize(layer.quantized_weight())
    for each in (model, other):
        each.merge_adapter(["a"])
    fp8kit.recode(model, torch.float8_e4m3fnuz)
    for each in (model, other):
        each.merge_adapter(["b"])
    numbers = (fp8kit.dequantize(each.quantized_weight()) for each in (layer, twin))
    assert_bits_equal(*numbers)
    model.unmerge_adapter()
    assert layer.codes.dtype == torch.float8_e4m3fnuz
    assert_bits_equal(fp8kit.dequantize(layer.quantized_weight()), before)


def test_a_bias_that_no_adapter_merges_may_change_meanwhile() -> None:
    model = adapted(pair(), "a", "b", lora_bias=False)
    layer = lora(model).get_base_layer()
    model.merge_adapter(["a"])
    fp8kit.load_weights(model, {"base_model.model.0.base_layer.bias": torch.ones(256)})
    model.merge_adapter(["b"])
    model.unmerge_adapter()
    assert_bits_equal(layer.bias, torch.ones(256).bfloat16())


def test_a_bias_that_unmerging_would_overwrite_is_refused() -> None:
    model = adapted(pair(), "a", lora_bias=True)
    layer, base = lora(model).get_base_layer(), "base_model.model.0.base_layer"
    before, given = layer.bias.clone(), {f"{base}.bias": torch.ones(256)}
    model.merge_adapter(["a"])
    with pytest.raises(fp8kit.CheckpointError, match=r"base_layer\.bias arrives while a are"):
        fp8kit.load_weights(model, given)
    with pytest.raises(RuntimeError, match=r"base_layer\.bias arrives while a are merged"):
        model.load_state_dict(given, strict=False)
    model.unmerge_adapter()
    assert_bits_equal(layer.bias, before)
    fp8kit.load_weights(model, given)
    assert_bits_equal(layer.bias, torch.ones(256).bfloat16())


@pytest.mark.parametrize("dora", [False, True])
def test_a_layer_that_became_dense_takes_adapters_as_peft_has_it(dora: bool) -> None:
    model = adapted(pair(), use_dora=dora)
    lora(model).base_layer = layer = lora(model).get_base_layer().to_linear()
    expected, x = adapted(nn.Sequential(copy.deepcopy(layer)), use_dora=dora), inputs()
    lora(model).load_state_dict(lora(expected).state_dict())
    assert_bits_equal(lora(model)(x), expected(x))
    for each in (model, expected):
        each.merge_adapter()
    assert_bits_equal(lora(model)(x), expected(x))
    for each in (model, expected):
        each.unmerge_adapter()
    assert_bits_equal(layer.weight, lora(expected).get_base_layer().weight)
    model.add_adapter("more", peft.LoraConfig(target_modules=["0"], init_lora_weights="pissa"))
    assert "more" in lora(model).lora_A


def test_a_merged_layer_that_became_dense_says_what_to_do() -> None:
    model = adapted(pair())
    layer, before = lora(model).get_base_layer(), state(lora(model).get_base_layer())
    model.merge_adapter()
    lora(model).base_layer = layer.to_linear()
    with pytest.raises(UnsupportedError, match=r"default were merged into an Fp8Linear"):
        model.unmerge_adapter()
    lora(model).base_layer = layer
    model.unmerge_adapter()
    assert_same_state(layer, before)


@pytest.mark.parametrize("safe", [False, True])
def test_what_is_not_finite_is_never_merged(safe: bool) -> None:
    model = adapted(pair())
    before = state(lora(model).get_base_layer())
    lora(model).lora_B["default"].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"NaN or infinities.*the layer is as it was"):
        model.merge_adapter(safe_merge=safe)
    assert not lora(model).merged
    assert_same_state(lora(model).get_base_layer(), before)


def test_a_sum_that_the_kept_weight_cannot_hold_is_not_merged() -> None:
    model = adapted(pair(weight_storage="keep").half())
    layer = lora(model).get_base_layer()
    layer.original_weight = torch.full((256, SIZE), 6e4, dtype=torch.float16)
    model(inputs().half())
    before = state(layer)
    lora(model).lora_B["default"].weight.data.fill_(1e5)
    with pytest.raises(ValueError, match=r"NaN or infinities.*in torch\.float16"):
        model.merge_adapter()
    assert_same_state(layer, before)


def test_a_merged_model_is_a_model_of_fp8_layers(tmp_path: Path) -> None:
    model = adapted(llama(), target_modules="all-linear")
    model.merge_adapter()
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    assert sum(isinstance(m, Fp8Linear) for m in merged.modules()) == 14
    merged.save_pretrained(tmp_path)
    with torch.no_grad():
        assert_bits_equal(merged(input_ids=IDS).logits, wanted)
        assert_bits_equal(fp8kit.load(tmp_path)(input_ids=IDS).logits, wanted)


def test_dora_is_that_of_the_dequantized_weight() -> None:
    base, x = pair("FP8_WEIGHT_ONLY"), inputs(64)
    plain = nn.Sequential(*(layer.to_linear() for layer in base))
    ours, theirs = (adapted(m, use_dora=True) for m in (base, plain))
    adapters = {n: t for n, t in ours.state_dict().items() if "lora_" in n}
    theirs.load_state_dict(adapters, strict=False)
    layer = lora(ours).get_base_layer()
    magnitude = lora(ours).lora_magnitude_vector["default"].weight
    assert_bits_equal(magnitude, lora(theirs).lora_magnitude_vector["default"].weight)
    magnitude.data.mul_(1.25)
    lora(theirs).lora_magnitude_vector["default"].weight.data.mul_(1.25)
    unit = torch.finfo(torch.bfloat16).eps
    assert relative_error(ours(x), theirs(x)) < 2 * unit
    before, y = state(layer), lora(ours)(x)
    summed = layer.to_linear(torch.float32).weight + lora(ours).get_delta_weight("default")
    wanted = summed * (magnitude.float() / summed.norm(dim=1)).view(-1, 1)
    ours.merge_adapter()
    merged = layer.to_linear(torch.float32).weight
    requantized = Fp8Linear.from_linear(dense(wanted.detach()), "FP8_WEIGHT_ONLY")
    assert relative_error(merged, requantized.to_linear(torch.float32).weight) < unit
    ours.unmerge_adapter()
    assert_same_state(layer, before)
    assert_bits_equal(lora(ours)(x), y)


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", "mica"])
def test_initializations_from_the_weight_are_refused(init: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"init_lora_weights='{init}'.*weights True"):
        adapted(pair(), init_lora_weights=init)


@pytest.mark.parametrize("on_meta", [False, True])
def test_an_adapter_that_cuts_the_weight_is_refused_before_it_does(on_meta: bool) -> None:
    config = peft.LoraConfig(target_modules=["0"], kasa_config=peft.KasaConfig())
    with pytest.raises(UnsupportedError, match=r"kasa_config on an Fp8Linear.*dense model"):
        peft.get_peft_model(pair(), config, low_cpu_mem_usage=on_meta)


def test_adapters_of_other_kinds_that_would_be_drawn_in_fp8_are_refused() -> None:
    config = peft.TinyLoraConfig(target_modules=["0"], init_weights="uniform")
    with pytest.raises(UnsupportedError, match=r"check_uniform_bounds.*takes its dtype"):
        peft.get_peft_model(pair(), config)


@pytest.mark.parametrize(
    "made_in_the_dtype_of_the_weight",
    [
        {"velora_config": peft.VeloraConfig(num_groups=2, init_type="random")},
        {"use_bdlora": peft.BdLoraConfig(target_modules_bd_a=["0"], nblocks=1)},
    ],
    ids=["velora", "bdlora"],
)
def test_adapters_that_would_be_drawn_in_fp8_are_refused(
    made_in_the_dtype_of_the_weight: dict[str, Any],
) -> None:
    with pytest.raises(UnsupportedError, match=r"takes its dtype. Use LoRA or DoRA"):
        adapted(pair(), **made_in_the_dtype_of_the_weight)


@pytest.mark.parametrize("init", [True, "gaussian", "eva"])
def test_other_initializations_are_those_of_peft(init: Any) -> None:
    model = peft.get_peft_model(
        pair(), peft.LoraConfig(target_modules=["0"], init_lora_weights=init)
    )
    assert_bits_equal(model(inputs()), pair()(inputs()))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.zeros(2, SIZE, SIZE, dtype=torch.float8_e4m3fn)
        self.gate_up_proj = nn.Parameter(codes, requires_grad=False)


@pytest.mark.parametrize(
    ("model", "name"),
    [(lambda: nn.ModuleDict({"e": Experts()}), "e.gate_up_proj"), (pair, "0.weight")],
)
def test_adapters_of_fp8_parameters_are_refused(model: Callable[[], Any], name: str) -> None:
    fp8kit.convert(nn.Sequential(nn.Linear(SIZE, SIZE)))
    config = peft.LoraConfig(target_modules=[], target_parameters=[name], r=RANK)
    with pytest.raises(UnsupportedError, match=r"which is FP8.*it would vanish.*target_modules"):
        peft.get_peft_model(model(), config)


@pytest.mark.parametrize("name", ["up_proj", "mlp"])
def test_training_a_copy_of_fp8_layers_is_refused(name: str) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
    with pytest.raises(
        UnsupportedError, match=r"modules_to_save.*layers\.0\.mlp\.up_proj.*exclude"
    ):
        peft.get_peft_model(llama(), config)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(llama(), config)
    model(IDS, labels=IDS).loss.backward()
    assert any(p.grad is not None for n, p in model.named_parameters() if "modules_to_save" in n)


def test_all_linear_means_experts_too_and_says_so() -> None:
    model = tiny("Mixtral")
    fp8kit.convert(model)
    with pytest.raises(UnsupportedError, match=r"'all-linear'.*Name other layers"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=RANK))
    model = tiny("Mixtral")
    fp8kit.convert(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=RANK))
    assert any("lora_A" in name for name, _ in tuned.named_modules())


OTHERS = {
    "IA3": {"feedforward_modules": []},
    "LoHa": {},
    "LoKr": {},
    "AdaLora": {"total_step": 10},
    "Vera": {},
    "BOFT": {},
    "C3A": {"block_size": 32, "init_weights": False},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_train_and_are_not_merged(kind: str) -> None:
    config = getattr(peft, f"{kind}Config")(target_modules=["0"], **OTHERS[kind])
    base = pair()
    before = state(base[0])
    model = peft.get_peft_model(base, config)
    model(inputs()).float().sum().backward()
    assert any(p.grad is not None for p in model.parameters())
    with pytest.raises(UnsupportedError, match=r"to_linear\(\)"):
        model.merge_adapter()
    assert_same_state(lora(model).get_base_layer(), before)


def test_an_adaption_prompt_of_the_dtype_of_codes_is_refused() -> None:
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)
    model = transformers.LlamaForCausalLM(config)
    fp8kit.convert(model)
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    with pytest.raises(UnsupportedError, match=r"needs numbers.*attach the adapter to the dense"):
        peft.get_peft_model(model, config)


def test_scales_of_unilora_are_not_rounded_to_fp8() -> None:
    config = peft.UniLoraConfig(target_modules=["0"], theta_d_length=101)

    def scales(base: nn.Module) -> Tensor:
        torch.manual_seed(3)
        held: Tensor = lora(peft.get_peft_model(base, config)).unilora_scales_A["default"]
        return held

    assert_bits_equal(scales(pair()), scales(nn.Sequential(pair()[0].to_linear())))


def test_swapping_an_adapter_compiles_nothing(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x, wanted = inputs(), []
    for number in range(2):
        model = adapted(pair(), r=RANK * (1 + number), lora_alpha=3 + number)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(1 + number)
        model.save_pretrained(tmp_path / str(number))
        with torch.no_grad():
            wanted.append(model(x))
    model = peft.PeftModel.from_pretrained(pair(), tmp_path / "0").eval()
    prepare_model_for_compiled_hotswap(model, target_rank=2 * RANK)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(x), wanted[0]) < torch.finfo(torch.bfloat16).eps
        hotswap_adapter(model, tmp_path / "1", adapter_name="default", torch_device="cpu")
        assert relative_error(compiled(x), wanted[1]) < torch.finfo(torch.bfloat16).eps
    assert counter.frame_count == 1


def test_peft_may_be_imported_after_the_conversion() -> None:
    code = (
        "import torch, fp8kit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(128, 128))\n"
        "fp8kit.convert(model)\n"
        "import peft\n"
        "tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=['0']))\n"
        "tuned.merge_adapter()\n"
        "assert type(tuned.merge_and_unload()[0]) is fp8kit.Fp8Linear\n"
    )
    fresh.run(code)


def test_an_old_peft_is_refused(outdate: Callable[[ModuleType], None]) -> None:
    outdate(peft)
    with pytest.raises(UnsupportedError, match=r"PEFT is 0\.1\.0.*written for 0\.21"):
        plugin.patch()
