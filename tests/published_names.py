"""The names of ``fp8kit.compat``, each with its origin, what it does here, and what differs.

``python tests/published_names.py`` writes the table of ``docs/compat.md``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "compat.md"
START, END = "<!-- names -->", "<!-- end of names -->"
_TABLE = re.compile(f"{START}\n(.*?){END}", re.DOTALL)


class Name(NamedTuple):
    """One public name.

    Args:
        name: name in ``fp8kit.compat``.
        origin: the file it was published in.
        here: what it does in this package.
        differs: how that differs from the published behaviour; empty if it does not.
        test: the test that compares it with the published behaviour.
    """

    name: str
    origin: str
    here: str
    differs: str
    test: str


W8A8 = "vLLM, w8a8_utils.py"
OPS = "vLLM, _custom_ops.py"
ONLINE = "vLLM, online/fp8.py"
MXFP8 = "vLLM, mxfp8_utils.py"
BLOCKS = "vLLM, fp8_utils.py"
CASTS = "DeepGEMM, utils/math.py"
GEMM = "the copied fp8_gemm.py"
LORAX = "LoRAX, layers/fp8.py"
_KERNEL = "which kernel runs, `fp8kit.scaled_mm` decides"
_DIVIDES = "divides by the scale, not multiplies by its inverse"
_PROBED = "probed by a product on the device, not looked up by capability"
_LAZY = "computed when it is read, not when the module is imported"

NAMES = (
    Name(
        "Fp8LinearOp", W8A8,
        "`apply(input, weight [K, N], weight_scale, out_dtype, input_scale, input_scale_ub, bias, "
        "use_per_token_if_dynamic)`: static or dynamic, per tensor or per token, any pairing",
        "takes the words of every constructor from 0.7 to 0.12; by position those that begin with "
        "`act_quant_static`, so give older ones, `cutlass_fp8_supported` and "
        "`use_per_token_if_dynamic`, by name; nothing is padded; " + _KERNEL,
        "test_w8a8.py::test_fp8_linear_op_computes_every_pairing",
    ),
    Name(
        "GroupShape", "vLLM, quant_utils.py",
        "a pair (row, col) with `PER_TENSOR`, `PER_TOKEN`, `PER_CHANNEL` and `is_per_...()`", "",
        "test_w8a8.py::test_group_shapes_that_inputs_do_not_have_are_refused",
    ),
    Name(
        "dispatch_w8a8_scaled_mm", W8A8,
        "gives the product for a pairing of scales",
        "takes the flag of older and the word of newer versions",
        "test_w8a8.py::test_dispatch_w8a8_scaled_mm_names_the_product",
    ),
    *(
        Name(
            f"{kind}_w8a8_scaled_mm", W8A8,
            "multiplies codes, drops padded rows, restores `output_shape`",
            f"takes scales of any pairing and shape; {_KERNEL}",
            "test_w8a8.py::test_products_drop_padding_and_restore_the_shape",
        )
        for kind in (
            "cutlass", "flashinfer", "rocm_per_tensor", "torch_per_tensor", "torch_per_token",
            "torch_channelwise",
        )
    ),
    Name(
        "scaled_fp8_quant", OPS,
        "codes and scale: static (one number or one per group), per tensor `(1,)` or per token "
        "`[M, 1]`; padding, bound, output, `output_dtype`",
        "divides by the scale where kernels multiply by its inverse; a zero input has a scale "
        "above 0; padded rows are zero; `scale_ub` bounds the scale of a tensor too, for which "
        "vLLM ignores or refuses it; groups that do not divide the input need `group_shape`",
        "test_w8a8.py::test_scaled_fp8_quant_finds_a_scale",
    ),
    Name(
        "cutlass_scaled_mm", OPS,
        "`scale_a * scale_b * (a @ b) + bias`",
        "FP8 only; per tensor, per row or channel, or 1x128 by 128x128; any N and K; runs on a CPU",
        "test_w8a8.py::test_cutlass_scaled_mm_takes_scales_of_any_shape",
    ),
    Name(
        "per_token_group_quant_fp8", BLOCKS,
        "codes and fp32 scales per `group_size` elements of a row, row- or column-major",
        "column-major scales always lie as `tma_aligned_scales` asks, rows of all leading "
        "dimensions counted; the last group may be shorter; `use_ue8m0` has no floor but `eps`",
        "test_blocks.py::test_per_token_group_quant_divides_by_the_scale_of_each_group",
    ),
    *(
        Name(
            name, origin, "codes by 1x128, weight by 128x128 (or other sides)",
            f"on a CPU, scaled operands are rounded to bf16 for bf16 results; {_KERNEL}",
            "test_blocks.py::test_products_by_blocks_take_scales_of_either_name",
        )
        for name, origin in (
            ("w8a8_block_fp8_matmul", "SGLang, fp8_kernel.py; vLLM up to 0.10"),
            ("w8a8_triton_block_scaled_mm", BLOCKS),
        )
    ),
    Name(
        "per_token_cast_to_fp8", CASTS,
        "e4m3fn codes and fp32 scales by 1x128, with amax at least 1e-4",
        _DIVIDES + "; packed scales are refused",
        "test_blocks.py::test_casts_have_the_floor_of_deep_gemm",
    ),
    Name(
        "per_block_cast_to_fp8", CASTS + "; vLLM, deep_gemm.py",
        "the same by 128x128",
        _DIVIDES + "; takes `use_ue8m0` and `gran_k` where either has them",
        "test_blocks.py::test_both_orders_of_arguments_are_taken",
    ),
    Name(
        "maybe_create_device_identity", W8A8,
        "makes `TORCH_DEVICE_IDENTITY`, which nothing here needs", "",
        "test_w8a8.py::test_the_device_identity_appears_when_it_is_made",
    ),
    Name(
        "supports", "fp8kit",
        "`supports(kind, device)`: whether `fp8`, `block_fp8`, `group_gemm`, `sparse` or "
        "`torch_rowwise` products run on tensor cores", "",
        "test_capabilities.py::test_a_cpu_supports_nothing_and_unknown_kinds_are_refused",
    ),
    *(
        Name(
            name, W8A8, f"`supports({kind!r})`", _PROBED,
            "test_capabilities.py::test_functions_answer_for_the_current_device",
        )
        for name, kind in (
            ("cutlass_fp8_supported", "fp8"),
            ("cutlass_block_fp8_supported", "block_fp8"),
            ("cutlass_group_gemm_supported", "group_gemm"),
            ("sparse_cutlass_supported", "sparse"),
        )
    ),
    *(
        Name(name, W8A8, here, _LAZY, "test_capabilities.py::test_flags_are_attributes")
        for name, here in (
            ("CUTLASS_FP8_SUPPORTED", "`cutlass_fp8_supported()`"),
            ("CUTLASS_BLOCK_FP8_SUPPORTED", "`cutlass_block_fp8_supported()`"),
            ("USE_ROWWISE_TORCH_SCALED_MM", "`supports('torch_rowwise')`"),
        )
    ),
    Name(
        "TORCH_DEVICE_IDENTITY", W8A8,
        "`None`, then fp32 `[1]` of one", "",
        "test_w8a8.py::test_the_device_identity_appears_when_it_is_made",
    ),
    Name(
        "convert_to_channelwise", W8A8,
        "one scale per shard becomes fp32 `[N, 1]`",
        "scales of any shape; scales that are not positive are refused",
        "test_fused_weights.py::test_convert_to_channelwise_repeats_scales",
    ),
    Name(
        "requantize_with_max_scale", W8A8,
        "brings all shards to the largest scale, in place; skipped when the last scale is unset",
        "decodes in fp32, not fp16; shards that have the largest scale keep their bytes",
        "test_fused_weights.py::test_requantize_with_max_scale_writes_in_place",
    ),
    Name(
        "normalize_e4m3fn_to_e4m3fnuz", W8A8,
        "the same bytes, 0x80 becomes 0, scales are doubled",
        "the weight given is left as it is; NaN stays NaN",
        "test_fused_weights.py::test_normalize_to_e4m3fnuz_keeps_every_value",
    ),
    Name(
        "per_tensor_dequantize", W8A8,
        "codes in fp16 times the scale", "",
        "test_fused_weights.py::test_per_tensor_dequantize_gives_what_torch_promotes_to",
    ),
    Name(
        "all_close_1d", W8A8,
        "whether all elements are close to the first",
        "a `ValueError` where an assertion failed",
        "test_fused_weights.py::test_all_close_1d_compares_with_the_first",
    ),
    Name(
        "Fp8PerTensorOnlineLinearMethod", ONLINE,
        "a dense weight on meta, quantized per tensor as soon as all shards have come; `weight` "
        "`[K, N]`, `weight_scale` `(1,)`",
        "inputs are quantized per token on every device; a reload writes the same storage; a shard "
        "that comes twice counts once, and FP8 codes are refused; no online method takes the "
        "`activation_quant_key` of newer vLLM",
        "test_online_linear.py::test_a_weight_is_quantized_as_soon_as_all_shards_are_there",
    ),
    Name(
        "Fp8PerBlockOnlineLinearMethod", ONLINE,
        "the same per 128x128 block; `weight` `[N, K]`, `weight_scale_inv`",
        "any N and K; scales are fp32, where newer vLLM rounds them to the weight's dtype; a "
        "reload writes the same storage",
        "test_online_linear.py::test_a_weight_is_quantized_as_soon_as_all_shards_are_there",
    ),
    Name(
        "Fp8PtpcOnlineLinearMethod", ONLINE,
        "the same per row; `weight` `[K, N]`, `weight_scale` `[N, 1]`",
        "scales are fp32, where vLLM rounds them to the weight's dtype; a reload writes the same "
        "storage",
        "test_online_linear.py::test_a_weight_is_quantized_as_soon_as_all_shards_are_there",
    ),
    Name(
        "Mxfp8OnlineLinearMethod", "vLLM, online/mxfp8.py",
        "the same in MXFP8; `weight` `[N, K]`, `weight_scale` E8M0 bytes `[N, K / 32]`",
        "any N and K; exponents are those of `mxfp8_e4m3_quantize`; a reload writes the same "
        "storage",
        "test_online_linear.py::test_a_weight_is_quantized_as_soon_as_all_shards_are_there",
    ),
    Name(
        "Fp8PerTensorOnlineMoEMethod", ONLINE,
        "experts `w13` and `w2`, each with its scale `[E]`; biases, `expert_map`, weights on the "
        "input, grouped top-k with a correction bias, shared experts",
        "`shared_experts` are added to the result; `apply` takes ids or the router's logits; takes "
        "`layer`, or `moe` as newer vLLM does; its own loader cuts nothing for a rank",
        "test_online_moe.py::test_experts_arrive_shard_by_shard",
    ),
    Name(
        "Fp8PerBlockOnlineMoEMethod", ONLINE,
        "the same per 128x128 block, `w13_weight_scale_inv` and `w2_weight_scale_inv`",
        "no size is rounded up to 128; scales are fp32, as above",
        "test_online_moe.py::test_experts_arrive_shard_by_shard",
    ),
    Name(
        "Fp8PtpcOnlineMoEMethod", ONLINE,
        "the same per row, `w13_weight_scale` and `w2_weight_scale` `[E, rows, 1]`",
        "scales are fp32, as above",
        "test_online_moe.py::test_experts_arrive_shard_by_shard",
    ),
    Name(
        "Mxfp8OnlineMoEMethod", "vLLM, online/mxfp8.py",
        "the same in MXFP8, `w13_weight_scale` and `w2_weight_scale` E8M0 bytes",
        "any size",
        "test_online_moe.py::test_experts_arrive_shard_by_shard",
    ),
    Name(
        "enable_fp8_gemm", GEMM,
        "replaces the linear layers that `module_filter` accepts by `FP8Linear`",
        "the default filter keeps sensitive layers; one layer in two places stays one; a warning "
        "if none was replaced",
        "test_gemm.py::test_the_default_filter_keeps_sensitive_layers_and_takes_small_ones",
    ),
    Name(
        "FP8GemmOptions", GEMM,
        "`cast_inputs`, `cast_output_back`, `fp16_weight_storage`, `materialize_fp8_on_wrap`", "",
        "test_gemm.py::test_options_that_contradict_each_other_are_refused",
    ),
    Name(
        "FP8Linear", GEMM,
        "FP8 on a GPU from the first call on, dense on a CPU; `invalidate_weight_cache()`, "
        "`materialize_fp8_weight(device)`",
        "one scale per row; the weight is in `state_dict` in every mode and read in every form; "
        "a copy can be made in every mode; `cpu_offload` follows changes too",
        "test_gemm.py::test_state_dict_has_the_weight_in_every_mode_and_every_mode_reads_it",
    ),
    Name(
        "fp8_linear_forward_many", GEMM,
        "calls layers of one input, which is quantized once",
        "layers that learn are called one by one",
        "test_gemm.py::test_layers_of_one_input_quantize_it_once",
    ),
    Name(
        "apply_fp8_linear", LORAX,
        "quantizes per token, or by `input_scale`, and multiplies",
        "any leading dimensions; the weight as `[K, N]` view or `[N, K]`",
        "test_lorax.py::test_apply_fp8_linear_takes_both_orientations",
    ),
    Name(
        "Fp8Linear", LORAX,
        "a layer of codes and scales; `weight` and `qweight` are the view `[K, N]`",
        "codes and scales are in `state_dict`; casts leave them alone",
        "test_lorax.py::test_fp8_linear_computes_and_shows_what_it_holds",
    ),
    Name(
        "get_linear", "LoRAX, layers/linear.py",
        "`None`: dense; `fp8` and `fp8-kv`: `Fp8Linear`",
        "a dense weight is quantized for `fp8`; other words are refused",
        "test_lorax.py::test_get_linear_makes_the_layer_of_a_quantization",
    ),
    Name(
        "mxfp8_e4m3_quantize", MXFP8,
        "codes and E8M0 scales `[..., K / 32]`, or swizzled and flat",
        "exponents are rounded up, as by FlashInfer and by vLLM 0.33 without it, on every device; "
        "without it, older vLLM scales to [1, 2), which leaves most of the range of e4m3 unused; "
        "ragged K is taken; `alignment` adds zeros on every device; a group with NaN or an "
        "infinity is NaN, where FlashInfer saturates",
        "test_mxfp8.py::test_quantize_gives_codes_and_scales_in_both_layouts",
    ),
    Name(
        "mxfp8_e4m3_quantize_fake", MXFP8,
        "empty tensors of those shapes",
        "`mxfp8_e4m3_quantize` is traced without it",
        "test_mxfp8.py::test_quantize_gives_codes_and_scales_in_both_layouts",
    ),
    Name(
        "dequant_mxfp8_to_bf16", MXFP8,
        "codes times scales, rounded once to bf16",
        "swizzled scales and `float8_e8m0fnu` are taken too; the byte 255 is NaN",
        "test_mxfp8.py::test_dequantize_multiplies_and_rounds_once",
    ),
    Name(
        "swizzle_mxfp8_scale", MXFP8,
        "tiles of 128x4, flat and padded; `fp8kit.unswizzle_scales` is the inverse", "",
        "test_mxfp8.py::test_swizzle_mxfp8_scale_drops_what_lies_beyond",
    ),
    Name(
        "Mxfp8LinearBackend", MXFP8,
        "`EMULATION`, `FLASHINFER_CUTLASS` (native), `MARLIN` (weight-only)",
        "names of ways to compute, not of libraries",
        "test_mxfp8.py::test_the_backend_is_chosen_by_the_device_and_wrong_scales_are_told",
    ),
    Name(
        "select_mxfp8_linear_backend", MXFP8,
        "native from sm100, weight-only from sm80, else emulation", "",
        "test_mxfp8.py::test_the_backend_is_chosen_by_the_device_and_wrong_scales_are_told",
    ),
    Name(
        "Mxfp8LinearOp", MXFP8,
        "`process_weights(layer)` and `apply(input, weight, weight_scale, out_dtype, bias)`",
        "`MARLIN` leaves the weight as it is; every backend computes on every device",
        "test_mxfp8.py::test_a_linear_op_computes_by_each_backend",
    ),
    *(
        Name(
            name, MXFP8, here, "",
            "test_mxfp8.py::test_the_backend_is_chosen_by_the_device_and_wrong_scales_are_told",
        )
        for name, here in (
            ("MXFP8_VALUE_DTYPE", "`torch.float8_e4m3fn`"),
            ("MXFP8_SCALE_DTYPE", "`torch.uint8`"),
            ("MXFP8_BLOCK_SIZE", "32"),
        )
    ),
)  # fmt: skip


def table() -> str:
    """Write the names as a Markdown table."""
    rows = ["| name | published in | here | differs |", "|---|---|---|---|"]
    rows += [f"| `{n.name}` | {n.origin} | {n.here} | {n.differs} |" for n in NAMES]
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """Return the text of the document with its table replaced by the current one."""
    return _TABLE.sub(lambda _: f"{START}\n{table()}{END}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
