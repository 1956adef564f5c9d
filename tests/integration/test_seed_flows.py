"""The code of AMD Quark's documentation, line for line, with one import instead of its many.

What differs from the documents: the model is a tiny random one, in a folder that bears the name it has on the Hub; the
calibration text is here instead of on the Hub; and ``cuda`` is not assumed. What a document shows in several blocks is
one function here.
"""
# fmt: off
# ruff: noqa: E501, F401, I001

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import tiny_model
from tests.support.onnx_runtime import session_options

TEXT = ["The quick brown fox jumps over the lazy dog.", "A module is a file containing Python definitions."] * 4
LLAMA = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # groups of 128 fit everywhere
OPT = {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, "num_hidden_layers": 1}
DONE = "[QUANTCORE-INFO]: Model quantization has been completed.\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A working folder in which the documents' model ids are folders."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model(folder / "meta-llama" / "Llama-2-70b-chat-hf", tie_word_embeddings=False, **LLAMA)
    tiny_model(folder / "facebook" / "opt-125m", dtype=torch.float32, **OPT)
    return folder


@pytest.fixture(autouse=True)
def _there(models, monkeypatch):
    monkeypatch.chdir(models)


def load_dataset(*_, **__):
    return {"text": TEXT}


def stored_tensors(folder):
    """Name -> tensor of the checkpoint in ``folder``."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def test_the_document_of_vllm():
    """Loading, calibration data, configuration, quantizing and exporting, as the page of vLLM prints it."""
    Path("llama_autosmoothquant_config.json").write_text(json.dumps({"name": "autosmoothquant", "scaling_layers": []}))
    seq_len = 512

    MODEL_ID = "meta-llama/Llama-2-70b-chat-hf"
    model = AutoModelForCausalLM.from_pretrained(
        MODEL_ID, device_map="auto", torch_dtype="auto",
    )
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID,
        model_max_length=seq_len, padding_side="left")

    BATCH_SIZE = 1
    NUM_CALIBRATION_DATA = 512
    MAX_SEQUENCE_LENGTH = 512

    dataset = load_dataset("mit-han-lab/pile-val-backup", split="validation")
    text_data = dataset["text"][:NUM_CALIBRATION_DATA]
    tokenized_outputs = tokenizer(text_data, return_tensors="pt",
        padding=True, truncation=True, max_length=MAX_SEQUENCE_LENGTH)
    calib_dataloader = DataLoader(tokenized_outputs['input_ids'],
        batch_size=BATCH_SIZE, drop_last=True)

    from quantcore import (Config, QuantizationConfig,
                           FP8E4M3PerTensorSpec,
                           load_quant_algo_config_from_file)

    FP8_PER_TENSOR_SPEC = FP8E4M3PerTensorSpec(observer_method="min_max",
        is_dynamic=False).to_quantization_spec()
    global_quant_config = QuantizationConfig(input_tensors=FP8_PER_TENSOR_SPEC,
        weight=FP8_PER_TENSOR_SPEC)
    KV_CACHE_SPEC = FP8_PER_TENSOR_SPEC
    kv_cache_layer_names_for_llama = ["*k_proj", "*v_proj"]
    kv_cache_quant_config = {name :
        QuantizationConfig(input_tensors=global_quant_config.input_tensors,
                           weight=global_quant_config.weight,
                           output_tensors=KV_CACHE_SPEC)
        for name in kv_cache_layer_names_for_llama}
    layer_quant_config = kv_cache_quant_config.copy()
    LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE = './llama_autosmoothquant_config.json'
    algo_config = load_quant_algo_config_from_file(LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE)
    EXCLUDE_LAYERS = ["lm_head"]

    quant_config = Config(
            global_quant_config=global_quant_config,
            layer_quant_config=layer_quant_config,
            kv_cache_quant_config=kv_cache_quant_config,
            exclude=EXCLUDE_LAYERS,
            algo_config=algo_config)

    from quantcore import ModelQuantizer, ModelExporter
    from quantcore import ExporterConfig, JsonExporterConfig

    quantizer = ModelQuantizer(quant_config)
    quant_model = quantizer.quantize_model(model, calib_dataloader)
    assert quant_model is model

    freezed_model = quantizer.freeze(model)

    LLAMA_KV_CACHE_GROUP = ["*k_proj", "*v_proj"]
    export_config = ExporterConfig(json_export_config=JsonExporterConfig())
    export_config.json_export_config.kv_cache_group = LLAMA_KV_CACHE_GROUP
    EXPORT_DIR = MODEL_ID.split("/")[1] + "-w-fp8-a-fp8-kvcache-fp8-pertensor-autosmoothquant"
    exporter = ModelExporter(config=export_config, export_dir=EXPORT_DIR)
    with torch.no_grad():
        exporter.export_safetensors_model(freezed_model,
            quant_config=quant_config, tokenizer=tokenizer, custom_mode='fp8')

    stored = stored_tensors(EXPORT_DIR)
    attention = "model.layers.2.self_attn."
    layer = freezed_model.get_submodule(attention + "v_proj")
    keys = freezed_model.get_submodule(attention + "k_proj")
    assert stored[attention + "v_scale"] == layer.output_quantizer.scale
    assert stored[attention + "k_scale"] == keys.output_quantizer.scale
    assert stored[attention + "q_proj.weight"].dtype == torch.float8_e4m3fn
    weight = stored[attention + "v_proj.weight"].float() * stored[attention + "v_proj.weight_scale"].float()
    assert torch.equal(weight.bfloat16(), layer.weight)
    norm = "model.layers.2.post_attention_layernorm.weight"  # scales were moved from here into the MLP
    assert torch.equal(stored[norm], freezed_model.get_parameter(norm))
    assert not torch.equal(stored[norm], AutoModelForCausalLM.from_pretrained(MODEL_ID).get_parameter(norm))
    assert json.loads((Path(EXPORT_DIR) / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_the_document_of_rocm(capsys):
    """The page of ROCm: fp8 weights, activations and KV cache, exported in AMD Quark's own format."""
    MODEL_ID = "meta-llama/Llama-2-70b-chat-hf"
    MAX_SEQ_LEN = 512

    model = AutoModelForCausalLM.from_pretrained(
        MODEL_ID, device_map="auto", torch_dtype="auto",
    )
    model.eval()

    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID, model_max_length=MAX_SEQ_LEN)
    tokenizer.pad_token = tokenizer.eos_token

    BATCH_SIZE = 1
    NUM_CALIBRATION_DATA = 512

    dataset = load_dataset("mit-han-lab/pile-val-backup", split="validation")
    text_data = dataset["text"][:NUM_CALIBRATION_DATA]

    tokenized_outputs = tokenizer(
    text_data, return_tensors="pt", padding=True, truncation=True, max_length=MAX_SEQ_LEN
    )
    calib_dataloader = DataLoader(
    tokenized_outputs['input_ids'], batch_size=BATCH_SIZE, drop_last=True
    )

    from quantcore import (Config, QuantizationConfig,
                           FP8E4M3PerTensorSpec)

    FP8_PER_TENSOR_SPEC = FP8E4M3PerTensorSpec(observer_method="min_max",
        is_dynamic=False).to_quantization_spec()

    global_quant_config = QuantizationConfig(input_tensors=FP8_PER_TENSOR_SPEC,
        weight=FP8_PER_TENSOR_SPEC)

    KV_CACHE_SPEC = FP8_PER_TENSOR_SPEC
    kv_cache_layer_names_for_llama = ["*k_proj", "*v_proj"]
    kv_cache_quant_config = {name :
        QuantizationConfig(input_tensors=global_quant_config.input_tensors,
                           weight=global_quant_config.weight,
                           output_tensors=KV_CACHE_SPEC)
        for name in kv_cache_layer_names_for_llama}
    layer_quant_config = kv_cache_quant_config.copy()

    EXCLUDE_LAYERS = ["lm_head"]
    quant_config = Config(
        global_quant_config=global_quant_config,
        layer_quant_config=layer_quant_config,
        kv_cache_quant_config=kv_cache_quant_config,
        exclude=EXCLUDE_LAYERS)

    from quantcore import ModelQuantizer, ModelExporter
    from quantcore import ExporterConfig, JsonExporterConfig

    quantizer = ModelQuantizer(quant_config)
    quant_model = quantizer.quantize_model(model, calib_dataloader)
    assert capsys.readouterr().err.endswith(DONE)
    before_freezing = quant_model(tokenized_outputs["input_ids"]).logits

    freezed_model = quantizer.freeze(model)
    assert torch.equal(freezed_model(tokenized_outputs["input_ids"]).logits, before_freezing)

    LLAMA_KV_CACHE_GROUP = ["*k_proj", "*v_proj"]
    export_config = ExporterConfig(json_export_config=JsonExporterConfig())
    export_config.json_export_config.kv_cache_group = LLAMA_KV_CACHE_GROUP

    EXPORT_DIR = MODEL_ID.split("/")[1] + "-w-fp8-a-fp8-kvcache-fp8-pertensor"
    exporter = ModelExporter(config=export_config, export_dir=EXPORT_DIR)
    with torch.no_grad():
        exporter.export_safetensors_model(freezed_model,
            quant_config=quant_config, tokenizer=tokenizer)

    stored = stored_tensors(EXPORT_DIR)
    attention = "model.layers.1.self_attn."
    assert stored[attention + "q_proj.weight"].dtype == torch.float8_e4m3fn
    for part in ("v_proj", "k_proj"):  # each has its own scale, as in the files that the command writes
        layer = freezed_model.get_submodule(attention + part)
        assert stored[attention + f"{part}.output_scale"].float() == layer.output_quantizer.scale
    weight = stored[attention + "k_proj.weight"].float() * stored[attention + "k_proj.weight_scale"].float()
    assert torch.equal(weight.bfloat16(), layer.weight)
    assert json.loads((Path(EXPORT_DIR) / "config.json").read_text())["quantization_config"]["quant_method"] == "quark"
    assert AutoTokenizer.from_pretrained(EXPORT_DIR)("fox")["input_ids"] == tokenizer("fox")["input_ids"]


def test_the_document_on_configs():
    """The steps of the configuration page: specs, layer configs, algorithms, the whole, quantizing."""
    from quantcore import QuantizationSpec
    from quantcore import Dtype, QSchemeType, ScaleType, RoundType
    from quantcore import PlaceholderObserver, PerTensorMinMaxObserver, PerGroupMinMaxObserver

    BFLOAT16_SPEC = QuantizationSpec(dtype=Dtype.bfloat16, observer_cls=PlaceholderObserver)

    FP8_PER_TENSOR_SPEC = QuantizationSpec(dtype=Dtype.fp8_e4m3,
                                           qscheme=QSchemeType.per_tensor,
                                           observer_cls=PerTensorMinMaxObserver,
                                           is_dynamic=False)

    INT8_PER_TENSER_SPEC = QuantizationSpec(dtype=Dtype.int8,
                                            qscheme=QSchemeType.per_tensor,
                                            observer_cls=PerTensorMinMaxObserver,
                                            symmetric=True,
                                            scale_type=ScaleType.float,
                                            round_method=RoundType.half_even,
                                            is_dynamic=False)

    UINT4_PER_GROUP_ASYM_SPEC = QuantizationSpec(dtype=Dtype.uint4,
                                                 observer_cls=PerGroupMinMaxObserver,
                                                 symmetric=False,
                                                 scale_type=ScaleType.float,
                                                 round_method=RoundType.half_even,
                                                 qscheme=QSchemeType.per_group,
                                                 ch_axis=1,
                                                 is_dynamic=False,
                                                 group_size=128)
    assert BFLOAT16_SPEC.to_dict()["observer_cls"] == "PlaceholderObserver"

    from quantcore import QuantizationConfig

    W_FP8_A_FP8_PER_TENSOR_CONFIG = QuantizationConfig(input_tensors=FP8_PER_TENSOR_SPEC,
                                                       weight=FP8_PER_TENSOR_SPEC)

    W_INT8_A_INT8_PER_TENSOR_CONFIG = QuantizationConfig(input_tensors=INT8_PER_TENSER_SPEC,
                                                         weight=INT8_PER_TENSER_SPEC)

    W_UINT4_PER_GROUP_CONFIG = QuantizationConfig(weight=UINT4_PER_GROUP_ASYM_SPEC)

    from quantcore import AwqProcessor
    from quantcore import SmoothQuantProcessor
    from quantcore import GptqProcessor
    from quantcore import AWQConfig, SmoothQuantConfig, GPTQConfig

    ALGORITHM_CONFIG=AWQConfig(
      scaling_layers=[
        {'prev_op': 'input_layernorm', 'layers': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'], 'inp': 'self_attn.q_proj', 'module2inspect': 'self_attn', 'has_kwargs': True, 'help': 'attention input'},
        {'prev_op': 'self_attn.v_proj', 'layers': ['self_attn.o_proj'], 'inp': 'self_attn.o_proj', 'module2inspect': None, 'has_kwargs': False, 'condition': 'module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape'},
        {'prev_op': 'post_attention_layernorm', 'layers': ['mlp.gate_proj', 'mlp.up_proj'], 'inp': 'mlp.gate_proj', 'module2inspect': 'mlp', 'has_kwargs': False, 'help': 'linear 1'},
        {'prev_op': 'mlp.up_proj', 'layers': ['mlp.down_proj'], 'inp': 'mlp.down_proj', 'module2inspect': None, 'has_kwargs': False, 'help': 'linear 2'}],
      model_decoder_layers='model.layers',
      embedding_layers=['model.embed_tokens'])
    AWQ_CONFIG = ALGORITHM_CONFIG

    ALGORITHM_CONFIG=SmoothQuantConfig(
      alpha=0.5,
      scale_clamp_min=0.001,
      scaling_layers=[
        {'prev_op': 'input_layernorm', 'layers': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'], 'inp': 'self_attn.q_proj', 'module2inspect': 'self_attn', 'has_kwargs': True, 'help': 'attention input'},
        {'prev_op': 'self_attn.v_proj', 'layers': ['self_attn.o_proj'], 'inp': 'self_attn.o_proj', 'module2inspect': None, 'has_kwargs': False, 'condition': 'module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape'},
        {'prev_op': 'post_attention_layernorm', 'layers': ['mlp.gate_proj', 'mlp.up_proj'], 'inp': 'mlp.gate_proj', 'module2inspect': 'mlp', 'has_kwargs': False, 'help': 'linear 1'},
        {'prev_op': 'mlp.up_proj', 'layers': ['mlp.down_proj'], 'inp': 'mlp.down_proj', 'module2inspect': None, 'has_kwargs': False, 'help': 'linear 2'}],
      embedding_layers=['model.embed_tokens'],
      model_decoder_layers='model.layers')
    assert ALGORITHM_CONFIG.alpha == 0.5 and ALGORITHM_CONFIG.scaling_layers == AWQ_CONFIG.scaling_layers

    ALGORITHM_CONFIG=GPTQConfig(
      damp_percent=0.01,
      desc_act=True,
      static_groups=True,
      true_sequential=True,
      inside_layer_modules=['self_attn.k_proj', 'self_attn.v_proj', 'self_attn.q_proj', 'self_attn.o_proj', 'mlp.up_proj', 'mlp.gate_proj', 'mlp.down_proj'],
      model_decoder_layers='model.layers',
      embedding_layers=['model.embed_tokens'])

    from quantcore import Config

    # Example 1: W_INT8_A_INT8_PER_TENSOR
    quant_config = Config(global_quant_config=W_INT8_A_INT8_PER_TENSOR_CONFIG)
    example_1 = quant_config

    # Example 2: W_UINT4_PER_GROUP with advanced algorithm
    quant_config = Config(global_quant_config=W_UINT4_PER_GROUP_CONFIG, algo_config=ALGORITHM_CONFIG)
    EXCLUDE_LAYERS = ["lm_head"] # For language models
    quant_config = replace(quant_config, exclude=EXCLUDE_LAYERS)
    example_2 = quant_config
    assert example_2.exclude == ("lm_head",) and example_2.algo_config == (ALGORITHM_CONFIG,)

    # Example 3: W_FP8_A_FP8_PER_TENSOR with KV_CACHE_FP8
    quant_config = Config(global_quant_config=W_FP8_A_FP8_PER_TENSOR_CONFIG)
    KV_CACHE_CFG = {
                "*.v_proj":
                QuantizationConfig(input_tensors=quant_config.global_quant_config.input_tensors,
                                   weight=quant_config.global_quant_config.weight,
                                   output_tensors=FP8_PER_TENSOR_SPEC),
                "*.k_proj":
                QuantizationConfig(input_tensors=quant_config.global_quant_config.input_tensors,
                                   weight=quant_config.global_quant_config.weight,
                                   output_tensors=FP8_PER_TENSOR_SPEC),
            }
    quant_config = replace(quant_config, layer_quant_config=KV_CACHE_CFG)

    example_3 = quant_config

    for quant_config in (example_1, replace(example_2, algo_config=AWQ_CONFIG), example_2, example_3):
        model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-70b-chat-hf")
        calib_dataloader = DataLoader(torch.randint(0, 512, (4, 16)))

        # In-place replacement with quantized modules in model
        from quantcore import ModelQuantizer
        quantizer = ModelQuantizer(quant_config)
        quant_model = quantizer.quantize_model(model, calib_dataloader)

        names = [name for name, module in quant_model.named_modules() if type(module).__name__ == "QuantizedLinear"]
        assert len(names) == 21 + (quant_config.exclude == ())
        has_kv = quant_model.model.layers[0].self_attn.v_proj.output_quantizer is not None
        assert has_kv == (quant_config is example_3)


def weight_only():
    from quantcore import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, RoundType, ScaleType
    from quantcore import PerChannelMinMaxObserver

    DEFAULT_UINT4_PER_GROUP_ASYM_SPEC = QuantizationSpec(dtype=Dtype.uint4,
                                                        observer_cls=PerChannelMinMaxObserver,
                                                        symmetric=False,
                                                        scale_type=ScaleType.float,
                                                        round_method=RoundType.half_even,
                                                        qscheme=QSchemeType.per_group,
                                                        ch_axis=0,
                                                        is_dynamic=False,
                                                        group_size=32)
    DEFAULT_W_UINT4_PER_GROUP_CONFIG = QuantizationConfig(weight=DEFAULT_UINT4_PER_GROUP_ASYM_SPEC)
    return Config(global_quant_config=DEFAULT_W_UINT4_PER_GROUP_CONFIG)


def dynamic():
    from quantcore import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, RoundType, ScaleType
    from quantcore import PerTensorMinMaxObserver

    INT8_PER_TENSER_DYNAMIC_SPEC = QuantizationSpec(dtype=Dtype.int8,
                                                    qscheme=QSchemeType.per_tensor,
                                                    observer_cls=PerTensorMinMaxObserver,
                                                    symmetric=True,
                                                    scale_type=ScaleType.float,
                                                    round_method=RoundType.half_even,
                                                    is_dynamic=True)
    DEFAULT_W_INT8_A_INT8_PER_TENSOR_DYNAMIC_CONFIG = QuantizationConfig(input_tensors=INT8_PER_TENSER_DYNAMIC_SPEC,
                                                                         weight=INT8_PER_TENSER_DYNAMIC_SPEC)
    return Config(global_quant_config=DEFAULT_W_INT8_A_INT8_PER_TENSOR_DYNAMIC_CONFIG)


def static():
    from quantcore import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
    from quantcore import PerTensorMinMaxObserver

    FP8_PER_TENSOR_SPEC = QuantizationSpec(dtype=Dtype.fp8_e4m3,
                                           qscheme=QSchemeType.per_tensor,
                                           observer_cls=PerTensorMinMaxObserver,
                                           is_dynamic=False)
    DEFAULT_W_FP8_A_FP8_PER_TENSOR_CONFIG = QuantizationConfig(input_tensors=FP8_PER_TENSOR_SPEC,
                                                               weight=FP8_PER_TENSOR_SPEC)
    return Config(global_quant_config=DEFAULT_W_FP8_A_FP8_PER_TENSOR_CONFIG)


@pytest.mark.parametrize("strategy", [weight_only, dynamic, static])
def test_the_document_on_strategies(strategy, capsys):
    """Weight-only, dynamic and static quantization of one model with the same lines."""
    # 1. Set model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("facebook/opt-125m")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained("facebook/opt-125m")

    # 2. Set quantization configuration
    quant_config = strategy()

    # 3. Define calibration dataloader (still need this step for weight only and dynamic quantization)
    from torch.utils.data import DataLoader
    text = "Hello, how are you?"
    tokenized_outputs = tokenizer(text, return_tensors="pt")
    calib_dataloader = DataLoader(tokenized_outputs['input_ids'])
    float_logits = model(**tokenized_outputs).logits

    # 4. In-place replacement with quantized modules in model
    from quantcore import ModelQuantizer
    quantizer = ModelQuantizer(quant_config)
    quant_model = quantizer.quantize_model(model, calib_dataloader)

    assert capsys.readouterr().err.endswith(DONE)
    difference = (quant_model(**tokenized_outputs).logits - float_logits).norm() / float_logits.norm()
    assert 0 < difference < {"weight_only": 0.5, "dynamic": 0.1, "static": 0.2}[strategy.__name__]


def test_the_basic_example(capsys):
    """int8 per tensor, weights only; freezing before an export."""
    # 1. Set model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("facebook/opt-125m")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained("facebook/opt-125m")

    # 2. Set quantization configuration
    from quantcore import Dtype, ScaleType, RoundType, QSchemeType
    from quantcore import Config, QuantizationSpec, QuantizationConfig
    from quantcore import PerTensorMinMaxObserver
    DEFAULT_INT8_PER_TENSOR_SYM_SPEC = QuantizationSpec(dtype=Dtype.int8,
                                            qscheme=QSchemeType.per_tensor,
                                            observer_cls=PerTensorMinMaxObserver,
                                            symmetric=True,
                                            scale_type=ScaleType.float,
                                            round_method=RoundType.half_even,
                                            is_dynamic=False)

    DEFAULT_W_INT8_PER_TENSOR_CONFIG = QuantizationConfig(weight=DEFAULT_INT8_PER_TENSOR_SYM_SPEC)
    quant_config = Config(global_quant_config=DEFAULT_W_INT8_PER_TENSOR_CONFIG)

    # 3. Define calibration dataloader (still need this step for weight only and dynamic quantization)
    from torch.utils.data import DataLoader
    text = "Hello, how are you?"
    tokenized_outputs = tokenizer(text, return_tensors="pt")
    calib_dataloader = DataLoader(tokenized_outputs['input_ids'])

    # 4. In-place replacement with quantized modules in model
    from quantcore import ModelQuantizer
    quantizer = ModelQuantizer(quant_config)
    quant_model = quantizer.quantize_model(model, calib_dataloader)
    assert capsys.readouterr().err.endswith(DONE)

    # # 5. (Optional) Export onnx
    # # If you want to export the quantized model, please freeze the quantized model first
    freezed_quantized_model = quantizer.freeze(quant_model)
    from quantcore import ModelExporter
    # Get dummy input
    for data in calib_dataloader:
        input_args = data
        break
    exporter = ModelExporter('export_path')
    exporter.export_onnx_model(quant_model, input_args)

    assert freezed_quantized_model is quant_model is model
    import onnxruntime
    # by default the inputs of such layers become int8, too
    session = onnxruntime.InferenceSession("export_path/model.onnx", session_options())
    [logits, *_] = session.run(None, {session.get_inputs()[0].name: input_args.numpy()})
    assert torch.allclose(torch.from_numpy(logits), model(input_args).logits, atol=1e-4)
