"""Logits in parts of the vocabulary: those of the whole head, with a part of its weight in memory."""

import pytest
import torch

from quantcore.engine.evaluation.model import open_model
from quantcore.engine.runtime import vocabulary as subject
from quantcore.engine.runtime.vocabulary import common_parts, head_of, in_parts
from quantcore.importing.model import read_model
from tests.support.models import VOCAB_SIZE, tiny_model

ARCHITECTURES = {
    "llama, tied": {},
    "llama, with its own head": {"tie_word_embeddings": False},
    "gemma2, with a soft cap": {
        "model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 5.0,
    },
    "granite, with a scale": {"model_type": "granite", "logits_scaling": 3.0},
    "phi, with a bias": {"model_type": "phi", "tie_word_embeddings": False},
    "gpt2, with embeddings of places": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    },
}  # fmt: skip
PARTS = (range(200), range(200, 400), range(400, VOCAB_SIZE))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(subject, "part_size", lambda width, *, on_host: 200)


def opened(folder, **shape):
    model = open_model(read_model(tiny_model(folder, dtype=torch.float32, **shape)))
    state = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    with model.head() as logits, torch.inference_mode():
        return model, state, logits(state)


def parts_of(vocabulary, state):
    found = []
    for tokens in common_parts(vocabulary):
        with vocabulary.part(tokens) as logits, torch.inference_mode():
            found.append(logits(state))
    return torch.cat(found, -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_parts_are_those_of_the_whole_head(tmp_path, small_parts, name):
    model, state, expected = opened(tmp_path, **ARCHITECTURES[name])
    with model.vocabulary(state) as vocabulary:
        assert vocabulary.parts == PARTS
        matrices = [each for each in vocabulary.outside.model.parameters() if VOCAB_SIZE in each.shape[:-1]]
        assert matrices and all(each.untyped_storage().nbytes() == each.element_size() for each in matrices)
        got = parts_of(vocabulary, state)
        with vocabulary.part(None) as logits, torch.inference_mode():
            torch.testing.assert_close(logits(state), expected)
    torch.testing.assert_close(got, expected)  # products of other shapes may be rounded otherwise
    assert all(parameter.is_meta for parameter in model.streamed.model.parameters()), "nothing stays in memory"


def test_a_head_in_memory_is_divided_as_well_and_is_as_before_afterwards(tmp_path, small_parts):
    model, state, expected = opened(tmp_path, model_type="phi", tie_word_embeddings=False)
    with model.head() as outside:
        before = dict(head_of(outside).named_parameters())
        vocabulary = in_parts(outside, state)
        assert vocabulary.parts == PARTS and vocabulary.rows is None
        torch.testing.assert_close(parts_of(vocabulary, state), expected)
        assert all(value is before[name] for name, value in head_of(outside).named_parameters())


def test_a_model_that_compares_its_logits_with_each_other_is_not_divided(tmp_path, small_parts):
    model, state, _ = opened(tmp_path)
    head = model.streamed.reader.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: output - output.amax(-1, keepdim=True))
    with model.vocabulary(state) as vocabulary:
        assert vocabulary.parts == () and common_parts(vocabulary) == (None,)
        assert parts_of(vocabulary, state).amax(-1).abs().max() == 0
    hook.remove()


def test_a_model_whose_code_fails_for_a_part_is_not_divided(tmp_path, small_parts):
    model, state, expected = opened(tmp_path)
    head = model.streamed.reader.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: output.index_select(-1, torch.arange(VOCAB_SIZE)))
    with model.vocabulary(state) as vocabulary:
        assert vocabulary.parts == ()
        torch.testing.assert_close(parts_of(vocabulary, state), expected)
    hook.remove()


def test_models_are_compared_in_parts_that_both_have(tmp_path, small_parts):
    model, state, _ = opened(tmp_path)
    with model.vocabulary(state) as divided, model.head() as outside:
        assert common_parts(divided, divided) == PARTS
        assert common_parts(divided, subject.Vocabulary(outside)) == (None,)
