"""Solvers against plain float64 textbook versions, and what they promise whatever the numbers are."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from quantcore.config.algorithms import GPTAQConfig, GPTQConfig, QronosConfig, RTNConfig, YAQAConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec
from quantcore.config.spec import QSchemeType, ScaleType
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.solvers import SOLVERS, gptq
from quantcore.engine.solvers.groups import Groups
from quantcore.engine.solvers.hessian import Hessian, order_of
from quantcore.engine.solvers.measures import TILE_INPUTS, GroupMeasure, Metric, PooledMeasure
from quantcore.engine.solvers.ranges import FullRange
from quantcore.engine.solvers.rtn import observed_ranges, round_to_nearest, search_ranges, transposed
from quantcore.errors import NumericsError
from quantcore.plan import workload
from quantcore.tensors.affine import QParams, dequantize, fake_quantize, scale_dtype
from quantcore.tensors.kernels import switch
from quantcore.tensors.qtensor import quantize_weight
from tests.support.params import with_usual

LOCAL = {
    "uint4_group": QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=16, symmetric=False),
    "uint4_odd_group": QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=23, symmetric=False),
    "int8_channel": QuantizationSpec(dtype="int8", qscheme="per_channel"),
    "int4_row": QuantizationSpec(dtype="int4", qscheme="per_group", group_size=-1),
    "fp8_channel": QuantizationSpec(dtype="fp8_e4m3", qscheme="per_channel"),
    "fp6_group": QuantizationSpec(dtype="fp6_e2m3", qscheme="per_group", group_size=16),
    "mxfp4": PRESETS["mxfp4"].layer_config.weight,
    "nvfp4": PRESETS["nvfp4"].layer_config.weight,
    "int3_small_groups": QuantizationSpec(dtype="int3", qscheme="per_group", group_size=6),
    "nf4": QuantizationSpec(dtype="nf4", qscheme="per_group", group_size=16),
    "int4_over_fp8": PRESETS["int4_fp8"].layer_config.weight,
    "uint8_float_zero": QuantizationSpec(
        dtype="uint8", qscheme="per_group", group_size=16, symmetric=False, zero_point_type="float32"
    ),
    "pof2": QuantizationSpec(dtype="int4", qscheme="per_group", group_size=16, scale_type="pof2"),
}
"""No two rows share parameters."""
POOLED = {
    "int8_tensor": QuantizationSpec(dtype="int8"),
    "uint4_tensor": QuantizationSpec(dtype="uint4", symmetric=False),
    "fp8_block": QuantizationSpec(dtype="fp8_e4m3", qscheme="per_block", block_size=(16, 24)),
    "int4_inputs": QuantizationSpec(dtype="int4", qscheme="per_channel", ch_axis=1),
    "int4_groups_of_outputs": QuantizationSpec(dtype="int4", qscheme="per_group", group_size=4, ch_axis=0),
}
SPECS = {**LOCAL, **POOLED}
INPUTS = {"uint4_odd_group": 115, "int8_channel": 131, "int4_row": 77, "fp8_channel": 97}
"""How many inputs, where 96 would not do or odd numbers are of interest."""


def tokens(num_inputs, num_tokens=600, seed=0):
    """Inputs [T, I] as layers have them: correlated, with a mean, a few much larger than the rest, one dead."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_inputs // 3, num_inputs, generator=generator) / 3
    mean = torch.randn(num_inputs, generator=generator)
    x = torch.randn(num_tokens, num_inputs // 3, generator=generator) @ mixed + mean
    x += 0.3 * torch.randn(num_tokens, num_inputs, generator=generator)
    x[:, 3] *= 20
    x[:, 5] = 0
    return x


def stats_of(x, reference=None):
    wide = x.double()
    gram = wide.T @ wide / len(x)
    shift = None if reference is None else ((reference.double() - wide).T @ wide / len(x)).float()
    return Stats(len(x), x.abs().amax(0), x.mean(0), x.abs().mean(0), gram.float(), shift_II=shift)


def weight_of(name="uint4_group", num_outputs=36, seed=1):
    """[O, I] in bfloat16 with a row of zeros and an outlier."""
    weight = torch.randn(num_outputs, INPUTS.get(name, 96), generator=torch.Generator().manual_seed(seed)) * 0.1
    weight[3] = 0
    weight[5, 7] = 2
    return weight.bfloat16()


def weight_without_ties(name="uint4_group", num_outputs=36):
    """The same in float32: bfloat16 weights often lie just between two codes, where a last bit decides."""
    generator = torch.Generator().manual_seed(3)
    weight = weight_of(name, num_outputs).float()
    return weight * (1 + 0.01 * torch.randn(weight.shape, generator=generator))


def plan(spec, shape, name="q_proj"):
    return LayerPlan(name, 0, tuple(shape), QuantizationConfig(weight=spec))


def solver_of(name, **options):
    config = {"rtn": RTNConfig, "gptq": GPTQConfig, "gptaq": GPTAQConfig, "yaqa": YAQAConfig, "qronos": QronosConfig}[
        name
    ](**options)
    return SOLVERS.get(name)(config)


def solve(name, weight, spec, stats, **options):
    layer = plan(spec, weight.shape)
    return solver_of(name, **options).solve({layer: weight}, stats)[layer]


def costs(error, gram):
    """error gram error^T of every row, float64 [O]."""
    error = error.double()
    return ((error @ gram.double()) * error).sum(1)


def cost_of(quantized, weight, stats):
    return costs(weight.double() - quantized.dequantize(), stats.gram_II)


def rounded_column(column, quantized, index):
    """One column [O] rounded with the parameters that ``quantized`` has there: whole weights, of which it is taken."""
    grouping = weight_grouping(quantized.spec)
    whole = column.float().unsqueeze(1).expand(quantized.codes.shape).contiguous()
    codes = quantize_weight(whole, quantized.params, quantized.spec).codes
    values = dequantize(grouping.split(codes), quantized.params, quantized.spec)
    return grouping.join(values, tuple(whole.shape))[:, index].double()


def textbook_gptq(target, gram, order, damping, rounded):
    """Frantar et al. 2022 in float64: [O, I]. ``rounded(column, index)`` rounds, ``damping`` is a share."""
    hessian = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(len(gram))
    inverse = torch.linalg.inv(hessian[order][:, order])
    left = target.double()[:, order].clone()
    result = torch.zeros_like(left)
    for k, index in enumerate(order.tolist()):
        result[:, k] = rounded(left[:, k], index)
        error = (left[:, k] - result[:, k]) / inverse[k, k]
        left[:, k:] -= torch.outer(error, inverse[k, k:])
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return torch.zeros_like(left).index_copy(1, order, result)


def textbook_descent(start, target, gram, order, damping, rounded):
    """One pass over the columns, each rounded to what is best given all others, float64 [O, I]."""
    hessian = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(len(gram))
    result = start.clone()
    for index in order.tolist():
        pull = (target.double() - result) @ hessian[:, index] / hessian[index, index]
        result[:, index] = rounded(result[:, index] + pull, index)
    return result


def assert_same(quantized, expected, target, gram):
    """The same values but for ties, which change what follows a little."""
    step = quantized.params.step.double().amin()
    different = (quantized.dequantize().double() - expected).abs() > step * 1e-3
    assert different.double().mean() < 0.005
    ours = costs(target.double() - quantized.dequantize(), gram).sum()
    torch.testing.assert_close(ours, costs(target.double() - expected, gram).sum(), rtol=1e-2, atol=0)


@pytest.fixture
def no_descent(monkeypatch):
    monkeypatch.setattr(gptq, "NUM_PASSES", 0)


class TestGPTQ:
    @pytest.mark.parametrize(
        ("desc_act", "static_groups"), with_usual(product([True, False], repeat=2), [(True, False), (False, True)])
    )
    @pytest.mark.parametrize("name", SPECS)
    def test_codes_are_the_textbook_s(self, no_descent, name, desc_act, static_groups):
        weight, stats = weight_without_ties(name, num_outputs=72), stats_of(tokens(INPUTS.get(name, 96)))
        options = {"damp_percent": 0.02, "desc_act": desc_act, "static_groups": static_groups}
        quantized = solve("gptq", weight, SPECS[name], stats, **options)
        groups = Groups.of(SPECS[name], weight)
        found_on_the_way = not static_groups and groups.is_local and groups.num_scales[1] > 1
        order = order_of(stats.hessian_diagonal_I, groups.group_size if found_on_the_way else None, act_order=desc_act)
        rounded = lambda column, index: rounded_column(column, quantized, index)  # noqa: E731
        expected = textbook_gptq(weight, stats.gram_II, order, 0.02, rounded)
        assert_same(quantized, expected, weight, stats.gram_II)

    @pytest.mark.parametrize("name", ["uint4_group", "nvfp4", "int8_channel"])
    def test_descent_is_the_textbook_s_and_only_improves(self, monkeypatch, name):
        weight, stats = weight_without_ties(name), stats_of(tokens(INPUTS.get(name, 96)))
        damped = stats.gram_II + 0.02 * stats.hessian_diagonal_I.mean() * torch.eye(len(stats.hessian_diagonal_I))
        results = []
        for num_passes in range(3):
            monkeypatch.setattr(gptq, "NUM_PASSES", num_passes)
            results.append(solve("gptq", weight, SPECS[name], stats, damp_percent=0.02, static_groups=True))
        order = order_of(stats.hessian_diagonal_I, None, act_order=True)
        rounded = lambda column, index: rounded_column(column, results[0], index)  # noqa: E731
        expected = textbook_descent(results[0].dequantize().double(), weight, stats.gram_II, order, 0.02, rounded)
        assert_same(results[1], expected, weight, damped)
        none, once, twice = (costs(weight.double() - one.dequantize(), damped) for one in results)
        assert once.sum() < 0.995 * none.sum()
        assert twice.sum() < once.sum()

    @pytest.mark.parametrize("static_groups", [True, False])
    @pytest.mark.parametrize("name", SPECS)
    def test_no_row_is_worse_than_rounded_with_the_same_parameters(self, name, static_groups):
        weight, stats = weight_of(name, num_outputs=120), stats_of(tokens(INPUTS.get(name, 96), num_tokens=40))
        for damping in (0.001, 0.9):
            quantized = solve("gptq", weight, SPECS[name], stats, static_groups=static_groups, damp_percent=damping)
            nearest = quantize_weight(weight, quantized.params, SPECS[name])
            assert (cost_of(quantized, weight, stats) <= cost_of(nearest, weight, stats) * (1 + 1e-4) + 1e-9).all()

    @pytest.mark.parametrize("name", SPECS)
    def test_costs_less_than_rounding(self, name):
        weight, stats = weight_of(name), stats_of(tokens(INPUTS.get(name, 96)))
        ours = cost_of(solve("gptq", weight, SPECS[name], stats), weight, stats).sum()
        assert ours < cost_of(solve("rtn", weight, SPECS[name], stats), weight, stats).sum()
        assert ours < 0.9 * cost_of(round_to_nearest(weight, SPECS[name]), weight, stats).sum()

    @pytest.mark.parametrize("name", ["uint4_group", "nvfp4", "fp6_group"])
    def test_ranges_found_on_the_way_cost_less(self, name):
        weight, stats = torch.cat([weight_of(name, seed=seed) for seed in range(8)]), stats_of(tokens(96))
        static, found = (
            cost_of(solve("gptq", weight, SPECS[name], stats, static_groups=static), weight, stats).sum()
            for static in (True, False)
        )
        assert found < static

    @pytest.mark.parametrize("static_groups", [True, False])
    def test_without_a_search_ranges_are_the_observer_s(self, static_groups):
        spec = replace(LOCAL["uint4_group"], observer_cls="PerGroupPercentileObserver")
        weight, stats = weight_of(), stats_of(tokens(96))
        quantized = solve("gptq", weight, spec, stats, range_search=False, static_groups=static_groups)
        expected = observed_ranges(weight, spec)
        if static_groups:
            assert torch.equal(quantized.params.scale, expected.scale)
        first = order_of(stats.hessian_diagonal_I, 16, act_order=True)[0] // 16  # nothing has moved it yet
        assert torch.equal(quantized.params.scale[:, first], expected.scale[:, first])
        assert torch.equal(quantized.params.zero_point[:, first], expected.zero_point[:, first])

    def test_static_ranges_are_searched_by_what_errors_cost_in_the_end(self):
        weight, stats = weight_without_ties(), stats_of(tokens(96))
        params = solve("gptq", weight, LOCAL["uint4_group"], stats, static_groups=True, damp_percent=0.02).params
        damped = stats.gram_II.double() + 0.02 * stats.hessian_diagonal_I.double().mean() * torch.eye(96)
        order = order_of(stats.hessian_diagonal_I, None, act_order=True)
        left = [torch.linalg.inv(damped[order[k:]][:, order[k:]])[0, 0] for k in range(96)]
        counts = torch.zeros(96).index_copy(0, order, (1 / torch.stack(left)).float())
        expected = search_ranges([weight], LOCAL["uint4_group"], Metric(counts), [None])[0]
        assert torch.isclose(params.scale, expected.scale, rtol=1e-3).double().mean() > 0.98

    def test_the_order(self):
        power = torch.tensor([1.0, 2, 3, 9, 8, 2, 4, 5])
        assert order_of(power, None, act_order=False).tolist() == list(range(8))
        assert order_of(power, None, act_order=True).tolist() == [3, 4, 7, 6, 2, 1, 5, 0]
        assert order_of(power, 4, act_order=True).tolist() == [4, 7, 6, 5, 3, 2, 1, 0]  # 5 4 2 8 have more than 1 2 3 9

    def test_a_dead_input_is_rounded_and_moves_nothing(self, no_descent):
        weight, stats = weight_of(), stats_of(tokens(96))
        weight[:, 5] = 0.05
        other = weight.clone()
        other[:, 5] = -0.05
        options = {"static_groups": True, "range_search": False}
        codes, others = (solve("gptq", one, LOCAL["uint4_group"], stats, **options).codes for one in (weight, other))
        assert torch.equal(codes[:, 5], round_to_nearest(weight, LOCAL["uint4_group"]).codes[:, 5])
        assert (codes[:3, 5] != others[:3, 5]).all()
        codes[:, 5] = others[:, 5]
        assert torch.equal(codes[:3], others[:3]) and torch.equal(codes[4:], others[4:])  # the third is but this input

    def test_groups_of_one(self):
        spec = QuantizationSpec(dtype="int4", qscheme="per_group", group_size=1, scale_type="float32")
        quantized = solve("gptq", weight_of(), spec, stats_of(tokens(96)))
        torch.testing.assert_close(quantized.dequantize(), weight_of().float(), rtol=1e-5, atol=1e-5)

    def test_fewer_tokens_than_inputs(self):
        x = tokens(96, num_tokens=20)
        quantized = solve("gptq", weight_of(), LOCAL["uint4_group"], stats_of(x))
        assert torch.isfinite(quantized.dequantize()).all()
        assert (quantized.dequantize()[3] == 0).all()

    def test_damping_follows_from_the_number_of_tokens_and_pays_on_others(self):
        turn = torch.linalg.qr(torch.randn(96, 96, generator=torch.Generator().manual_seed(5))).Q
        mixed = torch.arange(1, 97).rsqrt().unsqueeze(1) * turn  # eigenvalues 1, 1/2, 1/3 ...
        few, many = (
            stats_of(torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(num_tokens)) @ mixed)
            for num_tokens in (150, 20000)
        )
        weight = torch.cat([weight_of(seed=seed) for seed in range(4)])
        fixed, chosen = (
            cost_of(solve("gptq", weight, LOCAL["uint4_group"], few, damp_percent=damping), weight, many).sum()
            for damping in (0.01, None)
        )
        assert chosen < 0.9 * fixed
        order = torch.arange(96)
        once, twice = (Hessian.of(many.gram_II, num, order, None, torch.float32).damp_percent for num in (10000, 20000))
        assert once == pytest.approx(2 * twice)
        scaled = Hessian.of(100 * many.gram_II, 20000, order, None, torch.float32).damp_percent
        assert scaled == pytest.approx(twice, rel=1e-3)

    def test_more_damping_where_it_is_needed_is_told(self):
        x = tokens(96)
        gram = stats_of(x).gram_II
        rounded = gram - 0.03 * gram.diagonal().mean() * torch.eye(96)  # as bfloat16 sums may leave it
        solver = solver_of("gptq", damp_percent=0.01)
        layer = plan(LOCAL["uint4_group"], (36, 96), "model.layers.7.mlp.up_proj")
        solver.solve({layer: weight_of()}, replace(stats_of(x), gram_II=rounded))
        assert len(solver.notes) == 1
        assert "model.layers.7.mlp.up_proj" in solver.notes[0] and "0.1" in solver.notes[0]
        solver.solve({layer: weight_of()}, stats_of(x))
        assert len(solver.notes) == 1

    @pytest.mark.parametrize("damping", [None, 0.01])
    @pytest.mark.parametrize("bad", [torch.inf, torch.nan])
    def test_statistics_that_are_not_finite_are_an_error(self, bad, damping):
        stats = stats_of(tokens(96))
        stats.gram_II[4, 4] = bad
        with pytest.raises(NumericsError, match="cannot be factorized"):
            solve("gptq", weight_of(), LOCAL["uint4_group"], stats, damp_percent=damping)

    def test_float64(self):
        weight, stats = weight_of(), stats_of(tokens(96))
        assert solver_of("gptq", hessian_dtype="float64").needs.float64 and not solver_of("gptq").needs.float64
        double, single = (
            solve("gptq", weight, LOCAL["uint4_group"], stats, hessian_dtype=dtype) for dtype in ("float64", "float32")
        )
        torch.testing.assert_close(
            cost_of(double, weight, stats).sum(), cost_of(single, weight, stats).sum(), rtol=0.02, atol=0
        )

    def test_rows_beyond_one_piece(self, monkeypatch):
        weight, stats = weight_of(num_outputs=70), stats_of(tokens(96))
        whole = solve("gptq", weight, LOCAL["nvfp4"], stats)
        monkeypatch.setattr(workload, "SOLVED_ROWS", 32)
        pieces = solve("gptq", weight, LOCAL["nvfp4"], stats)
        assert (whole.codes != pieces.codes).double().mean() < 0.005
        assert (whole.params.scale != pieces.params.scale).double().mean() < 0.005

    @pytest.mark.parametrize(
        "name", with_usual(["uint4_group", "nvfp4", "int8_tensor", "int4_over_fp8", "nf4"], ["nvfp4"])
    )
    def test_the_loop_in_kernels(self, interpreter, monkeypatch, name):
        """As on a GPU, in Triton's interpreter: rounding may differ where float32 sums do, and nowhere else."""
        weight, stats = weight_without_ties(name), stats_of(tokens(96))
        wanted = solve("gptq", weight, SPECS[name], stats)
        monkeypatch.setattr(switch, "DEVICES", ("cpu",))
        found = solve("gptq", weight, SPECS[name], stats)
        assert (wanted.codes != found.codes).double().mean() < 0.005
        assert cost_of(found, weight, stats).sum() < 1.01 * cost_of(wanted, weight, stats).sum()


def shifted_tokens(num_inputs=96):
    """What a layer will see, and what the float model's layer saw."""
    y = tokens(num_inputs)
    generator = torch.Generator().manual_seed(9)
    change = torch.eye(num_inputs) + 0.02 * torch.randn(num_inputs, num_inputs, generator=generator)
    return y @ change + 0.05 * torch.randn(y.shape, generator=generator), y


def least_squares(x, wanted, prior, damping):
    """The weights [O, I] for inputs x [T, I] that come nearest to ``wanted`` [T, O] and, damped, to ``prior``."""
    strength = (damping * len(x)) ** 0.5
    left = torch.cat([x, strength * torch.eye(x.shape[1], dtype=x.dtype)])
    right = torch.cat([wanted, strength * prior.T])
    return torch.linalg.lstsq(left, right, driver="gelsd").solution.T


class TestShifted:
    @pytest.mark.parametrize("name", ["gptaq", "yaqa", "qronos"])
    def test_without_a_shift_they_are_gptq(self, name):
        weight, stats = weight_of(), stats_of(tokens(96))
        ours, plain = (solve(one, weight, LOCAL["uint4_group"], stats) for one in (name, "gptq"))
        assert torch.equal(ours.codes, plain.codes) and torch.equal(ours.params.scale, plain.params.scale)
        assert solver_of(name).needs.shift and solver_of(name).needs.gram

    @pytest.mark.parametrize("alpha", [0.3, 1.0])
    def test_gptaq_is_textbook_gptq_on_the_least_squares_weights(self, no_descent, alpha):
        weight, (x, y) = weight_without_ties(), shifted_tokens()
        stats = stats_of(x, y)
        options = {"static_groups": True, "damp_percent": 0.01}
        quantized = solve("gptaq", weight, LOCAL["uint4_group"], stats, alpha=alpha, **options)
        wanted = (x.double() + alpha * (y.double() - x.double())) @ weight.double().T
        damping = 0.01 * stats.hessian_diagonal_I.mean().item()
        target = least_squares(x.double(), wanted, weight.double(), damping)
        rounded = lambda column, index: rounded_column(column, quantized, index)  # noqa: E731
        order = order_of(stats.hessian_diagonal_I, None, act_order=True)
        assert_same(quantized, textbook_gptq(target, stats.gram_II, order, 0.01, rounded), target, stats.gram_II)

    def test_qronos_is_its_textbook(self, no_descent):
        """Zhang et al. 2025, algorithm 1, with tokens and least squares column after column, in float64."""
        weight, (x, y) = weight_without_ties(num_outputs=24), shifted_tokens()
        stats = stats_of(x, y)
        quantized = solve("qronos", weight, LOCAL["uint4_group"], stats, static_groups=True, damp_percent=0.01)
        damping = 0.01 * stats.hessian_diagonal_I.mean().item()
        order = order_of(stats.hessian_diagonal_I, None, act_order=True)
        x, y, prior = x.double()[:, order], y.double()[:, order], weight.double()[:, order]
        wanted = y @ prior.T
        left, result = prior.clone(), torch.zeros_like(prior)
        rest = wanted - x[:, 1:] @ left[:, 1:].T
        left[:, 0] = least_squares(x[:, :1], rest, prior[:, :1], damping)[:, 0]
        for k, index in enumerate(order.tolist()):
            result[:, k] = rounded_column(left[:, k], quantized, index)
            if k + 1 < len(order):
                rest = wanted - x[:, : k + 1] @ result[:, : k + 1].T
                left[:, k + 1 :] = least_squares(x[:, k + 1 :], rest, prior[:, k + 1 :], damping)
        expected = torch.zeros_like(result).index_copy(1, order, result)
        target = least_squares(x, wanted, prior, damping)
        assert_same(quantized, expected, torch.zeros_like(target).index_copy(1, order, target), stats.gram_II)

    def test_they_come_nearer_to_the_float_model(self):
        weight, (x, y) = weight_of(), shifted_tokens()
        stats = stats_of(x, y)
        loss = {}
        for name, options in {"gptq": {}, "gptaq": {"alpha": 0.5}, "qronos": {}}.items():
            restored = solve(name, weight, LOCAL["uint4_group"], stats, **options).dequantize()
            loss[name] = (y @ weight.float().T - x @ restored.T).square().mean()
        assert loss["qronos"] < 0.8 * loss["gptaq"]
        assert loss["gptaq"] < 0.8 * loss["gptq"]


def full_params(weight, spec):
    return FullRange.of(weight, spec).params()


def power_errors(weight, quantized, power):
    """sum(power * e^2) of every scale, float64 [R, G]."""
    error = (weight.double() - quantized.dequantize()).square() * power.double()
    return weight_grouping(quantized.spec).split(error).sum(-1)


class TestSearch:
    @pytest.mark.parametrize("name", SPECS)
    def test_never_worse_than_the_full_range(self, name):
        weight, stats = weight_of(name), stats_of(tokens(INPUTS.get(name, 96)))
        spec = SPECS[name]
        searched = search_ranges([weight], spec, Metric(stats.hessian_diagonal_I), [None])[0]
        before, after = (
            power_errors(weight, quantize_weight(weight, params, spec), stats.hessian_diagonal_I)
            for params in (full_params(weight, spec), searched)
        )
        assert (after <= before * (1 + 1e-4) + 1e-12).all()
        assert after.sum() < 0.97 * before.sum()

    @pytest.mark.parametrize("name", SPECS)
    def test_parameters_can_be_stored_and_a_global_scale_stays(self, name):
        weight, stats = weight_of(name), stats_of(tokens(INPUTS.get(name, 96)))
        spec = SPECS[name]
        full = full_params(weight, spec)
        for solver in ("rtn", "gptq"):
            params = solve(solver, weight, spec, stats).params
            assert params.scale.shape == full.scale.shape and (params.scale > 0).all()
            stored = {
                ScaleType.e8m0: lambda x: x.log2().round().exp2(),
                ScaleType.pof2: lambda x: x.log2().round().exp2(),
                ScaleType.e4m3: lambda x: x.to(torch.float8_e4m3fn).float(),
            }.get(spec.scale_type, lambda x: x.to(scale_dtype(spec, torch.bfloat16)).float())
            assert torch.equal(stored(params.scale), params.scale)
            assert (params.scale != full.scale).any() or params.scale.numel() == 1
            assert (params.zero_point is None) == (full.zero_point is None)
            if params.zero_point is not None:
                assert params.zero_point.dtype == full.zero_point.dtype
                assert ((params.zero_point >= spec.format.min) & (params.zero_point <= spec.format.max)).all()
            if full.global_scale is not None:
                assert torch.equal(params.global_scale, full.global_scale)

    def test_a_large_weight_of_a_dead_input_is_let_go(self):
        weight, stats = weight_of(), stats_of(tokens(96))
        weight[:, 5] = 1.0
        nearest = cost_of(round_to_nearest(weight, LOCAL["uint4_group"]), weight, stats).sum()
        for solver, share in {"rtn": 0.2, "gptq": 0.05}.items():
            assert cost_of(solve(solver, weight, LOCAL["uint4_group"], stats), weight, stats).sum() < share * nearest

    @pytest.mark.parametrize("name", ["int4_row", "int8_channel", *POOLED])
    def test_the_search_with_a_gram_matrix_is_by_its_blocks(self, name):
        weight, stats = weight_of(name), stats_of(tokens(INPUTS.get(name, 96)))
        spec = SPECS[name]
        params = search_ranges([weight], spec, Metric.of_gram(stats.gram_II), [None])[0]
        groups = Groups.of(spec, weight)
        cost = []
        for one in (full_params(weight, spec), params):
            error = weight.double() - quantize_weight(weight, one, spec).dequantize()
            size = min(groups.group_size, TILE_INPUTS)
            blocks = [slice(start, start + size) for start in range(0, weight.shape[1], size)]
            cost.append(sum(costs(error[:, block], stats.gram_II[block, block]).sum() for block in blocks))
        assert cost[1] < 0.97 * cost[0]

    @pytest.mark.parametrize("metric", ["power", "gram", "cross"])
    @pytest.mark.parametrize("name", LOCAL)
    def test_the_measure_is_the_error_of_fake_quantization(self, name, metric):
        spec = replace(LOCAL[name], group_size=16 if LOCAL[name].group_size else None)
        weight = weight_of()[:, :16].contiguous()
        gram = stats_of(tokens(96)).gram_II[:16, :16]
        full = FullRange.concat([FullRange.of(weight, spec)])
        factors = torch.tensor([1.0, 0.8, 0.55]).view(3, 1, 1)
        cross = torch.randn(16, 36, generator=torch.Generator().manual_seed(2)) if metric == "cross" else None
        weigher = Metric(gram.diagonal(), None if metric == "power" else gram)
        tiles = weigher.tiles(transposed(weight), slice(0, 16), full.of_rows(slice(None), 0), cross)
        tried = full.params(factors, factors)
        zero_CN = None if tried.zero_point is None else tried.zero_point[..., 0]
        global_N = None if full.global_scale is None else full.global_scale[:, 0]
        measured = GroupMeasure(tiles, spec).errors(QParams(tried.scale[..., 0], zero_CN, global_N)).double()
        for number in range(3):
            zero_NG = None if tried.zero_point is None else tried.zero_point[number]
            params = QParams(tried.scale[number], zero_NG, None if global_N is None else global_N[0])
            error = weight.double() - fake_quantize(weight.float(), spec, weight_grouping(spec), params).double()
            expected = costs(error, torch.diag(gram.diagonal()) if metric == "power" else gram)
            if cross is not None:
                expected += 2 * (error * cross.T.double()).sum(1)
            scale = expected.abs().amax()
            torch.testing.assert_close(measured[number], expected, rtol=1e-3, atol=scale.item() * 1e-5)

    @pytest.mark.parametrize("metric", ["power", "gram", "cross"])
    @pytest.mark.parametrize("name", ["uint4_group", "nvfp4"])
    def test_the_fitted_step_is_the_least_squares_one(self, name, metric):
        spec = replace(LOCAL[name], group_size=16)
        weight = weight_of()[:, :16].contiguous()
        gram = stats_of(tokens(96)).gram_II[:16, :16]
        full = FullRange.concat([FullRange.of(weight, spec)])
        cross = torch.randn(16, 36) * 0.1 if metric == "cross" else None
        weigher = Metric(gram.diagonal(), None if metric == "power" else gram)
        here = full.of_rows(slice(None), 0)
        params = here.params()
        fitted = GroupMeasure(weigher.tiles(transposed(weight), slice(0, 16), here, cross), spec).fit(params)
        counted = torch.diag(gram.diagonal()) if metric == "power" else gram
        values = fake_quantize(weight.float(), spec, weight_grouping(spec), full_params(weight, spec)).double()
        codes = values / params.step.double().unsqueeze(1)

        def slope(step):
            error = weight.double() - codes * step.double().unsqueeze(1)
            pull = error @ counted.double() + (0 if cross is None else cross.T.double())
            return (pull * codes).sum(1)

        at_start = slope(torch.zeros_like(params.step)).abs()
        alive = torch.arange(36) != 3
        assert (slope(fitted)[alive].abs() < 1e-4 * at_start[alive]).all()

    @pytest.mark.parametrize("name", ["uint4_group", "nf4"])
    def test_found_scales_are_near_the_least_squares_ones(self, name):
        weight, spec = torch.cat([weight_of(seed=seed) for seed in range(4)]).float(), LOCAL[name]
        metric = Metric(stats_of(tokens(96)).hessian_diagonal_I)
        found = search_ranges([weight], spec, metric, [None])[0]
        full = FullRange.concat([FullRange.of(weight, spec)])
        before = after = 0.0
        for group in range(6):
            inputs, here = slice(16 * group, 16 * group + 16), full.of_rows(slice(None), group)
            measure = GroupMeasure(metric.tiles(transposed(weight)[inputs], inputs, here), spec)
            zero = None if found.zero_point is None else found.zero_point[:, group]
            fitted = measure.fit(QParams(found.scale[:, group], zero))
            both = torch.stack([found.scale[:, group], torch.where(fitted > 0, fitted, 1)])
            error_2N = measure.errors(QParams(both, None if zero is None else zero.expand(2, -1)))
            before += error_2N[0].sum().item()
            after += error_2N.amin(0).sum().item()
        assert after > 0.985 * before

    def test_rows_that_share_parameters_are_measured_together(self):
        spec, weight = POOLED["fp8_block"], weight_of(num_outputs=37)
        full = FullRange.of(weight, spec)
        groups = Groups.of(spec, weight)
        metric = Metric(stats_of(tokens(96)).hessian_diagonal_I)
        inputs = [slice(start, start + 24) for start in range(0, 96, 24)]
        measure = PooledMeasure(
            groups, [GroupMeasure(metric.tiles(transposed(weight)[group], group, full), spec) for group in inputs]
        )
        params = full.params(0.7, 0.7)
        measured = measure.errors(QParams(params.scale.unsqueeze(0), None, None))[0]
        expected = power_errors(weight, quantize_weight(weight, params, spec), metric.hessian_diagonal_I)
        torch.testing.assert_close(measured.double(), expected, rtol=1e-3, atol=1e-9)

    def test_groups_say_where_parameters_are(self):
        for name, spec in SPECS.items():
            shape = (36, INPUTS.get(name, 96))
            groups = Groups.of(spec, torch.empty(shape))
            grouping = weight_grouping(spec)
            num_rows, num_groups = grouping.num_scales(shape)
            params = torch.arange(float(num_rows * num_groups)).view(num_rows, num_groups)
            size = grouping.split(torch.empty(shape)).shape[-1]
            expected = grouping.join(params.unsqueeze(-1).expand(-1, -1, size).contiguous(), shape)
            spread = groups.spread(params).repeat_interleave(groups.group_size, dim=0)[: shape[1]].T
            assert torch.equal(spread, expected), name
            ones = torch.ones(groups.index_JO.shape)
            assert torch.equal(groups.pool(ones).sum(), ones.sum()), name
            assert torch.equal(groups.pool(groups.spread(params)), params * groups.pool(ones)), name


class TestRTN:
    @pytest.mark.parametrize("name", SPECS)
    def test_without_statistics_it_is_rounding(self, name):
        weight, spec = weight_of(name), SPECS[name]
        expected = round_to_nearest(weight, spec)
        empty = replace(stats_of(tokens(INPUTS.get(name, 96))), gram_II=torch.zeros(weight.shape[1], weight.shape[1]))
        if spec.observer_method == "min_max" and spec.qscheme is QSchemeType.per_group:
            spec = replace(spec, observer_cls="PerGroupPercentileObserver")
            expected = round_to_nearest(weight, spec)
        for solver in ("rtn", "gptq", "gptaq", "yaqa", "qronos"):
            for stats in (None, empty):
                quantized = solve(solver, weight, spec, stats)
                assert torch.equal(quantized.codes.view(torch.uint8), expected.codes.view(torch.uint8))
                assert torch.equal(quantized.params.scale, expected.params.scale)

    @pytest.mark.parametrize("name", SPECS)
    def test_codes_are_the_nearest_in_the_searched_range(self, name):
        weight, stats = weight_of(name), stats_of(tokens(INPUTS.get(name, 96)))
        quantized = solve("rtn", weight, SPECS[name], stats)
        nearest = quantize_weight(weight, quantized.params, SPECS[name])
        assert torch.equal(quantized.codes.view(torch.uint8), nearest.codes.view(torch.uint8))
        plain = cost_of(round_to_nearest(weight, SPECS[name]), weight, stats).sum()
        assert cost_of(quantized, weight, stats).sum() < 0.97 * plain

    @pytest.mark.parametrize("name", ["uint4_group", "nvfp4"])
    def test_groups_know_of_each_other(self, name):
        weight, stats = torch.cat([weight_of(seed=seed) for seed in range(4)]), stats_of(tokens(96))
        alone = stats.gram_II * torch.block_diag(*[torch.ones(16, 16)] * 6)
        apart = search_ranges([weight], LOCAL[name], Metric.of_gram(alone), [None])[0]
        together = cost_of(solve("rtn", weight, LOCAL[name], stats), weight, stats).sum()
        assert together < 0.95 * cost_of(quantize_weight(weight, apart, LOCAL[name]), weight, stats).sum()

    def test_range_search_decides_whether_statistics_are_needed(self):
        assert solver_of("rtn").needs.gram and not solver_of("rtn", range_search=False).needs.gram


@pytest.mark.parametrize("solver", ["rtn", "gptq", "gptaq", "yaqa", "qronos"])
class TestAll:
    def stats(self, solver):
        return stats_of(*shifted_tokens()) if solver in ("gptaq", "yaqa", "qronos") else stats_of(tokens(96))

    @pytest.mark.parametrize("name", ["uint4_group", "nvfp4", "fp8_block"])
    def test_twice_is_the_same_and_weights_stay(self, solver, name):
        weight, stats = weight_of(), self.stats(solver)
        before, gram = weight.clone(), stats.gram_II.clone()
        first, second = (solve(solver, weight, SPECS[name], stats) for _ in range(2))
        assert torch.equal(first.codes.view(torch.uint8), second.codes.view(torch.uint8))
        assert torch.equal(first.params.scale, second.params.scale)
        assert torch.equal(weight, before) and torch.equal(stats.gram_II, gram)

    def test_layers_together_are_as_each_alone(self, solver):
        stats = self.stats(solver)
        names = ["uint4_group", "nvfp4", "uint4_group", "fp8_block", "nvfp4", "int4_over_fp8"]
        weights = {
            plan(SPECS[name], (20 + 4 * i, 96), f"layer{i}"): weight_of(num_outputs=20 + 4 * i, seed=i) * (i + 1)
            for i, name in enumerate(names)
        }
        together = solver_of(solver).solve(weights, stats)
        assert list(together) == list(weights)
        for layer, weight in weights.items():
            alone = solver_of(solver).solve({layer: weight}, stats)[layer]
            whole = together[layer]
            assert whole.codes.shape == weight.shape and whole.spec == layer.weight
            assert (whole.codes.view(torch.uint8) != alone.codes.view(torch.uint8)).double().mean() < 0.02
            assert (whole.params.scale != alone.params.scale).double().mean() < 0.02
            if alone.params.global_scale is not None:
                assert torch.equal(whole.params.global_scale, alone.params.global_scale)
            torch.testing.assert_close(
                cost_of(whole, weight, stats).sum(), cost_of(alone, weight, stats).sum(), rtol=1e-3, atol=0
            )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_scales_are_exact_in_the_model_s_dtype(self, solver, dtype):
        weight = weight_of().to(dtype)
        quantized = solve(solver, weight, LOCAL["uint4_group"], self.stats(solver))
        assert torch.equal(quantized.params.scale.to(dtype).float(), quantized.params.scale)
        assert quantized.codes.dtype == torch.uint8 and quantized.codes.is_contiguous()

    def test_a_plain_cast_is_one(self, solver):
        spec = QuantizationSpec(dtype="bfloat16", observer_cls="PlaceholderObserver")
        weight = weight_of().float() * 1.001
        quantized = solve(solver, weight, spec, self.stats(solver))
        assert quantized.codes.dtype == torch.bfloat16
        if solver in ("rtn", "gptq"):
            torch.testing.assert_close(quantized.dequantize(), weight, rtol=0.02, atol=0.005)
