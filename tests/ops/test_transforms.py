"""FP8 layers under transforms of ``torch.func`` have the gradients of ``backward``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

import fp8kit
from fp8kit.formats import SCHEMES

# torch's own code for transforms is scripted when it is first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_what_was_skipped() -> Iterator[None]:
    """Let later tests compile: Dynamo skips a layer's ``forward`` for ever once its graph broke."""
    yield
    torch._dynamo.reset()


def model_of(scheme: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    x = torch.randn(8, 128)
    fp8kit.convert(model, scheme, calibrate=lambda model: model(x))
    return model


def loss(y: Tensor) -> Tensor:
    return y.pow(2).sum()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reverse_mode_equals_backward(scheme: str) -> None:
    model = model_of(scheme)
    x = torch.randn(4, 128, requires_grad=True)
    loss(model(x)).backward()
    given = x.detach()
    torch.testing.assert_close(grad(lambda v: loss(model(v)))(given), x.grad)
    y, pull = vjp(model, given)
    torch.testing.assert_close(pull(2 * y)[0], x.grad)
    torch.testing.assert_close(vmap(grad(lambda v: loss(model(v))))(given[:, None])[:, 0], x.grad)
    bias = model[0].bias
    found = grad(lambda b: loss(functional_call(model, {"0.bias": b}, (given,))))(bias.detach())
    torch.testing.assert_close(found, bias.grad)
    wanted = torch.autograd.functional.jacobian(model, given[0])
    torch.testing.assert_close(jacrev(model)(given[0]), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mapped_calls_are_calls_one_by_one(scheme: str) -> None:
    model, x = model_of(scheme), torch.randn(3, 4, 128)
    expected = torch.stack([model(part) for part in x])
    torch.testing.assert_close(vjp(vmap(model), x)[0], expected)
    models = [model_of(scheme), model_of(scheme)]
    state, _ = stack_module_state(models)  # type: ignore[no-untyped-call]
    results = vmap(lambda s: vjp(lambda v: functional_call(model, s, (v,)), x[0])[0])(state)
    torch.testing.assert_close(results, torch.stack([m(x[0]) for m in models]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_differentiates(backend: str) -> None:
    model, x = model_of("FP8_DYNAMIC"), torch.randn(4, 128)
    wanted = grad(lambda v: loss(model(v)))(x)
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def found(x: Tensor) -> tuple[Tensor, ...]:
        mapped = grad(lambda v: loss(vmap(model)(v)))(x)
        return grad(lambda v: loss(model(v)))(x), mapped

    for one in found(x):
        torch.testing.assert_close(one, wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="gives zeros where the graph breaks inside, for dense layers too",
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_vjp_differentiates(backend: str) -> None:
    model, x = model_of("FP8_DYNAMIC"), torch.randn(4, 128)
    y, pull = vjp(model, x)
    wanted = pull(2 * y)[0]
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def found(x: Tensor) -> Tensor:
        y, pull = vjp(model, x)
        return pull(2 * y)[0]

    torch.testing.assert_close(found(x), wanted)


@pytest.mark.parametrize("differentiable", [False, True])
def test_compiled_code_maps(differentiable: bool) -> None:
    model, x = model_of("FP8_DYNAMIC"), torch.randn(3, 4, 128)
    wanted = torch.stack([model(part) for part in x])
    torch._dynamo.reset()
    with torch.set_grad_enabled(differentiable):
        found = torch.compile(lambda x: vmap(model)(x), backend="aot_eager")(x)
    torch.testing.assert_close(found, wanted)


def test_what_has_no_derivative_is_refused() -> None:
    model, x = model_of("FP8_DYNAMIC"), torch.randn(2, 128)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(model, (x,), (x,))
    state = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="A gradient for an FP8 weight"):
        grad(lambda s: loss(functional_call(model, s, (x,))))(state)
