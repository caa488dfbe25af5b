"""What code that reads or writes an FP8 cache layer gets, compared with Transformers' layers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from numerics import assert_bits_equal

pytest.importorskip("transformers")
from fp8kit.integrations.kv_cache_layers import (
    Fp8Layer,
    Fp8SlidingLayer,
    Fp8StaticLayer,
    Fp8StaticSlidingLayer,
)

KINDS: dict[type[Any], dict[str, int]] = {
    Fp8Layer: {},
    Fp8SlidingLayer: {"sliding_window": 6},
    Fp8StaticLayer: {"max_cache_len": 12},
    Fp8StaticSlidingLayer: {"max_cache_len": 12, "sliding_window": 6},
}
SCALES = {
    "token": None,
    "tensor": (torch.tensor([0.3]), torch.tensor([0.7])),
    "heads": (torch.tensor([0.3, 2.0]).view(2, 1, 1), torch.tensor([1.0, 0.1]).view(2, 1, 1)),
}
# methods of Transformers' layers that need no form of their own here, as they only read numbers
ONLY_READ = {"get_mask_sizes", "get_max_length", "get_max_cache_shape", "is_croppable"}


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, 2, 2, tokens, 64).to(dtype)
    return k, v


def pair(kind: type[Any], scales: str = "token") -> tuple[Any, Any]:
    """Return an FP8 layer, and a layer of Transformers for what ``update`` of the former gives."""
    return kind(SCALES[scales], **KINDS[kind]), kind.plain(**KINDS[kind])


def step(ours: Any, theirs: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Store new tokens in both, rounded alike."""
    k, v = states(tokens, dtype)
    found = ours.update(k, v)
    wanted = theirs.update(*(x[..., -tokens:, :] for x in rounded(ours, k, v)))
    for a, b in zip(found, wanted, strict=True):
        assert_bits_equal(a, b)


def rounded(ours: Any, k: Tensor, v: Tensor) -> Any:
    return Fp8Layer(ours.fixed).update(k, v)


def assert_alike(ours: Any, theirs: Any) -> None:
    assert_bits_equal(ours.keys, theirs.keys)
    assert_bits_equal(ours.values, theirs.values)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    assert ours.get_max_length() == theirs.get_max_length()
    for name, value in vars(theirs).items():
        assert name in ("keys", "values", "dtype") or getattr(ours, name) == value, name


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_get_numbers(kind: type[Any], scales: str) -> None:
    dtype = {"token": torch.bfloat16, "tensor": torch.float16, "heads": torch.float32}[scales]
    ours, theirs = pair(kind, scales)
    assert isinstance(ours, kind.plain)
    assert ours.keys is ours.values is theirs.keys is None
    assert not ours.is_initialized
    for tokens in (4, 1, 3, 1):
        step(ours, theirs, tokens, dtype)
        assert_alike(ours, theirs)
        assert ours.keys.dtype == ours.dtype == dtype
    ours.offload()
    assert_alike(ours, theirs)
    ours.prefetch()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_alike(twin, theirs)
        other = copy.deepcopy(theirs)
        step(twin, other, 1, dtype)
        assert_alike(twin, other)
    assert_alike(ours, theirs)
    ours.reset()
    assert ours.get_seq_length() == 0
    assert ours.keys is None or not ours.keys.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_layer_reads_as_that_of_transformers(kind: type[Any]) -> None:
    ours, theirs = pair(kind)
    for layer in (ours, theirs):
        layer.lazy_initialization(*states(0))
    assert_alike(ours, theirs)
    assert ours.keys.dtype == torch.bfloat16


def test_a_shallow_copy_grows_alone() -> None:
    ours, theirs = pair(Fp8Layer)
    step(ours, theirs, 3)
    twin = copy.copy(ours)
    step(twin, copy.copy(theirs), 2)
    assert twin.get_seq_length() == 5
    assert_alike(ours, theirs)


def test_attributes_that_are_set_reach_the_scales() -> None:
    ours, theirs = pair(Fp8SlidingLayer)
    for layer in (ours, theirs):
        layer.activate_past_recording()
    step(ours, theirs, 9)
    assert_alike(ours, theirs)
    for layer in (ours, theirs):
        layer.record_past = False  # as generate does when it ends
    step(ours, theirs, 1)
    assert_alike(ours, theirs)
    assert ours.scales.keys.shape[-2] == 5

    ours, theirs = pair(Fp8StaticLayer)
    step(ours, theirs, 9)
    lengths = [layer.cumulative_length.data_ptr() for layer in (ours.codes, ours.scales)]
    for layer in (ours, theirs):
        layer.cumulative_length -= 4
    step(ours, theirs, 2)
    assert_alike(ours, theirs)
    assert lengths == [x.cumulative_length.data_ptr() for x in (ours.codes, ours.scales)]


def test_a_name_of_the_class_is_replaced_on_the_layer_alone() -> None:
    ours, theirs = pair(Fp8StaticLayer)
    seen, update = [], ours.update

    def watched(*states: Tensor) -> Any:
        seen.append(states[0].dtype)
        return update(*states)

    ours.update, ours.is_compileable = watched, False
    step(ours, theirs, 3)
    assert seen == [torch.bfloat16]
    assert not ours.is_compileable
    assert ours.codes.is_compileable


@pytest.mark.parametrize("scales", SCALES)
def test_assigned_states_are_quantized(scales: str) -> None:
    ours, theirs = pair(Fp8Layer, scales)
    step(ours, theirs, 6)
    for layer in (ours, theirs):  # tokens are taken out, and no bit of the others changes
        layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, [0, 2, 4, 5]]
    assert_alike(ours, theirs)
    k, v = states(4, torch.float16)
    ours.keys, ours.values = k, v
    theirs.keys, theirs.values = rounded(ours, k, v)
    assert_alike(ours, theirs)
    step(ours, theirs, 1, torch.float16)
    ours.keys = ours.values = None
    assert ours.keys is ours.codes.keys is None
    ours.keys = torch.tensor([], dtype=torch.bfloat16)
    assert ours.keys.shape == (0,)
    ours.reset()
    step(ours, pair(Fp8Layer)[1], 2) if scales == "token" else ours.update(*states(2))
    with pytest.raises(UnsupportedError, match="gradients"):
        ours.keys = k.requires_grad_()


def test_static_layers_take_assigned_states_in_place() -> None:
    ours, theirs = pair(Fp8StaticLayer)
    step(ours, theirs, 6)
    before = ours.codes.keys.data_ptr(), ours.scales.keys.data_ptr()
    k, _ = states(12)
    ours.keys = k
    assert (ours.codes.keys.data_ptr(), ours.scales.keys.data_ptr()) == before
    assert_bits_equal(ours.keys, rounded(ours, k, k)[0])
    with pytest.raises(UnsupportedError, match=r"keys of shape \(2, 2, 9, 64\) for \(2, 2, 12"):
        ours.keys = k[:, :, :9]
    assert_bits_equal(ours.keys, rounded(ours, k, k)[0])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("window", [6, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_cropped_where_those_of_transformers_are(
    kind: type[Any], window: int, scales: str
) -> None:
    sizes = KINDS[kind] | ({"sliding_window": window} if "sliding_window" in KINDS[kind] else {})
    ours, theirs = kind(SCALES[scales], **sizes), kind.plain(**sizes)
    for layer in (ours, theirs):
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    assert getattr(ours, "is_croppable", None) == getattr(theirs, "is_croppable", None)
    step(ours, theirs, 9)
    if not getattr(theirs, "is_croppable", kind in (Fp8Layer, Fp8SlidingLayer)):
        with pytest.raises(UnsupportedError, match=r"crop\(-2\) of a static FP8 cache"):
            ours.crop(-2)
        assert_alike(ours, theirs)
        return
    for tokens in (2, 1):
        for layer in (ours, theirs):
            layer.crop(-2)
        assert_alike(ours, theirs)
        step(ours, theirs, tokens)
    assert ours.get_seq_length() == 8


def test_an_empty_static_layer_has_no_tokens_to_lose() -> None:
    ours, theirs = pair(Fp8StaticLayer)
    if not getattr(theirs, "is_croppable", False):
        pytest.skip("this Transformers crops no static layers")
    ours.crop(-2)
    step(ours, theirs, 4)
    assert_alike(ours, theirs)


def test_compiled_code_reads_numbers() -> None:
    ours, theirs = pair(Fp8StaticLayer)
    step(ours, theirs, 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def read(layer: Any, query: Tensor) -> tuple[Tensor, Tensor]:
        assert layer.is_initialized
        return query @ layer.keys.mT, layer.values[:, :, : layer.max_cache_len]

    query = states(1)[0]
    for a, b in zip(read(ours, query), (query @ theirs.keys.mT, theirs.values), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_transformers_has_its_form(kind: type[Any]) -> None:
    """A method that a new Transformers adds must change codes and scales alike."""
    public = {name for name, _ in inspect.getmembers(kind.plain) if not name.startswith("_")}
    methods = {name for name in public if not isinstance(getattr(kind.plain, name), bool)}
    own = {name for part in kind.__mro__ if "fp8kit" in part.__module__ for name in vars(part)}
    assert methods - own <= ONLY_READ
