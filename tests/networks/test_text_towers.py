"""Text towers and the tokens that they take."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from kontrast import networks
from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.networks import text_towers, tokenizers
from kontrast.networks.tokenizers import ByteTokenizer, VocabularyTokenizer

from support.doctests import run_examples

CAPTIONS = [f"a {color} {thing} in the {place}" for color in ("red", "blue") for thing in ("dog", "cat", "horse")
            for place in ("snow", "grass", "sea")]  # fmt: skip


def tower(**arguments):
    return networks.text_tower("transformer", vocabulary=258, length=24, width=16, depth=2, heads=2, **arguments).eval()


@pytest.mark.parametrize("thing", [ByteTokenizer])
def test_examples(thing):
    run_examples(thing)


def test_bytes_are_any_language_and_are_cut_at_the_length():
    tokens = ByteTokenizer(8)(["é", "abcdefgh"])
    assert tokens.tolist() == [[0, 2 + 0xC3, 2 + 0xA9, 1, -1, -1, -1, -1], [0, *range(99, 105), 1]]
    assert ByteTokenizer(8).cut(["abcdef", "abcdefg"]) == 1


def test_byte_pairs_are_learned_alike_and_survive_as_json():
    pytest.importorskip("tokenizers", reason="needs the extra text")
    first, second = (VocabularyTokenizer.learned(CAPTIONS, 300, 12) for _ in range(2))
    assert first.vocabulary == second.vocabulary and 258 < first.size <= 300
    again = VocabularyTokenizer(first.vocabulary, 12)
    assert torch.equal(again(CAPTIONS), first(CAPTIONS))
    tokens = first(["A red  DOG", "some quite unknown wörds, long and longer"])
    assert tokens[0, 0] == 0 and 1 in tokens[0].tolist() and tokens[1, -1] == 1  # the end is kept when a caption is cut
    assert torch.equal(first(["A red dog"]), first(["a RED dog"])) and first.cut(["a " * 40]) == 1
    assert (first(CAPTIONS) >= 0).sum() < (ByteTokenizer(64)(CAPTIONS) >= 0).sum()


def test_damaged_vocabulary_is_one_clear_line():
    pytest.importorskip("tokenizers", reason="needs the extra text")
    with pytest.raises(DataError, match="the vocabulary of the text tower is damaged"):
        VocabularyTokenizer('{"model": 3}')


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[text\]', or use text.tokens=bytes"):
        tokenizers.tokenizers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFault, match=r"needs transformers: pip install 'kontrast\[text\]'"):
        text_towers.transformers()


def test_padding_changes_nothing():
    """Neither the number of padded tokens nor what stands beside a caption may change its features."""
    network = tower()
    short, long = ByteTokenizer(12)(["a red dog"]), ByteTokenizer(24)(["a red dog", "a much longer caption"])
    torch.testing.assert_close(network(short), network(long)[:1], rtol=1e-5, atol=1e-6)


def test_the_order_of_words_matters_and_all_tokens_do():
    network, tokens = tower(), ByteTokenizer(24)(["dog bites man", "man bites dog", "dog bites mad"])
    a, b, c = network(tokens)
    assert not torch.allclose(a, b, atol=1e-4) and not torch.allclose(a, c, atol=1e-4)


def test_dropout_is_for_training_alone():
    network, tokens = tower(dropout=0.5), ByteTokenizer(24)(["a red dog"])
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert not torch.equal(network(tokens), network(tokens))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 10, "heads": 4}, "multiple of 4"),
        ({"dropout": 1.0}, "below 1"),
        ({"layers": 2}, "has no argument 'layers'"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        networks.text_tower("transformer", vocabulary=258, length=24, **arguments)
    with pytest.raises(UsageError, match="unknown text tower 'transfomer': did you mean 'transformer'"):
        networks.text_tower("transfomer", vocabulary=258, length=24)


@pytest.mark.slow  # the import of transformers alone takes seconds
def test_a_text_encoder_of_hugging_face_ignores_padding(tmp_path):
    package = pytest.importorskip("transformers", reason="needs the extra text")
    config = package.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    package.BertModel(config).save_pretrained(tmp_path, safe_serialization=True)
    first, second = (networks.text_tower(f"hf:{tmp_path}", vocabulary=60, length=8).eval() for _ in range(2))
    tokens = torch.tensor([[1, 5, 6, -1, -1, -1]])
    torch.testing.assert_close(first(tokens), second(tokens[:, :4]), rtol=1e-5, atol=1e-6)  # the weights of the folder
    assert first.width == 16
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(DataError, match="can't be read as a text encoder"):
        networks.text_tower(f"hf:{tmp_path}", vocabulary=60, length=8)


def test_a_folder_without_a_text_encoder_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_towers, "transformers", lambda: None)
    with pytest.raises(DataError, match=r"there is no .*config.json; give the folder of a text encoder"):
        networks.text_tower(f"hf:{tmp_path}", vocabulary=60, length=8)
