"""MXFP8 layers without MX tensor cores: rebased, reported, and saved as the original MXFP8."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.formats import MX, MX_FORMS, SCHEMES, QTensor, Scheme
from fp8kit.matmul import torch_native, triton_gemm
from fp8kit.matmul.problem import linear_problem
from fp8kit.modules.hooks import become
from fp8kit.modules.mx_forms import form_on, set_forms, stored_weight
from interrupts import interrupted
from mx_checkpoints import K, Model, N, directory, outlying, trained
from numerics import ONE_OPERAND, assert_bits_equal, assert_scheme_error, relative_error


@pytest.mark.parametrize(
    ("capability", "form"),
    [
        (None, "MXFP8_ROW"), ((8, 0), "MXFP8_ROW_WEIGHT_ONLY"),
        ((8, 6), "MXFP8_ROW_WEIGHT_ONLY"), ((8, 9), "MXFP8_ROW"), ((9, 0), "MXFP8_ROW"),
        ((10, 0), "MXFP8"), ((12, 0), "MXFP8"),
    ],
)  # fmt: skip
def test_the_device_decides_unless_a_form_is_named(
    capability: tuple[int, int] | None, form: str
) -> None:
    assert form_on(SCHEMES["MXFP8"], capability).name == form
    experts = form_on(SCHEMES["MXFP8"], capability, experts=True).name
    assert experts == ("MXFP8_ROW" if form == "MXFP8" else form)  # no kernel of experts reads MX
    for named in (*MX_FORMS.values(), SCHEMES["FP8_DYNAMIC"]):
        assert form_on(named, capability) == named


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("m", [1, 4096])
def test_tensor_cores_compute_the_form_of_every_device(capability: tuple[int, int], m: int) -> None:
    form = form_on(SCHEMES["MXFP8"], capability)
    problem = linear_problem((N, K), form, torch.bfloat16, torch.device("cpu"), False, m)
    problem = replace(problem, device_type="cuda", capability=capability)
    many = form.activation is None and m > 64  # decodes its weight once, for a dense product
    assert many or None in (torch_native.supports(problem), triton_gemm.supports(problem))


def test_convert_rebases_and_tells_it() -> None:
    dense, model = Model(), Model()
    x = torch.randn(9, K)
    plan = fp8kit.plan(model, "MXFP8", exclude=[])
    assert "MXFP8 weights rebased to scales per row" in str(plan)
    report = plan.apply()
    assert model.up.scheme.name == "MXFP8_ROW"
    assert model.up.weight_scale.shape == (N, 1)
    assert model.up.weight_exponents.dtype == torch.uint8
    held = sum(t.nbytes for t in model.state_dict().values())
    assert report.model_bytes_after == held
    (up, _) = report.converted
    assert (
        up.reason == f"MXFP8 rebased to one power of two per row, which changes 0 of {N * K} values"
    )
    assert "rebased to one power of two per row" in str(fp8kit.explain(model))
    wanted = fp8kit.dequantize(fp8kit.quantize(dense.up.weight.detach(), MX, role="weight"))
    assert_bits_equal(model.up.to_linear(torch.float32).weight.detach(), wanted)
    assert_scheme_error(model.up(x), dense.up(x), "FP8_DYNAMIC")


AS_FP8 = {
    "FP8_DYNAMIC": "MXFP8_ROW",
    "FP8_BLOCK": "MXFP8_BLOCK",
    "FP8_WEIGHT_ONLY": "MXFP8_ROW_WEIGHT_ONLY",
}


@pytest.mark.parametrize("form", ["MXFP8", *MX_FORMS, *AS_FP8])
def test_what_is_loaded_is_saved_bit_for_bit(form: str, tmp_path: Path) -> None:
    source = directory(tmp_path / "a", trained())
    model = fp8kit.load(source, Model(), scheme=form)
    assert model.up.scheme.name == {"MXFP8": "MXFP8_ROW", **AS_FP8}.get(form, form)
    assert ("which changes 0 of" in model.up.form_note) == model.up.scheme.rebased
    assert model(torch.randn(3, K)).isfinite().all()
    model.bfloat16()
    fp8kit.save(model, tmp_path / "b", target="sglang")
    back = fp8kit.load(tmp_path / "b", Model(), scheme="MXFP8_EMULATED")
    for name, q in trained().items():
        assert_bits_equal(back.get_submodule(name).weight_scale.detach(), q.scale)
        codes = stored_weight(back.get_submodule(name)).data
        if form in ("MXFP8_BLOCK", "FP8_BLOCK"):  # a few of its values lose their last bits
            assert (codes.view(torch.uint8) != q.data.view(torch.uint8)).sum() < 20
        else:
            assert_bits_equal(codes, q.data)


def test_a_round_trip_gives_the_same_file(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", trained())
    fp8kit.save(fp8kit.load(source, Model()), tmp_path / "b", target="sglang")
    again = fp8kit.load(tmp_path / "b", Model())
    fp8kit.save(again, tmp_path / "c", target="sglang")
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("b", "c")]
    assert files[0] == files[1]
    first, second = (open_checkpoint(tmp_path / d) for d in ("a", "b"))
    assert first.spec.scheme == second.spec.scheme == SCHEMES["MXFP8"]
    for name in first.tensors:
        assert_bits_equal(first.read(name), second.read(name))


def test_weights_that_would_lose_too_much_fall_back_by_name(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", outlying("columns"))
    with pytest.warns(UserWarning, match="up: one power of two per row would change"):
        model = fp8kit.load(source, Model())
    assert (model.up.scheme.name, model.down.scheme.name) == ("MXFP8_BLOCK", "MXFP8_ROW")
    assert model(torch.randn(2, K)).isfinite().all()
    source = directory(tmp_path / "b", outlying("everywhere"))
    with pytest.warns(UserWarning, match="up: one power of .*it stays MX, with activations in"):
        model = fp8kit.load(source, Model())
    assert model.up.scheme.name == "MXFP8_WEIGHT_ONLY"
    assert "stays MX" in str(fp8kit.explain(model))


def wild() -> Model:
    model = Model()
    model.up.weight.data.copy_(fp8kit.dequantize(outlying("columns")["up"]))
    return model


@pytest.mark.parametrize("form", ["MXFP8_ROW", "MXFP8_ROW_WEIGHT_ONLY"])
def test_a_form_that_is_named_is_counted_and_falls_back_as_well(form: str, tmp_path: Path) -> None:
    wanted = "MXFP8_BLOCK" if form == "MXFP8_ROW" else "MXFP8_WEIGHT_ONLY"
    model = wild()
    report = fp8kit.convert(model, form, exclude=[])
    assert (model.up.scheme.name, model.down.scheme.name) == (wanted, form)
    assert "one power of two per row would change" in str(report)
    assert "which changes 0 of" in report.converted[1].reason
    tensors = {n: t.detach() for n, t in wild().state_dict().items()}
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    write_checkpoint(tmp_path / "a", layout, tensors.items(), config={})
    with pytest.warns(UserWarning, match="up: one power of two per row would change"):
        loaded = fp8kit.load(tmp_path / "a", Model(), scheme=form, exclude=[])
    assert (loaded.up.scheme.name, loaded.down.scheme.name) == (wanted, form)


def test_a_weight_that_does_not_fit_the_form_of_its_layer_is_named() -> None:
    model = Model()
    fp8kit.convert(model, "MXFP8", exclude=[], weight_storage="keep")
    dense = wild().up.weight.detach()
    said = r"up.weight in the form MXFP8_ROW would change \d+ of"
    with pytest.warns(UserWarning, match=said):
        model.load_state_dict({"up.weight": dense}, strict=False)
    with pytest.warns(UserWarning, match=said):
        fp8kit.load_weights(model, [("up.weight", dense)])
    model = Model()
    fp8kit.convert(model, "MXFP8", exclude=[], weight_storage="keep")
    model.up.original_weight.copy_(dense)
    with pytest.warns(UserWarning, match=said):
        model.up.quantized_weight()


def test_rebased_layers_move_copy_and_reload() -> None:
    model = Model()
    fp8kit.convert(model, "MXFP8", exclude=[])
    state = {n: t.clone() for n, t in model.state_dict().items()}
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model).half().float()))
    twin.load_state_dict(state)
    x = torch.randn(2, K)
    assert_bits_equal(twin(x), model(x))
    place = model.up.weight.data_ptr()
    q = trained()["up"]
    model.up.load_state_dict({"weight": q.data, "weight_scale": q.scale, "bias": state["up.bias"]})
    assert model.up.weight.data_ptr() == place
    assert_bits_equal(stored_weight(model.up).data, q.data)
    dense = torch.randn(N, K)
    model.up.load_state_dict({"weight": dense, "bias": state["up.bias"]})
    wanted = fp8kit.quantize(dense, MX, role="weight")
    assert_bits_equal(fp8kit.dequantize(model.up.quantized_weight()), fp8kit.dequantize(wanted))
    fp8kit.load_weights(model, [("up.weight", state["up.weight"]), ("up.weight_scale",
                        state["up.weight_scale"]), ("up.weight_exponents",
                        state["up.weight_exponents"])])  # fmt: skip
    assert_bits_equal(model.up.weight_scale.detach(), state["up.weight_scale"])
    assert_bits_equal(model.up.codes.detach(), state["up.weight"])


def test_codes_that_were_changed_without_their_exponents_are_not_saved(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.up.weight[:, :64] *= 64
    fp8kit.convert(model, "MXFP8_ROW", exclude=[])
    model.up.weight = torch.nn.Parameter(torch.cat(model.up.weight.chunk(2, 1)[::-1], 1), False)
    with pytest.raises(ValueError, match=r"weight of up has \d+ codes that do not fit"):
        fp8kit.save(model, tmp_path / "a")
    dense = model.up.to_linear().weight.detach()
    model.up.load_state_dict({"weight": dense, "bias": model.up.bias})
    assert_bits_equal(fp8kit.dequantize(stored_weight(model.up)), dense)
    fp8kit.save(model, tmp_path / "b")


def test_a_kept_dense_weight_is_followed() -> None:
    model = Model()
    fp8kit.convert(model, "MXFP8", exclude=[], weight_storage="keep")
    model.up.original_weight.mul_(3)
    wanted = fp8kit.quantize(model.up.original_weight, MX, role="weight")
    assert_bits_equal(stored_weight(model.up).data, wanted.data)


def test_only_mx_weights_are_rebased() -> None:
    with pytest.raises(ValueError, match="rebased to rows or blocks"):
        Scheme("own", MX, MX, rebased=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("form", ["MXFP8", *MX_FORMS])
def test_a_layer_made_by_hand_is_filled_by_load_state_dict(form: str, device: str) -> None:
    def filled(state: dict[str, torch.Tensor]) -> fp8kit.Fp8Linear:
        layer = fp8kit.Fp8Linear(K, N, False, form, device=device, dtype=torch.float32)
        layer.load_state_dict(state, assign=device == "meta")
        assert layer.scheme.name == form
        return layer

    q = trained()["up"]
    layer = filled({"weight": q.data, "weight_scale": q.scale})
    assert_bits_equal(stored_weight(layer).data, q.data)
    assert_bits_equal(stored_weight(layer).scale, q.scale)
    x = torch.randn(3, K)
    y = layer(x)
    error = relative_error(y, x @ fp8kit.dequantize(q).T)  # activations alone are rounded
    assert error < 1e-5 if layer.scheme.activation is None else 0.5 < error / ONE_OPERAND < 1.5
    assert_bits_equal(filled(layer.state_dict())(x), y)
    values = fp8kit.dequantize(q)  # of a dense weight, quantized to MX as it arrives
    wanted = fp8kit.dequantize(fp8kit.quantize(values, MX, role="weight"))
    dense = filled({"weight": values})
    assert_bits_equal(fp8kit.dequantize(stored_weight(dense)), wanted)


@pytest.mark.parametrize(
    ("form", "held", "said"),
    [
        ("MXFP8", "MXFP8_ROW", "weight_exponents, and the layer is MXFP8. MX weights that were"),
        ("MXFP8_WEIGHT_ONLY", "MXFP8_BLOCK", "Make the layer with the scheme of the one that was"),
        ("MXFP8_ROW", "FP8_DYNAMIC", "no weight_exponents, and the layer is MXFP8_ROW. It holds"),
        ("MXFP8_BLOCK", "FP8_BLOCK", "no MX scales and no weight_exponents"),
        ("MXFP8", "FP8_DYNAMIC", "The scale must be torch.uint8"),
    ],
)
def test_what_another_form_holds_is_refused(form: str, held: str, said: str) -> None:
    state = fp8kit.Fp8Linear.from_linear(Model().up, held).state_dict()
    layer = fp8kit.Fp8Linear(K, N, True, form, dtype=torch.float32)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=said):
        layer.load_state_dict(state)
    for name, tensor in before.items():
        assert_bits_equal(layer.state_dict()[name], tensor)


def with_nan_group() -> QTensor:
    q = trained()["up"]
    q.scale[3, 2] = 255
    return q


@pytest.mark.parametrize("form", ["MXFP8", *MX_FORMS])
@pytest.mark.filterwarnings("ignore:.*would lose the codes of NaN groups")
def test_groups_of_nan_stay_nan_in_every_form(form: str) -> None:
    q = with_nan_group()
    layer = fp8kit.Fp8Linear(K, N, False, form, dtype=torch.float32)
    layer.load_state_dict({"weight": q.data, "weight_scale": q.scale})
    nan = fp8kit.dequantize(q).isnan()
    assert int(nan.sum()) == 32
    for held in (layer.quantized_weight(), stored_weight(layer)):
        assert torch.equal(fp8kit.dequantize(held).isnan(), nan)
    assert_bits_equal(stored_weight(layer).scale, q.scale)
    rows = layer(torch.randn(2, K)).isnan().all(0)
    assert rows.nonzero().tolist() == [[3]]


def test_a_weight_with_groups_of_nan_is_not_rebased() -> None:
    q = with_nan_group()
    layer = fp8kit.Fp8Linear.from_quantized(q, scheme="MXFP8")
    (told,) = set_forms({"up": layer})
    assert told.startswith("up: one power of two per row would lose the codes of NaN groups")
    assert layer.scheme.name == "MXFP8_WEIGHT_ONLY"
    assert_bits_equal(stored_weight(layer).data, q.data)


def test_checkpoints_with_groups_of_nan_are_refused_by_name(tmp_path: Path) -> None:
    said = "up.weight_scale_inv holds NaN"
    with pytest.raises(fp8kit.CheckpointError, match=said):
        directory(tmp_path / "a", trained() | {"up": with_nan_group()})
    source = directory(tmp_path / "b", trained())
    file = source / "model.safetensors"
    tensors = load_file(file) | {"up.weight_scale_inv": with_nan_group().scale}
    save_file(tensors, file)
    with pytest.raises(fp8kit.CheckpointError, match=said):
        fp8kit.load(source, Model())
    for scheme in (None, "FP8_DYNAMIC"):
        with pytest.raises(fp8kit.CheckpointError, match=said):
            fp8kit.convert_checkpoint(source, tmp_path / "c", scheme=scheme)


class Interrupted(fp8kit.Fp8Linear):
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name == "weight_scale" and "weight_scale" in self._parameters:
            raise KeyboardInterrupt
        super().register_parameter(name, param)


def test_an_interrupt_leaves_no_codes_with_scales_of_others() -> None:
    dense = torch.nn.Linear(128, 96)
    dense.weight.data[:, :32] *= 8
    layer = fp8kit.Fp8Linear.from_linear(dense, "MXFP8")
    value = fp8kit.dequantize(layer.quantized_weight())
    layer.__class__ = Interrupted
    with contextlib.suppress(KeyboardInterrupt):
        set_forms({"layer": layer})
    assert relative_error(fp8kit.dequantize(layer.quantized_weight()), value) < 0.01


def test_an_interrupted_conversion_leaves_layers_in_their_form() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    assert interrupted(lambda: fp8kit.convert(model, "MXFP8"), become, visit=2)
    assert str(model[0].scheme) == "MXFP8_ROW"
    assert type(model[1]) is torch.nn.Linear
