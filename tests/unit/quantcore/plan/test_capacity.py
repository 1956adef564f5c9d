"""Plans for hardware: seven answers that are known, figures from arithmetic that is not the code's, and what errs."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layout import TensorHeader
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.algorithms import config_of
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.errors import ConfigError
from quantcore.plan.capacity import distinct_blocks, plan_for
from quantcore.plan.hardware import GB, Hardware, parse_hardware
from quantcore.plan.planner import make_plan
from quantcore.plan.shapes_of_config import tensors_of
from tests.support.params import with_rare

CONFIGS = Path(__file__).parents[1] / "configs"
LONG = CalibrationConfig(num_samples=512, seq_len=2048)
LLAMA, DEEPSEEK, QWEN, MIXTRAL = "llama-3.1-405b", "deepseek-v3", "qwen3-235b-a22b", "mixtral-8x22b"


def config_json(name):
    found = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in found.items() if key != "quantization_config"}


def plan(name, hardware, preset="w4a16", *algorithms, calibration=LONG, **more):
    chosen = replace(presets.resolve(preset), algo_config=tuple(map(config_of, algorithms)))
    found = config_json(name)
    return plan_for(
        hardware, JobSpec(config=chosen, calibration=calibration, **more), ModelHeaders(found, tensors_of(found))
    )


def on(devices, nodes=1, host="1.5TB", disk="4TB"):
    return parse_hardware(devices, nodes, host, disk)


def test_a_language_model_inside_a_larger_one_is_planned_by_one_block_of_each_kind():
    """Its config is inside config.json; a tower stays as it is, whole."""
    depth = {"num_hidden_layers": 6, "hidden_size": 64, "layer_types": ["full_attention"] * 6}
    tensors = {
        **{f"language_model.layers.{i}.fc.weight": TensorHeader("BF16", (64, 64), "", 0, 8192) for i in range(6)},
        **{f"vision_tower.layers.{i}.fc.weight": TensorHeader("BF16", (32, 64), "", 0, 4096) for i in range(9)},
    }
    found = plan_for(
        Hardware(),
        JobSpec(config=presets.resolve("int8_weight_only")),
        ModelHeaders({"model_type": "llava", "text_config": depth}, tensors),
    )
    assert (found.num_layers, found.plan.num_blocks, found.size_before_bytes) == (6, 1, 6 * 8192 + 9 * 4096)
    assert any("'vision_tower.layers.*' (9 blocks" in warning for warning in found.plan.warnings)


GOLDEN = {
    # model, hardware, scheme: executor, whether it fits, GB a rank, GB on disk
    (LLAMA, "8x80GB", 1, "gptq"): ("streamed", True, 71.5, 1105.4),
    (LLAMA, "8x192GB", 1, "gptq"): ("streamed", True, 71.5, 1105.4),
    (LLAMA, "8x80GB", 2, "gptq"): ("streamed", True, 68.4, 1105.4),
    (LLAMA, "1x80GB", 1, "gptq"): ("streamed", True, 68.8, 1139.7),
    (LLAMA, "8x80GB", 1, "fp8"): ("streamed", True, 29.5, 1290.5),
    (LLAMA, "1x24GB", 1, "mxfp4"): ("file_to_file", True, 17.2, 1033.5),
    (LLAMA, "1x48GB", 1, "gptq"): ("streamed", False, 68.8, 1139.7),
    (DEEPSEEK, "8x80GB", 1, "gptq"): ("streamed_fsdp", True, 74.0, 1790.6),
    (DEEPSEEK, "8x80GB", 1, "mxfp4"): ("file_to_file", True, 3.9, 1755.3),
    (DEEPSEEK, "8x192GB", 1, "gptq"): ("streamed", True, 93.6, 1790.6),
    (DEEPSEEK, "8x80GB", 2, "gptq"): ("streamed_fsdp", True, 67.9, 1790.6),
    (DEEPSEEK, "1x80GB", 1, "gptq"): ("streamed", False, 274.0, 1790.6),
    (DEEPSEEK, "8x80GB", 1, "fp8"): ("streamed", True, 40.1, 2099.0),
    (DEEPSEEK, "1x80GB", 1, "mxfp4"): ("file_to_file", True, 3.9, 1755.3),
    (QWEN, "8x80GB", 1, "gptq"): ("streamed", True, 19.3, 616.0),
    (QWEN, "1x80GB", 1, "gptq"): ("streamed", True, 56.0, 616.0),
    (QWEN, "8x192GB", 1, "gptq"): ("streamed", True, 19.3, 616.0),
    (QWEN, "8x80GB", 2, "gptq"): ("streamed", True, 18.1, 616.0),
    (MIXTRAL, "8x80GB", 1, "gptq"): ("streamed", True, 20.6, 383.4),
    (MIXTRAL, "1x24GB", 1, "gptq"): ("streamed", False, 47.6, 396.3),
    (MIXTRAL, "8x192GB", 1, "gptq"): ("streamed", True, 20.6, 383.4),
    (MIXTRAL, "8x80GB", 2, "gptq"): ("streamed", True, 19.2, 383.4),
    (MIXTRAL, "1x80GB", 1, "gptq"): ("streamed", True, 60.5, 383.4),
}


@cache
def golden(name, devices, nodes, scheme):
    algorithms = (scheme,) if scheme == "gptq" else ()
    return plan(name, on(devices, nodes), "w4a16" if algorithms else scheme, *algorithms)


SLOW = [(case,) for case in GOLDEN if case[0] in (DEEPSEEK, QWEN) and case[1:] != ("8x80GB", 1, "gptq")]


@pytest.mark.parametrize(
    ("case",), with_rare([(case,) for case in GOLDEN], SLOW), ids=lambda case: " ".join(map(str, case))
)
def test_golden(case):
    found = golden(*case)
    got = (found.chosen.executor, found.fits, round(found.chosen.num_bytes / GB, 1))
    assert (*got, round(sum(found.disk.values()) / GB, 1)) == GOLDEN[case]
    assert found.fits == (not found.faults) and (found.fits or found.advice)


def test_the_405b_is_as_large_as_it_is():
    """By hand: 405.853 B parameters; a block is 6.375 GB; the input of down_proj has a matrix of 53248^2 floats, the
    three others 16384^2: 14.56 GB. 512 windows of 2048 tokens are 34.4 GB of hidden states."""
    found = golden(LLAMA, "8x80GB", 1, "gptq")
    footprint = found.plan.footprint
    assert found.num_parameters == 405_853_388_800 and found.size_before_bytes == 811_706_777_600
    assert found.num_layers == 126 * 7
    assert footprint.block == pytest.approx(6.375 * GB, rel=1e-3)
    assert footprint.grams == 4 * (53248**2 + 3 * 16384**2)
    assert footprint.states == 512 * 2048 * 16384 * 2
    resident = next(one for one in found.candidates if one.executor == "resident_fsdp")
    assert resident.parts["shard_of_the_model"] == pytest.approx(101.5 * GB, rel=1e-3) and not resident.fits
    assert found.seconds["forward"] == pytest.approx(269, rel=0.01)  # 8.5e17 flop on 8 x 396 TFLOP/s
    assert found.seconds["read"] == pytest.approx(116, rel=0.01)


PARAMETERS = {DEEPSEEK: (671.0, 37.6), QWEN: (235.1, 22.2), MIXTRAL: (140.6, 39.2)}
"""In total and for a token, as the models' cards have them (billions)."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_cards(name):
    found = golden(name, "8x80GB", 1, "gptq")
    whole, active = PARAMETERS[name]
    behind = 13.4 if name == DEEPSEEK else 0  # the block for multi-token prediction, with its embedding and head
    assert found.num_parameters / 1e9 == pytest.approx(whole + behind, rel=0.002)
    if name == DEEPSEEK:  # to the last one: the published files hold 684 531 M values, 41.5 M of them scales
        assert found.num_parameters == 684_489_845_504
    forward = found.seconds["forward"] * 8 * 0.4 * 989e12 / (512 * 2048) / 2 / 1e9
    assert forward == pytest.approx(active, rel=0.05)


def test_a_depth_of_many_blocks_is_planned_as_one_of_a_few():
    """The same sizes as with every block by itself."""
    found = config_json(MIXTRAL) | {"num_hidden_layers": 5}
    tensors = tensors_of(found)
    short, counts = distinct_blocks(tensors, "model.layers.", 5)
    assert counts == [5] and len(short) == 3 + (len(tensors) - 3) // 5
    chosen = presets.resolve("w4a16")
    whole = make_plan(JobSpec(config=chosen), ModelHeaders(found, tensors))
    for exclude in (("lm_head",), ("lm_head", "model.layers.0.*")):
        changed = replace(chosen, exclude=exclude)
        whole = make_plan(JobSpec(config=changed), ModelHeaders(found, tensors))
        answer = plan_for(Hardware(), JobSpec(config=changed), ModelHeaders(found, tensors))
        assert answer.num_layers == len(whole.layers)
        assert answer.size_after_bytes == whole.size_after_bytes
        assert answer.size_before_bytes == whole.size_before_bytes
    assert answer.num_layers == 4 * (4 + 24)


def test_blocks_that_differ_are_counted_apart():
    tensors = tensors_of(config_json(DEEPSEEK))
    [(prefix, num_blocks)] = find_blocks(tensors, config_json(DEEPSEEK)).lists
    short, counts = distinct_blocks(tensors, prefix, num_blocks)
    assert (num_blocks, counts) == (61, [3, 58])
    assert {name.split(".")[2] for name in short if name.startswith(prefix)} == {"0", "1", "2"}  # 2: for prediction
    other = {**tensors, f"{prefix}7.input_layernorm.weight": TensorHeader("F32", (7168,), "", 0, 4 * 7168)}
    assert distinct_blocks(other, prefix, num_blocks)[1] == [3, 57, 1]


@pytest.mark.slow
def test_more_ranks_share_the_windows_and_shards_the_block():
    one, many = (golden(QWEN, devices, 1, "gptq").chosen.parts for devices in ("1x192GB", "8x192GB"))
    assert many["activations"] == one["activations"] // 8
    footprint = golden(QWEN, "8x192GB", 1, "gptq").plan.footprint
    assert one["statistics"] == 4 * footprint.grams, "sums of 8, 4, 2 and 1 chunks while they are learned"
    assert many["statistics"] == footprint.grams + footprint.gram + footprint.grams // 8, "its own, and what it is sent"
    found = golden(DEEPSEEK, "8x80GB", 1, "gptq")
    whole, sharded = (found.candidates[index].parts["one_block"] for index in (0, 1))
    assert sharded < whole / 4


def test_what_does_not_fit_says_what_would_and_that_does():
    found = golden(MIXTRAL, "1x24GB", 1, "gptq")
    assert found.faults[0].startswith("A device has 24.0 GB, but ")
    [needed] = [text for text in found.advice if text.startswith("Devices of")]
    size = float(needed.split()[2]) + 0.1
    assert golden(MIXTRAL, f"1x{size:.1f}GB", 1, "gptq").fits
    found = plan(LLAMA, on("1x68GB"), "w4a16", "rtn")
    [fewer] = [text for text in found.advice if text.startswith("--num_calib_data")]
    count = int(fewer.split()[1].rstrip(":"))
    calibration = LONG.model_copy(update={"num_samples": count})
    assert not found.fits and plan(LLAMA, on("1x68GB"), "w4a16", "rtn", calibration=calibration).fits
    assert any("from file to file" in text for text in found.advice) and plan(LLAMA, on("1x68GB")).fits
    small = plan(LLAMA, on("8x80GB", disk="1TB", host="50GB"), "w4a16", "rtn")
    assert [text.split(" has ")[0] for text in small.faults] == ["A host", "The disk"]
    assert plan(LLAMA, Hardware(host_bytes=10 * GB), "fp8").faults


ODD = {"devices": "8*80GB", "devices ": "0x80GB", "devices  ": "8x80", "host_memory": "much", "disk": "0TB", "nodes": 0}


@pytest.mark.parametrize("field", ODD)
def test_odd_hardware_is_refused(field):
    with pytest.raises(ConfigError) as caught:
        parse_hardware(**{field.strip(): ODD[field]})
    assert (caught.value.code, caught.value.field) == ("invalid_hardware", f"/hardware/{field.strip()}")


@pytest.mark.parametrize("name", with_rare([LLAMA, DEEPSEEK, QWEN, MIXTRAL], [DEEPSEEK, QWEN]))
def test_the_command_answers_without_torch(name):
    """Whose import alone takes seconds; ``make bench-scale`` says how long an answer takes."""
    code = (
        "import sys\n"
        "from quantcore.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print(*[name in sys.modules for name in ('torch', 'transformers')], file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    flags = [
        str(CONFIGS / f"{name}.json"),
        "--quant_scheme",
        "mxfp4",
        "--effort",
        "fast",
        "--devices",
        "8x80GB",
        "--json",
    ]
    ran = subprocess.run([sys.executable, "-c", code, "plan", *flags], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.split() == ["False", "False"]
    answer = json.loads(ran.stdout)
    assert answer["fits"] and answer["executor"] == "file_to_file"
    assert answer["bytes_per_rank"]["total"] == sum(list(answer["bytes_per_rank"].values())[1:])


def test_the_command_for_people(capsys):
    flags = ["--quant_scheme", "w4a16", "--quant_algo", "rtn", "--num_calib_data", "512", "--seq_len", "2048"]
    config = str(CONFIGS / f"{LLAMA}.json")
    assert main(["plan", config, *flags, "--devices", "8x80GB", "--host_memory", "1TB", "--disk", "4TB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("fits 8 x 80.0 GB: streamed") and "statistics" in said and "Time assumes" in said
    assert main(["plan", config, *flags, "--devices", "1x68GB"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("does not fit") and "Would fit: --num_calib_data" in said
    assert main(["plan", config, "--devices", "many"]) == 1
    assert "Use count x memory" in capsys.readouterr().err


def test_slices_are_no_way_for_what_needs_whole_blocks():
    ways = {one.executor for one in plan(DEEPSEEK, on("8x80GB"), "int8_static", "autoround").candidates}
    assert ways == {"streamed", "resident_fsdp"}
    ways = {one.executor for one in plan(DEEPSEEK, on("8x80GB"), "int8_static", "smoothquant").candidates}
    assert ways == {"streamed", "streamed_fsdp", "resident_fsdp"}


def test_gradients_take_time_disk_and_memory():
    """Before every block the states of all windows, and moments of outputs in blocks of 4096."""
    windows = CalibrationConfig(num_samples=128, seq_len=2048)
    without, found = (plan(LLAMA, on("8x141GB"), "w4a16", name, calibration=windows) for name in ("gptaq", "yaqa"))
    assert found.disk["gradients"] == 127 * 128 * 2048 * 16384 * 2 and "gradients" not in without.disk
    blocks_of_4096 = 4 + 4 + 4 + 13 + 13  # of q, o, down, gate and up
    assert found.plan.footprint.outputs == 4 * (blocks_of_4096 * 4096**2 + 2 * 1024**2)
    assert found.seconds["gradients"] > 2 * found.seconds["forward"]
    assert without.chosen.num_bytes < found.chosen.num_bytes


def test_tuning_takes_time_and_memory():
    """Each of 200 steps costs four passes of 8 windows, which ranks share; a weight of a block takes 88 bytes.

    Before that it costs what its start costs, and the statistics of the start are still in memory.
    """
    windows = CalibrationConfig(num_samples=128, seq_len=2048)
    hardware = on("1x141GB", host="4TB")
    without, found = (plan(LLAMA, hardware, "w4a16", name, calibration=windows) for name in ("yaqa", "autoround"))
    assert found.seconds["tune"] == pytest.approx(found.seconds["forward"] / 2 * 4 * 200 * 8 / 128)
    num_weights = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    assert found.chosen.parts["tuned_block"] == 88 * num_weights and "tuned_block" not in without.chosen.parts
    footprint = found.plan.footprint
    assert found.chosen.parts["statistics"] == footprint.grams + footprint.outputs > footprint.grams
    assert {step: found.seconds[step] for step in without.seconds} == without.seconds
    assert "tune" not in without.seconds and without.seconds["gradients"] > 0
    together = plan(LLAMA, on("8x141GB", host="4TB"), "w4a16", "autoround", calibration=windows)
    assert together.seconds["tune"] == pytest.approx(found.seconds["tune"] / 8)


def test_distillation_takes_time_memory_and_disk():
    """72 windows go forward, 64 cost four passes; a window has two states, a scale five floats.

    The two windows of a step have states before each of 126 blocks and after the last, which are on disk if large.
    """
    windows = CalibrationConfig(num_samples=72, seq_len=2048)
    hardware = on("1x80GB", host="4TB")
    without, found = (
        plan(LLAMA, hardware, "w2a16", *names, calibration=windows) for names in (["gptq"], ["gptq", "distill"])
    )
    assert found.seconds["distill"] == pytest.approx(found.seconds["forward"] * (4 * 64 + 64 + 24) / 72)
    num_scales = 126 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) // 64
    grown = found.chosen.parts["distillation"]
    assert grown == 2 * 72 * 2048 * 16384 * 2 + 20 * num_scales + 2**28 and "distillation" not in without.chosen.parts
    assert found.disk["distilled_states"] == 127 * 2 * 2048 * 16384 * 2
    assert found.disk["saved_tuning"] == 24 * num_scales
    assert found.disk["codes"] == 64 * num_scales and "codes" not in without.disk
    assert "distill" not in without.seconds
