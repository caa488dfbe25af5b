"""Tiny random Transformers models: dense ones, and one for each form of stacks of experts."""

from __future__ import annotations

from typing import Any

import torch

# sides of 128: smaller layers and experts are not worth FP8
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"intermediate_size": 128, "num_experts_per_tok": 2}
_QWEN: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 128}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": _QWEN,
    "Qwen3_5MoeText": {**_QWEN, "shared_expert_intermediate_size": 128,
        "layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "DeepseekV3": {**_DEEPSEEK, "n_group": 2, "topk_group": 1, "q_lora_rank": 64,
        "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
        "head_dim": 32},
    "GptOss": {"num_local_experts": 4},
    "Llama4Text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1},
    "GraniteMoe": {"num_local_experts": 4},
    "NemotronH": {"n_routed_experts": 4, "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128, "moe_latent_size": None,
        "layers_block_type": ["attention", "moe"]},
    "Olmoe": {"num_experts": 4},
    "Glm4Moe": _DEEPSEEK,
}  # fmt: skip


def tiny(kind: str, **changes: Any) -> Any:
    """Return a random model in bf16, in eval mode.

    Args:
        kind: model type; one that is not in ``KINDS`` is dense.
        changes: fields of the config.
    """
    import transformers

    sizes = {**SIZES, **({**_EXPERTS, **KINDS[kind]} if kind in KINDS else {}), **changes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    made = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    model = made._from_config(config, dtype=torch.bfloat16).eval()
    random = torch.Generator().manual_seed(1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name:  # these are made, not drawn
            tensor.data.copy_(0.1 * torch.randn(tensor.shape, generator=random))
    return model
