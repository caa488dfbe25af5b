"""Pickles and ``torch.save`` files of an earlier version load, with the same results.

``earlier_version`` was written by that version from ``earlier_models``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

import earlier_models
import fp8kit
import fresh
from fp8kit.conversion.plan import Plan
from fp8kit.conversion.report import Report
from fp8kit.io import moved_classes
from fp8kit.modules.fused_producers import FusedNorm
from numerics import SCHEME_ERROR, relative_error

FILES = Path(__file__).parent / "earlier_version"


def load(name: str) -> object:
    if name.endswith(".pkl"):
        return pickle.loads((FILES / name).read_bytes())
    return torch.load(FILES / name, weights_only=False)


@pytest.mark.parametrize("name", ["model.pkl", "model.pt"])
def test_models_of_an_earlier_version_load(name: str) -> None:
    model = load(name)
    objects = load("objects.pt")
    assert isinstance(model, earlier_models.Model)
    assert isinstance(objects, dict)
    block = model.blocks[0]
    assert isinstance(block.input_layernorm, FusedNorm)
    assert type(block.self_attn.q) is fp8kit.Fp8Linear
    assert block.self_attn.q.shared is block.self_attn.v.shared
    with torch.no_grad():
        for _ in range(3):
            y = model(earlier_models.inputs())
            # differently rounded sums change a few codes: far less than rounding to FP8
            assert relative_error(y, objects["result"].double()) < SCHEME_ERROR["FP8_DYNAMIC"][0]


def test_models_of_an_earlier_version_can_be_saved_again() -> None:
    model = load("model.pt")
    assert isinstance(model, earlier_models.Model)
    text = pickle.dumps(model)
    assert not [
        old for old in moved_classes.MODULES if f"{old}\n".encode() in pickle.dumps(model, 0)
    ]
    again = pickle.loads(text)
    with torch.no_grad():
        x = earlier_models.inputs()
        assert torch.equal(again(x), model(x))


def test_objects_of_an_earlier_version_load() -> None:
    objects = load("objects.pt")
    assert isinstance(objects, dict)
    assert isinstance(objects["plan"], Plan)
    assert isinstance(objects["report"], Report)
    assert objects["recipe"] == fp8kit.Recipe("FP8_BLOCK")
    assert objects["scheme"] == fp8kit.SCHEMES["FP8"]
    expected = torch.arange(64.0).reshape(4, 16)
    assert torch.allclose(fp8kit.dequantize(objects["qtensor"]), expected, rtol=0.07)


def test_a_process_that_has_imported_nothing_loads_them() -> None:
    code = (
        "import sys, torch; "
        f"torch.load({str(FILES / 'model.pt')!r}, weights_only=False); "
        "print('fp8kit' in sys.modules)"
    )
    assert fresh.run(code, first=Path(earlier_models.__file__).parent).stdout.strip() == "True"


def test_old_modules_have_no_other_names() -> None:
    for old, new in moved_classes.MODULES.items():
        with pytest.raises(AttributeError):
            sys.modules[old].no_such_name  # noqa: B018
        assert sys.modules[old].__name__ == old
        assert not hasattr(sys.modules[old], "__file__")  # inspect looks for it in every module
        assert new not in moved_classes.MODULES
