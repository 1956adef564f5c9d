"""Experts as linear layers: the same outputs as the fused module, no second copy, and found in headers alone."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from quantcore.checkpoint.experts import find_routers
from quantcore.checkpoint.headers import read_local
from quantcore.checkpoint.layout import own_layout
from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.expert_token_topup import MIN_TOKENS
from quantcore.engine.calibration.experts import share_ranges, too_few_tokens
from quantcore.engine.calibration.ranges import collect_ranges
from quantcore.engine.model.experts import ProjectionNames, SplitExperts, experts_split, is_fused, split_experts
from quantcore.engine.model.parameter_names import projection_names
from quantcore.errors import CalibrationError
from quantcore.tensors.sink import Sink
from quantcore.tensors.source import Source
from tests.support.models import MIXTURES, SHAPE

USUAL = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = {
    "mixtral": ("w1", "w3", "w2"),
    "gpt_oss": (None, "gate_up_proj", "down_proj"),
}


def random_model(name):
    torch.manual_seed(0)
    overrides = {**SHAPE, **MIXTURES[name], "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **overrides), experts_implementation="eager")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.ndim > 1:
            tensor.data.normal_(std=tensor.shape[-1] ** -0.5)
        elif tensor.is_floating_point() and tensor.shape == (4,):  # the routers' biases, of 4 experts
            tensor.data.normal_(std=0.1)
    return model.eval()


def first_fused(model):
    return next((name, module) for name, module in model.named_modules() if is_fused(module))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_split_module_computes_what_the_fused_one_does(name):
    """30 tokens to 2 of 4 experts each, and on another batch only to experts 1 and 3."""
    model = random_model(name)
    _, fused = first_fused(model)
    x_TH = torch.randn(30, SHAPE["hidden_size"])
    split = SplitExperts(fused, projection_names(model))
    weights_TK = torch.rand(30, 2)
    for index_TK in (torch.rand(30, 4).argsort(dim=1)[:, :2], torch.tensor([[1, 3]]).expand(30, 2)):
        with torch.no_grad():
            expected = fused(x_TH, index_TK, weights_TK)
            got = split(x_TH, index_TK, weights_TK)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("index_TK", [[[1, 4], [4, 3], [1, 3]], [[0, 2], [2, 0], [3, 1]]], ids=["identity", "usual"])
def test_experts_that_all_run_give_the_same(index_TK):
    """Also for the number 4 of 4 experts, which stands for the identity (LongCat)."""
    model = random_model("qwen3_moe")
    split = SplitExperts(first_fused(model)[1], projection_names(model))
    x_TH, weights_TK = torch.randn(3, SHAPE["hidden_size"]), torch.rand(3, 2)
    with torch.no_grad():
        expected = split(x_TH, torch.tensor(index_TK), weights_TK)
        split.runs_all = True
        assert torch.equal(split(x_TH, torch.tensor(index_TK), weights_TK), expected)
        assert split(x_TH[:0], torch.tensor(index_TK)[:0], weights_TK[:0]).shape == (0, SHAPE["hidden_size"])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_in_bfloat16_it_gives_the_bits_of_the_default_implementation(name):
    model = random_model(name).bfloat16()
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(1, 500, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
        split_experts(model, projection_names(model))
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_loaded_model_is_split_in_place_without_a_copy(name):
    model = random_model(name)
    ids = torch.randint(1, 500, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    size = sum(p.numel() for p in model.parameters())
    stacks = [weakref.ref(parameter) for parameter in first_fused(model)[1].parameters()]
    names = projection_names(model)
    assert (names.gate, names.up, names.down) == PROJECTIONS.get(name, USUAL)
    replaced = split_experts(model, names)
    assert replaced and not any(map(is_fused, model.modules()))
    assert all(stack() is None for stack in stacks)  # nothing but the linear layers holds their memory
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == storages
    assert sum(p.numel() for p in model.parameters()) == size
    linear = model.get_submodule(f"{replaced[0]}.3.{names.down}")
    assert isinstance(linear, torch.nn.Linear)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
        linear.weight.zero_()
        assert not torch.equal(model(ids).logits, expected)


def test_llama4_is_split_though_its_experts_get_scaled_copies_of_all_tokens():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama4_text", **SHAPE, num_local_experts=4, num_experts_per_tok=2)
    mixture = Llama4TextMoe(config).eval()
    for parameter in mixture.parameters():
        parameter.data.normal_(std=0.1)
    x_TH, seen = torch.randn(30, SHAPE["hidden_size"]), {}
    with torch.no_grad():
        expected, scores = mixture(x_TH)
        mixture.experts = SplitExperts(mixture.experts, ProjectionNames())
        for index in range(4):
            layer = mixture.experts.get_submodule(f"{index}.up_proj")
            layer.register_forward_pre_hook(lambda _, inputs, index=index: seen.update({index: len(inputs[0])}))
        got, _ = mixture(x_TH)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    chosen = torch.topk(scores, 2, dim=1).indices.flatten().bincount(minlength=4)
    assert seen == dict(enumerate(chosen.tolist())) and expected.abs().max() > 0.1


def test_only_the_tokens_of_an_expert_reach_it():
    model = random_model("mixtral")
    split = SplitExperts(first_fused(model)[1], ProjectionNames("w1", "w3", "w2"))
    seen = {}
    for index in range(4):
        linear = split.get_submodule(f"{index}.w1")
        linear.register_forward_pre_hook(lambda _, inputs, index=index: seen.update({index: inputs[0]}))
    x_TH = torch.randn(3, 64)
    split(x_TH, torch.tensor([[0, 2], [2, 0], [2, 3]]), torch.ones(3, 2))
    assert {index: len(x) for index, x in seen.items()} == {0: 2, 2: 3, 3: 1}
    assert torch.equal(seen[3], x_TH[2:])


def test_fused_modules_come_back_after_the_context():
    model = random_model("qwen3_moe")
    name, fused = first_fused(model)
    with experts_split(model, [name], ProjectionNames()):
        assert isinstance(model.get_submodule(name), SplitExperts)
    assert model.get_submodule(name) is fused and is_fused(fused)


def test_interleaved_gate_and_up_are_not_torn_apart():
    with pytest.raises(ValueError, match="interleaved"):
        SplitExperts(first_fused(random_model("gpt_oss"))[1], ProjectionNames())


E, INNER, H = 4, 24, 16
STACKS = {
    "qwen3_5": ({"gate_up_proj": (E, 2 * INNER, H), "down_proj": (E, H, INNER)}, "experts."),
    "granite": ({"input_linear.weight": (E, 2 * INNER, H), "output_linear.weight": (E, H, INNER)}, ""),
    "as_wide": ({"gate_up_proj": (E, 2 * INNER, 2 * INNER), "down_proj": (E, 2 * INNER, INNER)}, "experts."),
}  # fmt: skip
DBRX = {f"ffn.experts.mlp.{name}": torch.randn(E * INNER, H) for name in ("w1", "v1", "w2")}
DBRX["ffn.router.layer.weight"] = torch.randn(E, H)
TRANSPOSES = {"llama4": ("gate_up_proj", "down_proj"), "aria": ("fc1.weight", "fc2.weight")}


def stored(folder, tensors):
    """(headers, source) of a checkpoint that holds ``tensors``."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    headers = read_local(folder)
    return headers, Source(folder, headers.tensors)


@pytest.mark.parametrize("case", STACKS)
def test_stacked_experts_are_read_one_by_one(case, tmp_path):
    shapes, folder = STACKS[case]
    (gate_up, down) = (torch.randn(shape).bfloat16() for shape in shapes.values())
    first, second = (f"model.layers.0.mlp.{folder}{name}" for name in shapes)
    headers, source = stored(tmp_path, {first: gate_up, second: down, "norm.weight": torch.ones(3).bfloat16()})
    assert len(headers.tensors) == 3 * E + 1 and headers.total_bytes == 2 * (gate_up.numel() + down.numel() + 3)
    for index in range(E):
        start = f"model.layers.0.mlp.experts.{index}"
        assert torch.equal(source.read(f"{start}.gate_proj.weight"), gate_up[index, :INNER])
        assert torch.equal(source.read(f"{start}.up_proj.weight"), gate_up[index, INNER:])
        assert torch.equal(source.read(f"{start}.down_proj.weight"), down[index])


def test_stacked_transposes_with_biases_are_read_one_by_one(tmp_path):
    start = "model.layers.0.mlp.experts"
    tensors = {
        f"{start}.gate_up_proj": torch.randn(E, H, 2 * INNER),
        f"{start}.gate_up_proj_bias": torch.randn(E, 2 * INNER),
        f"{start}.down_proj": torch.randn(E, INNER, H),
        f"{start}.down_proj_bias": torch.randn(E, H),
    }
    headers, source = stored(tmp_path, tensors)
    assert len(headers.tensors) == 4 * E
    for index in range(E):
        for projection in ("gate_up_proj", "down_proj"):
            weight = source.read(f"{start}.{index}.{projection}.weight")
            assert weight.is_contiguous() and torch.equal(weight, tensors[f"{start}.{projection}"][index].T)
            bias = source.read(f"{start}.{index}.{projection}.bias")
            assert torch.equal(bias, tensors[f"{start}.{projection}_bias"][index])


@pytest.mark.parametrize("case", TRANSPOSES)
def test_stacked_transposes_are_read_one_by_one(case, tmp_path):
    """Gate and up of an expert lie side by side: neither is one run of bytes."""
    first, second = (f"model.layers.0.mlp.experts.{name}" for name in TRANSPOSES[case])
    gate_up, down = torch.randn(E, H, 2 * INNER).bfloat16(), torch.randn(E, INNER, H).bfloat16()
    headers, source = stored(tmp_path, {first: gate_up, second: down})
    assert len(headers.tensors) == 3 * E and headers.total_bytes == 2 * (gate_up.numel() + down.numel())
    for index in range(E):
        start = f"model.layers.0.mlp.experts.{index}"
        assert torch.equal(source.read(f"{start}.gate_proj.weight"), gate_up[index].T[:INNER])
        assert torch.equal(source.read(f"{start}.up_proj.weight"), gate_up[index].T[INNER:])
        assert torch.equal(source.read_rows(f"{start}.up_proj.weight", range(3, 7)), gate_up[index].T[INNER:][3:7])
        assert torch.equal(source.read(f"{start}.down_proj.weight"), down[index].T)


def test_matrices_of_all_rows_are_read_one_by_one(tmp_path):
    """DBRX; the number of its experts is the height of the router."""
    headers, source = stored(tmp_path, DBRX)
    assert len(headers.tensors) == 3 * E + 1
    for index in range(E):
        of_rows = slice(index * INNER, (index + 1) * INNER)
        gate, up, down = (tensor[of_rows] for name, tensor in DBRX.items() if ".mlp." in name)
        assert torch.equal(source.read(f"ffn.experts.{index}.gate_proj.weight"), gate)
        assert torch.equal(source.read(f"ffn.experts.{index}.up_proj.weight"), up)
        assert torch.equal(source.read(f"ffn.experts.{index}.down_proj.weight"), down.T)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100])
@pytest.mark.parametrize("case", [*STACKS, *TRANSPOSES, "gpt_oss", "dbrx"])
def test_what_was_read_one_by_one_is_written_into_its_stack(case, max_shard_bytes, tmp_path):
    names = TRANSPOSES.get(case, TRANSPOSES["llama4"])
    shapes, folder = STACKS.get(case, (dict(zip(names, ((E, H, 2 * INNER), (E, INNER, H)), strict=True)), "experts."))
    tensors = {f"model.layers.0.mlp.{folder}{name}": torch.randn(shape) for name, shape in shapes.items()}
    if case == "gpt_oss":
        tensors |= {f"{name}_bias": torch.randn(E, stack.shape[2]) for name, stack in tensors.items()}
    if case == "dbrx":
        tensors = dict(DBRX)
    tensors["norm.weight"] = torch.ones(3)
    headers, source = stored(tmp_path, tensors)
    sink = Sink(tmp_path / "again", own_layout(headers.tensors), max_shard_bytes, tensors=headers.tensors)
    for name in reversed(headers.tensors):
        assert sink.dtype_of(name) == torch.float32
        sink.write(name, source.read(name))
    with pytest.raises(RuntimeError, match="written twice"):
        sink.write(name, source.read(name))
    sink.finish()
    files = list((tmp_path / "again").glob("*.safetensors"))
    assert len(files) == (1 if max_shard_bytes > 100 else len(tensors))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_stack_that_is_not_filled_is_said(tmp_path):
    shapes, folder = STACKS["granite"]
    tensors = {f"mlp.{folder}{name}": torch.randn(shape) for name, shape in shapes.items()}
    headers, source = stored(tmp_path, tensors)
    sink = Sink(tmp_path / "again", own_layout(headers.tensors), tensors=headers.tensors)
    for name in headers.tensors:
        if name != "mlp.experts.2.up_proj.weight":
            sink.write(name, source.read(name))
    with pytest.raises(RuntimeError, match=r"1 tensor.*mlp\.experts\.2\.up_proj\.weight"):
        sink.finish()
    sink.close()


def test_a_stack_of_unknown_layout_stays_whole(tmp_path):
    start = "model.layers.0.feed_forward.experts"
    tensors = {f"{start}.gate_up_proj": torch.randn(E, H, INNER), f"{start}.down_proj": torch.randn(E, INNER, H)}
    assert set(stored(tmp_path, tensors)[0].tensors) == set(tensors)
    assert set(load_file(tmp_path / "model.safetensors")) == set(tensors)


def test_routers_are_found_by_shape_and_place():
    """512 experts and a shared expert of width 512, as in Qwen3-Next: the shape alone would take both."""
    shapes = {
        "mlp.experts.511.up_proj": (512, 64), "mlp.gate": (512, 64), "mlp.shared_expert_gate": (1, 64),
        "mlp.shared_expert.gate_proj": (512, 64), "mlp.shared_expert.down_proj": (64, 512),
        "self_attn.q_proj": (512, 64), "moe.experts.0.w1": (8, 8), "moe.experts.7.w1": (8, 8),
        "moe.router.layer": (8, 8), "moe.gate.wg": (8, 8), "moe.latent": (16, 8),
    }  # fmt: skip
    stored = {f"model.layers.3.{name}.weight": shape for name, shape in shapes.items()}
    found = {"mlp.gate", "mlp.shared_expert_gate", "moe.router.layer", "moe.gate.wg"}
    assert find_routers(stored) == {f"model.layers.3.{name}" for name in found}


def watch_experts(tokens_by_expert, configs=None):
    """Four linear layers of 8 inputs, watched while expert i sees so many tokens, all of value i + 1."""
    fp8 = presets.PRESETS["fp8"].layer_config
    modules = {
        LayerPlan(f"model.layers.2.mlp.experts.{index}.up_proj", 2, (4, 8), (configs or {}).get(index, fp8)):
        torch.nn.Linear(8, 4) for index in range(len(tokens_by_expert))
    }  # fmt: skip
    with collect_ranges(modules, torch.nn.ModuleList(modules.values())) as watched:
        for index, (module, num_tokens) in enumerate(zip(modules.values(), tokens_by_expert, strict=True)):
            if num_tokens:
                module(torch.full((num_tokens, 8), index + 1.0))
    return watched


def input_ranges(watched):
    return [tuple(x.item() for x in observers.inputs.range()) for observers in watched.values()]


def test_a_layer_that_is_never_called_is_said_to_be_so():
    """Mamba reads dt_proj's weight and never calls the layer: more calibration text changes nothing."""
    layer = LayerPlan("backbone.layers.0.mixer.dt_proj", 0, (8, 8), presets.PRESETS["int8_static"].layer_config)
    module = torch.nn.Linear(8, 8)
    with collect_ranges({layer: module}, module) as watched:
        pass
    with pytest.raises(CalibrationError, match=r"never called backbone\.layers\.0\.mixer\.dt_proj") as caught:
        share_ranges(watched)
    assert caught.value.code == "layer_never_called" and caught.value.hint.startswith("Exclude it")
    assert [(one.code, "exclude it" in one.message) for one in too_few_tokens({layer: 0})] == [
        ("layer_never_called", True)
    ]
    assert [one.code for one in too_few_tokens({layer: 3})] == ["layer_saw_few_tokens"]


def test_experts_that_few_tokens_reached_take_the_range_of_all():
    watched = watch_experts([100, MIN_TOKENS - 1, 0, MIN_TOKENS])
    shared, warnings = share_ranges(watched)
    assert input_ranges(shared) == [(1, 1), (1, 4), (1, 4), (4, 4)]
    assert [warning.code for warning in warnings] == ["expert_saw_few_tokens"]
    assert "2 expert(s) of model.layers.2.mlp saw fewer than 16 calibration tokens (expert 1 15, expert 2 0)" in (
        warnings[0].message
    )
    assert [observers.inputs.num_values for observers in watched.values()] == [800, 120, 0, 128]  # left as they were


def test_experts_with_tokens_enough_keep_what_they_saw():
    watched = watch_experts([MIN_TOKENS] * 3)
    assert share_ranges(watched) == (watched, [])


def test_only_experts_of_the_same_config_share():
    """Expert 2 is quantized otherwise, so that nobody's range is its: it is named, instead of a crash later."""
    other = presets.PRESETS["int8_static"].layer_config
    with pytest.raises(
        CalibrationError, match=r"No token .* reached model\.layers\.2\.mlp\.experts\.2\.up_proj"
    ) as caught:
        share_ranges(watch_experts([100, 100, 0], {2: other}))
    assert caught.value.code == "layer_saw_no_token"
