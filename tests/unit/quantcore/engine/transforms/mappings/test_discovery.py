"""Edges: what folding does to weights, what is found and what is refused, and that the proof sees what is false."""

from collections import UserDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from quantcore.config.quark_layers import ScalingLayer
from quantcore.engine.model.stacks import restack
from quantcore.engine.transforms.mappings.discovery import EdgeFinder, FoundEdges, find_edges, listed_edges, prove
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from tests.support.decoder_blocks import RunOf, model_in_memory, run_of
from tests.support.known_edges import KNOWN, as_known
from tests.support.models import MIXTURES, SHAPE
from tests.sweep.classes import build, find_class

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class Toy(nn.Module):
    """A block with a norm, a ReLU between two linear layers, and a residual stream of 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.requires_grad_(False)

    def forward(self, x, **kwargs):
        return x + self.after_norm(self.norm(x), **kwargs)

    def after_norm(self, h):
        return self.down(self.up(h).relu())


def find(block, **kwargs):
    return find_edges(block, toy_run(block, **kwargs))


def toy_run(block, dtype=torch.float32, **kwargs):
    return RunOf(block, torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(3)).to(dtype), **kwargs)


def pairs(found):
    return {(edge.producer, edge.consumers) for edge in found.edges}


def reasons(found):
    return {one.producer: one.reason for one in found.rejected}


TOY = {("norm", ("up",)), ("up", ("down",))}


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "phi3", "opt"])
def test_edges_of_real_architectures(name):
    run = run_of(model_in_memory(name), 1)
    found = find_edges(run.block, run)
    assert as_known(found) == set(KNOWN[name])
    assert found.rejected == ()


def test_a_toy_has_two_edges():
    found = find(Toy())
    assert pairs(found) == TOY
    assert found.rejected == ()


def test_two_tokens_are_enough():
    """Half of a ReLU's channels are dead for a random token; those of the first that is given are all alive."""
    found = find_edges(block := Toy(), RunOf(block, torch.randn(1, 2, 8)))
    assert pairs(found) == TOY


class Leaky(Toy):
    def after_norm(self, h):
        return super().after_norm(h) + 1e-3 * h


class Handing(Toy):
    def after_norm(self, h, shared):
        shared["for later blocks"] = h
        return super().after_norm(h)


class Twice(Toy):
    def after_norm(self, h):
        return super().after_norm(h) + self.down(self.up(2 * h).relu())


class Spare(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 4)


class Flipped(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def after_norm(self, h):
        return super().after_norm(h) + self.other(h.flip(-1))


class Squared(Toy):
    class Norm(nn.RMSNorm):
        def forward(self, x):
            return nn.functional.rms_norm(x, (8,), self.weight**2)

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Norm(8)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)


class Weightless(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, elementwise_affine=False)


class Gelu(Toy):
    def after_norm(self, h):
        return self.down(nn.functional.gelu(self.up(h)))


class ReluSquared(Toy):
    def after_norm(self, h):
        return self.down(self.up(h).relu() ** 2)


class Summed(Toy):
    def after_norm(self, h):
        h = self.up(h).relu()
        return self.down(h + h.roll(1, -1))


@pytest.mark.parametrize(
    ("block", "producer", "reason", "left"),
    [
        (Leaky, "norm", "has other readers (the output of the block)", {("up", ("down",))}),
        (Twice, None, "runs more than once", set()),
        (Spare, "norm", "spare did not run", {("up", ("down",))}),
        (Flipped, "norm", "has other readers (other)", {("up", ("down",))}),
        (Squared, "norm", "multiplies neither with its weight", {("up", ("down",))}),
        (Weightless, "norm", "the norm has no weight", {("up", ("down",))}),
        (Gelu, "up", "do not pass a scale through", {("norm", ("up",))}),
        (ReluSquared, "up", "do not pass a scale through", {("norm", ("up",))}),
        (Summed, None, "not the channel-wise output of one layer", {("norm", ("up",))}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_no_edge_is_rejected_with_its_reason(block, producer, reason, left):
    found = find(block())
    assert any(one.producer == producer and reason in one.reason for one in found.rejected), found.rejected
    assert pairs(found) == left


def test_a_tensor_left_for_later_blocks_is_read_there():
    found = find(Handing(), shared=UserDict())
    assert pairs(found) == {("up", ("down",))}
    assert reasons(found) == {"norm": "its output has other readers (the output of the block)"}


def test_two_readers_of_two_halves_are_two_edges():
    class Halves(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 16), nn.Linear(4, 16)
            del self.up

        def after_norm(self, h):
            return self.down(self.left(h[..., :4]).relu()) + self.right(h[..., 4:])[..., :8]

    found = find(Halves())
    rows = {edge.producer + " " + edge.consumers[0]: edge.rows.tolist() for edge in found.edges}
    assert rows == {"norm left": [0, 1, 2, 3], "norm right": [4, 5, 6, 7], "left down": list(range(16))}


def test_what_only_the_real_numbers_show_is_found_by_the_proof():
    """A limit far above the numbers of every size that are tried with given outputs."""

    class Limited(Toy):
        def after_norm(self, h):
            return self.down(self.up(h).relu().clamp(max=1e5))

    block = Limited()
    block.up.weight *= 1e6
    found = find(block)
    assert pairs(found) == {("norm", ("up",))}
    assert "a scale folded through it changes the block by" in reasons(found)["up"]
    block.up.weight *= 1e-6
    assert pairs(find(block)) == TOY


def test_a_router_that_is_no_layer_keeps_its_norm_from_being_folded():
    class Hidden(nn.Module):
        """A router with its weight where nobody looks."""

        def __init__(self, router):
            super().__init__()
            self.router = [router]

        def forward(self, x):
            return self.router[0](x)

    run = run_of(model_in_memory("mixtral"), 1)
    run.block.mlp.gate = Hidden(run.block.mlp.gate)
    found = find_edges(run.block, run)
    assert reasons(found) == {"post_attention_layernorm": "its output has other readers (the output of the block)"}
    assert len(found.edges) == len(KNOWN["mixtral"]) - 1


def test_experts_that_are_not_split_keep_their_norm_from_being_folded():
    config = AutoConfig.for_model("mixtral", **SHAPE, **MIXTURES["mixtral"], use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    run = run_of(model.requires_grad_(False), 1)
    found = find_edges(run.block, run)
    assert reasons(found) == {"post_attention_layernorm": "its output has other readers (mlp.experts)"}


def test_channels_that_are_dead_in_the_weights_are_mapped_all_the_same():
    run = run_of(model_in_memory("llama"), 1)
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        run.block.get_submodule(name).weight[3:9] = 0
    assert as_known(find_edges(run.block, run)) == set(KNOWN["llama"])


def test_experts_without_a_token_are_found_and_proven():
    run = run_of(model_in_memory("deepseek_v3"), 1)
    run.block.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, -9.0, -9.0]))
    found = find_edges(run.block, run)
    assert as_known(found) == set(KNOWN["deepseek_v3", 1])
    false = [ScalePair("mlp.experts.3.gate_proj", ("mlp.experts.3.down_proj",), torch.arange(64), torch.arange(64))]
    assert prove(run.block, run, false) > 0.1


def mixture_of(name):
    """Return the class's first block with experts, and what runs it on random states."""
    model = build(find_class(name))
    restack(model)
    layers = model.get_encoder().block if model.config.is_encoder_decoder else model.model.layers
    block = next(layer for layer in layers if any("expert" in part for part, _ in layer.named_modules()))
    states = torch.randn(1, 24, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    beside = {} if model.config.is_encoder_decoder else {"position_embeddings": model.model.rotary_emb(states, PLACES)}
    return RunOf(block, states, **beside)


PLACES = torch.arange(24)[None]
OTHER_MIXTURES = {
    "SwitchTransformersForConditionalGeneration": ("layer.1.layer_norm", "layer.1.mlp.router.classifier", 8),
    "JetMoeForCausalLM": ("post_attention_layernorm", "mlp.router.layer", 16),
}


@pytest.mark.parametrize("name", OTHER_MIXTURES)
def test_experts_that_get_their_tokens_in_other_ways(name):
    """By a mask, and by numbers of rows: each run must send the same tokens to the same experts."""
    run, (norm, router, num_layers) = mixture_of(name), OTHER_MIXTURES[name]
    found = find_edges(run.block, run)
    [consumers] = [edge.consumers for edge in found.edges if edge.producer == norm]
    assert consumers[0] == router and len(consumers) == 1 + num_layers
    assert found.rejected == ()
    experts = [
        edge.producer for edge in found.edges if ".experts." in edge.producer and "self_attention" not in edge.producer
    ]
    assert len(experts) == 8


FALSE = {
    "a consumer left out": lambda e: replace(e[0], consumers=QKV[:2]),
    "channels moved by one": lambda e: replace(e[1], channels=e[1].channels.roll(1)),
    "heads in another order": lambda e: replace(e[1], channels=torch.arange(64) % 32),
    "the gate": lambda e: replace(e[3], producer="mlp.gate_proj"),
    "a norm that multiplies with 1 + weight": lambda e: replace(e[0], plus_one=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("false", FALSE)
def test_the_proof_sees_a_false_edge(false, dtype):
    """Also where what it feeds is next to nothing beside the rest of the update."""
    run = run_of(model_in_memory("llama", dtype), 1)
    edges = find_edges(run.block, run).edges
    assert prove(run.block, run, edges) == 0
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        run.block.get_submodule(name).weight *= 2.0**-20
    assert prove(run.block, run, edges) == 0
    assert prove(run.block, run, [FALSE[false](edges)]) > 0.1


@pytest.mark.parametrize(("dtype", "small"), [(torch.float16, 6e-8), (torch.bfloat16, 1e-40), (torch.float32, 3e-45)])
def test_undoing_a_fold_gives_back_numbers_too_small_to_be_scaled(dtype, small):
    block = Toy().to(dtype)
    for layer in (block.up, block.down):
        layer.weight[:, ::3] = small
        layer.weight[0, :] = torch.finfo(dtype).max / 8
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    edges = [
        ScalePair("norm", ("up",), torch.arange(8), torch.arange(8)),
        ScalePair("up", ("down",), torch.arange(16), torch.arange(16)),
    ]
    prove(block, toy_run(block, dtype), edges)
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_run_that_fails_leaves_the_block_as_it_was():
    """Whichever run it is: one as it is, one with given outputs, one with folded weights."""
    block = Toy().bfloat16()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    counted = toy_run(block, torch.bfloat16)
    find_edges(block, counted)
    for fails_at in range(counted.count):
        run = toy_run(block, torch.bfloat16)

        def failing(run=run, fails_at=fails_at):
            if run.count == fails_at:
                raise RuntimeError("out of memory")
            return run()

        with pytest.raises(RuntimeError, match="out of memory"):
            find_edges(block, failing)
        for name, tensor in block.state_dict().items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, before[name]), name
        assert all("forward" not in vars(module) for module in block.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())


def test_blocks_that_are_built_alike_are_searched_once():
    model, finder = model_in_memory("llama"), EdgeFinder()
    runs = [run_of(model, index) for index in range(3)]
    found = [finder.find(run.block, run) for run in runs]
    assert [run.count for run in runs] == [15, 2, 2]
    assert [as_known(one) for one in found] == [set(KNOWN["llama"])] * 3


def test_a_block_that_is_built_alike_but_computes_otherwise_is_searched_anew():
    finder, plain, leaky = EdgeFinder(), Toy(), Toy()
    assert pairs(finder.find(plain, toy_run(plain))) == TOY
    leaky.after_norm = lambda h: Toy.after_norm(leaky, h) + h
    found = finder.find(leaky, toy_run(leaky))
    assert pairs(found) == {("up", ("down",))}
    assert "has other readers" in reasons(found)["norm"]


def listed(prev_op, *layers):
    return ScalingLayer(prev_op=prev_op, layers=layers, inp=layers[0])


def test_listed_edges_keep_all_readers_and_leave_out_what_is_not_listed():
    run = run_of(model_in_memory("llama"), 1)
    found = find_edges(run.block, run)
    chosen = listed_edges(
        run.block, run, [listed("input_layernorm", *QKV[:2]), listed("mlp.up_proj", "mlp.down_proj")], found
    )
    assert chosen.edges == (found.edges[0], found.edges[3])
    assert chosen.edges[0].consumers == QKV
    assert chosen.rejected == ()


def test_listed_edges_that_were_not_discovered_are_tried():
    run = run_of(model_in_memory("gemma2", num_key_value_heads=4), 1)
    entries = [
        listed("input_layernorm", *QKV),
        listed("self_attn.v_proj", "self_attn.o_proj"),
        listed("mlp.up_proj", "mlp.down_proj"),
        listed("mlp.gate_proj", "mlp.down_proj"),
        listed("pre_feedforward_layernorm", "mlp.gate_proj"),
        listed("mlp.fc1", "mlp.down_proj"),
        listed("self_attn.v_proj", "mlp.down_proj"),
    ]
    chosen = listed_edges(run.block, run, entries, FoundEdges((), ()))
    assert [(edge.producer, edge.plus_one) for edge in chosen.edges] == [
        ("input_layernorm", True), ("self_attn.v_proj", False), ("mlp.up_proj", False),
    ]  # fmt: skip
    assert [one.producer for one in chosen.rejected] == [entry.prev_op for entry in entries[3:]]
    changed, reader, name, width = (one.reason for one in chosen.rejected)
    assert changed.startswith(start := "a scale folded through it changes the block by ")
    assert reader.startswith(start)
    assert name == "the block has no layer mlp.fc1 with a weight"
    assert width == "self_attn.v_proj has 64 outputs, but mlp.down_proj has a weight of (64, 128)"


def test_a_listed_edge_that_discovery_rejected_has_its_reason():
    block = Gelu()
    found = find(block)
    chosen = listed_edges(block, toy_run(block), [listed("up", "down")], found)
    assert chosen == FoundEdges((), found.rejected)


def test_fold_divides_rows_and_multiplies_the_columns_that_come_from_them():
    block = nn.ModuleDict({"v": nn.Linear(3, 6), "o": nn.Linear(4, 2)})
    v, bias, o = block.v.weight.clone(), block.v.bias.clone(), block.o.weight.clone()
    edge = ScalePair("v", ("o",), torch.tensor([5, 2]), torch.tensor([0, 0, 1, 0]))
    assert edge.fold(block, torch.tensor([2.0, 8.0])) == ["v.weight", "v.bias", "o.weight"]
    factors = torch.tensor([1, 1, 1 / 8, 1, 1, 1 / 2])
    assert torch.equal(block.v.weight, v * factors[:, None])
    assert torch.equal(block.v.bias, bias * factors)
    assert torch.equal(block.o.weight, o * torch.tensor([2.0, 2, 8, 2]))
    assert edge.largest(torch.tensor([1.0, 7, 3, 2])).tolist() == [7, 3]


def test_fold_into_layers_that_store_their_weight_transposed():
    block = nn.ModuleDict({"norm": nn.LayerNorm(3), "fc": Conv1D(2, 3)})
    nn.init.ones_(block.norm.bias)
    before = block.fc.weight.clone()
    edge = ScalePair("norm", ("fc",), torch.arange(3), torch.arange(3))
    assert edge.fold(block, torch.tensor([2.0, 4, 8])) == ["norm.weight", "norm.bias", "fc.weight"]
    assert torch.equal(block.fc.weight, before * torch.tensor([[2.0], [4], [8]]))
    assert block.norm.weight.tolist() == block.norm.bias.tolist() == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("plus_one", [False, True])
def test_consumers_take_back_what_a_norm_can_store(plus_one):
    """1 + weight near 0.01 is far from what was asked for, in a type whose numbers near -1 lie 0.004 apart."""
    block = nn.ModuleDict({"norm": nn.RMSNorm(64), "fc": nn.Linear(64, 4, bias=False)}).bfloat16()
    nn.init.normal_(block.norm.weight, 0.0 if plus_one else 1.0, 0.1)
    edge = ScalePair("norm", ("fc",), torch.arange(64), torch.arange(64), plus_one)
    product = (block.norm.weight.float() + plus_one) * block.fc.weight.float()
    edge.fold(block, torch.linspace(20, 90, 64))
    after = (block.norm.weight.float() + plus_one) * block.fc.weight.float()
    assert ((after - product).abs() <= 2**-8 * product.abs()).all()
    assert not torch.equal(after, product)
