"""The flags of ``bitfoundry quantize``, as the Task that they say."""

import json

import pytest

from quantcore.cli import auto, plan_command
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import task_of
from quantcore.cli.grammar import ELSEWHERE, default_output
from quantcore.config import presets
from quantcore.config.algorithms import AWQConfig, GPTQConfig, RotationConfig, RTNConfig, SmoothQuantConfig
from quantcore.config.presets import PresetChanges, resolve
from quantcore.config.quantization import parse_config, parse_size
from quantcore.config.recipes import recipe
from quantcore.errors import ConfigError
from quantcore.tensors.sink import MAX_SHARD_BYTES


def task(tmp_path, *flags):
    return task_of(parser().parse_args(["--model_dir", str(tmp_path), "--output_dir", "out", *flags]))


def chain(tmp_path, *flags):
    return task(tmp_path, *flags).config.algo_config


def algorithm_file(tmp_path, file="algorithm.json", **fields):
    path = tmp_path / file
    path.write_text(json.dumps(fields))
    return str(path)


def test_the_two_commands_of_the_document_of_vllm(tmp_path):
    first = task(
        tmp_path, "--quant_scheme", "w_fp8_a_fp8", "--kv_cache_dtype", "fp8", "--custom_mode", "fp8",
        "--quant_algo", "autosmoothquant", "--num_calib_data", "512", "--model_export", "hf_format",
        "--skip_evaluation",
    )  # fmt: skip
    assert [algorithm.name for algorithm in first.config.algo_config] == ["autosmoothquant"]
    assert first.export == ("fp8",) and first.evaluation.num_windows == 0 and first.calibration.num_samples == 512
    assert first.config.kv_cache_quant_config == presets.resolve("fp8", kv_cache="fp8").kv_cache_quant_config
    second = task(
        tmp_path, "--quant_scheme", "w_int8_per_channel_a_int8_per_tensor_sym",
        "--kv_cache_dtype", "int8_per_tensor_static", "--pre_quantization_optimization", "rotation",
        "--pre_quantization_optimization", "smoothquant", "--num_calib_data", "512", "--model_export", "hf_format",
    )  # fmt: skip
    assert second.config.algo_config == (RotationConfig(), SmoothQuantConfig(name="smoothquant"))
    weight, cache = second.config.global_quant_config.weight, second.config.kv_cache_quant_config["*v_proj"]
    assert (weight.dtype, weight.qscheme) == ("int8", "per_channel")
    assert (cache.output_tensors.dtype, cache.output_tensors.qscheme, cache.output_tensors.is_static) == (
        "int8", "per_tensor", True,
    )  # fmt: skip


SPELLINGS = (
    ["m", "w4a16", "-o", "out"],
    ["-o", "out", "m", "w4a16"],
    ["m", "-o", "out", "w4a16"],
    ["m", "--quant-scheme", "w4a16", "--output", "out"],
    ["--model_dir", "m", "--output_dir=out", "--quant_scheme", "w4a16"],
    ["m", "w4a16", "--model_dir", "m", "-oout"],
)


@pytest.mark.parametrize("line", SPELLINGS, ids=" ".join)
def test_model_preset_and_output_in_any_spelling(line):
    options = parser().parse_args(line)
    assert (options.model_dir, options.quant_scheme, options.output_dir) == ("m", "w4a16", "out")
    assert parser().given(line) == {"model_dir", "quant_scheme", "output_dir"}


def test_the_commands_name_the_model_alike():
    goal = ["--runtime", "vllm", "--device", "24GB"]
    assert auto.parser().parse_args(["m", *goal, "-o", "out"]).output_dir == "out"
    assert auto.parser().parse_args([*goal, "--model_dir", "m"]).model_dir == "m"
    assert plan_command.parser().parse_args(["m", "--devices", "1x24GB", "w4a16"]).quant_scheme == "w4a16"
    assert parser().parse_args(["m"]).quant_scheme == "fp8"
    assert "quant_scheme" not in parser().given(["m"])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (["m", "--model_dir", "other"], "the model is given twice: m, and --model_dir other."),
        (["m", "w4a16", "--quant_scheme", "fp8"], "the preset is given twice: w4a16, and --quant_scheme fp8."),
        (["-o", "out"], "no model is given. It comes first: bitfoundry quantize MODEL"),
        (["m", "w4a16", "out"], "unrecognized arguments: out"),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(line, fault, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(line)
    assert ended.value.code == 2 and fault in capsys.readouterr().err


def test_a_result_is_a_folder_and_not_a_model_file(tmp_path, capsys):
    for flag in ("-o", "--output_dir"):
        with pytest.raises(SystemExit):
            parser().parse_args(["m", "Q4_K_M", flag, "out/bot.gguf"])
        assert "out/bot.gguf names a file" in (said := capsys.readouterr().err) and "give -o out/bot\n" in said
    (tmp_path / "old.gguf").mkdir()
    for folder in (str(tmp_path / "old.gguf"), "out/v1.5"):
        assert parser().parse_args(["m", "Q4_K_M", "-o", folder]).output_dir == folder


def test_the_folder_of_a_result_without_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_output("org/Model-1B", "w4a16") == "Model-1B-w4a16"
    assert default_output("/models/m.v1/", "configs/mix.json") == "m.v1-mix"
    assert default_output("a/model.Q4_0.gguf", "awq") == "model.Q4_0-awq"
    assert default_output(".", "fp8") == f"{tmp_path.name}-fp8"


@pytest.mark.parametrize(
    ("given", "meant"),
    [(given, ours) for ours, others in ELSEWHERE.items() for given in others]
    + [("--quant-schema", "--quant_scheme"), ("--seq_lens", "--seq_len")],
)
def test_an_unknown_flag_gets_the_one_that_was_meant(given, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--model_dir", "m", "--output_dir", "out", given, "x"])
    assert ended.value.code == 2
    assert f"there is no flag {given}. Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "meant"),
    [(["--gate", "warning"], "warn"), (["--effort", "Fast"], "fast")],
)
def test_an_unknown_choice_gets_the_nearest_one(flags, meant, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["m", *flags])
    said = capsys.readouterr().err
    assert f"argument {flags[0]}: unknown value '{flags[1]}'. Did you mean '{meant}'? Available: " in said


def test_a_size_is_written_as_for_transformers(tmp_path):
    assert task(tmp_path).max_shard_size == "5GB" and parse_size("5GB") == MAX_SHARD_BYTES
    assert task(tmp_path, "--max_shard_size", "1.5GB").max_shard_size == "1.5GB"
    sizes = {"500MB": 500_000_000, "1.5GB": 1_500_000_000, "20 kb": 20_000, "1TB": 10**12}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("5", "5GiB", "-5GB", "0KB", "GB", "5GB5", "", "9" * 50 + "GB"):
        with pytest.raises(ConfigError, match="is not a file size") as refusal:
            task(tmp_path, f"--max_shard_size={text}")
        assert refusal.value.code == "invalid_max_shard_size" and "5GB or 500MB" in refusal.value.hint


def test_without_a_flag_a_preset_has_its_recipe(tmp_path):
    assert chain(tmp_path, "--quant_scheme", "w4a16") == recipe([resolve("w4a16")], "balanced") != ()
    assert chain(tmp_path, "--quant_scheme", "w4a16", "--effort", "best") == recipe([resolve("w4a16")], "best")
    for flags in (["--quant_algo", "none"], ["--effort", "fast"], ["--file2file_quantization"]):
        assert chain(tmp_path, "--quant_scheme", "w4a16", *flags) == ()
    assert chain(tmp_path, "--quant_scheme", "w_uint4_per_group_asym") == ()


def test_an_effort_goes_with_no_algorithms(tmp_path):
    for flags in (["--quant_algo", "gptq"], ["--quant_algo", "none"], ["--pre_quantization_optimization", "awq"]):
        with pytest.raises(ConfigError) as refusal:
            chain(tmp_path, "--quant_scheme", "w4a16", "--effort", "best", *flags)
        assert refusal.value.code == "conflicting_effort"


def test_what_comes_before_comes_before(tmp_path):
    names = chain(
        tmp_path, "--quant_algo", "awq, gptq", "--pre_quantization_optimization", "smooth",
        "--pre_quantization_optimization", "rotation",
    )  # fmt: skip
    assert [algorithm.name for algorithm in names] == ["smooth", "rotation", "awq", "gptq"]


def test_files_give_options_to_the_algorithms_of_their_name(tmp_path):
    damped = algorithm_file(tmp_path, "a.json", name="gptq", damp_percent=0.05)
    half = algorithm_file(tmp_path, "b.json", name="smooth", alpha=0.5)
    found = chain(
        tmp_path, "--quant_algo_config_file", "gptq", damped, "--quant_algo_config_file", "smoothquant", half,
        "--quant_algo", "smoothquant,awq,gptq",
    )  # fmt: skip
    assert found == (SmoothQuantConfig(alpha=0.5), AWQConfig(), GPTQConfig(damp_percent=0.05))


def test_a_file_for_another_algorithm_is_refused(tmp_path):
    path = algorithm_file(tmp_path, name="gptaq")
    with pytest.raises(ConfigError, match=r"for gptq, but the file is for gptaq") as caught:
        chain(tmp_path, "--quant_algo", "gptq", "--quant_algo_config_file", "gptq", path)
    assert caught.value.code == "invalid_algo_config"


def test_a_file_that_nobody_asked_for_is_refused(tmp_path):
    path = algorithm_file(tmp_path, name="awq")
    with pytest.raises(ConfigError, match=r"awq, which is not enabled.*--quant_algo gptq,awq"):
        chain(tmp_path, "--quant_algo", "gptq", "--quant_algo_config_file", "awq", path)


def test_two_files_for_one_algorithm_are_refused(tmp_path):
    path = algorithm_file(tmp_path, name="awq")
    with pytest.raises(ConfigError, match="so is an earlier file"):
        chain(
            tmp_path, "--quant_algo", "awq", "--quant_algo_config_file", "awq", path,
            "--quant_algo_config_file", "awq", path,
        )  # fmt: skip


@pytest.mark.parametrize("flag", ["quant_algo", "pre_quantization_optimization", "quant_algo_config_file"])
def test_an_unknown_name_is_answered_with_the_list(tmp_path, flag):
    more = ["file.json"] if flag.endswith("file") else []
    with pytest.raises(ConfigError, match=r"Did you mean 'gptq'\? Available: smoothquant, .*rotation") as caught:
        chain(tmp_path, f"--{flag}", "gtpq", *more)
    assert caught.value.code == f"unknown_{flag}"


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("gptq,rtn", "gptq and rtn both round the weights"),
        ("gptq,awq", "comes last: awq, gptq"),
        ("awq,rotation,awq", "awq is listed twice"),
        ("smooth,smoothquant", "listed twice"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(tmp_path, names, fault):
    with pytest.raises(ConfigError, match=fault) as caught:
        chain(tmp_path, "--quant_algo", names)
    assert (caught.value.code, caught.value.field) == ("invalid_config", "/algo_config")


def test_several_sources_of_text(tmp_path):
    several = task(tmp_path, "--dataset", "a.txt:3,org/b:column=c:1", "--num_calib_data", "8").calibration
    assert several.counts == [6, 2] and several.parts[1].column == "c"
    with pytest.raises(ConfigError, match="column set together with sources"):
        task(tmp_path, "--dataset", "a.txt:3,b.txt:1", "--dataset_column", "c")


def test_arguments_of_chat_templates(tmp_path, capsys):
    thinking = '{"enable_thinking": false}'
    said = task(tmp_path, "--chat_template_kwargs", thinking, "--eval_dataset", "a.jsonl")
    assert said.calibration.chat_template_kwargs == {"enable_thinking": False}
    assert said.evaluation.chat_template_kwargs == {}
    said = task(tmp_path, "--eval_chat_template_kwargs", thinking, "--eval_dataset", "a.jsonl")
    assert said.evaluation.chat_template_kwargs == {"enable_thinking": False}
    for wrong in ("{", "3", "enable_thinking=false"):
        with pytest.raises(SystemExit):
            task(tmp_path, "--chat_template_kwargs", wrong)
        assert f"'{wrong}' is not a JSON object" in capsys.readouterr().err


def test_a_config_file_keeps_its_own_algorithms(tmp_path):
    config = {**presets.PRESETS["w4a16"].config.to_dict(), "algo_config": [{"name": "gptq", "desc_act": False}]}
    path = algorithm_file(tmp_path, "config.json", **config)
    assert chain(tmp_path, "--quant_scheme", path) == (GPTQConfig(desc_act=False),)
    with pytest.raises(ConfigError, match=r"config\.json already sets algorithms"):
        chain(tmp_path, "--quant_scheme", path, "--quant_algo", "awq")


@pytest.mark.parametrize(
    ("flags", "export"),
    [
        ([], ()),
        (["--custom_mode", "quark"], ("quark",)),
        (["--custom_mode", "fp8"], ("fp8",)),
        (["--model_export", "fake_quantized"], ("fake_quantized",)),
        (["--model_export", "hf_format", "--model_export", "fake_quantized"], ("quark", "fake_quantized")),
        (["--model_export", "awq, quark", "--model_export=fake_quantized"], ("awq", "quark", "fake_quantized")),
        (["--export_weight_format", "real_quantized"], ()),
        (["--export_weight_format", "fake_quantized"], ("fake_quantized",)),
        (["--custom_mode", "fp8", "--export_weight_format", "fake_quantized"], ("fake_quantized",)),
        (
            ["--model_export", "hf_format", "--model_export", "quark", "--export_weight_format", "fake_quantized"],
            ("fake_quantized", "quark"),
        ),
    ],
)
def test_formats(tmp_path, flags, export):
    assert task(tmp_path, *flags).export == export


def test_a_weight_format_without_the_format_that_it_is_about_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--model_export is quark") as caught:
        task(tmp_path, "--model_export", "quark", "--export_weight_format", "fake_quantized")
    assert caught.value.code == "invalid_export"
    with pytest.raises(ConfigError, match="real_quantized"):
        task(tmp_path, "--export_weight_format", "fake")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--seq_len", "4"), "/seq_len"),
        (("--seed", "-1"), "/seed"),
        (("--dataset_config", "en"), "/"),
        (("--dataset", "a:1,b:0.001"), "/"),
        (("--quant_scheme", "w4a16", "--group_size", "0"), "/"),
        (("--eval_seq_len", "3"), "/evaluation/seq_len"),
    ],
)
def test_a_value_that_cannot_be_is_an_error_in_plain_words(tmp_path, flags, field):
    with pytest.raises(ConfigError, match=f"not valid at {field}") as caught:
        task(tmp_path, *flags)
    assert "[type=" not in str(caught.value)


OVERRIDDEN = {
    "a pattern twice": (
        ["--layer_quant_scheme", "*.o_proj", "w4a16", "--layer_quant_scheme", "*.o_proj", "int8"],
        "o_proj",
    ),
    "a mode without its format": (["--custom_mode", "fp8", "--model_export", "compressed_tensors"], "custom_mode fp8"),
}


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_no_flag_overrides_another_one_silently(tmp_path, case):
    flags, text = OVERRIDDEN[case]
    with pytest.raises(ConfigError, match=text):
        task(tmp_path, *flags)


def test_no_flag_is_overridden_by_the_config_file(tmp_path):
    path = tmp_path / "config.json"
    config = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    path.write_text(json.dumps({**config, "layer_quant_config": {"*.o_proj": {"weight": {"dtype": "int4"}}}}))
    with pytest.raises(ConfigError, match=r"'\*.o_proj' of --layer_quant_scheme already has another scheme"):
        task(tmp_path, "--quant_scheme", str(path), "--layer_quant_scheme", "*.o_proj", "w4a16")
    presets_file = tmp_path / "presets.json"
    presets_file.write_text(json.dumps({"ours": {"config": {**config, "algo_config": [{"name": "gptq"}]}}}))
    with pytest.raises(ConfigError, match="the preset ours sets more"):
        task(tmp_path, "--preset_file", str(presets_file), "--layer_quant_scheme", "*.o_proj", "ours")


@pytest.mark.parametrize(
    ("flags", "excluded"),
    [
        ([], ("lm_head",)),
        (["--exclude_layers", "*o_proj"], ("lm_head", "*o_proj")),
        (["--exclude_layers", "lm_head", "*o_proj"], ("lm_head", "*o_proj")),
        (["--exclude_layers"], ()),
        (["--include_layers", "lm_head"], ()),
        (["--include_layers", "language_model.lm_head", "--exclude_layers", "*o_proj"], ("*o_proj",)),
        (["--include_layers", "*.gate"], ("lm_head",)),
        (["--layer_quant_scheme", "lm_head", "fp8_dynamic"], ()),
        (["--layer_quant_scheme", "lm_head", "fp8_dynamic", "--exclude_layers", "lm_head"], ("lm_head",)),
        (["--layer_quant_scheme", "*o_proj", "fp8_dynamic"], ("lm_head",)),
    ],
)
def test_the_head_stays_excluded_unless_it_is_named(tmp_path, flags, excluded):
    assert task(tmp_path, "--quant_scheme", "int8_dynamic", *flags).config.exclude == excluded


def test_flags_and_a_request_change_a_preset_alike(tmp_path):
    """``resolve`` applies the changes of a request; each value is another one than the preset's."""
    changes = {
        "group_size": 32, "kv_cache": "fp8", "towers": "int8", "drafts": "fp8", "exclude": ("*o_proj",),
        "include": ("lm_head",), "token_embedding_type": "q8_0", "output_type": "Q6_K",
    }  # fmt: skip
    assert changes.keys() == PresetChanges.model_fields.keys()
    flags = ["--quant_scheme", "w4a16", "--quant_algo", "none"]
    for name, flag in PresetChanges.flags().items():
        flags += [flag, *(changes[name] if isinstance(changes[name], tuple) else [str(changes[name])])]
    changed = resolve("w4a16", **changes)
    assert task(tmp_path, *flags).config == changed
    assert all(resolve("w4a16", **{name: value}) != resolve("w4a16") for name, value in changes.items())
    assert changed.exclude == ("*o_proj",) and changed.kv_cache_quant_config.keys() == {*presets.KV_CACHE_LAYERS}


def test_a_config_file_may_be_given_layers_to_include(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(resolve("int8_dynamic", exclude=("*.gate",)).to_dict()))
    config = task(tmp_path, "--quant_scheme", str(file), "--include_layers", "lm_head").config
    assert config.exclude == ("*.gate",) and config.include == ("lm_head",)


def test_an_importance_matrix_is_for_rtn_alone(tmp_path):
    file = str(tmp_path / "im.gguf")
    used = (RTNConfig(imatrix=file),)
    assert chain(tmp_path, "--quant_scheme", "gguf_q4_k", "--imatrix", file) == used
    assert chain(tmp_path, "--quant_scheme", "gguf_q4_k", "--imatrix", file, "--quant_algo", "rtn") == used
    with pytest.raises(ConfigError, match="gptq cannot use it") as caught:
        chain(tmp_path, "--quant_scheme", "gguf_q4_k", "--imatrix", file, "--quant_algo", "gptq")
    assert caught.value.code == "invalid_algo_config" and "Leave --imatrix out" in caught.value.hint
    with pytest.raises(ConfigError, match="or --imatrix names them"):
        chain(tmp_path, "--quant_scheme", "gguf_q4_k", "--imatrix", file, "--effort", "best")
    scheme = resolve("gguf_q4_k").to_dict()
    given = {"name": "rtn", "imatrix": file}
    for algorithms in (
        [{"name": "awq"}, given],
        [given, {"name": "bias_correction"}],
        [given | {"range_search": False}],
    ):
        with pytest.raises(ConfigError, match="with which rtn searches ranges"):
            parse_config(scheme | {"algo_config": algorithms})
    assert not parse_config(scheme | {"algo_config": [given]}).needs_calibration
