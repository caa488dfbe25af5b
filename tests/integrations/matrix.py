"""The tables of docs/integrations.md: what works with other libraries, and the test that shows it.

    python tests/integrations/matrix.py

writes them. To add a line, add a ``Row`` with its test here, and run this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A use of a library: whether it works, how, and the test as a path below ``tests``."""

    outcome: Literal["works", "refused", "untested"]
    feature: str
    test: str = ""
    how: str = ""


# by library: the name of its distribution, which must have a line in constraints.txt
MATRIX: dict[str, tuple[Row, ...]] = {
    "transformers": (
        Row("works", "`from_pretrained(quantization_config=fp8kit.Fp8KitConfig())`",
            "integrations/test_transformers_use.py::test_every_linear_layer_of_the_blocks_is_fp8",
            "each weight is quantized as it is read; the model is built on meta"),
        Row("works", "the same: memory",
            "checkpoint/test_peak.py::test_loading_a_transformers_model",
            "never more than the FP8 model, one layer and five per cent"),
        Row("works", "the same: layers that no file has, such as a new head",
            "integrations/"
            "test_transformers_use.py::test_a_layer_that_no_file_has_stays_dense_to_be_trained",
            "stay dense and can be trained"),
        Row("works", "`from_pretrained` of what was saved",
            "integrations/test_transformers.py::test_stock_transformers_computes_the_same",
            "by compressed-tensors, which decodes on a CPU; `fp8kit.load` runs FP8"),
        Row("refused", "`Fp8KitConfig` for a checkpoint that is FP8 already",
            "integrations/"
            "test_transformers_use.py::test_another_config_for_what_is_quantized_is_refused",
            "use `fp8kit.load`"),
        Row("works", "`save_pretrained`",
            "integrations/test_transformers.py::test_save_pretrained_loads_everywhere",
            "as compressed-tensors, byte for byte what `fp8kit.save` writes"),
        Row("works", "`save_pretrained` by one process of many",
            "integrations/test_transformers_trial.py::test_one_process_of_many_saves_alone",
            "no other process needs to take part, nor for `fp8kit.save` and `quantize_checkpoint`"),
        Row("works", "`save_pretrained(state_dict=)`",
            "integrations/test_transformers.py::test_a_state_dict_is_what_is_saved",
            "codes with scales or dense weights, which are quantized; a part is written alone"),
        Row("refused", "`from_pretrained(None, state_dict=)` with the codes of a converted model",
            "integrations/test_transformers.py::test_codes_do_not_fill_a_dense_model_as_numbers",
            "convert the dense model and call `load_state_dict`"),
        Row("works", "`Fp8KitConfig` as a dictionary",
            "integrations/test_transformers.py::test_a_config_survives_a_dictionary",
            "`include` and `exclude` as patterns, not as functions"),
        Row("works", "`generate`, dynamic and static cache",
            "integrations/test_transformers_use.py::test_generate"),
        Row("works", "compilation by `generate`",
            "integrations/test_transformers_use.py::test_generate_compiles_the_decoding_by_itself",
            "one graph, no break"),
        Row("works", '`set_attn_implementation("fp8kit_sdpa")`',
            "integrations/test_transformers_attention.py::test_tokens_are_those_of_sdpa",
            "one new token repeats no keys and values"),
        Row("refused", '`generate_batch` with `"fp8kit_sdpa"`',
            "integrations/test_transformers_attention.py::test_paged_caches_are_refused",
            "its masks are made for `sdpa`"),
        Row("works", "beam search, prompt lookup",
            "integrations/test_transformers_use.py::test_other_searches_run"),
        Row("works", "`generate_batch`",
            "integrations/test_transformers_use.py::test_generate_batch"),
        Row("works", "`pipeline`",
            "integrations/test_transformers_use.py::test_a_pipeline_of_a_model_or_a_directory"),
        Row("works", '`device_map="auto"`',
            "integrations/test_transformers_use.py::test_device_maps"),
        Row("refused", "quantizing while loading, with disk in the `device_map`",
            "integrations/"
            "test_transformers_use.py::test_quantizing_into_weights_on_disk_is_refused",
            "the loader would keep the file's weights; save FP8 first"),
        Row("untested", "an FP8 checkpoint with disk in the `device_map`",
            how="compressed-tensors decodes it in memory; use `fp8kit.load` and `dispatch_model`"),
        Row("works", "no network",
            "integrations/test_transformers_use.py::test_everything_works_without_a_network"),
        Row("refused", "`.half()`, `.float()` of a model that was quantized while loading",
            "integrations/test_transformers_use.py::test_casts_of_a_quantized_model_are_refused",
            "by Transformers; `.to(dtype)` casts everything but codes and scales"),
        Row("works", "`resize_token_embeddings` of a model whose head is FP8",
            "integrations/test_transformers.py::test_a_model_with_an_fp8_head_gets_other_words",
            "the head is dequantized, resized and quantized"),
        Row("works", "`dequantize()`", "integrations/test_transformers.py::test_dense_again"),
        Row("works", "`generate(past_key_values=fp8kit.Fp8Cache(model))`, static too",
            "integrations/test_kv_cache.py::test_generate_gives_the_tokens_of_rounded_states",
            "keys and values in FP8: greedy, beams, prompt lookup"),
        Row("works", "an FP8 cache with the scales of the checkpoint",
            "integrations/test_kv_cache.py::test_the_scales_of_a_checkpoint_serve_the_cache",
            '`scale="checkpoint"`; without it one scale per token and head'),
        Row("works", "an FP8 cache of an encoder-decoder model",
            "integrations/"
            "test_kv_cache.py::test_an_encoder_decoder_model_keeps_its_cross_attention",
            "of the decoder; keys and values of the encoder stay in high precision"),
        Row("works", "an FP8 cache and sliding windows",
            "integrations/test_kv_cache.py::test_a_window_slides_as_that_of_transformers"),
        Row("works", "an FP8 cache and code that reads `keys` and `values` of its layers",
            "integrations/test_kv_cache.py::test_models_that_read_the_cache_get_numbers",
            "numbers; what is assigned is quantized"),
        Row("refused", "an FP8 cache and code that writes into the `keys` or `values` that it read",
            "integrations/test_decoded_copies.py::test_writes_are_refused_at_the_next_use"),
        Row("refused", "a static FP8 cache: other batches; gradients into a cache",
            "integrations/test_kv_cache.py::test_caches_refuse_wrong_scales_and_arguments"),
        Row("refused", "an FP8 cache for hybrid layers",
            "integrations/test_kv_cache.py::test_kinds_of_layers_without_such_a_cache_are_named"),
    ),
    "peft": (
        Row("works", "LoRA and DoRA: training",
            "integrations/test_peft.py::test_training_moves_the_adapter_alone",
            "the base is frozen, adapters are fp32"),
        Row("works", "the loss of LoRA on an FP8 base",
            "integrations/test_peft.py::test_training_follows_that_of_the_bf16_weights",
            "follows that on the bf16 weights to a percent"),
        Row("works", "`Trainer`, activation checkpointing",
            "integrations/test_peft.py::test_the_trainer_of_transformers",
            "without an adapter Transformers refuses a model quantized while loading, and of a "
            "converted one trains what is not FP8: embeddings, norms, head"),
        Row("works", "`prepare_model_for_kbit_training`",
            "integrations/"
            "test_peft.py::test_preparing_for_training_leaves_codes_and_their_dtype_alone"),
        Row("works", "`add_adapter`, `load_adapter`, `set_adapter` of Transformers",
            "integrations/test_peft.py::test_adapters_by_the_methods_of_transformers"),
        Row("works", "adapters saved and loaded",
            "io/test_savers.py::test_an_adapter_is_saved_alone_and_loads"),
        Row("works", "several adapters, a batch of mixed ones",
            "integrations/test_peft.py::test_adapters_of_a_batch"),
        Row("works", "hot swap in a compiled model",
            "integrations/test_peft.py::test_swapping_an_adapter_compiles_nothing",
            "compiles nothing anew"),
        Row("works", "`merge_adapter`, `unmerge_adapter`",
            "integrations/test_peft.py::test_merging_adds_to_the_numbers_and_quantizes_once",
            "in fp32, quantized once, in place; unmerging restores every byte"),
        Row("refused", "`load_state_dict`, `load_weights` of a base while adapters are merged",
            "integrations/test_peft.py::test_a_merged_model_takes_adapters_and_no_other_base",
            "unmerging would discard them; adapters alone load"),
        Row("works", "merging where accelerate offloads",
            "integrations/test_peft.py::test_offloaded_layers_are_merged_where_they_are_kept",
            "to the CPU or disk"),
        Row("works", "`merge_and_unload`, then saving",
            "integrations/test_peft.py::test_a_merged_model_is_a_model_of_fp8_layers",
            "the result is an FP8 model"),
        Row("refused", "merging adapters, and DoRA and HRA, attached before the conversion",
            "integrations/test_peft.py::test_a_model_with_adapters_is_converted_around_them",
            "LoRA computes; to merge, and for the others, attach them after it"),
        Row("works", "DoRA: results and merging",
            "integrations/test_peft.py::test_dora_is_that_of_the_dequantized_weight",
            "dequantizes the weight at each call"),
        Row("works", "adapters of a layer that became dense by `to_linear()`",
            "integrations/test_peft.py::test_a_layer_that_became_dense_takes_adapters_as_peft_has_it",
            "as PEFT has it; unmerge before it becomes dense"),
        Row("refused", "an adapter with NaN or infinities is merged",
            "integrations/test_peft.py::test_what_is_not_finite_is_never_merged",
            "with and without `safe_merge`"),
        Row("works", "`init_lora_weights` True, gaussian, eva",
            "integrations/test_peft.py::test_other_initializations_are_those_of_peft"),
        Row("refused", "PiSSA, OLoRA, MiCA, KaSA, orthogonal, and others that read the weight",
            "integrations/test_peft.py::test_initializations_from_the_weight_are_refused",
            "initialize on the dense model"),
        Row("refused", "`target_parameters` of FP8 experts or layers",
            "integrations/test_peft.py::test_adapters_of_fp8_parameters_are_refused",
            "PEFT adds the adapter to the weight itself; rounded to codes it would vanish"),
        Row("refused", "`modules_to_save` of FP8 layers",
            "integrations/test_peft.py::test_training_a_copy_of_fp8_layers_is_refused",
            "dense ones, such as `lm_head`, are trained"),
        Row("works", "IA3, LoHa, LoKr, AdaLoRA, VeRA, BOFT: training",
            "integrations/test_peft.py::test_other_adapters_train_and_are_not_merged"),
        Row("refused", "the same: merging",
            "integrations/test_peft.py::test_other_adapters_train_and_are_not_merged",
            "call `to_linear()` on these layers first"),
    ),
    "diffusers": (
        Row("works", "`from_pretrained(quantization_config=)`, `save_pretrained`",
            "integrations/"
            "test_diffusers.py::test_a_family_is_quantized_while_loading_saved_and_loaded",
            "Flux, SD3, Wan, Qwen-Image, LTX, HunyuanVideo, to the bit"),
        Row("refused", "loading what was saved without this package",
            "integrations/test_diffusers.py::test_without_this_package_a_saved_model_does_not_load",
            "by diffusers: `import fp8kit` first"),
        Row("works", "`PipelineQuantizationConfig`, pipelines saved and loaded",
            "integrations/test_diffusers.py::test_a_pipeline_is_quantized_saved_and_loaded",
            "by mapping or by backend"),
        Row("works", "FP8 files of Black Forest Labs (`fp8r`)",
            "integrations/test_diffusers.py::test_a_file_of_black_forest_labs_is_read_to_the_bit",
            "`from_single_file`"),
        Row("refused", "NVFP4 files of Black Forest Labs",
            "integrations/test_diffusers.py::test_files_of_another_form_are_refused"),
        Row("works", "`enable_group_offload`: leafs, blocks, disk",
            "integrations/test_diffusers.py::test_group_offload_changes_no_bit",
            "after the conversion: before it, layers stay dense; streams are untested"),
        Row("works", "`enable_cache`: pyramid attention broadcast, FasterCache, first block, "
            "TaylorSeer, MagCache",
            "integrations/test_diffusers.py::test_caches_between_steps_meet_fused_layers",
            "fused layers change no bit of it"),
        Row("works", "`enable_model_cpu_offload`",
            "integrations/test_diffusers.py::test_model_offload_of_a_pipeline_changes_no_bit"),
        Row("works", "`enable_layerwise_casting`",
            "integrations/test_diffusers.py::test_layerwise_casting_leaves_codes_and_scales"),
        Row("works", "`fuse_qkv_projections`",
            "integrations/"
            "test_diffusers.py::test_projections_are_joined_before_the_conversion_alone",
            "before the conversion; refused after it, where q, k and v share their input anyway"),
        Row("refused", "quantizing while loading, with disk in the `device_map`",
            "integrations/test_diffusers.py::test_quantizing_into_weights_on_disk_is_refused"),
        Row("refused", "`save_pretrained` with adapters attached",
            "io/test_savers.py::test_diffusers_refuses_to_save_a_base_with_adapters",
            "save the adapters, then unload them"),
        Row("refused", "`.half()`, `.to(dtype)` of a model that was quantized while loading",
            "integrations/test_diffusers.py::test_casts_of_a_quantized_model_are_refused",
            "by diffusers"),
    ),
    "accelerate": (
        Row("works", "`cpu_offload`, `disk_offload`, `dispatch_model`",
            "integrations/test_accelerate.py::test_offloaded_layers_compute_the_same",
            "no bit changes, and nothing stays in memory"),
        Row("works", "offloading again and again",
            "integrations/test_accelerate.py::test_a_model_may_be_offloaded_again_and_again"),
        Row("works", "`cpu_offload_with_hook`",
            "integrations/test_accelerate.py::test_models_take_turns_by_hooks"),
        Row("works", "`load_checkpoint_and_dispatch` to CPU and disk",
            "integrations/test_accelerate.py::test_checkpoints_are_loaded_and_dispatched",
            "into a model whose layers are `Fp8Linear`"),
        Row("works", "`load_checkpoint_in_model`, `load_checkpoint_and_dispatch` of dense weights",
            "integrations/"
            "test_accelerate.py::test_dense_checkpoints_are_quantized_with_scales_of_their_own",
            "quantized as they are placed, into CPU or GPU memory; not to disk"),
        Row("works", "`infer_auto_device_map` over GPUs",
            "integrations/test_accelerate.py::test_a_device_map_counts_codes_as_bytes",
            "planned with faked memory, not run on hardware"),
        Row("works", "`Accelerator.prepare`",
            "integrations/test_accelerate.py::test_an_accelerator_prepares_a_model"),
        Row("refused", "converting a model that is dispatched already",
            "conversion/test_plan.py::test_obstacles_are_left_alone_by_name",
            "its layers stay dense, with the reason in the report"),
    ),
    "torch": (
        Row("works", "`compile(fullgraph=True, dynamic=True)`",
            "ops/test_operators.py::test_compiles_to_one_graph_for_every_row_count",
            "one graph for every number of rows above one"),
        Row("works", '`compile(mode="max-autotune")`, `"reduce-overhead"`',
            "integrations/test_torch.py::test_modes_of_the_compiler"),
        Row("works", "`export`", "ops/test_operators.py::test_exported_program_survives_saving"),
        Row("works", "AOTInductor packages",
            "integrations/test_torch.py::test_a_package_of_ahead_of_time_code",
            "in a process that imports fp8kit, whose operators it calls"),
        Row("works", "`func.functional_call`",
            "integrations/"
            "test_torch.py::test_functional_call_takes_codes_and_scales_from_elsewhere"),
        Row("works", "`func.vmap`, `grad`, `vjp`, `jacrev`",
            "ops/test_transforms.py::test_reverse_mode_equals_backward"),
        Row("works", "`func.grad`, `vjp`, `jacrev` in what is compiled",
            "ops/test_transforms.py::test_compiled_code_differentiates",
            "the graph breaks there, so not with `fullgraph=True`; with torch before 2.13 a "
            "compiled `vjp` that a graph break is inside of gives zeros, for dense layers too; "
            "Dynamo then skips the `forward` of FP8 layers until `torch._dynamo.reset()`"),
        Row("refused", "forward-mode differentiation, a gradient for an FP8 weight",
            "ops/test_transforms.py::test_what_has_no_derivative_is_refused"),
        Row("works", "`load(weights_only=True)` of a `state_dict`",
            "integrations/test_torch.py::test_a_state_dict_is_weights_only"),
        Row("works", "`load(weights_only=True)` of a whole model",
            "integrations/test_torch.py::test_a_whole_model_is_weights_only_with_its_classes_named",
            "after `add_safe_globals` of its classes: `Fp8Linear`, `Scheme`, `GroupShape` are "
            "ours"),
        Row("works", "`autocast`",
            "integrations/test_torch.py::test_autocast_decides_the_dtype_of_the_model"),
        Row("works", "`inference_mode`, `no_grad`",
            "integrations/test_torch.py::test_inference_mode_and_no_grad_agree"),
        Row("works", "`FlopCounterMode`",
            "integrations/test_flop_counter.py::test_linear_layers_forward_and_backward"),
        Row("works", "`jit.trace`", "modules/test_shared_input.py::test_a_trace_takes_other_rows",
            "siblings, norms and activations compute one by one"),
        Row("refused", "`jit.script`", "integrations/test_torch.py::test_scripting_is_refused"),
    ),
}  # fmt: skip


def version(library: str) -> str:
    """Return the version that the tests run on."""
    pinned = (ROOT / "constraints.txt").read_text()
    found = re.search(rf"^{re.escape(library)}==(\S+)$", pinned, re.MULTILINE)
    assert found, f"{library} is not in constraints.txt"
    return found[1]


def tables(matrix: dict[str, tuple[Row, ...]]) -> str:
    """Write one table per library."""
    lines = []
    for library, rows in matrix.items():
        lines += [f"### {library} {version(library)}", "", "| what | | how | shown by |"]
        lines += ["|---|---|---|---|"]
        for row in rows:
            shown = f"`tests/{row.test}`" if row.test else ""
            lines.append(f"| {row.feature} | {row.outcome} | {row.how} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def written(document: str) -> str:
    """Return the document with its tables replaced."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables(MATRIX)}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
