"""Running a model never changes the files that it is saved to, with any common way to save.

Each saver writes a model before and after it has run in every way; the files are equal byte for
byte, and load into another model with the same tensors.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.integrations.peft import MIN_PEFT_VERSION

import fp8kit
from fp8kit.errors import CheckpointError
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal, assert_same_tensors
from recorded_calls import fuse_on_cpu
from tiny_experts import tiny

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
hub = pytest.importorskip("huggingface_hub")
tokenizers = pytest.importorskip("tokenizers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they warn about on import is not ours to fix
    diffusers = pytest.importorskip("diffusers")
    peft = pytest.importorskip("peft")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

# tied names, of which a saver may leave out one
TIED = {
    *("embed.weight", "head.weight", "model.embed_tokens.weight", "lm_head.weight"),
    *("out.weight", "out.weight_scale", "again.weight", "again.weight_scale"),
}
IDS = torch.arange(600).view(1, -1) * 37 % 160


class Plain(nn.Module, hub.PyTorchModelHubMixin):
    """Siblings, biases, a tied head, a buffer, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(160, 128)
        self.norm = nn.LayerNorm(128)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(128, n) for n in (256, 128, 128))
        self.out = self.again = nn.Linear(128, 128, bias=False)
        self.head = nn.Linear(128, 160, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3, 4]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.head(self.again(self.out(q[..., :128] * k + q[..., 128:] * v)))


def plain(scheme: str = "FP8_DYNAMIC") -> nn.Module:
    model = Plain().bfloat16().eval().requires_grad_(False)
    assert len(fp8kit.convert(model, scheme).converted) == 4
    return model


def llama(scheme: str = "FP8_DYNAMIC") -> Any:
    model = tiny("Llama", num_attention_heads=4, tie_word_embeddings=True)
    assert len(fp8kit.convert(model, scheme).converted) == 14
    return model


def qwen3_moe() -> Any:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    assert len(fp8kit.convert(model).stacks) == 1
    return model


def transformer(scheme: str = "FP8_DYNAMIC") -> Any:
    model = diffusers.Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=32,
        norm_num_groups=8,
        num_layers=1,
        sample_size=8,
        cross_attention_dim=128,
    )
    model = model.bfloat16().eval()
    assert len(fp8kit.convert(model, scheme).converted) >= 8
    return model


def run(model: nn.Module, rows: int) -> Tensor:
    """Call any of these models with about this number of rows."""
    device = next(model.parameters()).device
    if isinstance(model, diffusers.Transformer2DModel):
        side = max(1, int(rows**0.5))
        images = torch.ones(1, 32, side, side, dtype=torch.bfloat16, device=device)
        states = torch.ones(1, 8, 128, dtype=torch.bfloat16, device=device)
        result: Tensor = model(images, states, return_dict=False)[0]
        return result
    y = model(ids(rows, device))
    return y if isinstance(y, Tensor) else y.logits


@functools.cache
def ids(rows: int, device: torch.device) -> Tensor:
    """Return cached tokens, because nothing can be copied to a GPU during a capture."""
    return IDS[:, :rows].to(device)


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        for rows in (1, 5, 600, 5):
            run(model, rows)


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for rows in (1, 5, 600):
            run(model, rows)


def with_gradients(model: nn.Module) -> None:
    for rows in (5, 600):
        run(model, rows)


def in_every_order(model: nn.Module) -> None:
    """Call all and some of the siblings one after another, in every order."""
    groups = {id(m.shared): m.shared for m in model.modules() if isinstance(m, Fp8Linear)}
    for group in filter(None, groups.values()):
        size = len(group.members)
        for count in range(1, size + 1):
            for order in itertools.permutations(range(size), count):
                first = group.members[0]
                x = torch.ones(3, first.in_features, dtype=torch.bfloat16)
                with torch.no_grad():
                    for i in order:
                        group.members[i](x.to(first.weight.device))


def fused_and_moved(model: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fuse_on_cpu(patch)
        run(model, 5)
        device = next(model.parameters()).device
        model.cpu().to(device)
        run(model, 5)
        run(copy.deepcopy(model), 5)


USES = (without_gradients, in_inference_mode, with_gradients, in_every_order, fused_and_moved)


@dataclass(frozen=True)
class Saver:
    """A way to write a model to a folder, and to read it into another model of its kind."""

    save: Callable[[Any, Path], object]
    load: Callable[[Any, Path], Any]
    exact: bool = True  # the same tensors elsewhere in memory are written as the same bytes


def torch_save(thing: Callable[[nn.Module], object]) -> Callable[[nn.Module, Path], object]:
    return lambda model, path: torch.save(thing(model), path / "model.bin")


def filled(read: Callable[[Path], Any]) -> Callable[[nn.Module, Path], nn.Module]:
    """Load a folder's state_dict into a model; tied tensors may be present only once."""

    def load(model: nn.Module, path: Path) -> nn.Module:
        missing, unexpected = model.load_state_dict(read(path), strict=False)
        assert not unexpected
        assert set(missing) <= TIED
        return model

    return load


def read_files(path: Path) -> dict[str, Tensor]:
    """Read all weight files of a folder, in any format."""
    state: dict[str, Tensor] = {}
    for file in sorted(path.rglob("*")):
        if file.suffix == ".safetensors":
            state |= load_file(file)
        elif file.suffix == ".bin":
            state |= torch.load(file, weights_only=True)
    return state


def accelerator() -> Any:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return accelerate.Accelerator(cpu=True)


def save_accelerate_state(safe: bool) -> Callable[[nn.Module, Path], None]:
    def save(model: nn.Module, path: Path) -> None:
        chief = accelerator()
        chief.prepare(model)
        chief.save_state(path, safe_serialization=safe)
        for other in path.glob("random_states*"):  # generators have moved on
            other.unlink()

    return save


def load_dcp(model: nn.Module, path: Path) -> nn.Module:
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True)
    model.load_state_dict(state)
    return model


def save_async(model: nn.Module, path: Path) -> None:
    dcp.async_save(model.state_dict(), checkpoint_id=path / "dcp", no_dist=True).result()


def load_states(model: nn.Module, path: Path) -> nn.Module:
    set_model_state_dict(model, torch.load(path / "model.bin", weights_only=True))
    return model


def save_trained(model: Any, path: Path) -> None:
    arguments = transformers.TrainingArguments(path / "made", use_cpu=True, report_to=[])
    transformers.Trainer(model=model, args=arguments).save_model(path)
    (path / "training_args.bin").unlink()  # they hold the path


def save_pipeline(model: Any, path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    transformers.TextGenerationPipeline(model, tokenizer=tokenizer).save_pretrained(path)


def load_torch(model: nn.Module, path: Path) -> Any:
    return torch.load(path / "model.bin", weights_only=False)


def load_pickle(model: nn.Module, path: Path) -> Any:
    return pickle.loads((path / "model.pickle").read_bytes())


def save_tensors(model: nn.Module, path: Path) -> None:
    kept = {id(t): n for n, t in reversed(model.state_dict(keep_vars=True).items())}
    state = {n: t for n, t in model.state_dict().items() if n in kept.values()}
    save_file(state, path / "model.safetensors")


def load_whole(model: nn.Module, path: Path) -> nn.Module:
    load_model(model, path / "model.safetensors")
    return model


def save_ours(model: nn.Module, path: Path) -> None:
    fp8kit.save(model, path / "saved")


def save_compiled(model: nn.Module, path: Path) -> None:
    fp8kit.save(torch.compile(model), path / "saved")


def save_wrapped(model: nn.Module, path: Path) -> None:
    fp8kit.save(nn.DataParallel(model), path / "saved")


def load_compiled(model: nn.Module, path: Path) -> nn.Module:
    compiled: Any = torch.compile(model)
    assert fp8kit.load(path / "saved", compiled) is compiled
    return model


def load_mapped(model: nn.Module, path: Path) -> nn.Module:
    """Replace the model's tensors by the mapped tensors of the file."""
    state = torch.load(path / "model.bin", mmap=True, weights_only=True)
    model.load_state_dict(state, assign=True)
    return model


def save_one_by_one(model: nn.Module, path: Path) -> None:
    for name, tensor in model.state_dict().items():
        torch.save(tensor, path / name)


def load_one_by_one(model: nn.Module, path: Path) -> nn.Module:
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.load(path / name, weights_only=True))
    return model


def load_ours(model: nn.Module, path: Path) -> Any:
    return fp8kit.load(path / "saved", model)


SAVERS = {
    "torch.save of state_dict": Saver(
        torch_save(lambda m: m.state_dict()), filled(read_files)
    ),
    "torch.save of the module": Saver(torch_save(lambda m: m), load_torch),
    "pickle": Saver(
        lambda m, p: (p / "model.pickle").write_bytes(pickle.dumps(m)), load_pickle, exact=False
    ),
    "safetensors.save_file": Saver(save_tensors, filled(read_files)),
    "safetensors.save_model": Saver(
        lambda m, p: save_model(m, str(p / "model.safetensors")), load_whole
    ),
    "huggingface_hub.save_torch_model": Saver(hub.save_torch_model, filled(read_files)),
    "huggingface_hub.save_torch_model in shards": Saver(
        lambda m, p: hub.save_torch_model(m, p, max_shard_size="60KB"), filled(read_files)
    ),
    "huggingface_hub.save_torch_state_dict": Saver(
        lambda m, p: hub.save_torch_state_dict(m.state_dict(), p), filled(read_files)
    ),
    "huggingface_hub.save_torch_model as pickles": Saver(
        lambda m, p: hub.save_torch_model(m, p, safe_serialization=False), filled(read_files)
    ),
    "accelerate.save_model": Saver(
        lambda m, p: accelerator().save_model(m, p), filled(read_files)
    ),
    "accelerate.save_model as pickles": Saver(
        lambda m, p: accelerator().save_model(m, p, safe_serialization=False), filled(read_files)
    ),
    "accelerate.save_state": Saver(save_accelerate_state(True), filled(read_files)),
    "accelerate.save_state as pickles": Saver(save_accelerate_state(False), filled(read_files)),
    "torch.distributed.checkpoint": Saver(
        lambda m, p: dcp.save(m.state_dict(), checkpoint_id=p / "dcp", no_dist=True), load_dcp
    ),
    "torch.distributed.checkpoint.async_save": Saver(save_async, load_dcp),
    "get_model_state_dict": Saver(torch_save(get_model_state_dict), load_states),
    "fp8kit.save": Saver(save_ours, load_ours),
    "fp8kit.save of a compiled model": Saver(save_compiled, load_ours),
}  # fmt: skip
OF_TRANSFORMERS = {
    "save_pretrained": Saver(
        lambda m, p: m.save_pretrained(p), lambda _, p: fp8kit.load(p)
    ),
    "save_pretrained in shards": Saver(
        lambda m, p: m.save_pretrained(p, max_shard_size="60KB"), lambda _, p: fp8kit.load(p)
    ),
    "torch.compile's save_pretrained": Saver(
        lambda m, p: torch.compile(m).save_pretrained(p), lambda _, p: fp8kit.load(p)
    ),
    "Trainer.save_model": Saver(save_trained, lambda _, p: fp8kit.load(p)),
    "pipeline.save_pretrained": Saver(save_pipeline, lambda _, p: fp8kit.load(p)),
}  # fmt: skip
OF_DIFFUSERS = {
    "diffusers' save_pretrained": Saver(
        lambda m, p: m.save_pretrained(p),
        lambda m, p: type(m).from_pretrained(p, torch_dtype=torch.bfloat16),
    ),
    "diffusers' save_pretrained as pickles": Saver(
        lambda m, p: m.save_pretrained(p, safe_serialization=False),
        lambda m, p: type(m).from_pretrained(p, torch_dtype=torch.bfloat16, use_safetensors=False),
    ),
}
OF_PLAIN = {
    "PyTorchModelHubMixin": Saver(lambda m, p: m.save_pretrained(p), load_whole),
    "fp8kit.save, loaded into a compiled model": Saver(save_ours, load_compiled),
    "fp8kit.save of DataParallel": Saver(save_wrapped, load_ours),
    "torch.save, mapped into memory": Saver(torch_save(lambda m: m.state_dict()), load_mapped),
    "torch.save of each tensor": Saver(save_one_by_one, load_one_by_one),
}
NAMED_AND_DATED = (".metadata",)  # contains the path and a random number
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Saver]]] = {
    "plain": (plain, SAVERS | OF_PLAIN),
    "llama": (llama, SAVERS | OF_TRANSFORMERS),
    "transformer": (transformer, SAVERS | OF_DIFFUSERS),
    "qwen3_moe": (qwen3_moe, SAVERS | OF_TRANSFORMERS),
}
CASES = [(model, name) for model, (_, savers) in MODELS.items() for name in savers]


def written(save: Callable[[Any, Path], object], model: Any, path: Path) -> dict[str, bytes]:
    path.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' warnings about their own code
        save(model, path)
    files = [p for p in path.rglob("*") if p.is_file() and p.name not in NAMED_AND_DATED]
    assert files
    return {str(p.relative_to(path)): content(p) for p in files}


def content(file: Path) -> bytes:
    """Return the bytes of a file; in safetensors files, with sorted metadata in the header."""
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def changed(saver: Saver, before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    assert after.keys() == before.keys()
    if saver.exact:
        return [file for file in before if after[file] != before[file]]
    return [file for file in before if size(after[file]) != size(before[file])]


def size(pickled: bytes) -> int:
    """Return the size of a pickle without the addresses by which it names storages."""
    return len(re.sub(rb"\d{8,}", b"", pickled))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k}-{n}" for k, n in CASES])
def test_running_changes_nothing_that_is_saved(kind: str, name: str, tmp_path: Path) -> None:
    make, savers = MODELS[kind]
    model, saver = make(), savers[name]
    before, untouched = written(saver.save, model, tmp_path / "before"), copy.deepcopy(model)
    for use in USES:
        use(model)
        after = written(saver.save, model, tmp_path / use.__name__)
        assert not changed(saver, before, after), use.__name__
    for folder in ("before", USES[-1].__name__):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = saver.load(make(), tmp_path / folder)
        assert_same_tensors(model, loaded)
        with torch.no_grad():
            assert_bits_equal(run(untouched, 5), run(loaded, 5))


@pytest.mark.parametrize("name", ["torch.save of state_dict", "torch.save of the module"])
def test_a_model_that_has_run_is_cast_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    model, save = plain(), SAVERS[name].save
    before = written(save, copy.deepcopy(model).half(), tmp_path / "before")
    for use in USES:
        use(model)
    assert written(save, model.half(), tmp_path / "after") == before


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8", "FP8_TENSOR", "FP8_WEIGHT_ONLY"])
@pytest.mark.parametrize("name", ["safetensors.save_model", "accelerate.save_model"])
def test_no_scheme_ties_what_the_model_does_not(name: str, scheme: str, tmp_path: Path) -> None:
    model = plain(scheme)
    before = written(SAVERS[name].save, model, tmp_path / "before")
    for use in USES:
        use(model)
    assert written(SAVERS[name].save, model, tmp_path / "after") == before
    parameters = dict(model.named_parameters())
    assert len({p.untyped_storage().data_ptr() for p in parameters.values()}) == len(parameters)


def test_the_check_sees_weights_that_are_tied_by_a_call(tmp_path: Path) -> None:
    model = plain()
    saver = SAVERS["accelerate.save_model"]
    before = written(saver.save, model, tmp_path / "before")
    layers = (model.q_proj, model.k_proj)
    whole = torch.cat([layer.weight.view(torch.uint8) for layer in layers])
    for layer, part in zip(layers, whole.split([256, 128]), strict=True):
        layer.weight.data = part.view(layer.weight.dtype)
    assert written(saver.save, model, tmp_path / "after") != before


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k}-{n}" for k, n in CASES])
def test_captures_and_moves_change_nothing_that_is_saved(
    kind: str, name: str, tmp_path: Path
) -> None:
    make, savers = MODELS[kind]
    model, saver = make(), savers[name]
    model.cuda().cpu()  # drops attributes that Transformers sets on buffers, as of any model
    before = written(saver.save, model, tmp_path / "before")
    model.cuda()
    on_gpu = written(saver.save, model, tmp_path / "gpu")
    model.cuda()  # a Trainer that saves with `use_cpu` moves the model
    for use in USES:
        use(model)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        run(model, 5)
    graph.replay()
    torch.cuda.synchronize()
    assert not changed(saver, on_gpu, written(saver.save, model, tmp_path / "captured"))
    model.cpu()
    assert not changed(saver, before, written(saver.save, model, tmp_path / "cpu"))


def adapted(base: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"])
    torch.manual_seed(2)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8", "FP8_TENSOR"])
def test_a_trainer_resumes_from_the_files_that_it_saved(scheme: str, tmp_path: Path) -> None:
    """The Trainer loads tensors by name, but the dialects have other names for scales."""
    model, other = llama(scheme), llama(scheme)
    for tensor in other.state_dict().values():
        tensor.view(torch.uint8).fill_(64)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    transformers.Trainer(model=model, args=arguments).save_model(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1/trainer_state.json").write_text('{"global_step": 0}')
    trainer = transformers.Trainer(model=other, args=arguments)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert_same_tensors(model, other)


@pytest.mark.filterwarnings("ignore")  # peft's warnings about its own code
def test_an_adapter_is_saved_alone_and_loads(tmp_path: Path) -> None:
    base = llama()
    untouched = copy.deepcopy(base)
    model = adapted(base)
    before = written(lambda m, p: m.save_pretrained(p), model, tmp_path / "before")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= before.keys()
    assert all("lora_" in name for name in load_file(tmp_path / "before/adapter_model.safetensors"))
    for use in (without_gradients, in_inference_mode, with_gradients):
        use(model)
    assert written(lambda m, p: m.save_pretrained(p), model, tmp_path / "after") == before
    again = peft.PeftModel.from_pretrained(untouched, tmp_path / "before").eval()
    with torch.no_grad():
        assert_bits_equal(run(again, 5), run(model, 5))


@pytest.mark.filterwarnings("ignore")
def test_a_base_is_saved_once_its_adapter_is_gone(tmp_path: Path) -> None:
    base = llama()
    before = written(lambda m, p: m.save_pretrained(p), base, tmp_path / "before")
    model = adapted(base)
    with pytest.raises(CheckpointError, match=r"Adapters are attached to .*q_proj.*unload"):
        model.get_base_model().save_pretrained(tmp_path / "wrapped")
    assert not list((tmp_path / "wrapped").glob("*.safetensors"))
    bare = model.unload()
    assert written(lambda m, p: m.save_pretrained(p), bare, tmp_path / "after") == before


@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_is_saved_as_one_that_never_ran(tmp_path: Path) -> None:
    model = adapted(llama())
    untouched = copy.deepcopy(model).merge_and_unload()
    before = written(lambda m, p: m.save_pretrained(p), untouched, tmp_path / "before")
    for use in (without_gradients, in_inference_mode, with_gradients):
        use(model)
    merged = model.merge_and_unload()
    assert written(lambda m, p: m.save_pretrained(p), merged, tmp_path / "after") == before
    without_gradients(merged)
    assert written(lambda m, p: m.save_pretrained(p), merged, tmp_path / "run") == before
    loaded = fp8kit.load(tmp_path / "after")
    with torch.no_grad():
        assert_bits_equal(run(loaded, 5), run(merged, 5))


ROOM = 8192  # bytes for names, types and the format itself


@pytest.mark.parametrize("name", ["torch.save of the module", "torch.save of state_dict"])
def test_one_layer_is_as_large_after_a_call_as_before(name: str, tmp_path: Path) -> None:
    """This also holds for a sibling, whose weight lies beside others after a call."""
    model, saver = plain(), SAVERS[name]
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    before = {n: written(saver.save, m, tmp_path / f"{n}-before") for n, m in layers.items()}
    for use in USES:
        use(model)
        for n, layer in layers.items():
            after = written(saver.save, layer, tmp_path / f"{n}-{use.__name__}")
            sizes = [
                {file: len(data) for file, data in files.items()} for files in (before[n], after)
            ]
            assert sizes[0] == sizes[1], f"{n} {use.__name__}"
            (size,) = sizes[1].values()
            held = sum(t.nbytes for t in layer.state_dict().values())
            assert size < held + ROOM, f"{n} brings its siblings"


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_transformers_added_is_saved_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "c")
    assert all("lora_" in name for name in load_file(tmp_path / "c/adapter_model.safetensors"))
    assert not (tmp_path / "c/model.safetensors").exists()


def test_files_that_divide_a_weight_from_its_scale_load_as_one(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        layers = [nn.Linear(256, 256, bias=False).bfloat16() for _ in range(3)]
        fp8kit.convert(model := nn.Sequential(*layers))
        return model

    hub.save_torch_model(made(3), tmp_path, max_shard_size="66KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert files["1.weight"] != files["1.weight_scale"]
    other = made(5)
    remedy = r"fp8kit\.load\(dir, model\) or accelerate\.load_checkpoint_in_model"
    with pytest.raises(RuntimeError, match=remedy):
        hub.load_torch_model(other, tmp_path, strict=False)
    wanted = made(3).state_dict()
    for load in (
        lambda model: fp8kit.load(tmp_path, model),
        lambda model: accelerate.load_checkpoint_in_model(model, str(tmp_path)),
    ):
        for other in (made(5), made(5).to("meta")):
            load(other)
            assert_same_tensors(other, wanted)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_files_without_a_scheme_load_into_layers_that_hold_such_codes(
    name: str, tmp_path: Path
) -> None:
    def made(scheme: str) -> Any:
        model = tiny(name, num_hidden_layers=1)
        fp8kit.convert(model, scheme)
        return model

    model, same, blocks = made("FP8_WEIGHT_ONLY"), made("FP8_WEIGHT_ONLY"), made("FP8_BLOCK")
    hub.save_torch_model(model, tmp_path)
    same.load_state_dict({n: torch.ones_like(t) for n, t in same.state_dict().items()})
    fp8kit.load(tmp_path, same)
    assert_same_tensors(same, model.state_dict())
    schemes = {m.scheme.name for m in same.modules() if hasattr(m, "scheme")}
    assert schemes == {"FP8_WEIGHT_ONLY"}
    with pytest.raises(CheckpointError, match=r"in the checkpoint and .*FP8_BLOCK in the model"):
        fp8kit.load(tmp_path, blocks)


def test_an_exported_program_holds_the_same_weights(tmp_path: Path) -> None:
    model = plain()

    def exported() -> dict[str, Tensor]:
        buffer = io.BytesIO()
        with torch.no_grad():
            program = torch.export.export(model, (IDS[:, :5],))
        torch.export.save(program, buffer)
        buffer.seek(0)
        return dict(torch.export.load(buffer).state_dict)

    before = exported()
    without_gradients(model)
    after = exported()
    assert before.keys() == after.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert_bits_equal(before[name], tensor)
        assert_bits_equal(after[name], tensor)


@pytest.mark.parametrize("model", [transformer, lambda: nn.Sequential(transformer())[0]])
def test_diffusers_saves_what_it_loads(model: Callable[[], Any], tmp_path: Path) -> None:
    saved = model()
    saved.save_pretrained(tmp_path / "c")
    loaded = type(saved).from_pretrained(tmp_path / "c", torch_dtype=torch.bfloat16)
    assert_same_tensors(loaded, saved)


@pytest.mark.filterwarnings("ignore")
def test_diffusers_saves_a_part_that_was_converted_and_a_copy(tmp_path: Path) -> None:
    dense = diffusers.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=32, norm_num_groups=8
    )
    dense.save_pretrained(tmp_path / "dense")  # a model without FP8 layers is saved as ever
    fp8kit.convert(dense.transformer_blocks)
    for model in (dense, copy.deepcopy(dense), pickle.loads(pickle.dumps(dense))):
        model.save_pretrained(tmp_path / "c")
        assert_same_tensors(type(model).from_pretrained(tmp_path / "c"), dense)
    restored = dense.dequantize()
    assert not any(isinstance(m, Fp8Linear) for m in restored.modules())
    restored.save_pretrained(tmp_path / "c")
    assert json.loads((tmp_path / "c/config.json").read_text()).get("quantization_config") is None


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY"])
def test_the_mixin_of_huggingface_hub_loads_what_it_saves(scheme: str, tmp_path: Path) -> None:
    model: Any = plain(scheme)
    model.save_pretrained(tmp_path)
    loaded = Plain.from_pretrained(tmp_path)
    assert loaded is not model
    assert loaded.out.scheme == model.out.scheme  # codes alone say nothing of activations
    assert_same_tensors(loaded.bfloat16(), model)
    assert torch.equal(loaded(IDS), model(IDS))
    dense = Plain()
    dense.save_pretrained(tmp_path)
    assert_same_tensors(Plain.from_pretrained(tmp_path), dense)


def wrapped_inside(model: nn.Module) -> Any:
    """Compile each block by itself, and wrap some layers in activation checkpointing."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(module, nn.ModuleList):
                setattr(module, name, torch.compile(child, backend="eager"))
            elif isinstance(child, Fp8Linear) and child.bias is None:
                setattr(module, name, checkpoint_wrapper(child))
    assert any(n.endswith("_wrapped_module") for n, _ in model.named_modules())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [plain, llama])
def test_what_is_wrapped_inside_a_model_is_saved_under_its_own_names(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    bare = make()
    model = wrapped_inside(copy.deepcopy(bare))
    before = list(model.named_modules())
    fp8kit.save(bare, tmp_path / "bare")
    fp8kit.save(model, tmp_path / "saved")
    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("saved", "bare"))
    assert ours.keys() == theirs.keys()
    assert_same_tensors(load_ours(make(), tmp_path), bare)
    filled = wrapped_inside(make())
    assert fp8kit.load(tmp_path / "saved", filled) is filled
    assert_same_tensors(filled, model)
    fp8kit.load_weights(filled, {n: t.clone() for n, t in bare.state_dict().items()})
    assert_same_tensors(filled, model)
    assert list(model.named_modules()) == before
    if make is llama:
        model.save_pretrained(tmp_path / "own")
        assert_same_tensors(fp8kit.load(tmp_path / "own"), bare)


@pytest.mark.filterwarnings("ignore")
def test_diffusers_refuses_to_save_a_base_with_adapters(tmp_path: Path) -> None:
    model = transformer()
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["to_q"]), model)
    with pytest.raises(CheckpointError, match=r"Adapters are attached to .*to_q.*unload_lora"):
        adapted.save_pretrained(tmp_path / "c")
    assert not (tmp_path / "c").exists()
