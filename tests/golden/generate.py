"""Write the golden checkpoints: a tiny folder for each dialect, in its published layout.

A dialect is one tool's way to store FP8. Layout and numbers follow each format's own description,
without code of this package. ``PYTHONPATH=tests python -m golden.generate`` writes the files again;
the tests compare them byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from golden.layout import (
    ARGS,
    DOWN,
    IGNORE,
    LEFT,
    OUT,
    W1,
    W2,
    Golden,
    by_block,
    by_mx,
    by_row,
    by_tensor,
    codes,
    compressed,
    dense_tensors,
    exponents,
    fp8,
    power,
    scales,
    spread,
    values,
    write,
)

FOLDER = Path(__file__).parent
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"
TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"strategy": "group", "dynamic": True}
BYTES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
HF_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    **LEFT,
}
MX = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0",
    **LEFT,
}


def cache(tensors: dict[str, Tensor], key: str, value: str, shape: tuple[int, ...]) -> None:
    tensors[key], tensors[value] = torch.full(shape, 0.5), torch.full(shape, 0.75)


KV = {f"{ATTENTION}.k_scale": 0.5, f"{ATTENTION}.v_scale": 0.75}


def compressed_tensors() -> dict[str, Golden]:
    static = by_tensor("weight_scale", "input_scale", (1,))
    cache(static["tensors"], *KV, (1,))
    tensor = {"strategy": "tensor"}
    kv = {**ARGS, "strategy": "tensor", "dynamic": False}
    mx = {"strategy": "group", "group_size": 32, **BYTES}
    mixed = by_row("weight_scale")
    mixed["tensors"][f"{OUT}.weight_scale"] = torch.tensor([0.02])
    mixed["truth"][OUT] = values(W1, torch.tensor([[0.02]]))
    groups = compressed({"strategy": "channel"}, TOKEN)
    one = compressed({"strategy": "tensor"}, None)["config_groups"]["group_0"]
    groups["config_groups"]["group_1"] = {**one, "targets": [OUT]}
    short = by_row("weight_scale")
    for layer, w in ((OUT, W1), (DOWN, W2)):
        scale = short["tensors"][f"{layer}.weight_scale"].bfloat16()
        short["tensors"][f"{layer}.weight_scale"] = scale
        short["truth"][layer] = values(w, scale.float())
    name = "compressed-tensors"
    return {
        "compressed-tensors-static": Golden(name, "FP8",
            quantization=compressed(tensor, {"strategy": "tensor", "dynamic": False},
                kv_cache_scheme=kv), writable=True, cache=KV, **static),
        "compressed-tensors-dynamic": Golden(name, "FP8_DYNAMIC",
            quantization=compressed({"strategy": "channel"}, TOKEN), writable=True,
            **by_row("weight_scale")),
        "compressed-tensors-bf16-scales": Golden(name, "FP8_DYNAMIC",
            quantization=compressed({"strategy": "channel"}, TOKEN), **short),
        "compressed-tensors-block": Golden(name, "FP8_BLOCK",
            quantization=compressed(BLOCKS, {**GROUP, "group_size": 128}), writable=True,
            **by_block("weight_scale")),
        "compressed-tensors-mxfp8": Golden(name, "MXFP8",
            quantization=compressed(mx, {**GROUP, "group_size": 32, **BYTES},
                format="mxfp8-quantized"), writable=True, **by_mx("weight_scale")),
        "compressed-tensors-two-groups": Golden(name,
            {OUT: "FP8_TENSOR_BY_16BIT", DOWN: "FP8_DYNAMIC"}, quantization=groups, **mixed),
    }  # fmt: skip


def fp8_method() -> dict[str, Golden]:
    mistral = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    auto = {"quant_method": "fp8", "activation_scheme": "static", **LEFT}
    static = by_tensor("weight_scale", "input_scale", ())
    cache(static["tensors"], *KV, ())
    two = codes(2, 16, 32)
    stack = {
        f"{EXPERTS}.down_proj": fp8(two),
        f"{EXPERTS}.down_proj_scale_inv": scales(2, 1, 1),
    }
    up = codes(2, 256, 8, seed=2)
    stack |= {
        f"{EXPERTS}.gate_up_proj": fp8(up),
        f"{EXPERTS}.gate_up_proj_scale_inv": scales(2, 2, 1, seed=4),
    }
    fnuz = by_tensor("weight_scale", "", ())
    for layer in (OUT, DOWN):
        # in e4m3fnuz the same bits are half the value; 0x80 is NaN, and 0x7F is 240, NaN in e4m3fn
        raw = fnuz["tensors"][f"{layer}.weight"].view(torch.uint8)
        raw = torch.where((raw & 127) < 1, 0, raw).to(torch.uint8)
        fnuz["tensors"][f"{layer}.weight"] = raw.view(torch.float8_e4m3fnuz)
        fnuz["truth"][layer] = values(raw, fnuz["tensors"][f"{layer}.weight_scale"] / 2)
    return {
        "fp8-block": Golden("fp8", "FP8_BLOCK", quantization=HF_BLOCK, writable=True,
            **by_block("weight_scale_inv")),
        "fp8-block-ue8m0": Golden("fp8", "FP8_BLOCK_UE8M0",
            quantization=HF_BLOCK | {"scale_fmt": "ue8m0"}, writable=True,
            **by_block("weight_scale_inv", power)),
        "fp8-block-e8m0": Golden("fp8", "FP8_BLOCK_UE8M0",
            quantization=HF_BLOCK | {"scale_fmt": "ue8m0", "expert_dtype": "fp8"},
            **by_block("scale", lambda e: e.view(torch.float8_e8m0fnu))),
        "fp8-block-experts": Golden("fp8", "FP8_BLOCK", dense_tensors() | stack,
            {f"{EXPERTS}.down_proj": values(two, spread(scales(2, 1, 1), (16, 32), 128, 128)),
                f"{EXPERTS}.gate_up_proj": values(up,
                    spread(scales(2, 2, 1, seed=4), (256, 8), 128, 128))}, HF_BLOCK),
        "fp8-mistral": Golden("fp8", "FP8", quantization=mistral,
            **by_tensor("weight_scale_inv", "activation_scale", ())),
        "autofp8-static": Golden("autofp8", "FP8",
            quantization=auto | {"kv_cache_scheme": "static"}, writable=True, cache=KV, **static),
        "autofp8-dynamic": Golden("autofp8", "FP8_TENSOR",
            quantization=auto | {"activation_scheme": "dynamic"}, writable=True,
            **by_tensor("weight_scale", "", ())),
        "autofp8-fnuz": Golden("autofp8", "FP8_TENSOR",
            quantization=auto | {"activation_scheme": "dynamic"}, **fnuz),
        "mxfp8": Golden("mxfp8", "MXFP8", quantization=MX, writable=True,
            **by_mx("weight_scale_inv")),
        "mxfp8-weight-scale": Golden("mxfp8-weight-scale", "MXFP8", quantization=MX, writable=True,
            **by_mx("weight_scale")),
    }  # fmt: skip


def fbgemm() -> dict[str, Golden]:
    layers = by_row("weight_scale")
    up, down = codes(2, 8, 16, seed=1), codes(2, 12, 8, seed=6)
    s_up, s_down = scales(2, 1, 16), scales(2, 8, 1, seed=5)
    layers["tensors"] |= {
        f"{EXPERTS}.gate_up_proj": fp8(up),
        f"{EXPERTS}.gate_up_proj_scale": s_up,
        f"{EXPERTS}.down_proj": fp8(down),
        f"{EXPERTS}.down_proj_scale": s_down,
    }
    layers["truth"] |= {
        f"{EXPERTS}.gate_up_proj": values(up, s_up).mT,
        f"{EXPERTS}.down_proj": values(down, s_down.mT).mT,
    }
    config = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": IGNORE,
    }
    dense = Golden("fbgemm", "FP8_DYNAMIC", quantization=config, **by_row("weight_scale"))
    return {
        "fbgemm": Golden("fbgemm", "FP8_DYNAMIC", quantization=config, **layers),
        "fbgemm-dense": replace(dense, writable=True),
    }


def fp4(experts: int, n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed blocks, scales and values of a stack in the layout of GPT-OSS."""
    halves = codes(experts, n, k // 32, 32, seed=seed) & 15
    blocks = halves[..., 0::2] | halves[..., 1::2] << 4
    known = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    signs = 1.0 - 2.0 * (halves >> 3).float()
    power_of = exponents(experts, n, k // 32)
    numbers = known[(halves & 7).long()] * signs * torch.exp2(power_of.float() - 127).unsqueeze(-1)
    return blocks, power_of, numbers.view(experts, n, k)


def mxfp4() -> dict[str, Golden]:
    tensors, truth = dense_tensors(), {}
    for name, (n, k) in (("gate_up_proj", (8, 64)), ("down_proj", (4, 32))):
        blocks, power_of, numbers = fp4(2, n, k, seed=n)
        tensors[f"{EXPERTS}.{name}_blocks"] = blocks
        tensors[f"{EXPERTS}.{name}_scales"] = power_of
        truth[f"{EXPERTS}.{name}"] = numbers
    config = {"quant_method": "mxfp4", "modules_to_not_convert": IGNORE}
    packed, known = dense_tensors(), {}
    for layer, (n, k) in ((OUT, (24, 32)), (DOWN, (20, 64))):
        blocks, power_of, numbers = fp4(1, n, k, seed=n)
        packed |= {f"{layer}.weight": blocks.view(n, k // 2), f"{layer}.weight_scale": power_of[0]}
        known[layer] = numbers[0]
    group = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    common = {"weight": group, "input_tensors": {**group, "is_dynamic": True}}
    left = {"ignore": IGNORE, "exclude": IGNORE}
    amd = {"quant_method": "quark", "global_quant_config": common, **left}
    nvidia = {"quant_method": "modelopt", "quant_algo": "mxfp4", **left}
    theirs = {"mxfp4": (config, tensors, truth)}
    theirs |= {"quark-mxfp4": (amd, packed, known), "modelopt-mxfp4": (nvidia, packed, known)}
    return {
        name: Golden(name.partition("-")[0], "MXFP8", quantization=c, tensors=t, truth=v)
        for name, (c, t, v) in theirs.items()
    }


def nvfp4_weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and values of a matrix that row-wise FP8 represents exactly.

    The largest value of a row is 4 * 28 = 448 / 4, the other scales are powers of two.
    """
    halves = codes(n, k // 16, 16, seed=n) & 15
    powers = torch.tensor((0, 1, 2, 4, 6, 6, 4, 2), dtype=torch.uint8)  # 0, 0.5, 1, 2, 4
    halves[:, 0] = powers[(halves[:, 0] & 7).long()] | halves[:, 0] & 8
    halves[:, 0, 0] = 6
    groups = (5 + torch.arange(n * (k // 16)).view(n, -1) % 7).to(torch.uint8) * 8
    groups[:, 0] = 11 * 8 + 6
    known = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    signs = 1.0 - 2.0 * (halves >> 3).float()
    scale = values(groups, torch.tensor(1.0)).unsqueeze(-1)
    numbers = (known[(halves & 7).long()] * signs * scale).view(n, k)
    halves = halves.view(n, k)
    return halves[:, 0::2] | halves[:, 1::2] << 4, groups, numbers


def nvfp4() -> dict[str, Golden]:
    theirs, nvidia, truth = dense_tensors(), dense_tensors(), {}
    for layer, shape in ((OUT, (24, 32)), (DOWN, (20, 64))):
        packed, groups, numbers = nvfp4_weight(*shape)
        theirs |= {
            f"{layer}.weight_packed": packed,
            f"{layer}.weight_scale": fp8(groups),
            f"{layer}.weight_global_scale": torch.tensor([1024.0]),
            f"{layer}.input_global_scale": torch.tensor([300.0]),
        }
        nvidia |= {
            f"{layer}.weight": packed,
            f"{layer}.weight_scale": fp8(groups),
            f"{layer}.weight_scale_2": torch.tensor(2.0**-10),
            f"{layer}.input_scale": torch.tensor(0.01),
        }
        truth[layer] = numbers * 2.0**-10
    four = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    config = compressed(four, {**four, "dynamic": "local"}, format="nvfp4-pack-quantized")
    flat = {"quant_method": "modelopt", "ignore": IGNORE, "quant_algo": "NVFP4", "group_size": 16}
    made = {"compressed-tensors": (config, theirs), "modelopt": (flat, nvidia)}
    return {
        f"{dialect}-nvfp4": Golden(
            dialect, "FP8_DYNAMIC", quantization=settings, tensors=tensors, truth=truth
        )
        for dialect, (settings, tensors) in made.items()
    }


def modelopt() -> dict[str, Golden]:
    nested = by_tensor("weight_scale", "input_scale", ())
    cache(nested["tensors"], f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale", ())
    file = {
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*.mlp.gate"],
        },
    }
    flat = {"quant_method": "modelopt", "ignore": IGNORE, "producer": {"name": "modelopt"}}
    blocks = by_block("weight_scale")
    for name, t in blocks["tensors"].items():
        if name.endswith("weight_scale"):
            blocks["tensors"][name] = t.view(t.shape[0], 1, t.shape[1], 1)
    mixed = by_row("weight_scale", column=False)
    mixed["tensors"][f"{OUT}.weight_scale"] = torch.tensor(0.02)
    mixed["tensors"][f"{OUT}.input_scale"] = torch.tensor(0.5)
    mixed["truth"][OUT] = values(W1, torch.tensor([[0.02]]))
    layers = {
        OUT: {"quant_algo": "FP8"},
        "*.down_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    }
    return {
        "modelopt-nested": Golden("modelopt", "FP8",
            extra={"hf_quant_config.json": file,
                "config.json": {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}},
            cache=KV, **nested),
        "modelopt-flat": Golden("modelopt", "FP8", quantization=flat | {"quant_algo": "FP8"},
            **by_tensor("weight_scale", "input_scale", ())),
        "modelopt-channel": Golden("modelopt", "FP8_DYNAMIC",
            quantization=flat | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            **by_row("weight_scale", column=False)),
        "modelopt-block": Golden("modelopt", "FP8_BLOCK",
            quantization=flat | {"quant_algo": "FP8_PB_WO"}, **blocks),
        "modelopt-mxfp8": Golden("modelopt", "MXFP8", quantization=flat | {"quant_algo": "MXFP8"},
            **by_mx("weight_scale")),
        "modelopt-mixed": Golden("modelopt", {OUT: "FP8", DOWN: "FP8_DYNAMIC"},
            quantization=flat | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
            inputs={OUT: 0.5}, **mixed),
    }  # fmt: skip


def swizzled(scale: Tensor) -> Tensor:
    """Store the byte of row r and column c at tile (r // 128, c // 4), as cuBLAS documents it."""
    rows, cols = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    flat = torch.zeros(rows * cols * 512, dtype=torch.uint8)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            tile = r // 128 * cols + c // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    return flat.view(rows * 32, cols * 16)


def torchao() -> dict[str, Golden]:
    up, w_mx, w2 = "model.layers.0.mlp.up_proj", codes(130, 32, seed=8), codes(10, 16)
    e, s = exponents(130, 1), scales(24, 1)
    one = torch.tensor([[0.03]])
    tensors = {
        f"{OUT}._weight_qdata": fp8(W1),
        f"{OUT}._weight_scale": s,
        f"{DOWN}._weight_qdata": fp8(w2),
        f"{DOWN}._weight_scale": one,
        f"{up}._weight_qdata": fp8(w_mx),
        f"{up}._weight_scale": swizzled(e).view(torch.float8_e8m0fnu),
    }
    acts = {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {"granularity": {"_type": "PerRow"}}}
    mx_acts = {"_type": "QuantizeTensorToMXKwargs", "_data": {"block_size": 32}}
    described: dict[str, Any] = {
        f"{OUT}.weight": ("Float8Tensor", {"block_size": [1, 32], "act_quant_kwargs": acts}),
        f"{DOWN}.weight": ("Float8Tensor", {"block_size": [10, 16], "act_quant_kwargs": None}),
        f"{up}.weight": ("MXTensor",
            {"elem_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "block_size": 32,
                "act_quant_kwargs": mx_acts, "is_swizzled_scales": True}),
    }  # fmt: skip
    names = ["qdata", "scale"]
    metadata = {
        n: json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
        for n, (kind, data) in described.items()
    }
    metadata |= {n: json.dumps({"_type": "Tensor"}) for n in dense_tensors()}
    metadata["tensor_names"] = json.dumps([*described, *dense_tensors()])
    return {
        "torchao": Golden(
            "torchao",
            {OUT: "FP8_DYNAMIC", DOWN: "FP8_TENSOR_BY_16BIT", up: "MXFP8"},
            dense_tensors() | tensors,
            {OUT: values(W1, s), DOWN: values(w2, one), up: values(w_mx, power(e))},
            {"quant_method": "torchao", "quant_type": {"default": {"_version": 2}}},
            metadata=metadata,
        )
    }


def of_diffusers() -> dict[str, Golden]:
    mixed = by_row("weight_scale")
    mixed["tensors"][f"{OUT}.weight_scale"] = torch.tensor([[0.02]])
    mixed["truth"][OUT] = values(W1, torch.tensor([[0.02]]))
    layers = {OUT: "FP8_TENSOR", DOWN: "FP8_DYNAMIC"}
    return {
        "diffusers": Golden(
            "fp8kit",
            layers,
            quantization={"quant_method": "fp8kit", "scheme": "FP8_DYNAMIC", "layers": layers},
            file="diffusion_pytorch_model.safetensors",
            **mixed,
        )
    }


def quark() -> dict[str, Golden]:
    def config(weight: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        fp8_ = {"dtype": "fp8_e4m3", "symmetric": True}
        return {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {**fp8_, "is_dynamic": False, **weight},
                "input_tensors": {**fp8_, **inputs},
                "output_tensors": None,
                "bias": None,
            },
            "exclude": IGNORE,
            "export": {"weight_format": "real_quantized", "kv_cache_group": []},
        }

    static = by_tensor("weight_scale", "input_scale", ())
    cache(
        static["tensors"],
        f"{ATTENTION}.k_proj.output_scale",
        f"{ATTENTION}.v_proj.output_scale",
        (1,),
    )
    group = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return {
        "quark-tensor": Golden("quark", "FP8",
            quantization=config({"qscheme": "per_tensor"},
                {"qscheme": "per_tensor", "is_dynamic": False}), cache=KV, **static),
        "quark-channel": Golden("quark", "FP8_DYNAMIC",
            quantization=config({"qscheme": "per_channel", "ch_axis": 0},
                {"qscheme": "per_channel", "is_dynamic": True}),
            **by_row("weight_scale", column=False)),
        "quark-mxfp8": Golden("quark", "MXFP8",
            quantization=config(group, {**group, "is_dynamic": True}),
            **by_mx("weight_scale", e8m0=True)),
    }  # fmt: skip


def without_a_config() -> dict[str, Golden]:
    """Return the dialects that need no config, only tensors: Mistral's own, ComfyUI, LoRAX."""
    names = {OUT: "layers.0.attention.wo", DOWN: "layers.0.feed_forward.w2"}
    found = by_tensor("qscale_weight", "qscale_act", ())
    for ours, native in names.items():
        found["truth"][native], found["inputs"][native] = (
            found[part].pop(ours) for part in ("truth", "inputs")
        )
    renamed = {}
    for name, t in found["tensors"].items():
        for ours, native in names.items():
            name = name.replace(ours, native)
        renamed[name] = t
    native = "layers.0.attention"
    cache(
        renamed,
        f"{native}.k_fake_quantizer.qscale_act",
        f"{native}.v_fake_quantizer.qscale_act",
        (),
    )
    found["tensors"] = renamed
    params = {"dim": 8, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    old, new = by_tensor("scale_weight", "", ()), by_row("weight_scale")
    old["tensors"]["scaled_fp8"] = fp8(torch.zeros(2, dtype=torch.uint8))
    text = json.dumps({"format": "float8_e4m3fn"}).encode()
    for layer in (OUT, DOWN):
        new["tensors"][f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    fused, w = f"{ATTENTION}.qkv_proj", codes(16, 32)
    parts = torch.tensor([0.01, 0.03, 0.02])
    bare = by_row("weight_scale")
    bare["tensors"] |= {f"{fused}.weight": fp8(w), f"{fused}.weight_scale": parts}
    rows = torch.cat([parts[i].expand(n, 1) for i, n in enumerate((8, 4, 4))])
    bare["truth"][fused] = values(w, rows)
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16"}
    return {
        "mistral": Golden("mistral", "FP8", extra={"params.json": params},
            file="consolidated.safetensors",
            cache={f"{native}.k_scale": 0.5, f"{native}.v_scale": 0.75}, **found),
        "comfyui-scaled": Golden("comfyui", "FP8_TENSOR_BY_16BIT", file="diffusion.safetensors",
            **old),
        "comfyui-quant": Golden("comfyui", "FP8_WEIGHT_ONLY", file="diffusion.safetensors", **new),
        "bare": Golden("bare", "FP8_DYNAMIC", extra={"config.json": model}, **bare),
    }  # fmt: skip


def goldens() -> dict[str, Golden]:
    """Return all golden checkpoints by the name of their folder."""
    quantized = (compressed_tensors, fp8_method, fbgemm, mxfp4, nvfp4, modelopt, torchao, quark)
    every = (*quantized, of_diffusers, without_a_config)
    return {name: golden for family in every for name, golden in family().items()}


if __name__ == "__main__":
    for name, golden in goldens().items():
        write(golden, FOLDER / name)
