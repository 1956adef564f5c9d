"""Smoothings: formulas against plain loops, the search against trying everything, and errors measured on the data."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from quantcore.config.algorithms import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.preset_table import INT8, INT8_CHANNEL, PRESETS
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.engine.calibration.ranges import collect_ranges, learned
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.engine.transforms import SMOOTHINGS, Consumer
from quantcore.engine.transforms.autosmoothquant import NUM_TOKENS, AutoSmoothQuant, OutputError, input_range, static
from quantcore.engine.transforms.awq import AWQ, RoundingError
from quantcore.engine.transforms.mappings.scale_pair import ScalePair
from quantcore.engine.transforms.scale_search import (
    NUM_STEPS,
    TriedWeight,
    scale_for,
    search,
    share_of_rows,
    spread_evenly,
)
from quantcore.engine.transforms.smoothquant import SmoothQuant
from tests.support.params import with_usual

UINT4 = QuantizationConfig(weight=QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=8))
STATIC = QuantizationConfig(weight=INT8_CHANNEL, input_tensors=INT8)
DYNAMIC = PRESETS["int8_dynamic"].layer_config
PLAIN = ScalePair("norm", ("q", "k"), torch.arange(16), torch.arange(16))
GROUPED = ScalePair("v", ("o",), torch.arange(8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]))


def stats_of(x_TI):
    x = x_TI.float()
    return Stats(len(x), x.abs().amax(0), x.mean(0), x.abs().mean(0), x.T @ x / len(x), x_TI)


def consumer(weight_OI, x_TI, config=UINT4):
    layer = None if config is None else LayerPlan("layer", 0, tuple(weight_OI.shape), config)
    return Consumer(weight_OI, x_TI if isinstance(x_TI, Stats) else stats_of(x_TI), layer)


def inputs(num_tokens=200, outliers=(3, 11), factor=40.0, seed=0):
    """Tokens [T, 16]: like a model's, whose sizes differ, with a few channels of outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 16, generator=generator) * torch.logspace(-0.5, 0.5, 16)
    x[:, list(outliers)] *= factor
    return x


def weights(num_outputs=48, seed=1):
    return torch.randn(num_outputs, 16, generator=torch.Generator().manual_seed(seed))


def measured(edge, consumers, scale_F):
    """Relative square error of what the quantized layers give on all tokens of the sample."""
    scale_I = torch.ones(16) if scale_F is None else edge.spread(scale_F)
    total = 0.0
    for one in consumers:
        x, y = one.stats.sample_TI, one.stats.sample_TI @ one.weight_OI.T
        scaled = x / scale_I
        if one.layer.input_tensors is not None:
            step = (one.stats.largest_I / scale_I).amax() / 127
            scaled = (scaled / step).round().clamp(-128, 127) * step
        rounded = round_to_nearest(one.weight_OI * scale_I, one.layer.weight).dequantize()
        total += ((scaled @ rounded.T - y).square().sum() / y.square().sum()).item()
    return total


# SmoothQuant


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("edge", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_smoothquant_is_the_paper_s_formula(edge, alpha):
    """Two quantized layers and a router, whose large weights must not count."""
    x, layers = inputs(), [weights(8), weights(12, seed=2)]
    consumers = [*(consumer(weight, x) for weight in layers), consumer(1e3 * weights(4), x, None)]
    got = SmoothQuant(SmoothQuantConfig(alpha=alpha)).choose(edge, consumers)
    for position in range(edge.num_scales):
        columns = [i for i in range(16) if edge.channels[i] == position]
        x_max = max(abs(x[t, i].item()) for t in range(len(x)) for i in columns)
        w_max = max(abs(weight[o, i].item()) for weight in layers for o in range(len(weight)) for i in columns)
        assert got[position].item() == pytest.approx(x_max**alpha / w_max ** (1 - alpha), rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_smoothquant_leaves_channels_without_signal_alone_and_keeps_the_floor(alpha):
    x, weight = inputs(), weights()
    x[:, 0], weight[:, 1] = 0, 0
    x[:, 2], weight[:, 2] = 1e-30, 1e30
    got = SmoothQuant(SmoothQuantConfig(alpha=alpha, scale_clamp_min=0.01)).choose(PLAIN, [consumer(weight, x)])
    assert got[:2].tolist() == [1, 1]
    assert got[2].item() == pytest.approx(0.01)
    assert got.dtype == torch.float32
    assert (torch.isfinite(got) & (got >= 0.01)).all()


def test_smoothquant_where_the_largest_input_overflowed():
    x = inputs().half()
    x[0, 5] = torch.inf
    got = SmoothQuant(SmoothQuantConfig(alpha=0.5)).choose(PLAIN, [consumer(weights(), x)])
    assert got[5] == 1
    assert torch.isfinite(got).all()


def test_the_names_of_config_files_are_registered():
    assert SMOOTHINGS.get("smooth") is SMOOTHINGS.get("smoothquant") is SmoothQuant
    assert (SMOOTHINGS.get("autosmoothquant"), SMOOTHINGS.get("awq")) == (AutoSmoothQuant, AWQ)
    assert SmoothQuantConfig().name in SMOOTHINGS


# Rounding some rows as within the whole weight

WEIGHT_SPECS = {
    **{name: preset.layer_config.weight for name, preset in PRESETS.items()},
    "groups_along_outputs": QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=32, ch_axis=0),
    "scale_of_each_input": QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=1),
    "floor": QuantizationSpec(dtype="int8", qscheme="per_channel", round_method="floor"),
    "asymmetric_tensor": QuantizationSpec(dtype="uint8"),
    "cast": QuantizationSpec(dtype="bfloat16"),
}


@pytest.mark.parametrize(
    "name", with_usual(WEIGHT_SPECS, {spec: name for name, spec in reversed(WEIGHT_SPECS.items())}.values())
)
@pytest.mark.parametrize("num_rows", [40, 1000])
def test_some_rows_are_rounded_as_within_the_whole(name, num_rows):
    spec = WEIGHT_SPECS[name]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(320, 256, generator=generator)
    weight[5, 7] = 30  # of a row that is not among the chosen, but sets the scale of the tensor
    scale = torch.rand(256, generator=generator) + 0.5
    tried = TriedWeight(weight, spec, num_rows)
    chosen = [(weight == row).all(1).nonzero().item() for row in tried.weight_RI]
    smallest = replace(spec, observer_cls=None)  # the ranges of all trials, whatever the spec's observer
    expected = round_to_nearest(weight * scale, smallest).dequantize()
    if spec.scale_type is ScaleType.double_quant:  # by the mean of all scales: not known of some rows
        assert (tried.rounded(scale) - expected[chosen]).norm() < 0.05 * expected[chosen].norm()
        return
    torch.testing.assert_close(tried.rounded(scale), expected[chosen], rtol=0, atol=0)
    if num_rows == 40 and name in ("int8", "int8_static", "w4a16", "nvfp4", "fp8", "mxfp4", "int4_fp8"):
        assert len(chosen) == 40 and 5 not in chosen
    assert len(chosen) == 320 or num_rows == 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_may_have_two_bytes(dtype):
    weight, spec = weights().to(dtype), INT8_CHANNEL
    ones = torch.ones(16)
    expected = round_to_nearest(weight, spec).dequantize()
    assert torch.equal(TriedWeight(weight, spec, 1000).rounded(ones), expected)
    for name, config in (("awq", AWQConfig()), ("autosmoothquant", AutoSmoothQuantConfig())):
        got = SMOOTHINGS.get(name)(config).choose(PLAIN, [consumer(weight, inputs().to(dtype), STATIC)])
        assert got is not None and got.dtype == torch.float32


@pytest.mark.parametrize("height", [1, 32, 576])
def test_positions_are_spread_evenly(height: int) -> None:
    for length, wanted in product([1, 5, 16, 100, 576], [1, 16, 100, 5000]):
        got, case = spread_evenly(length, wanted, height).tolist(), (length, wanted)
        assert got[0] == 0 and len(set(got)) == len(got) and max(got) < length, case
        if wanted >= length:
            assert got == list(range(length)), case
        if height == 1:
            assert 0.6 * min(wanted, length) <= len(got) <= 1.6 * wanted, case
            assert len({b - a for a, b in pairwise(got)}) <= 1, case
        for piece in {position // height for position in got}:  # a piece comes whole
            assert set(range(piece * height, min(length, (piece + 1) * height))) <= set(got), case


def test_rows_are_shared_out_by_size():
    consumers = [consumer(torch.zeros(rows, 16), inputs(2)) for rows in (600, 200, 8)]
    assert [share_of_rows(one, consumers, 404) for one in consumers] == [300, 100, 16]


# The search


@pytest.mark.parametrize("best", range(NUM_STEPS + 1))
def test_the_search_finds_the_bottom_of_a_valley(best):
    """In a quarter of the tries that all steps would take, or half of them."""
    losses = search(lambda steps: [abs(step - best) ** 1.5 + 1 for step in steps])
    assert min(losses, key=losses.__getitem__) == best
    assert len(losses) <= 10
    assert all(loss == abs(step - best) ** 1.5 + 1 for step, loss in losses.items())


def test_what_is_not_a_number_never_wins():
    losses = search(lambda steps: [math.nan if step < 10 else 1 / step for step in steps])
    assert min(losses, key=losses.__getitem__) == 20
    assert losses[0] == math.inf


@pytest.mark.parametrize("step", [0, 7, 20])
def test_a_tried_scale_is_smoothquant_s_times_a_number(step):
    x, w = torch.rand(9) + 0.1, torch.rand(9) + 0.1
    x[2], w[4] = 0, 0
    got = scale_for(step, x, w)
    alpha = step / NUM_STEPS
    ratio = [got[i].item() / (x[i].item() ** alpha / w[i].item() ** (1 - alpha)) for i in (0, 1, 3, 5, 6, 7, 8)]
    assert ratio == pytest.approx([ratio[0]] * 7, rel=1e-5)
    assert got[2] == got[4] == 1
    counted = got[[0, 1, 3, 5, 6, 7, 8]]
    assert (counted.max() * counted.min()).item() == pytest.approx(1, rel=1e-5)


def test_a_tried_scale_stays_within_bounds():
    x = torch.tensor([1e-30, 1.0, 1e4, 0.0])
    got = scale_for(NUM_STEPS, x, torch.ones(4))
    assert got.tolist() == pytest.approx([0.01, 0.01, 100, 1], rel=1e-4)
    assert scale_for(3, torch.zeros(4), torch.ones(4)).tolist() == [1] * 4


# What the searches minimise, against loops


def loops(weight, x, scale, spec):
    """(change of every output [T][O], outputs) of a weight in asymmetric groups of 8, inputs as they are or int8."""
    rounded = round_to_nearest(weight * scale, spec.weight).dequantize()
    step = max((abs(value) / s).item() for row in x for value, s in zip(row, scale, strict=True)) / 127
    changes, outputs = [], []
    for row in x:
        seen = [(value / s).item() for value, s in zip(row, scale, strict=True)]
        if spec.input_tensors is not None:
            seen = [max(-128, min(127, round(value / step))) * step for value in seen]
        outputs.append([sum(w * v for w, v in zip(line, row.tolist(), strict=True)) for line in weight.tolist()])
        got = [sum(w * v for w, v in zip(line, seen, strict=True)) for line in rounded.tolist()]
        changes.append([a - b for a, b in zip(got, outputs[-1], strict=True)])
    return changes, outputs


@pytest.mark.parametrize("measure", ["MSE", "MAE", "RMSE"])
@pytest.mark.parametrize("config", [UINT4, STATIC], ids=["weight_only", "static"])
def test_the_error_of_outputs_is_that_of_loops(measure, config):
    x, weight, scale = inputs(12), weights(6), torch.rand(16) + 0.5
    changes, outputs = loops(weight, x, scale, config)

    def mean(rows):
        flat = [value for row in rows for value in row]
        if measure == "MAE":
            return sum(map(abs, flat)) / len(flat)
        square = sum(value**2 for value in flat) / len(flat)
        return square if measure == "MSE" else square**0.5

    smoothing = AutoSmoothQuant(AutoSmoothQuantConfig(compute_scale_loss=measure))
    got = OutputError(consumer(weight, x, config), 1000, smoothing._measure)(scale).item()
    assert got == pytest.approx(12 * mean(changes) / mean(outputs), rel=1e-3)


def test_the_error_of_rounding_is_that_of_loops():
    x, weight, scale = inputs(12), weights(6), torch.rand(16) + 0.5
    change = round_to_nearest(weight * scale, UINT4.weight).dequantize() / scale - weight
    power = [sum(x[t, i].item() ** 2 for t in range(12)) / 12 for i in range(16)]
    expected, total = (
        sum(tensor[o, i].item() ** 2 * power[i] for o in range(6) for i in range(16)) for tensor in (change, weight)
    )
    got = RoundingError(consumer(weight, x), 1000)(scale).item()
    assert got == pytest.approx(12 * expected / total, rel=1e-4)


def test_the_end_of_a_range_that_is_larger_comes_from_all_tokens():
    """A channel of both signs, one of positive values only, one that is mostly negative."""
    sample = torch.tensor([[-1.0, 0.5, -8.0], [2.0, 3.0, 1.0]])
    stats = Stats(9, torch.tensor([5.0, 4.0, 9.0]), torch.zeros(3), torch.zeros(3), None, sample)
    assert input_range(stats).tolist() == [[-1.0, 0.5, -9.0], [5.0, 4.0, 1.0]]


@pytest.mark.parametrize(
    "spec",
    [INT8, QuantizationSpec(dtype="uint8"), QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=-1),
     PRESETS["nvfp4"].layer_config.input_tensors],
    ids=["int8", "uint8", "scale_of_each_input", "nvfp4"],
)  # fmt: skip
def test_static_parameters_are_those_that_calibration_finds(spec):
    layer = LayerPlan("layer", 0, (4, 16), QuantizationConfig(weight=INT8_CHANNEL, input_tensors=spec))
    module, x = torch.nn.Linear(16, 4), inputs()
    with collect_ranges({layer: module}, module) as ranges:
        module(x)
    expected, got = learned(layer, ranges[layer], torch.float32).inputs, static(input_range(stats_of(x)), spec)
    assert torch.equal(got.scale, expected.scale)
    assert (got.zero_point is None) == (expected.zero_point is None)
    assert got.zero_point is None or torch.equal(got.zero_point, expected.zero_point)


def test_inputs_without_static_parameters_need_none():
    assert static(input_range(stats_of(inputs())), DYNAMIC.input_tensors) is None


# What the searches choose


def brute_force(edge, consumers, smoothing):
    """Every alpha there is, by the errors that the smoothing itself uses; the best first."""
    errors = [OutputError(one, 1000, smoothing._measure) for one in consumers]
    x = edge.largest(torch.stack([one.stats.largest_I for one in consumers]).amax(0))
    w = edge.largest(torch.cat([one.weight_OI for one in consumers]).abs().amax(0))
    scales = [scale_for(step, x, w) for step in range(NUM_STEPS + 1)]
    losses = [sum(error(edge.spread(scale)).item() for error in errors) for scale in scales]
    return sorted(zip(losses, range(NUM_STEPS + 1), strict=True))


@pytest.mark.parametrize("edge", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_autosmoothquant_finds_the_alpha_that_trying_all_finds(edge):
    """The smallest whose error is within a tenth of the least, of those that the search comes by."""
    consumers = [consumer(weights(), inputs(), STATIC), consumer(weights(24, seed=5), inputs(), STATIC)]
    smoothing = AutoSmoothQuant(AutoSmoothQuantConfig())
    got = smoothing.choose(edge, consumers)
    ranking = brute_force(edge, consumers, smoothing)
    x = edge.largest(consumers[0].stats.largest_I)
    w = edge.largest(torch.cat([one.weight_OI for one in consumers]).abs().amax(0))
    step = next(step for step in range(NUM_STEPS + 1) if torch.equal(got, scale_for(step, x, w)))
    losses = {step: loss for loss, step in ranking}
    assert losses[step] <= 1.1 * ranking[0][0]
    assert losses[max(0, step - 4)] > 1.1 * ranking[0][0]


@pytest.mark.parametrize("measure", ["MSE", "MAE", "RMSE"])
@pytest.mark.parametrize("edge", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_outliers_in_static_inputs_make_autosmoothquant_help(edge, measure):
    consumers = [consumer(weights(), inputs(), STATIC)]
    got = AutoSmoothQuant(AutoSmoothQuantConfig(compute_scale_loss=measure)).choose(edge, consumers)
    assert measured(edge, consumers, got) < 0.3 * measured(edge, consumers, None)


@pytest.mark.parametrize("edge", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_outliers_make_awq_help(edge):
    outliers = (3, 11) if edge is PLAIN else (3, 7)  # of heads that share values: both channels of one scale
    consumers = [
        consumer(weights(), inputs(outliers=outliers)),
        consumer(weights(8, seed=4), inputs(outliers=outliers)),
    ]
    got = AWQ(AWQConfig()).choose(edge, consumers)
    assert got.shape == (edge.num_scales,)
    assert measured(edge, consumers, got) < 0.6 * measured(edge, consumers, None)
    assert got[3] > 2 * got[[0, 1, 2]].max()


CHOOSERS = {
    "awq": AWQ(AWQConfig()),
    "MSE": AutoSmoothQuant(AutoSmoothQuantConfig()),
    "MAE": AutoSmoothQuant(AutoSmoothQuantConfig(compute_scale_loss="MAE")),
}


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("config", [UINT4, STATIC, DYNAMIC], ids=["uint4", "static", "dynamic"])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_chosen_is_better_than_nothing(name, config, seed):
    """By the error that is minimised, from inputs without outliers to such as have nothing else."""
    x, weight = inputs(seed=seed, factor=(1.0, 4.0)[seed % 2]), weights(seed=seed + 10)
    one, chooser = consumer(weight, x, config), CHOOSERS[name]
    got = chooser.choose(PLAIN, [one])
    error = RoundingError(one, 1000) if name == "awq" else OutputError(one, 1000, chooser._measure)
    if got is not None:
        assert error(got) < 0.95 * error(torch.ones(16))
    else:
        assert seed % 2 == 0 or (name, config) != ("MSE", STATIC), "outliers of four times the size must be seen"


@pytest.mark.parametrize("name", CHOOSERS)
def test_where_rounding_changes_nothing_the_edge_stays_alone(name):
    weight = torch.randint(-127, 128, (48, 16), generator=torch.Generator().manual_seed(0)).float()
    weight[:, 0] = 127
    config = QuantizationConfig(weight=INT8_CHANNEL)
    assert CHOOSERS[name].choose(PLAIN, [consumer(weight, inputs(), config)]) is None
    cast = QuantizationConfig(weight=QuantizationSpec(dtype="bfloat16"))
    assert CHOOSERS[name].choose(PLAIN, [consumer(weights().bfloat16(), inputs(factor=1), cast)]) is None


@pytest.mark.parametrize("edge", [PLAIN, GROUPED], ids=["plain", "grouped"])
@pytest.mark.parametrize("config", [STATIC, DYNAMIC, UINT4], ids=["static", "dynamic", "uint4"])
def test_largest_values_count_where_the_range_is_fixed_and_usual_ones_elsewhere(config, edge):
    """Nearly all tokens are small, and their large channels are others than those of the rest."""
    x = torch.cat([inputs(20, outliers=(1, 13), factor=100), 0.1 * inputs(400, outliers=(6,))])
    layers = [weights(), weights(8, seed=5)]
    stats, all_w = stats_of(x), torch.cat(layers).abs()

    def by_scale(reduce, values):
        return torch.stack([reduce(values[edge.channels == position]) for position in range(edge.num_scales)])

    if config is STATIC:
        sizes = by_scale(torch.max, stats.largest_I), by_scale(torch.max, all_w.amax(0))
    else:
        sizes = by_scale(torch.mean, x.abs().mean(0)), by_scale(torch.mean, all_w.mean(0))
    consumers = [consumer(weight, stats, config) for weight in layers]
    got = CHOOSERS["MSE"].choose(edge, consumers)
    assert any(torch.allclose(got, scale_for(step, *sizes), rtol=1e-4) for step in range(NUM_STEPS + 1))
    got = CHOOSERS["awq"].choose(edge, consumers)
    sizes = by_scale(torch.mean, x.square().mean(0)).sqrt(), by_scale(torch.mean, all_w.mean(0))
    assert any(torch.allclose(got, scale_for(step, *sizes), rtol=1e-4) for step in range(NUM_STEPS + 1))


@pytest.mark.parametrize("smoothing", [SmoothQuant(SmoothQuantConfig()), *CHOOSERS.values()])
def test_layers_that_are_not_quantized_or_not_reached_do_not_count(smoothing):
    seen, unseen = stats_of(inputs()), Stats(0, *[torch.zeros(16)] * 3, torch.zeros(16, 16), torch.zeros(0, 16))
    alone = smoothing.choose(PLAIN, [consumer(weights(), seen, STATIC)])
    others = [consumer(1e4 * weights(seed=8), seen, None), consumer(1e4 * weights(seed=9), unseen, STATIC)]
    assert torch.equal(smoothing.choose(PLAIN, [others[0], consumer(weights(), seen, STATIC), others[1]]), alone)
    assert smoothing.choose(PLAIN, others) is None


@pytest.mark.parametrize("config", [UINT4, STATIC, DYNAMIC], ids=["uint4", "static", "dynamic"])
@pytest.mark.parametrize("smoothing", [SmoothQuant(SmoothQuantConfig()), *CHOOSERS.values()])
def test_zeros_and_single_tokens(smoothing, config):
    """Inputs or weights that are all zeros, channels of zeros, one token, infinite inputs: usable scales, or none."""
    dead_x, dead_w = inputs(), weights()
    dead_x[:, 4], dead_w[:, 9] = 0, 0
    for x, weight in (
        (dead_x, dead_w), (inputs(1), weights()), (torch.zeros(3, 16), weights()), (inputs(), torch.zeros(48, 16)),
        (inputs(), weights(1)), (torch.full((5, 16), torch.inf), weights()),
    ):  # fmt: skip
        for edge in (PLAIN, GROUPED):
            got = smoothing.choose(edge, [consumer(weight, x, config)])
            assert got is None or (torch.isfinite(got) & (got > 0)).all()
    got = smoothing.choose(PLAIN, [consumer(dead_w, dead_x, config)])
    assert got is None or got[4] == got[9] == 1


@pytest.mark.parametrize("smoothing", [SmoothQuant(SmoothQuantConfig()), *CHOOSERS.values()])
def test_the_same_twice_and_nothing_given_is_changed(smoothing):
    consumers = [consumer(weights(400), inputs(NUM_TOKENS + 90), STATIC)]
    weight, sample, gram = (
        tensor.clone() for tensor in (consumers[0].weight_OI, consumers[0].stats.sample_TI, consumers[0].stats.gram_II)
    )
    first, second = (smoothing.choose(PLAIN, consumers) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(consumers[0].weight_OI, weight)
    assert torch.equal(consumers[0].stats.sample_TI, sample) and torch.equal(consumers[0].stats.gram_II, gram)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("smoothing", CHOOSERS.values(), ids=CHOOSERS)
def test_every_scheme(name, smoothing):
    """Scales that leave less error than none, or none, whatever the formats of weight and input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-1, 1, 256)[torch.randperm(256, generator=generator)]
    weight = torch.randn(130, 256, generator=generator)
    edge = ScalePair("norm", ("q",), torch.arange(256), torch.arange(256))
    one = consumer(weight, x, PRESETS[name].layer_config)
    got = smoothing.choose(edge, [one])
    error = RoundingError(one, 1000) if isinstance(smoothing, AWQ) else OutputError(one, 1000, smoothing._measure)
    assert got is None or error(got) < 0.95 * error(torch.ones(256))
    if name in ("w4a16", "int8_static"):
        assert got is not None


def test_a_share_of_an_expert_counts_by_its_tokens():
    """Two experts that want different scales: the one that more tokens reach has its way."""
    few, many = inputs(10, outliers=(3,)), inputs(2000, outliers=(12,), seed=7)
    consumers = [consumer(weights(), few), consumer(weights(seed=6), many)]
    got = AWQ(AWQConfig()).choose(PLAIN, consumers)
    assert got[12] > 2 * got[3]
