"""Fused norms and activations give the codes of the public functions, also when replayed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import fused
from fp8kit.formats import Scheme
from fp8kit.modules.activation_formula import activation_codes
from fp8kit.modules.codes_calls import quantize_options
from fp8kit.modules.fused_producers import FusedGatedMlp
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.ops.operators import RowCodes
from fp8kit.runtime.replay_cache import MOST_KEYS, ReplayCache
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install
from registered_calls import RegisteredCalls

K = 256
SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK")
BLOCKS = Scheme.of("FP8_BLOCK")
UE8M0 = Scheme("ue8m0", fp8kit.BLOCK, fp8kit.GROUP128, ue8m0=True)
FORMULAS = {
    "llama": NormFormula("rms_norm", 1e-6),
    "gemma": NormFormula("rms_norm", 1e-6, 1.0, "once"),
    "layer": NormFormula("layer_norm", 1e-5),
}


@pytest.fixture
def cpu_backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


def norm_of(name: str, device: str = "cpu") -> nn.Module:
    made = nn.LayerNorm(K) if name == "layer" else nn.RMSNorm(K)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made.to(device, torch.bfloat16).requires_grad_(False)


def x_of(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*(shape or (2, 3, K)), dtype=torch.bfloat16, device=device)


def assert_codes(codes: RowCodes, q: fp8kit.QTensor) -> None:
    rows = q.data.shape[:-1].numel()
    assert codes.shape == q.shape
    assert_bits_equal(codes.data, q.data.reshape(rows, -1))
    assert_bits_equal(codes.scale, q.scale.reshape(rows, -1))
    groups = codes.scale.shape[1]
    assert groups == 1 or rows == 1 or codes.scale.stride() == (1, -(-rows // 4) * 4)


def quantized(formula: NormFormula, x: Tensor, norm: nn.Module, scheme: Scheme) -> fp8kit.QTensor:
    """Compute the codes of a norm by the public functions, which record nothing."""
    weight, how = norm._parameters.get("weight"), quantize_options(scheme)
    if formula.kind == "layer_norm":
        bias = norm._parameters.get("bias")
        return fused.layer_norm_quantize(x, weight, bias, formula.eps, **how)
    assert weight is not None
    settings = {"weight_offset": formula.weight_offset, "rounding": formula.rounding}
    return fused.rms_norm_quantize(x, weight, formula.eps, **settings, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("scheme", [*SCHEMES, UE8M0], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_norms_are_recorded(
    name: str, scheme: str | Scheme, rows: int, cpu_backends: CpuBackends
) -> None:
    formula, norm, recordings = FORMULAS[name], norm_of(name), ReplayCache()
    scheme = Scheme.of(scheme)
    for turn in range(5):
        x = x_of(1, rows, K)
        cpu_backends.calls.clear()
        codes = formula.codes((x,), norm, scheme).run(recordings)[0]
        assert cpu_backends.calls == ([] if turn > 1 else ["norm"])
        assert_codes(codes, quantized(formula, x, norm, scheme))
        assert codes.dtype == x.dtype


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_sums_and_their_norms_are_recorded(
    name: str, scheme: str, cpu_backends: CpuBackends
) -> None:
    formula, norm, recordings, made = (
        FORMULAS[name],
        norm_of(name),
        ReplayCache(),
        Scheme.of(scheme),
    )
    for turn in range(5):
        x, residual = x_of(), x_of()
        cpu_backends.calls.clear()
        codes, (total,) = formula.codes((x, residual), norm, made).run(recordings)
        assert cpu_backends.calls == ([] if turn > 1 else ["norm"])
        assert_bits_equal(total, x + residual)
        assert total.is_contiguous()
        assert_codes(codes, quantized(formula, x + residual, norm, made))


def test_a_tensor_is_added_to_itself(cpu_backends: CpuBackends) -> None:
    norm, scheme = norm_of("llama"), BLOCKS
    for distinct in (True, False):
        recordings = ReplayCache()
        for turn in range(6):
            x = x_of()
            residual = x_of() if distinct == (turn < 3) else x
            codes, (total,) = FORMULAS["llama"].codes((x, residual), norm, scheme).run(recordings)
            assert_bits_equal(total, x + residual)
            assert_codes(codes, quantized(FORMULAS["llama"], total, norm, scheme))


def test_a_tensor_added_to_itself_does_not_keep_others_from_recordings(
    cpu_backends: CpuBackends,
) -> None:
    norm, scheme, recordings = norm_of("llama"), BLOCKS, ReplayCache()
    x = x_of()
    for _ in range(3):
        FORMULAS["llama"].codes((x, x), norm, scheme).run(recordings)
    assert not recordings
    for _ in range(3):
        cpu_backends.calls.clear()
        FORMULAS["llama"].codes((x_of(), x_of()), norm, scheme).run(recordings)
    assert cpu_backends.calls == []


def test_a_weight_with_gaps_is_another_weight(cpu_backends: CpuBackends) -> None:
    norm, scheme, recordings = norm_of("layer"), BLOCKS, ReplayCache()
    both = torch.randn(2 * K, dtype=torch.bfloat16)
    norm.weight.data = both[:K]
    for _ in range(3):
        FORMULAS["layer"].codes((x_of(),), norm, scheme).run(recordings)[0]
    norm.weight.data = both[::2]  # from the same address, in the same shape
    x = x_of()
    assert_codes(
        FORMULAS["layer"].codes((x,), norm, scheme).run(recordings)[0],
        quantized(FORMULAS["layer"], x, norm, scheme),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", ["alone", "halves", "apart"])
def test_activations_are_recorded(
    kind: str, gated: str, scheme: str, cpu_backends: CpuBackends
) -> None:
    recordings, made = ReplayCache(), Scheme.of(scheme)
    for turn in range(5):
        gate, up = x_of(1, 5, 2 * K).chunk(2, -1) if gated == "halves" else (x_of(), x_of())
        up = None if gated == "alone" else up
        cpu_backends.calls.clear()
        codes = activation_codes(kind, gate, up, made).run(recordings)[0]
        assert cpu_backends.calls == ([] if turn > 1 else ["activate"])
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        if kind == "silu":
            q = fused.silu_mul_quantize(gate, up, **quantize_options(made))
        elif up is None:
            q = fused.gelu_quantize(gate, approximate, **quantize_options(made))
        else:
            q = fused.gelu_mul_quantize(gate, up, approximate, **quantize_options(made))
        assert_codes(codes, q)


def recorded_norm(backends: CpuBackends) -> tuple[nn.Module, ReplayCache]:
    norm, recordings = norm_of("layer"), ReplayCache()
    for _ in range(3):
        FORMULAS["layer"].codes((x_of(),), norm, BLOCKS).run(recordings)[0]
    backends.calls.clear()
    return norm, recordings


def scaled_in_place(norm: nn.Module) -> None:
    norm.weight.data.mul_(2)


def moved(norm: nn.Module) -> None:
    norm.weight.data = norm.weight.data * 2


def another_parameter(norm: nn.Module) -> None:
    norm.weight = nn.Parameter(norm.weight * 2, requires_grad=False)


def no_bias(norm: nn.Module) -> None:
    norm.bias = None


def cast_in_place(norm: nn.Module) -> None:
    address = norm.weight.data_ptr()
    norm.weight.data = norm.weight.data.view(torch.float16)
    assert norm.weight.data_ptr() == address


@pytest.mark.parametrize(
    "change", [scaled_in_place, moved, another_parameter, no_bias, cast_in_place]
)
def test_a_change_of_the_norm_is_seen(
    change: Callable[[nn.Module], None], cpu_backends: CpuBackends
) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    change(norm)
    for turn in range(4):
        x = x_of()
        cpu_backends.calls.clear()
        codes = FORMULAS["layer"].codes((x,), norm, BLOCKS).run(recordings)[0]
        repeated = turn > 1 or change is scaled_in_place  # the kernel reads the values anew
        assert cpu_backends.calls == ([] if repeated else ["norm"])
        assert_codes(codes, quantized(FORMULAS["layer"], x, norm, BLOCKS))


def unaligned(x: Tensor) -> Tensor:
    buffer = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


OTHERS = {
    "strided": transposed,
    "unaligned": unaligned,
    "float16": lambda x: x.half(),
    "rows": lambda x: x[:1].clone(),
    "subclass": lambda x: x.as_subclass(Wrapped),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_input_is_not_repeated(kind: str, cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    x = OTHERS[kind](x_of())
    codes = FORMULAS["layer"].codes((x,), norm, BLOCKS).run(recordings)[0]
    assert cpu_backends.calls == ["norm"]
    assert_codes(codes, quantized(FORMULAS["layer"], x, norm, BLOCKS))


def test_another_scheme_or_formula_is_not_repeated(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    x = x_of()
    for formula, scheme in (
        (FORMULAS["layer"], UE8M0),
        (FORMULAS["layer"], Scheme.of("FP8_DYNAMIC")),
        (NormFormula("layer_norm", 0.5), BLOCKS),
    ):
        cpu_backends.calls.clear()
        codes = formula.codes((x,), norm, scheme).run(recordings)[0]
        assert cpu_backends.calls == ["norm"]
        assert_codes(codes, quantized(formula, x, norm, scheme))


def test_whoever_looks_on_sees_the_operator(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    with RegisteredCalls() as seen:
        FORMULAS["layer"].codes((x_of(),), norm, BLOCKS).run(recordings)[0]
    assert "layer_norm_quantize" in seen.names


class Wrapped(Tensor):
    """A tensor subclass with its own meaning, such as a distributed weight."""


def test_a_weight_of_another_class_is_not_recorded(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    norm._parameters["weight"] = norm.weight.detach().as_subclass(Wrapped)
    for _ in range(4):
        cpu_backends.calls.clear()
        FORMULAS["layer"].codes((x_of(),), norm, BLOCKS).run(recordings)[0]
        assert cpu_backends.calls == ["norm"]


def test_wrong_operands_are_refused_as_before(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    for _ in range(3):
        with pytest.raises(ValueError, match="Got a weight of shape"):
            FORMULAS["layer"].codes((x_of(2, 128),), norm, BLOCKS).run(recordings)[0]


def test_empty_inputs_are_computed(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    for _ in range(4):
        codes = FORMULAS["layer"].codes((x_of(0, K),), norm, BLOCKS).run(recordings)[0]
        assert codes.data.shape == (0, K)


def test_few_recordings_are_kept(cpu_backends: CpuBackends) -> None:
    norm, recordings = recorded_norm(cpu_backends)
    for rows in range(1, 2 * MOST_KEYS):
        FORMULAS["layer"].codes((x_of(rows, K),), norm, BLOCKS).run(recordings)[0]
    assert 0 < len(recordings) <= MOST_KEYS


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(K, 384, False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(384, K, False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_modules_are_recorded_and_copies_start_without(
    copied: Callable[[nn.Module], nn.Module], cpu_backends: CpuBackends
) -> None:
    mlp = Mlp().bfloat16()
    fp8kit.convert(mlp, "FP8_BLOCK", fuse="inputs")
    separate = copy.deepcopy(mlp)
    made = FusedGatedMlp(mlp, "silu").requires_grad_(False)
    with torch.no_grad():
        for turn in range(5):
            x = x_of()
            cpu_backends.calls.clear()
            y = made(x)
            assert turn < 2 or cpu_backends.calls.count("activate") == 0
            assert_bits_equal(y, separate(x))
        twin = copied(made)
        assert made.down_proj.replays
        assert not twin.down_proj.replays
        assert_bits_equal(twin(x), y)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="launches of Triton are taped anywhere, but this is where it is measured",
)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu_recordings_give_the_bits_of_the_operators(scheme: str, rows: int) -> None:
    made, recordings = (
        Scheme.of(scheme),
        {name: ReplayCache() for name in (*FORMULAS, "add", "silu")},
    )
    norms = {name: norm_of(name, "cuda") for name in FORMULAS}
    for _ in range(4):
        x, residual = x_of(1, rows, K, device="cuda"), x_of(1, rows, K, device="cuda")
        for name, formula in FORMULAS.items():
            codes = formula.codes((x,), norms[name], made).run(recordings[name])[0]
            assert_codes(codes, quantized(formula, x, norms[name], made))
        both = FORMULAS["llama"].codes((x, residual), norms["llama"], made)
        codes, (total,) = both.run(recordings["add"])
        assert_bits_equal(total, x + residual)
        assert_codes(codes, quantized(FORMULAS["llama"], total, norms["llama"], made))
        gate, up = x_of(1, rows, 2 * K, device="cuda").chunk(2, -1)
        codes = activation_codes("silu", gate, up, made).run(recordings["silu"])[0]
        assert_codes(codes, fused.silu_mul_quantize(gate, up, **quantize_options(made)))
    for each in recordings.values():
        assert each.launches(x.shape) == 1 or each.launches(gate.shape) == 1
