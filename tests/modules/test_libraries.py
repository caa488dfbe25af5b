"""Libraries with a saving of their own are told of FP8 layers, if they are loaded."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit.modules import libraries


def test_converting_loads_no_library() -> None:
    code = (
        "import sys, torch, fp8kit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(128, 128))\n"
        "fp8kit.convert(model)\n"
        "assert not {'transformers', 'diffusers', 'peft', 'accelerate'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_library_that_cannot_be_told_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from fp8kit.integrations import transformers_saving

    monkeypatch.setattr(libraries, "_told", set())
    monkeypatch.setattr(transformers_saving, "OLDEST", (99, 0))
    with pytest.warns(UserWarning, match=r"transformers is loaded.*for 99\.0 .*fp8kit\.save"):
        fp8kit.convert(nn.Sequential(nn.Linear(128, 128)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8kit.convert(nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16)))
