"""What a GGUF input says of its model in general is kept in a GGUF output; what it says of the file is not."""

from pathlib import Path

from gguf import GGUFReader, GGUFWriter

from quantcore.engine.containers.gguf import _general
from quantcore.export.gguf.metadata import add_general


def test_general_metadata_is_kept(tmp_path: Path) -> None:
    before = GGUFWriter(tmp_path / "before.gguf", "llama")
    before.add_name("Tiny")
    before.add_license("apache-2.0")
    before.add_author("somebody")
    before.add_languages(["en", "de"])
    before.add_base_model_count(1)
    before.add_base_model_name(0, "Base")
    before.add_file_type(2)
    before.add_quantized_by("them")
    _write(before)
    about = _general(tmp_path / "before.gguf")
    assert about.pop("general.name") == "Tiny"
    after = GGUFWriter(tmp_path / "after.gguf", "llama")
    add_general(after, about)
    _write(after)
    kept = {key: field.contents() for key, field in GGUFReader(tmp_path / "after.gguf").fields.items()}
    assert {key: value for key, value in kept.items() if key.startswith("general.")} == {
        "general.architecture": "llama", "general.license": "apache-2.0", "general.author": "somebody",
        "general.languages": ["en", "de"], "general.base_model.count": 1, "general.base_model.0.name": "Base",
    }  # fmt: skip
    assert _general(tmp_path) == {}


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
