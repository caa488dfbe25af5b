"""Names of layers and classes with a known meaning: tables for conversion, checkpoints, engines.

They hold only what cannot be found by inspecting a model or shapes.
"""

from __future__ import annotations

_QKV = ("q_proj", "k_proj", "v_proj")
_TO_QKV = ("to_q", "to_k", "to_v")
_ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")
GATE_UP = ("gate_proj", "up_proj")
_W1_W3 = ("w1", "w3")  # names of Meta's Llama, and of Mixtral's experts; w2 is the down projection

# children of one module that read one tensor, in call order
SIBLINGS = (_QKV, _TO_QKV, _ADDED_QKV, GATE_UP, _W1_W3)
# the same in cross attention, where queries read another tensor than keys and values
CROSS_SIBLINGS = (_QKV[1:], _TO_QKV[1:], _ADDED_QKV[1:])

# a joined layer, and the layers it is made of in the order of its rows
JOINED: dict[str, tuple[tuple[str, ...], ...]] = {
    "qkv_proj": (_QKV,),
    "to_qkv": (_TO_QKV,),
    "gate_up_proj": (GATE_UP, _W1_W3),
    "up_gate_proj": (GATE_UP[::-1],),
    "w13": (_W1_W3,),
}
# a stack of experts [E, N, K], and the layers of one expert it is made of
STACKED: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (GATE_UP, _W1_W3),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
# the layers of an expert under the names of Mixtral
MIXTRAL_PARTS = dict(zip((*GATE_UP, "down_proj"), (*_W1_W3, "w2"), strict=True))
# linear attention (Qwen3.5): a layer that engines merge, and the layers it is made of
OF_DELTA_NET = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# a layer, and all that serving engines merge it with, so that all of them are FP8 or none is
MERGED_BY_ENGINES = {
    name: group
    for group in (
        *(_QKV, GATE_UP, _W1_W3, ("q_a_proj", "kv_a_proj_with_mqa")),
        *(("query", "key", "value"), ("c_fc_0", "c_fc_1")),  # BERT's; the gate and up of EXAONE
        *OF_DELTA_NET.values(),
    )
    for name in group
}

_ATTENTION = " ".join(f"self_attn.{name}" for name in _QKV)
_MLP = " ".join(f"mlp.{name}" for name in GATE_UP)
_PLAIN = (f"input_layernorm -> {_ATTENTION}", f"post_attention_layernorm -> {_MLP}")
_SANDWICH = (_PLAIN[0], f"pre_feedforward_layernorm -> {_MLP}")
_JOINT = (
    "norm1 -> attn.to_q attn.to_k attn.to_v",
    "norm1_context -> attn.add_q_proj attn.add_k_proj attn.add_v_proj",
)
# families of diffusers whose single blocks concatenate attention and feed-forward
_CONCATENATING = (
    *("flux", "chroma", "bria", "bria_fibo", "longcat_image", "motif_video"),
    *("hunyuan_video", "hunyuanimage"),
)
# in the mixtures of experts among them only the first link applies
_PLAIN_FAMILIES = (
    *("llama", "mistral", "ministral", "ministral3", "mixtral"),
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "granite", "helium", "smollm3"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "glm4_moe", "gpt_oss", "starcoder2"),
)
# patterns of full class names of blocks, and the links that reading their code has shown; a link is
# written as `fusion_rules` defines
BLOCKS: dict[str, tuple[str, ...]] = {
    **{f"transformers.models.{family}.*DecoderLayer": _PLAIN for family in _PLAIN_FAMILIES},
    **{f"transformers.models.{family}.*DecoderLayer": _SANDWICH for family in ("gemma2", "gemma3")},
    **{
        f"diffusers.models.transformers.transformer_{family}.*SingleTransformerBlock": (
            "act_mlp +> proj_out",
        )
        for family in _CONCATENATING
    },
    "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttention": (
        "mlp_act_fn +> to_out",
    ),
    "diffusers.models.transformers.transformer_flux[23].Flux*FeedForward": (
        "act_fn -> linear_out",
    ),
    "diffusers.models.transformers.transformer_flux.FluxTransformerBlock": _JOINT,
    "diffusers.models.transformers.transformer_flux.FluxSingleTransformerBlock": (
        "norm -> proj_mlp attn.to_q attn.to_k attn.to_v",
    ),
    "diffusers.models.attention.JointTransformerBlock": _JOINT,
    "diffusers.models.attention.BasicTransformerBlock": (
        "norm1 -> attn1.to_q attn1.to_k attn1.to_v",
        "norm2 -> attn2.to_q",
        "norm3 -> ff.net.0.proj",
    ),
}
