"""``bitfoundry speed`` with Transformers; ``tests/consumers/test_serving.py`` has the other programs."""

import json
import sys
from pathlib import Path

import pytest

from quantcore.cli import main as cli
from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.commands.speed import Load, speed, summarize
from quantcore.errors import ConfigError, ModelError
from quantcore.events import silence
from quantcore.export import EXPORTERS
from quantcore.sandbox.environment import OWN_SETTINGS
from quantcore.serving.run_in_env import STOPWATCH, kv_cache_dtype, run_in_env
from quantcore.serving.stopwatch import _prompt
from tests.support.models import tiny_model


@pytest.mark.slow
def test_a_model_beside_its_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tiny_model(tmp_path / "small")
    large = tiny_model(tmp_path / "large", num_hidden_layers=24)
    flags = ["--prompt_len", "16", "--num_new", "5", "--batch_size", "2", "--repeats", "2", "--json"]
    assert cli.main(["speed", str(small), "--against", str(large), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runtime"], found["load"]["batch_size"]) == ("transformers", 2)
    for one in (found["model"], found["against"]):
        assert one["load_s"] > 0 and one["peak_memory_bytes"] > 100e6 and one["peak_device_bytes"] is None
    assert found["ratio"]["prompt_tokens_per_s"] > 1.5, "it has far fewer layers"
    assert found["ratio"]["new_tokens_per_s"] > 1.5


def test_medians_of_the_repetitions() -> None:
    seen = {"version": "1", "load_s": 2.0, "peak_memory_bytes": 7, "peak_device_bytes": None}
    seen |= {"first_s": [0.5, 9.0, 0.25], "all_s": [1.5, 9.5, 2.25]}
    found = summarize(seen, Load(prompt_len=100, num_new=11, batch_size=3, repeats=3))
    assert found["prompt_tokens_per_s"] == 3 * 100 / 0.5
    assert found["new_tokens_per_s"] == 3 * 10 / 1.0


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
@pytest.mark.parametrize("export", ["quark", "compressed_tensors", "fp8"])
def test_vllm_is_told_of_the_scales_of_a_kv_cache(tmp_path: Path, kv_cache: str | None, export: str) -> None:
    """It takes no notice of them otherwise."""
    config = presets.resolve("fp8", kv_cache=kv_cache)
    chosen, why = config.choose("model.layers.0.self_attn.k_proj", "Linear")
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, 64), chosen, chosen_by=why)
    said = EXPORTERS.get(export).quantization_config(config, (layer,), ())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}), "utf-8")
    assert kv_cache_dtype(tmp_path) == (kv_cache or "auto")
    assert kv_cache_dtype(tmp_path / "model.gguf") == "auto"


def test_prompts_share_no_start() -> None:
    prompts = [_prompt(row, repetition, 32, 49152) for row in range(4) for repetition in range(4)]
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert all(0 <= token < 49152 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("runtime", "python", "code", "words"),
    [
        ("llama_cpp", sys.executable, "no_runtime", "no module llama_cpp"),
        ("vllm", "/nowhere/python", "no_runtime", "/nowhere/python cannot be started"),
        ("transformers", "false", "runtime_failed", "status 1"),
    ],
)
def test_a_program_that_is_not_there(tmp_path: Path, runtime: str, python: str, code: str, words: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises((ConfigError, ModelError), match=words) as error:
        speed(str(tmp_path / "model"), None, Load(), silence, runtime=runtime, python=python)
    assert error.value.code == code and error.value.hint


@pytest.mark.slow
def test_what_the_program_says_of_a_model_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match="nonsense") as error:
        speed(str(tmp_path / "model"), None, Load(), silence)
    assert error.value.code == "runtime_failed"


def test_other_programs_run_with_their_own_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for the libraries of our own processes is not for them; what a user sets is."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport json, os\nprint('RESULT', json.dumps(dict(os.environ)))\n")
    program.chmod(0o755)
    for name, value in OWN_SETTINGS.items():
        monkeypatch.setenv(name, value)
    assert not OWN_SETTINGS.keys() & run_in_env(STOPWATCH, {"model": "x"}, python=str(program), program="x").keys()
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "99")
    seen = run_in_env(STOPWATCH, {"model": "x"}, python=str(program), program="x")
    assert seen["LRU_CACHE_CAPACITY"] == "99"


@pytest.mark.parametrize("load", [{"num_new": 1}, {"prompt_len": 0}, {"batch_size": 0}, {"repeats": 0}])
def test_a_load_that_is_none(load: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(load))} is .*; it must be at least") as error:
        Load(**load)
    assert error.value.code == "invalid_load"


def test_a_folder_with_a_gguf_file_stands_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    asked = []

    def measured(path: Path, runtime: str, python: str, load: Load) -> None:
        asked.append((path, runtime))
        raise ConfigError("enough", code="enough")

    monkeypatch.setattr("quantcore.engine.commands.speed._measured", measured)
    with pytest.raises(ConfigError, match="enough"):
        speed(str(tmp_path), None, Load(), silence)
    assert asked == [(tmp_path / "model.gguf", "llama_cpp")]
