"""Uses of a Transformers model in FP8: load, generate, serve batches, place on devices."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8kit
from checkpoint_samples import NANO
from fp8kit.errors import UnsupportedError
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal

transformers = pytest.importorskip("transformers")

PROMPT = "import torch\n\ndef "
NEW = 6


def on_the_fly(path: Path = NANO, **options: Any) -> Any:
    options.setdefault("quantization_config", fp8kit.Fp8KitConfig("FP8_DYNAMIC"))
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a model quantized while loading, with fp32 activations, which are fast on any CPU."""
    return on_the_fly(dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(NANO)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> Tensor:
    ids: Tensor = tokenizer(PROMPT, return_tensors="pt").input_ids
    return ids


@pytest.fixture(scope="module")
def greedy(model: Any, prompt: Tensor) -> Tensor:
    """Return the most likely tokens, each by a pass over the whole text."""
    ids = prompt
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], -1)
    return ids


def generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    result: Tensor = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    return result


def test_every_linear_layer_of_the_blocks_is_fp8(model: Any) -> None:
    assert sum(isinstance(m, Fp8Linear) for m in model.modules()) == 28
    assert len(model.hf_quantizer.report.converted) == 28
    assert model.is_quantized
    assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(fp8kit.UnsupportedError, match=r"weight of model\.layers\.1\.mlp\.up_proj"):
        model.model.layers[1].mlp.up_proj.weight.float()


def test_quantizing_nothing_is_a_warning() -> None:
    config = fp8kit.Fp8KitConfig(include=["lm_head"])
    with pytest.warns(UserWarning, match=r"^No layer becomes FP8: not in include \(28\)"):
        on_the_fly(quantization_config=config)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a BERT of one block for masked words: it has no pooler."""
    config = transformers.BertConfig(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    path = tmp_path_factory.mktemp("encoder")
    transformers.BertForMaskedLM(config).save_pretrained(path)
    return path


def test_a_layer_that_no_file_has_stays_dense_to_be_trained(encoder: Path, prompt: Tensor) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(
        encoder, quantization_config=fp8kit.Fp8KitConfig("FP8_DYNAMIC")
    )
    new, report = model.bert.pooler.dense, model.hf_quantizer.report
    assert type(new) is torch.nn.Linear
    assert 0 < new.weight.std() < 0.1
    assert len(report.converted) == sum(isinstance(m, Fp8Linear) for m in model.modules()) == 6
    reasons = {r.name: r.reason for r in report.skipped}
    assert reasons["bert.pooler.dense"] == "no file has its weight"
    model(prompt % 160, labels=torch.tensor([1])).loss.backward()
    assert new.weight.grad is not None


def test_strict_refuses_a_layer_that_no_file_has(encoder: Path) -> None:
    config = fp8kit.Fp8KitConfig(strict=True)
    with pytest.raises(fp8kit.ConversionError, match=r"pooler\.dense: no file has its weight"):
        transformers.BertModel.from_pretrained(encoder, quantization_config=config)


def test_a_model_that_the_files_lack_is_a_warning() -> None:
    options = {"quantization_config": fp8kit.Fp8KitConfig("FP8_DYNAMIC")}
    with pytest.warns(UserWarning, match=r"^No layer becomes FP8: no file has its weight \(28\)"):
        transformers.LlamaForQuestionAnswering.from_pretrained(NANO, **options)


def test_weights_with_nan_are_refused(tmp_path: Path) -> None:
    weights = load_file(NANO / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][5, 5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(NANO / "config.json", tmp_path)
    with pytest.raises(fp8kit.ConversionError, match=r"0.mlp.up_proj.weight holds NaN"):
        on_the_fly(tmp_path)


@pytest.mark.parametrize("said", [{"layers": {"lm_head": "FP8_BLOCK"}}, {"mx_form": "MXFP8_ROW"}])
def test_what_describes_fp8_files_is_refused_for_dense_ones(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Got layers or mx_form for a checkpoint in high prec"):
        on_the_fly(quantization_config=fp8kit.Fp8KitConfig("FP8_DYNAMIC", **said))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str, model: Any, prompt: Tensor, greedy: Tensor) -> None:
    assert torch.equal(generate(model, prompt, cache_implementation=cache), greedy)


def test_generate_compiles_the_decoding_by_itself(
    model: Any, prompt: Tensor, greedy: Tensor
) -> None:
    torch._dynamo.reset()
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiling = transformers.CompileConfig(backend=counting, mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # on a GPU this is the default
    options = {"cache_implementation": "static", "compile_config": compiling}
    for _ in range(2):
        assert torch.equal(generate(model, prompt, **options), greedy)
        assert len(graphs) == 1


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_other_searches_run(options: dict[str, int], model: Any, prompt: Tensor) -> None:
    assert generate(model, prompt, **options).shape == (1, prompt.shape[1] + NEW)


def test_generate_batch(model: Any, prompt: Tensor, greedy: Tensor) -> None:
    plan = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    serving = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(
        [prompt[0].tolist(), [5, 6, 7]],
        generation_config=plan,
        continuous_batching_config=serving,
        progress_bar=False,
    )
    assert found["req_0"].generated_tokens == greedy[0, prompt.shape[1] :].tolist()
    assert len(found["req_1"].generated_tokens) == NEW


def test_a_pipeline_of_a_model_or_a_directory(model: Any, tokenizer: Any, greedy: Tensor) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = tokenizer.decode(greedy[0])
    given = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert given(PROMPT, **options)[0]["generated_text"] == wanted
    config = {"quantization_config": fp8kit.Fp8KitConfig("FP8_DYNAMIC")}
    named = transformers.pipeline(
        "text-generation", model=str(NANO), dtype=torch.float32, model_kwargs=config
    )
    assert named(PROMPT, **options)[0]["generated_text"] == wanted


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}], ids=str)
def test_device_maps(device_map: Any, model: Any, prompt: Tensor) -> None:
    placed = on_the_fly(dtype=torch.float32, device_map=device_map)
    with torch.no_grad():
        assert_bits_equal(placed(prompt).logits, model(prompt).logits)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8"])
def test_a_model_on_meta_shows_what_fp8_takes(scheme: str) -> None:
    placed = on_the_fly(device_map="meta", quantization_config=fp8kit.Fp8KitConfig(scheme))
    assert all(p.is_meta for p in placed.parameters())
    assert placed.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "auto", "max_memory": {"cpu": 3 * 2**20}},
        {"device_map": {"model": "disk", "lm_head": "cpu"}},
    ],
    ids=["auto", "named"],
)
def test_quantizing_into_weights_on_disk_is_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"places layers on disk.*save an FP8 checkpoint"):
        on_the_fly(offload_folder=tmp_path, **options)


def test_everything_works_without_a_network(
    prompt: Tensor, greedy: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(*_: Any, **__: Any) -> Any:
        raise AssertionError("a socket was opened")

    for way in ("socket.connect", "socket.connect_ex", "socket.sendto", "getaddrinfo"):
        monkeypatch.setattr(f"socket.{way}", blocked)
    loaded = on_the_fly(dtype=torch.float32)
    assert torch.equal(generate(loaded, prompt), greedy)
    loaded.save_pretrained(tmp_path)
    again = fp8kit.load(tmp_path, dtype=torch.float32)
    assert torch.equal(generate(again, prompt), greedy)
    with pytest.raises(AssertionError, match="socket"):
        socket.create_connection(("127.0.0.1", 9))


def test_another_config_for_what_is_quantized_is_refused(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with CompressedTensorsConfig"):
        on_the_fly(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8kit"}
    with pytest.raises(UnsupportedError, match=r"which layers are FP8.*fp8kit\.load"):
        on_the_fly(tmp_path, config=config, quantization_config=None)


def test_the_config_of_diffusers_is_refused() -> None:
    pytest.importorskip("diffusers")
    from fp8kit.integrations.diffusers import Fp8KitConfig

    with pytest.raises(TypeError, match=r"diffusers\.Fp8KitConfig.*Import it from fp8kit\."):
        on_the_fly(quantization_config=Fp8KitConfig())


@pytest.mark.parametrize("cast", ["half", "float"])
def test_casts_of_a_quantized_model_are_refused(cast: str, model: Any) -> None:
    with pytest.raises(ValueError, match="quantized"):
        getattr(model, cast)()


def test_moving_to_a_dtype_leaves_the_codes_alone(prompt: Tensor) -> None:
    moved = on_the_fly(dtype=torch.bfloat16)
    before = {n: t for n, t in moved.state_dict().items() if t.dtype == torch.float8_e4m3fn}
    moved.to(torch.float32)
    assert len(before) == 28
    for name, codes in before.items():
        assert_bits_equal(moved.state_dict()[name], codes)
        assert moved.get_submodule(name.removesuffix(".weight")).weight_scale.dtype == torch.float32
    assert moved(prompt).logits.dtype == torch.float32
