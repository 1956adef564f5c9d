"""Rotations folded into weights leave what a model computes as it was; where they cannot, the reason is said."""

import json
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from quantcore.config import presets
from quantcore.config.algorithms import load_quant_algo_config_from_file
from quantcore.engine.model.experts import split_experts
from quantcore.engine.model.parameter_names import projection_names
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.engine.transforms.rotation import fold as rotation_module
from quantcore.engine.transforms.rotation import residual as residual_module
from quantcore.engine.transforms.rotation.fold import (
    find_head_size,
    find_head_sizes,
    rotate_input,
    rotate_residual,
    rotate_values,
)
from quantcore.engine.transforms.rotation.hadamard import orthogonal
from quantcore.engine.transforms.rotation.residual import Residual, StreamNorm, find_embedding, find_head, find_residual
from quantcore.errors import CalibrationError, ConfigError, ModelError
from quantcore.nn.quantizer import ModelQuantizer
from tests.support.models import MIXTURES, SHAPE

NUM_TOKENS, WIDTH = 24, SHAPE["hidden_size"]
LIKE = torch.empty(1, NUM_TOKENS, WIDTH)
IDS = torch.randint(0, SHAPE["vocab_size"], (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))

DENSE = {
    "llama": {},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},  # norms multiply with 1 + weight
    "granite": {
        "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "logits_scaling": 2.0,
    },
    "phi3": {},  # q, k and v in one layer, gate and up in one
}  # fmt: skip


def build(name, dtype=torch.float32, **options):
    """A model whose norms and biases are all but neutral, and whose head is a weight of its own."""
    torch.manual_seed(0)
    overrides = {**MIXTURES.get(name, DENSE.get(name, {})), **options}
    config = AutoConfig.for_model(
        overrides.pop("model_type", name), **{**SHAPE, **overrides}, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(False).requires_grad_(False)
    for key, parameter in model.named_parameters():
        spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
        offset = 1.0 if parameter.ndim == 1 and "norm" in key and "bias" not in key else 0.0
        parameter.copy_(offset + spread * torch.randn_like(parameter))
    model.config.use_cache = False
    return model.to(dtype)


def blocks_of(model):
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return next(part for part in lists if len(part) == model.config.num_hidden_layers)


class Stopped(Exception):
    pass


@contextmanager
def hooked(handle):
    try:
        yield
    finally:
        handle.remove()


def calls_of(model):
    """What each block is called with, and a function for each that calls it with other hidden states."""
    calls = []

    def note(block, args, kwargs):
        calls.append((args, kwargs))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks_of(model)]
    model(IDS)
    for handle in handles:
        handle.remove()

    def runner(block, args, kwargs):
        def run(x):
            output = block(x, *args[1:], **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return run

    return [runner(block, *call) for block, call in zip(blocks_of(model), calls, strict=True)]


def find_all(model):
    """Residuals of the embedding, of every block and of the head."""
    first, last = blocks_of(model)[0], blocks_of(model)[-1]

    def embed():
        seen = []

        def stop(_, args, kwargs):
            seen.append(args[0] if args else kwargs["hidden_states"])
            raise Stopped

        with hooked(first.register_forward_pre_hook(stop, with_kwargs=True)), pytest.raises(Stopped):
            model(IDS)
        return seen[0]

    def head(x):
        with hooked(last.register_forward_hook(lambda _, __, output: (x,) if isinstance(output, tuple) else x)):
            return model(IDS).logits

    runs = calls_of(model)
    blocks = [find_residual(block, run, LIKE) for block, run in zip(blocks_of(model), runs, strict=True)]
    return find_embedding(model, embed, WIDTH), blocks, find_head(model, head, LIKE)


def distance(x, y):
    return ((x - y).norm() / y.norm()).item()


def rotate_all(model, found, rotation):
    embedding, blocks, head = found
    changed = rotate_residual(model, embedding, rotation)
    for block, residual in zip(blocks_of(model), blocks, strict=True):
        changed += rotate_residual(block, residual, rotation)
    return changed + rotate_residual(model, head, rotation)


@pytest.mark.parametrize(
    ("name", "split"), [*((name, False) for name in (*DENSE, *MIXTURES)), *((name, True) for name in MIXTURES)]
)
def test_r1_leaves_the_logits_as_they_were(name, split):
    """Proof and folding agree, in weights of every kind; nothing but the changed parameters is touched."""
    model = build(name)
    if split:
        split_experts(model, projection_names(model))
    before, weights = model(IDS).logits, deepcopy(model.state_dict())
    found = find_all(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())  # finding leaves no trace
    assert torch.equal(model(IDS).logits, before)
    assert max(one.change for one in (found[0], *found[1], found[2])) < 1e-5
    changed = rotate_all(model, found, orthogonal(WIDTH, seed=9))
    assert distance(model(IDS).logits, before) < 1e-5
    differ = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert {key.rpartition(".")[2] for key in differ} == {key.rpartition(".")[2] for key in changed}
    assert len(differ) == len(changed)


def test_readers_writers_and_norms_of_a_block():
    model = build("qwen2_moe")
    split_experts(model, projection_names(model))
    found = find_residual(blocks_of(model)[1], calls_of(model)[1], LIKE)
    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    experts = {f"mlp.experts.{index}.{name}_proj" for index in range(4) for name in ("gate", "up")}
    mlp = {"mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"} | experts
    assert [norm.name for norm in found.norms] == ["input_layernorm", "post_attention_layernorm"]
    assert found.norms[0].readers == attention and set(found.norms[1].readers) == mlp
    assert set(found.readers) == {*attention, *mlp}
    down = {f"mlp.experts.{index}.down_proj" for index in range(4)}
    assert set(found.writers) == {"self_attn.o_proj", "mlp.shared_expert.down_proj"} | down


def test_norms_that_multiply_with_one_plus_weight_are_told_apart():
    for name, plus_one, neutral in (("gemma", True, 0.0), ("llama", False, 1.0)):
        model = build(name)
        block = blocks_of(model)[0]
        found = find_residual(block, calls_of(model)[0], LIKE)
        assert [norm.plus_one for norm in found.norms] == [plus_one] * 2
        rotate_residual(block, found, orthogonal(WIDTH))
        assert (block.input_layernorm.weight == neutral).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_fewer_bits_are_proven_in_float32(dtype):
    model = build("qwen2_moe", dtype)
    split_experts(model, projection_names(model))
    block, run = blocks_of(model)[1], calls_of(model)[1]
    before = deepcopy(block.state_dict())
    found = find_residual(block, run, LIKE.to(dtype))
    assert found.change < 1e-5
    for key, value in block.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, before[key])
    assert run(LIKE.to(dtype).zero_() + 1).dtype == dtype  # nothing is left of the widening
    rotate_residual(block, found, orthogonal(WIDTH))
    assert {parameter.dtype for parameter in block.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "post_attention_layernorm normalizes the output of self_attn.o_proj"),
        ("gemma3_text", "post_attention_layernorm normalizes the output of self_attn.o_proj"),
        ("olmo2", "post_attention_layernorm normalizes the output of self_attn.o_proj"),
        ("opt", r"self_attn_layer_norm subtracts the mean over channels \(LayerNorm\)"),
        ("gpt2", r"ln_1 subtracts the mean over channels \(LayerNorm\)"),
        ("gpt_neox", r"input_layernorm subtracts the mean over channels \(LayerNorm\)"),
    ],
)
def test_what_cannot_be_rotated_is_refused_with_its_reason(name, reason):
    model = build(name)
    with pytest.raises(ModelError, match=reason) as caught:
        find_residual(blocks_of(model)[0], calls_of(model)[0], LIKE)
    assert caught.value.code == "cannot_rotate"


class RMSNorm(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5 if weight is None else weight)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """x + down(silu(up(norm(x)))), as often as it has layers; subclasses do it in another way."""

    def __init__(self, count=1, make=nn.Linear):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm() for _ in range(count))
        self.ups = nn.ModuleList(make(*shape(make, WIDTH, 96)) for _ in range(count))
        self.downs = nn.ModuleList(make(*shape(make, 96, WIDTH)) for _ in range(count))
        for part in self.modules():
            if isinstance(part, nn.Linear | Conv1D):
                nn.init.normal_(part.weight, std=0.2)
                nn.init.normal_(part.bias, std=0.2)

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + self.write(down(nn.functional.silu(up(norm(x)))), x)
        return x

    def write(self, y, x):
        return y


def shape(make, inputs, outputs):
    return (outputs, inputs) if make is Conv1D else (inputs, outputs)


def check_block(block, **kwargs):
    torch.manual_seed(3)
    block.requires_grad_(False)
    found = find_residual(block, block, LIKE)
    rotation = orthogonal(WIDTH, seed=4, **kwargs)
    x = torch.randn(LIKE.shape)
    before = block(x)
    rotate_residual(block, found, rotation)
    assert distance(rotation.inverse(block(rotation.apply(x))), before) < 1e-5
    return found


def test_weights_that_are_stored_transposed():
    assert check_block(Block(make=Conv1D)).writers == ("downs.0",)


def test_rotations_in_blocks():
    check_block(Block(), block_size=16)


def test_large_weights_are_turned_piece_by_piece(monkeypatch):
    monkeypatch.setattr(rotation_module, "MAX_WIDE_VALUES", 100)  # one row of 64 or 96 at a time
    check_block(Block())


def test_norms_with_equal_weights_keep_their_own_readers():
    """With all writers silent both norms give the same numbers."""
    block = Block(2)
    block.norms[1].weight = nn.Parameter(block.norms[0].weight.clone())
    found = check_block(block)
    assert [norm.readers for norm in found.norms] == [("ups.0",), ("ups.1",)]


def test_a_norm_without_a_weight_and_a_reader_without_a_norm():
    class Bare(Block):
        def __init__(self):
            super().__init__()
            self.norms[0] = nn.RMSNorm(WIDTH, elementwise_affine=False)
            self.gate = nn.Linear(WIDTH, 1, bias=False)

        def write(self, y, x):
            return torch.sigmoid(self.gate(x)) * y

    found = check_block(Bare())
    assert found.norms == (StreamNorm("norms.0", ("ups.0",)),)
    assert set(found.readers) == {"ups.0", "gate"}


class HiddenReader(Block):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, 1))

    def write(self, y, x):
        return torch.sigmoid(x @ self.matrix) * y


class HiddenWriter(Block):
    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(WIDTH))

    def write(self, y, x):
        return y + self.constant


class LayerScale(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def write(self, y, x):
        return y * self.scale


class Crooked(RMSNorm):
    def forward(self, x):
        return super().forward(x) * (1 + x.tanh())


class Squared(RMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight.square()


class Router(nn.Module):
    """Has a matrix as readers have, but looks at its input channel by channel first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(1, WIDTH))

    def forward(self, x):
        return nn.functional.linear(x.abs(), self.weight)


class Transposed(nn.Module):
    """Its matrix is [in, out], which nobody knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x):
        return x @ self.weight


class Routed(Block):
    def __init__(self, router):
        super().__init__()
        self.router = router()

    def write(self, y, x):
        return torch.sigmoid(self.router(x)) * y


def with_norm(norm):
    block = Block()
    block.norms[0] = norm
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (HiddenReader, "rotated, it computes something else"),
        (lambda: Routed(Router), "rotated, it computes something else"),
        (lambda: Routed(Transposed), "rotated, it computes something else"),
        (HiddenWriter, "does not pass through unchanged"),
        (LayerScale, r"the output of downs\.0 is changed channel by channel"),
        (lambda: with_norm(Crooked()), r"norms\.0 \(Crooked\) does more than divide by the norm"),
        (lambda: with_norm(Squared()), "and multiply by a weight"),
        (lambda: nn.Sequential(Block(), RMSNorm()), "does not pass through unchanged"),
    ],
)
def test_strange_blocks_are_refused(make, reason):
    torch.manual_seed(5)
    block = make().requires_grad_(False)
    before = deepcopy(block.state_dict())
    with pytest.raises(ModelError, match=reason):
        find_residual(block, block, LIKE)
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())


def without(found, name):
    norms = tuple(norm for norm in found.norms if norm.name != name)
    readers = tuple(reader for reader in found.readers if reader != name)
    return Residual(norms, readers, tuple(writer for writer in found.writers if writer != name))


@pytest.mark.parametrize("name", ["qwen3", "granite", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_part_that_is_missed_changes_far_more_than_rounding(name):
    """The tolerance lies between: a hundred times above the first, a hundred below the second."""
    model = build(name)
    if name in MIXTURES:
        split_experts(model, projection_names(model))
    block, run = blocks_of(model)[1], calls_of(model)[1]
    found = find_residual(block, run, LIKE)
    assert found.change < 1e-5
    x, rotation = residual_module.random_like(LIKE, seed=1), orthogonal(WIDTH, seed=2)
    x *= (run(x) - x).square().mean().sqrt()
    for part in (*(norm.name for norm in found.norms), *found.readers, *found.writers):
        with pytest.raises(ModelError, match=r"relative change ([1-9]\.\de[-+]0[01])"):
            residual_module._prove(block, run, x, without(found, part), rotation, 1.0)


def test_an_expert_that_no_token_reaches_is_tried_as_well():
    model = build("qwen2_moe", num_experts_per_tok=1)
    split_experts(model, projection_names(model))
    block, run = blocks_of(model)[1], calls_of(model)[1]
    gate = block.mlp.gate.weight
    gate.copy_(torch.stack([gate[0], -gate[0], 0 * gate[0], 0 * gate[0]]))
    reached = []
    for index in range(4):
        expert = block.mlp.experts.get_submodule(str(index))
        expert.up_proj.register_forward_hook(lambda *_, index=index: reached.append(index))
    x, rotation = residual_module.random_like(LIKE, seed=1), orthogonal(WIDTH, seed=2)
    run(x)
    assert 3 not in reached
    found = find_residual(block, run, LIKE)
    assert 3 in reached
    with pytest.raises(ModelError, match="relative change"):
        residual_module._prove(block, run, x, without(found, "mlp.experts.3.up_proj"), rotation, 1.0)


def test_an_expert_that_gets_every_token_counts_once():
    """Its own layers then read just what the mixture reads."""
    model = build("qwen3_moe", num_experts_per_tok=1)
    split_experts(model, projection_names(model))
    blocks_of(model)[1].mlp.gate.weight.zero_()
    found = find_residual(blocks_of(model)[1], calls_of(model)[1], LIKE)
    assert len(found.readers) == len(set(found.readers)) == 3 + 1 + 2 * 4
    assert len(found.writers) == len(set(found.writers)) == 1 + 4


def test_tokens_that_a_gate_shuts_out_are_no_failures():
    """Their update is nothing but rounding."""

    class Gated(Block):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 1)

        def write(self, y, x):
            return torch.sigmoid(100 * self.gate(x)) * y

    check_block(Gated())


def test_what_a_block_is_given_beside_is_widened_too():
    class Tabled(Block):
        def forward(self, x, table):
            return x + self.downs[0](self.ups[0](self.norms[0](x)) @ table)

    block, table = Tabled().requires_grad_(False).bfloat16(), torch.randn(96, 96).bfloat16()
    assert find_residual(block, lambda x: block(x, table=table), LIKE.bfloat16()).change < 1e-5


def edges_of(model):
    """Values to o_proj, and up to down, by hand."""
    config = model.config
    heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    values = torch.arange(shared * size).view(shared, size)
    channels = values.repeat_interleave(heads // shared, 0).flatten()
    producer, rows = "self_attn.v_proj", values.flatten()
    if config.model_type == "phi3":
        producer, rows = "self_attn.qkv_proj", rows + (heads + shared) * size
    if config.model_type == "deepseek_v3":
        size = config.v_head_dim
        producer = "self_attn.kv_b_proj"
        each = config.qk_nope_head_dim + size
        rows = (torch.arange(heads)[:, None] * each + config.qk_nope_head_dim + torch.arange(size)).flatten()
        channels = torch.arange(heads * size)
    return ScalePair(producer, ("self_attn.o_proj",), rows, channels), size


@pytest.mark.parametrize("name", [*DENSE, "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_r2_leaves_the_logits_as_they_were(name):
    model = build(name)
    edge, size = edges_of(model)
    before, weights = model(IDS).logits, deepcopy(model.state_dict())
    for index, (block, run) in enumerate(zip(blocks_of(model), calls_of(model), strict=True)):
        assert find_head_size(block, edge, run, LIKE) == size
        changed = rotate_values(block, edge, orthogonal(size, seed=index))
    differ = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert len(differ) == len(changed) * model.config.num_hidden_layers
    assert distance(model(IDS).logits, before) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_found_only_where_values_pass_unchanged(dtype):
    model = build("llama", dtype)
    block, run = blocks_of(model)[0], calls_of(model)[0]
    edge, size = edges_of(model)
    assert find_head_size(block, edge, run, LIKE.to(dtype)) == size
    inner = torch.arange(SHAPE["intermediate_size"])
    assert (
        find_head_size(block, ScalePair("mlp.up_proj", ("mlp.down_proj",), inner, inner), run, LIKE.to(dtype)) is None
    )
    readers = tuple(f"self_attn.{name}_proj" for name in "qkv")
    norm = ScalePair("input_layernorm", readers, torch.arange(WIDTH), torch.arange(WIDTH))
    assert find_head_size(block, norm, run, LIKE.to(dtype)) is None
    shuffled = ScalePair(edge.producer, edge.consumers, edge.rows, edge.channels.flip(0))
    assert find_head_size(block, shuffled, run, LIKE.to(dtype)) is None


class Attention(nn.Module):
    """Two heads of 8 values that look at tokens as ``patterns`` [2, T, T] say, and an activation behind them."""

    def __init__(self, patterns, activation=nn.Identity):
        super().__init__()
        self.patterns, self.activation = patterns, activation()
        self.v, self.o = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.edge = ScalePair("v", ("o",), torch.arange(16), torch.arange(16))

    def forward(self, x):
        values = self.v(x).unflatten(-1, (2, 8))
        mixed = torch.einsum("hts,bshd->bthd", self.patterns, values)
        return x + self.o(self.activation(mixed.flatten(-2)))


def patterns_of(difference, first=0.0):
    """Weights [2, T, T] of two heads that differ by little, most of them on the first token if ``first`` is near 1."""
    torch.manual_seed(6)
    base = torch.rand(NUM_TOKENS, NUM_TOKENS).softmax(-1)
    patterns = torch.stack([base, (base + difference * torch.rand_like(base)).softmax(-1)])
    patterns *= 1 - first
    patterns[:, :, 0] += first
    return patterns


@pytest.mark.parametrize(("difference", "first"), [(1.0, 0.0), (0.05, 0.0), (1.0, 0.99999)])
def test_heads_are_told_apart_however_alike_they_look(difference, first):
    patterns = patterns_of(difference, first)
    if difference < 1:  # the same but for a little
        patterns[1] = patterns[0] * (1 + difference * 0.02 * torch.randn(NUM_TOKENS, NUM_TOKENS))
    block = Attention(patterns).requires_grad_(False)
    assert find_head_size(block, block.edge, block, LIKE) == 8


def test_heads_of_several_edges_are_found_at_once():
    model = build("mixtral")
    split_experts(model, projection_names(model))
    block, run, num_runs = blocks_of(model)[0], calls_of(model)[0], [0]
    edge, size = edges_of(model)
    inner = torch.arange(SHAPE["intermediate_size"])
    experts = [f"mlp.experts.{index}" for index in range(4)]
    edges = [edge, *(ScalePair(f"{expert}.w3", (f"{expert}.w2",), inner, inner) for expert in experts)]

    def counted(x):
        num_runs[0] += 1
        return run(x)

    assert find_head_sizes(block, edges, counted, LIKE) == [size, None, None, None, None]
    assert num_runs == [3]


def test_an_activation_behind_the_values_is_noticed():
    """Equal values stay equal through it: only the rotation shows it."""
    block = Attention(patterns_of(1.0), nn.Tanh).requires_grad_(False)
    assert find_head_size(block, block.edge, block, LIKE) is None


def test_a_handful_of_tokens_is_too_few():
    block = Attention(patterns_of(1.0)).requires_grad_(False)
    with pytest.raises(CalibrationError, match="there are only 7"):
        find_head_size(block, block.edge, block, LIKE[:, :7])


def test_heads_that_do_not_begin_where_a_head_begins_are_refused():
    block = Attention(patterns_of(1.0))
    shifted = ScalePair("v", ("o",), torch.arange(16), torch.arange(4, 12).repeat(2))
    with pytest.raises(ValueError, match="heads of 8 values do not fit"):
        rotate_values(block, shifted, orthogonal(8))


def test_heads_of_another_size_are_refused():
    model = build("llama")
    edge, size = edges_of(model)
    with pytest.raises(ValueError, match="heads of 32 values do not fit"):
        rotate_values(blocks_of(model)[0], edge, orthogonal(2 * size))


def test_a_rotation_within_part_of_a_head_is_one_too():
    model = build("llama")
    edge, size = edges_of(model)
    before = model(IDS).logits
    rotate_values(blocks_of(model)[0], edge, orthogonal(size // 2, seed=1))
    assert distance(model(IDS).logits, before) < 1e-5


def test_r4_turns_the_input_while_the_model_runs():
    model = build("llama")
    before, block = model(IDS).logits, blocks_of(model)[1]
    weight = block.mlp.down_proj.weight.clone()
    handle = rotate_input(block, "mlp.down_proj", orthogonal(SHAPE["intermediate_size"], seed=1))
    assert distance(block.mlp.down_proj.weight, weight) > 0.1
    assert distance(model(IDS).logits, before) < 1e-5
    handle.remove()
    assert distance(model(IDS).logits, before) > 1e-3


def test_r4_stays_when_the_layer_is_quantized():
    """What the input's quantizer sees is turned: an outlier costs the other channels little."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(128, 32)).requires_grad_(False)
    x = torch.randn(64, 128)
    x[:, 5] += 300
    before = model(x)
    errors = []
    for turned in (False, True):
        copy = deepcopy(model)
        if turned:
            rotate_input(copy, "0", orthogonal(128, seed=1))
        quantized = ModelQuantizer(presets.resolve("int8_dynamic")).quantize_model(copy)
        errors.append(distance(quantized(x), before))
    assert errors[1] < 0.7 * errors[0]  # what is left is the rounding of the weight


def test_a_file_of_amd_quark_is_understood(tmp_path):
    """What its 0.13 has as default for llama, and the fields that it writes with it."""
    layer = {"prev_modules": ["model.embed_tokens"], "norm_module": "model.norm", "next_modules": ["lm_head"]}
    layers = {"first_layer": [layer], "middle_layers": [layer, layer], "last_layer": [{"target_modules": []}]}
    given = {
        "name": "rotation", "backbone": "model", "model_decoder_layers": "model.layers", "mlp": "mlp", "r1": True,
        "v_proj": "self_attn.v_proj", "o_proj": "self_attn.o_proj", "self_attn": "self_attn", "random_r1": False,
        "scaling_layers": layers, "online_r1_rotation": False, "online_config": None, "trainable": False,
        "train_smooth": None, "smooth_positions": None,
    }  # fmt: skip
    file = tmp_path / "rotation.json"
    file.write_text(json.dumps(given))
    config = load_quant_algo_config_from_file(file)
    assert (config.r1, config.r2, len(config.scaling_layers["middle_layers"])) == (True, False, 2)
    for wrong, field in (({"trainable": True}, "trainable"), ({"online_r1_rotation": True}, "online_r1_rotation")):
        file.write_text(json.dumps({**given, **wrong}))
        with pytest.raises(ConfigError, match=field):
            load_quant_algo_config_from_file(file)
