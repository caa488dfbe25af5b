"""Every user-facing error says what arrived, what is required and what to do."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit import formats, moe
from fp8kit.checkpoint.schema.targets import dialect_for
from fp8kit.conversion import calibration
from fp8kit.errors import (
    CheckpointError,
    ConversionError,
    InvalidType,
    InvalidValue,
    UnsupportedError,
    counted,
    did_you_mean,
    teach,
)
from fp8kit.fused import rms_norm_quantize, silu_mul_quantize
from fp8kit.io.checkpoints import workers_on

X = torch.ones(4, 256)
W = fp8kit.quantize(torch.ones(128, 256), role="weight")
W_BLOCK = fp8kit.quantize(torch.ones(128, 256), fp8kit.BLOCK)
Q = fp8kit.quantize(X)
ONE = torch.ones(1, 1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def converted() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(256, 128))
    fp8kit.convert(model)
    return model


class BytesPath(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"dir"


def meta_scale_q() -> formats.QTensor:
    return formats.QTensor(Q.data, Q.scale.to("meta"), fp8kit.ROW)


# by exception class: calls, and their messages; dots stand for omitted text
CASES: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    TypeError: [
        (lambda: fp8kit.convert(mlp(), include=nn.Linear(2, 2)),
         "Got a module of the class Linear as include. ... list of patterns ... named_modules()"),
        (lambda: fp8kit.convert(mlp(), exclude=torch.empty(0)),
         "Got exclude=tensor([]). ... list of patterns ... Pass exclude=['*.o_proj']"),
        (lambda: fp8kit.load_weights(mlp(), ONE[0, 0]),
         "Got weights of type Tensor. ... pairs of names and tensors ... Pass a state dict"),
        (lambda: fp8kit.recode(mlp(), "e4m3"),
         "Got e4m3 to write in another encoding. ... float8_e4m3fnuz ... Quantize again"),
        (lambda: fp8kit.verify_checkpoint("a", "b", progress="no"),
         "Got progress='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.quantize_checkpoint("a", "b", progress=ONE),
         "Got progress=tensor([[1.]]). ... True or False ... Pass one of these"),
        (lambda: fp8kit.explain(converted(), m=True),
         "Got m=True. ... one row count, an integer ... m=16"),
        (lambda: moe.route(X, True),
         "Got top_k=True. ... an integer ... num_experts_per_tok"),
        (lambda: moe.route(X, 2, custom=lambda *_: None),
         "custom function returned None. ... ids and weights ... in a tuple"),
        (lambda: fp8kit.Fp8Experts(2, 128, 128).place("0 1"),
         "Got placement='0 1'. ... a vector of ids ... Pass torch.tensor"),
        (lambda: moe.Activation(gated="no"),
         "Got gated='no'. ... True or False ... Pass one of these"),
        (lambda: moe.route(X, 2, renormalize="no"),
         "Got renormalize='no'. ... True or False ... Pass one of these"),
        (lambda: moe.tokens_per_expert(ONE, 3),
         "Got ids=tensor([[1.]]). ... tensor of integers ... Pass ids first"),
        (lambda: fp8kit.load(BytesPath()),
         "Got b'dir' as a checkpoint. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.save(converted(), "dir", overwrite="no"),
         "Got overwrite='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.convert(mlp(), strict="no"),
         "Got strict='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.convert(mlp(), copy="no"),
         "Got copy='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.load("dir", strict=None),
         "Got strict=None. ... True or False ... Pass one of these"),
        (lambda: fp8kit.load_weights(mlp(), {}, partial=1),
         "Got partial=1. ... True or False ... Pass one of these"),
        (lambda: fp8kit.warmup(converted(), tune="no"),
         "Got tune='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.Recipe(strict="no"),
         "Got strict='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.scaled_mm(Q, W, batch_invariant="no"),
         "Got batch_invariant='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.linear(X, W, batch_invariant=1),
         "Got batch_invariant=1. ... True or False ... Pass one of these"),
        (lambda: fp8kit.scaled_mm(Q, W, backend=3),
         "Got backend=3. ... named by a word ... Leave it out"),
        (lambda: fp8kit.Scheme("own", "ROW", None),
         "Got 'ROW' as the granularity. ... GroupShape ... Pass fp8kit.ROW"),
        (lambda: fp8kit.Scheme(None, fp8kit.ROW, fp8kit.ROW),
         "Got None as the name of a scheme. ... a str ... name='MINE'"),
        (lambda: fp8kit.Scheme("own", fp8kit.ROW, "ROW"),
         "Got 'ROW' as the granularity. ... GroupShape ... Pass fp8kit.ROW"),
        (lambda: fp8kit.Scheme("own", fp8kit.ROW, fp8kit.ROW, ue8m0="no"),
         "Got ue8m0='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.scale_shape((4, 256), "ROW"),
         "Got 'ROW' as the granularity. ... GroupShape ... Pass fp8kit.ROW"),
        (lambda: fp8kit.rebase(fp8kit.quantize(X, fp8kit.MX), "ROW"),
         "Got 'ROW' as the granularity. ... GroupShape ... Pass fp8kit.ROW"),
        (lambda: fp8kit.QTensor([1.0], ONE, fp8kit.ROW),
         "Got codes of type list. ... FP8 tensor ... fp8kit.quantize"),
        (lambda: fp8kit.quantize(X, dtype=[8]),
         "Got [8] as the dtype of FP8 codes. ... float8_e4m3fn ... Pass one of these"),
        (lambda: fp8kit.quantize(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)),
         "Got x as a nested tensor. ... one dense tensor ... x.unbind()"),
        (lambda: fp8kit.Fp8Linear(256, 128, dtype="float16"),
         "Got dtype='float16'. ... high precision ... Pass torch.bfloat16"),
        (lambda: fp8kit.Fp8Linear.from_quantized(W, dtype="float16"),
         "Got dtype='float16'. ... high precision ... Pass torch.bfloat16"),
        (lambda: fp8kit.Fp8Experts(2, 128, 128, dtype="float16"),
         "Got dtype='float16'. ... high precision ... Pass torch.bfloat16"),
        (lambda: fp8kit.Fp8Experts(2, 128, 128, bias="no"),
         "Got bias='no'. ... True or False ... Pass one of these"),
        (lambda: fp8kit.plan(mlp(), m=True),
         "Got m=True. ... positive integers ... Pass m=[1, 4096]"),
        (lambda: fp8kit.plan(mlp(), m="16"),
         "Got m='16'. ... positive integers ... Pass m=[1, 4096]"),
        (lambda: fp8kit.quantize_checkpoint(".", "dir", runner=3),
         "Got runner=3. ... a function ... fp8kit.ray_runner()"),
        (lambda: fp8kit.load(None),
         "Got None as a checkpoint. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.save(converted(), None),
         "Got None as the destination. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.inspect(None),
         "Got None as a checkpoint. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.convert_checkpoint(None, "dir"),
         "Got None as a checkpoint. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.quantize_checkpoint(".", None),
         "Got None as the destination. ... a str or a pathlib.Path ... 'model-fp8'"),
        (lambda: fp8kit.warmup("dir"),
         "Got a str as the model. ... a module with FP8 layers ... fp8kit.load(directory"),
        (lambda: fp8kit.Scheme("x", fp8kit.ROW, fp8kit.ROW, dtype=torch.int8),
         "Got torch.int8 as the dtype of FP8 codes. ... float8_e4m3fn ... Pass one of these"),
        (lambda: fp8kit.quantize(X, dtype=torch.int8),
         "Got torch.int8 as the dtype of FP8 codes. ... float8_e4m3fn, float8_e4m3fnuz, "
         "float8_e5m2 ... Pass one of these"),
        (lambda: formats.QTensor(Q.data, Q.scale.half(), fp8kit.ROW),
         "Got a scale of dtype torch.float16 for row groups. ... must be torch.float32 ... "
         ".float()"),
        (lambda: formats.QTensor(Q.data, torch.ones(4, 8), fp8kit.MX),
         "Got a scale of dtype torch.float32 for mx groups. ... torch.uint8 (E8M0 bytes) ... "
         "View float8_e8m0fnu as uint8"),
        (lambda: fp8kit.quantize(torch.ones(4, 4, dtype=torch.int32)),
         "Got x of dtype torch.int32 and shape (4, 4). ... bfloat16, float16 or float32 ... "
         "convert numbers by .float()"),
        (lambda: fp8kit.linear(Q.data, W),
         "Got x of dtype torch.float8_e4m3fn and shape (4, 256). ... bfloat16, float16 or "
         "float32 ... Codes go to fp8kit.scaled_mm with their scales"),
        (lambda: fp8kit.linear(X, W, [1.0] * 128),
         "Got a bias of type list. ... A bias is a float tensor of shape (128,), or None. ... "
         "Pass a torch.Tensor with one value per output feature."),
        (lambda: converted()(Q.data),
         "0 (Fp8Linear [128, 256]): Got x of dtype torch.float8_e4m3fn and shape (4, 256) ... "
         "bfloat16, float16 or float32, or a QTensor ... the layer's compute_dtype"),
        (lambda: fp8kit.dequantize(Q, torch.float64),
         "Got torch.float64 as the dtype of the result. ... bfloat16, float16 or float32 ... "
         "Pass one of these"),
        (lambda: fp8kit.scaled_mm(Q, W, out_dtype=torch.int8),
         "Got torch.int8 as the dtype of the result. ... bfloat16, float16 or float32 ... Pass "
         "one of these"),
        (lambda: fp8kit.plan(mlp(), exclude="abc"),
         "Got exclude='abc'. ... a list of patterns ... Pass exclude=['abc']."),
        (lambda: fp8kit.quantize(X, "ROW"),
         "Got 'ROW' as the granularity. ... fp8kit.TENSOR, ROW, GROUP128, BLOCK or MX. ... Pass "
         "fp8kit.ROW."),
        (lambda: fp8kit.GroupShape(True, 128),
         "Got GroupShape(rows=True, cols=128). ... integers. ... or pass integers."),
        (lambda: fp8kit.quantize(X, "FP8_BLOCK"),
         "Got 'FP8_BLOCK' as the granularity. ... It must be a GroupShape ... "
         "fp8kit.GroupShape(rows, cols)"),
        (lambda: silu_mul_quantize(X, X, group="mx"),
         "Got 'mx' as the granularity. ... It must be a GroupShape ... Pass fp8kit.MX."),
        (lambda: formats.QTensor(Q.data, Q.scale, "row"),
         "Got 'row' as the granularity. ... It must be a GroupShape ... Pass fp8kit.ROW."),
        (lambda: fp8kit.quantize([[1.0, 2.0]]),
         "Got x of type list. ... bfloat16, float16 or float32 tensor ... Pass a torch.Tensor"),
        (lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=0.1),
         "Got a scale of type float. ... torch.float32 tensor of shape (1, 1) ... Pass "
         "torch.full((1, 1), number"),
        (lambda: fp8kit.quantize(X, scale_ub=3.0),
         "Got scale_ub=3.0. ... one float32 number on cpu, as a tensor ... Pass "
         "torch.tensor(3.0, device=x.device)."),
        (lambda: fp8kit.dequantize(Q.data),
         "Got q of type Tensor. ... codes with the scales they belong to ... Make one with "
         "fp8kit.quantize"),
        (lambda: fp8kit.linear(X, W, input_scale=0.1),
         "Got a scale of type float. ... torch.float32 tensor of shape (1, 1) ... Pass "
         "torch.full((1, 1), number"),
        (lambda: fp8kit.convert(mlp(), calibrate=X),
         "Got calibrate of type Tensor. ... a function that takes the model ... Pass "
         "calibrate=lambda model: model(batch)."),
        (lambda: fp8kit.convert("model-dir"),
         "Got a model of type str. ... an nn.Module with linear layers ... fp8kit.load"),
        (lambda: fp8kit.explain(mlp(), m=[1, 16]),
         "Got m=[1, 16]. ... one row count ... fp8kit.explain(model, m=16) once for each"),
        (lambda: fp8kit.load("dir", "FP8_DYNAMIC"),
         "Got 'FP8_DYNAMIC' as the model. ... the module to fill ... Pass scheme='FP8_DYNAMIC'"),
    ],
    ValueError: [
        (lambda: fp8kit.Fp8Linear(128, 128, device="wat"),
         "Got device='wat'. ... 'cuda:0' or 'meta' ... leave it out"),
        (lambda: fp8kit.Fp8Experts(2, 128, 128, device=True),
         "Got device=True. ... 'cuda:0' or 'meta' ... leave it out"),
        (lambda: fp8kit.Fp8Linear(128, 128, dtype=torch.float64),
         "Got dtype=torch.float64. ... high precision ... Pass torch.bfloat16"),
        (lambda: fp8kit.Fp8Linear(True, 128),
         "Got in_features=True. ... a whole number ... Pass an int"),
        (lambda: moe.route(X, 2, groups=True, top_groups=True),
         "Got True groups, True of them taken ... divide the experts ... n_group"),
        (lambda: moe.Activation(limit=True),
         "Got limit=True. ... positive and finite ... Pass None"),
        (lambda: moe.Activation(alpha=True),
         "Got alpha=True. ... a finite number ... Pass a float"),
        (lambda: rms_norm_quantize(X, X[0], -1.0),
         "Got eps=-1.0 and weight_offset=0.0. ... eps is not negative ... that is replaced"),
        (lambda: rms_norm_quantize(X, X[0], weight_offset=math.nan),
         "Got eps=1e-06 and weight_offset=nan. ... finite ... that is replaced"),
        (lambda: fp8kit.Evaluation((), 0.0, None, None, None, None).exclusions(math.nan),
         "Got min_sqnr=nan. ... a finite number ... Pass a float"),
        (lambda: workers_on(["cpu"], True),
         "Got True workers. ... do the work ... Leave it out"),
        (lambda: moe.Activation(alpha="1"),
         "Got alpha='1'. ... finite number ... Pass a float"),
        (lambda: moe.Activation(limit="7"),
         "Got limit='7'. ... positive and finite ... Pass None for no bound"),
        (lambda: moe.route(X, 2, scaling_factor=math.nan),
         "Got scaling_factor=nan. ... finite number ... Pass a float"),
        (lambda: fp8kit.Fp8Linear(-1, 128),
         "Got in_features=-1. ... 0 or more ... Pass an int"),
        (lambda: fp8kit.Fp8Linear(256, None),
         "Got out_features=None. ... 0 or more ... Pass an int"),
        (lambda: fp8kit.Fp8Experts("2", 128, 128),
         "Got num_experts='2'. ... 0 or more ... Pass an int"),
        (lambda: fp8kit.Fp8Linear(256, 128, dtype=torch.float8_e4m3fn),
         "Got dtype=torch.float8_e4m3fn. ... high precision ... Choose FP8 by its scheme"),
        (lambda: fp8kit.plan(mlp(), m=[]),
         "Got m=[]. ... positive integers ... Pass m=[1, 4096]"),
        (lambda: fp8kit.save(converted(), "dir", max_shard_bytes=True),
         "Got max_shard_bytes=True. ... bytes ... Pass a positive number"),
        (lambda: fp8kit.load("dir", device=10**30),
         "Got device=1000 ... a device of this machine ... Pass one of these"),
        (lambda: workers_on(["cpu"], "2"),
         "Got '2' workers. ... 1 to 1024 do the work ... Leave it out"),
        (lambda: fp8kit.quantize_checkpoint("", "dir"),
         "Got an empty path as a checkpoint. ... the path of ... such as 'model-fp8'"),
        (lambda: fp8kit.quantize_checkpoint(".", ""),
         "Got an empty path as the destination. ... the path of ... such as 'model-fp8'"),
        (lambda: fp8kit.load("a\0b"),
         r"Got 'a\x00b' as a checkpoint. ... no null character. ... Look at what made it"),
        (lambda: setattr(converted()[0], "scheme", "FP8_BLOCK"),
         "Got scheme FP8_BLOCK for a layer that holds codes and scales of FP8_DYNAMIC. ... "
         "quantizes nothing ... Fp8Linear.from_linear(layer.to_linear(), scheme)"),
        (lambda: fp8kit.rebase(None), "Got None. ... E8M0 ... fp8kit.MX"),
        (lambda: fp8kit.GroupShape(0, 4),
         "Got GroupShape(rows=0, cols=4). ... rows >= 1 ... Use fp8kit.TENSOR"),
        (lambda: fp8kit.scale_shape((5,), fp8kit.BLOCK),
         "Got a tensor of 1 dimensions for 128x128 groups. ... need at least 2 ... unsqueeze(0)"),
        (lambda: fp8kit.quantize(X, role="bias"),
         "Got role='bias'. ... activation, weight. ... Pass one of these words"),
        (lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=ONE, role="bias"),
         "Got role='bias'. ... activation, weight. ... Pass one of these words"),
        (lambda: fp8kit.Scheme("x", fp8kit.ROW, fp8kit.ROW, static=True),
         "Got a static scheme 'x' with row activations. ... one number per layer ... Use "
         "activation=TENSOR"),
        (lambda: fp8kit.Scheme("x", fp8kit.ROW, None, dtype=torch.float8_e5m2, rebased=True),
         "Got rebased=True for row weights of torch.float8_e5m2. ... E4m3 codes of MX groups ... "
         "Pass weight=ROW or BLOCK"),
        (lambda: fp8kit.linear(X, W, input_scale=ONE, scale_ub=torch.tensor(1.0)),
         "Got scale_ub for activations that have no scale of their own. ... from the data ... "
         "Leave scale_ub out"),
        (lambda: fp8kit.Scheme.of("FP9"),
         "Unknown scheme 'FP9'. ... FP8, FP8_DYNAMIC, FP8_TENSOR, FP8_BLOCK, MXFP8, "
         "FP8_WEIGHT_ONLY ... a fp8kit.Scheme of your own"),
        (lambda: formats.QTensor(Q.data, torch.ones(4), fp8kit.ROW),
         "Got a scale of shape (4,). ... Codes of shape (4, 256) in row groups need (4, 1). ... "
         "Reshape the scale"),
        (meta_scale_q,
         "Got a scale on meta. ... The codes are on cpu. ... Move both to one device."),
        (lambda: converted()(torch.ones(4, 128)),
         "0 (Fp8Linear [128, 256]): Got x of shape (4, 128) and a weight of shape (128, 256). "
         "... x [..., K] ... Check the orientation"),
        (lambda: fp8kit.quantize(torch.tensor(1.0)),
         "Got x of shape () for row groups. ... a last dimension K ... reshape or unsqueeze"),
        (lambda: fp8kit.quantize(torch.ones(5), fp8kit.BLOCK),
         "Got x of shape (5,) for 128x128 groups. ... two dimensions for groups of several rows "
         "... unsqueeze"),
        (lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=ONE, scale_ub=torch.tensor(1.0)),
         "Got a static scale with scale_ub, scale_rounding or scale_layout. ... scales that are "
         "taken from the data ... Leave them out"),
        (lambda: fp8kit.quantize(X, scale_layout="column"),
         "Got scale_layout='column' for row groups. ... 'row', or 'column' for groups along a "
         "row ... Pass scale_layout='row'"),
        (lambda: fp8kit.quantize(X, fp8kit.GROUP128, scale_layout="diagonal"),
         "Got scale_layout='diagonal' for 1x128 groups. ... 'row', or 'column' for groups along "
         "a row ... Pass scale_layout='row'"),
        (lambda: fp8kit.quantize(X, scale_rounding="floor"),
         "Got scale_rounding='floor' for row groups. ... 'exact' or 'up' ... leave it out"),
        (lambda: fp8kit.quantize(X, fp8kit.MX, scale_rounding="exact"),
         "Got scale_rounding='exact' for mx groups. ... 'up' or 'floor' ... leave it out"),
        (lambda: fp8kit.quantize(X, scale_ub=torch.tensor(1.0, dtype=torch.float64)),
         "Got scale_ub torch.float64 () on cpu. ... one float32 number on cpu ... "
         "torch.tensor(bound, device=x.device)"),
        (lambda: fp8kit.linear(X, W, scale_ub=torch.ones(2)),
         "Got scale_ub torch.float32 (2,) on cpu. ... one float32 number ... torch.tensor(bound"),
        (lambda: fp8kit.quantize(X, scale_ub=torch.tensor(-1.0)),
         "Got scale_ub=-1. ... it is positive ... None for no bound"),
        (lambda: fp8kit.linear(X, W, scale_ub=torch.tensor(float("nan"))),
         "Got scale_ub=nan. ... bounds amax ... largest magnitude"),
        (lambda: fp8kit.linear(X, W, scheme="FP8_WEIGHT_ONLY", scale_ub=torch.tensor(1.0)),
         "Got scale_ub for activations that have no scale of their own. ... bounds scales that "
         "are taken from the data ... Leave scale_ub out"),
        (lambda: fp8kit.linear(torch.ones(4, 128), W),
         "Got x of shape (4, 128) and a weight of shape (128, 256). ... x [..., K] is "
         "multiplied by a weight [N, K] ... rows are output features"),
        (lambda: fp8kit.scaled_mm(fp8kit.quantize(torch.ones(2, 4, 256), fp8kit.BLOCK), W_BLOCK),
         "Got x of shape (2, 4, 256) in 128x128 groups. ... one matrix [M, K] ... Flatten x "
         "before it is quantized"),
        (lambda: fp8kit.linear(X, W, torch.ones(3)),
         "Got a bias of shape (3,) and dtype torch.float32. ... needs a bias (128,) "
         "in bf16, fp16 or fp32. ... one value per output feature"),
        (lambda: fp8kit.linear(X, W, torch.ones(128, dtype=torch.float64)),
         "Got a bias of shape (128,) and dtype torch.float64. ... bf16, fp16 or fp32. ... call "
         ".float() on other dtypes"),
        (lambda: fp8kit.linear(X, W, torch.ones(128, device="meta")),
         "Got x on cpu and a bias on meta. ... one device ... Move them to the same device."),
        (lambda: fp8kit.linear(X, W, accum="exact"),
         "Got accum='exact'. ... precise, fast. ... Pass one of these words."),
        (lambda: fp8kit.scaled_mm(Q, W, backend="cublas"),
         "Unknown backend 'cublas'. ... Known are  ... Pass one of these or None."),
        (lambda: fp8kit.linear(X, fp8kit.quantize(torch.ones(128, 256), fp8kit.GROUP128)),
         "Got a weight in 1x128 groups and no scheme. ... Only row, tensor, 128x128, mx weights "
         "have a standard one. ... Pass scheme=fp8kit.Scheme("),
        (lambda: fp8kit.linear(X, W, scheme="FP8_BLOCK"),
         "Got a weight in row groups for scheme FP8_BLOCK. ... FP8_BLOCK has 128x128 weights. "
         "... name the scheme of the weight"),
        (lambda: fp8kit.linear(X, fp8kit.quantize(X, fp8kit.TENSOR), scheme="FP8"),
         "Scheme FP8 got no input_scale. ... a calibrated scale ... Pass input_scale, or use "
         "FP8_TENSOR or FP8_DYNAMIC."),
        (lambda: fp8kit.linear(X, W, scheme="FP8_DYNAMIC", input_scale=ONE),
         "Scheme FP8_DYNAMIC got an input_scale. ... by their own amax ... use the static "
         "scheme FP8"),
        (lambda: fp8kit.Fp8Linear.from_quantized(fp8kit.quantize(X, dtype=torch.float8_e5m2)),
         "Got a weight of torch.float8_e5m2 codes for scheme FP8_DYNAMIC. ... It holds "
         "torch.float8_e4m3fn codes. ... Pass a scheme with that dtype"),
        (lambda: fp8kit.Fp8Linear.from_quantized(fp8kit.quantize(torch.ones(8))),
         "a weight of shape (8,). ... a weight [N, K] ... rows are output features"),
        (lambda: fp8kit.convert(mlp(), weight_storage="disk"),
         "Got weight_storage='disk'. ... discard, cpu_offload, keep ... Pass one of these"),
        (lambda: fp8kit.explain(mlp()),
         "Sequential holds no Fp8Linear and no FP8 experts. ... only for FP8 layers ... Call "
         "fp8kit.convert(model) first."),
        (lambda: fp8kit.explain(mlp(), m=-1),
         "Got m=-1. ... not negative ... Pass the number of tokens."),
        (lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=0 * ONE),
         "Got a static scale of 0. ... which are positive ... amax / 448"),
        (lambda: silu_mul_quantize(X, X, group=fp8kit.TENSOR, scale=-ONE),
         "Got a static scale of -1. ... which are positive ... amax / 448"),
        (lambda: fp8kit.linear(Q, W, input_scale=ONE),
         "Got input_scale for an input that is quantized already. ... Its scales are those of "
         "the QTensor. ... pass the tensor itself"),
        (lambda: fp8kit.linear(X, W, input_scale=0 * ONE),
         "Got an input_scale of 0. ... positive and finite ... Calibrate with data that reach "
         "this layer"),
        (lambda: fp8kit.Fp8Linear.from_linear(mlp()[0], "FP8", math.nan * ONE),
         "Got an input_scale of nan. ... positive and finite ... Calibrate with data that reach "
         "this layer"),
        (lambda: fp8kit.Fp8Linear.from_linear(mlp()[0], "FP8", 0 * ONE),
         "Got an input_scale of 0. ... positive and finite ... Calibrate with data that reach "
         "this layer"),
        (lambda: fp8kit.convert(mlp(), fuse=None),
         "Got fuse=None. ... none, inputs, all ... a mapping from blocks to rules"),
        (lambda: fp8kit.plan(mlp(), fuse=False),
         "Got fuse=False. ... none, inputs, all ... a mapping from blocks to rules"),
        (lambda: fp8kit.plan(mlp(), fuse=["0 1"]),
         "Got fuse=['0 1']. ... none, inputs, all ... a mapping from blocks to rules"),
    ],
    UnsupportedError: [
        (lambda: fp8kit.scaled_mm(Q, W, backend="torch_native"),
         "No backend computes [M<=4, K=256] per row @ [N=128, K] per row -> bfloat16 ... "
         "torch_native: runs on cuda, not on cpu ... leave this layer in high precision"),
    ],
    ConversionError: [
        (lambda: fp8kit.plan(mlp(), include=["fc9"]),
         "The include pattern 'fc9' matches no linear layer. ... The model's linear layers are "
         "0, 1. ... Correct the pattern or remove it"),
        (lambda: fp8kit.plan(nn.Sequential(nn.Linear(8, 8)), strict=True),
         "strict=True, and 1 layer cannot be converted:\n  0: too small to gain ... must be "
         "convertible ... Exclude these layers by name"),
        (lambda: fp8kit.convert(mlp().to("meta")),
         "The weights of 0, 1 are on the meta device. ... needs their values ... Load the "
         "weights first"),
        (lambda: fp8kit.convert(mlp(), "FP8"),
         "Scheme FP8 got no calibration data. ... one static scale per layer ... Pass "
         "calibrate=lambda model: model(batch)"),
        (lambda: fp8kit.convert(nn.Linear(128, 128)),
         "Got a bare Linear as the model. ... replaced inside the module that holds them ... "
         "Fp8Linear.from_linear"),
        (lambda: calibration.observe_amax(mlp(), ["0"], lambda _: None),
         "Calibration never reached 0. ... finite inputs of every converted layer ... Feed "
         "data that exercises these layers"),
        (lambda: fp8kit.convert(mlp(), "FP8", calibrate=lambda m: m[1](0 * m[0](X[:, :128]))),
         "Calibration saw only zeros in 1. ... not all zero ... or exclude them"),
    ],
}  # fmt: skip


IN_PARTS = {ValueError: InvalidValue, TypeError: InvalidType}


@pytest.mark.parametrize("kind", [InvalidValue, InvalidType, CheckpointError, ConversionError])
def test_an_error_keeps_its_text(kind: type[Exception]) -> None:
    error = kind("A.", "B.", "C.")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "A. B. C."
    assert str(kind(f"layer: {error}")) == "layer: A. B. C."


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [pytest.param(k, *case, id=case[1][:40]) for k, cases in CASES.items() for case in cases],
)
def test_error_text(kind: type[Exception], call: Callable[[], object], said: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    text, parts = str(caught.value), said.split(" ... ")
    assert len(parts) == 3, "what arrived, what is required, what to do"
    places = [text.find(part) for part in parts]
    assert -1 not in places, f"{parts[places.index(-1)]!r} is not in {text!r}"
    assert places == sorted(places), "arrived, required and remedy come in this order"
    assert type(caught.value) in (kind, IN_PARTS.get(kind))


def test_weight_and_scale_gradients_are_refused_with_a_remedy() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    layer.weight_scale.requires_grad_(True)
    y = layer(torch.ones(2, 64, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"for an FP8 weight .* requires_grad_\(False\)"):
        y.backward()


def test_backward_through_quantize_is_refused_with_a_remedy() -> None:
    x = torch.ones(2, 64, requires_grad=True)
    value = fp8kit.dequantize(fp8kit.quantize(x))
    with pytest.raises(RuntimeError, match=r"A gradient through quantize.*torch\.no_grad"):
        value.sum().backward()


def test_load_errors_name_the_entry() -> None:
    model = nn.Sequential(fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64, bias=False)))
    state = model.state_dict()
    without = {"0.weight": state["0.weight"]}
    with pytest.raises(RuntimeError, match=r"0\.weight is .* and has no 0\.weight_scale\."):
        model.load_state_dict(without)
    dense = {"0.weight": torch.ones(64, 64), "0.weight_scale": state["0.weight_scale"]}
    with pytest.raises(RuntimeError, match=r"A dense weight has no scale\. Drop the scale"):
        model.load_state_dict(dense)
    other = {
        "0.weight": torch.ones(64, 64).to(torch.float8_e5m2),
        "0.weight_scale": state["0.weight_scale"],
    }
    with pytest.raises(RuntimeError, match=r"holds torch\.float8_e4m3fn codes\. Pass a scheme"):
        model.load_state_dict(other)
    wrong = {"0.weight": state["0.weight"], "0.weight_scale": torch.ones(64)}
    with pytest.raises(RuntimeError, match=r"need \(64, 1\)"):
        model.load_state_dict(wrong)


def test_exceptions_fit_the_builtin_hierarchy() -> None:
    assert issubclass(UnsupportedError, RuntimeError)
    assert issubclass(ConversionError, ValueError)
    assert issubclass(CheckpointError, ValueError)


def test_teach_joins_three_sentences() -> None:
    assert teach("A.", "B.", "C.") == "A. B. C."


def test_a_mistyped_name_is_answered_with_the_closest() -> None:
    assert did_you_mean("fp8_dynamc", ["FP8", "FP8_DYNAMIC"]) == " Did you mean 'FP8_DYNAMIC'?"
    assert did_you_mean("marlin", ["FP8", "FP8_DYNAMIC"]) == ""
    assert did_you_mean("x", []) == ""


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


@pytest.mark.parametrize(
    ("call", "closest"),
    [
        (lambda: fp8kit.Scheme.of("fp8-dynamic"), "FP8_DYNAMIC"),
        (lambda: dialect_for("transformer", fp8kit.Scheme.of("FP8_DYNAMIC")), "transformers"),
        (lambda: fp8kit.plan(siblings(), exclude=["*.q_prj"]), "q_proj"),
        (lambda: fp8kit.plan(siblings(), include=["a.k_porj"]), "a.k_proj"),
        (lambda: fp8kit.scaled_mm(Q, W, backend="dequantised"), "dequantized"),
    ],
    ids=["scheme", "target", "exclude", "include", "backend"],
)
def test_names_that_are_checked_are_suggested(call: Callable[[], object], closest: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean '{closest}'\?$"):
        call()


def siblings() -> nn.Module:
    model = nn.Module()
    model.a = nn.Module()
    model.a.q_proj, model.a.k_proj = nn.Linear(128, 128), nn.Linear(128, 128)
    return model
