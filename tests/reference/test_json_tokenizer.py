"""A tokenizer.json: what is text stays text, what ends a document ends it."""

import hashlib
import json

import pytest
import torch

from reference.config import preset
from reference.data.json_tokenizer import JsonTokenizer, require_belongs

EOS = "<|end|>"
TEXT = 'def café():\n    return "日本 😀"  # 2024\n'.encode()


def written(folder, **changes):
    """A tokenizer.json of 256 byte symbols, two merges and an end of a document, id 258."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "re", "ret"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("r", "e"), ("re", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([EOS])
    content = json.loads(tokenizer.to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    return folder


def test_text_comes_back_and_the_document_ends_once(tmp_path):
    tokenizer = JsonTokenizer(written(tmp_path))
    tokens = tokenizer.encode_document(TEXT)
    assert tokens.dtype == torch.int64
    assert tokens[-1] == tokenizer.eos == 258
    assert (tokens[:-1] != 258).all()
    assert len(tokens) < len(TEXT) + 1  # "return" is shorter in tokens
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode_documents([TEXT, b""])[1].tolist() == [258]


def test_the_size_is_the_largest_id_plus_one_and_the_hash_that_of_the_file(tmp_path):
    tokenizer = JsonTokenizer(written(tmp_path) / "tokenizer.json")
    assert tokenizer.vocabulary_size == 259
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert tokenizer.json_bytes == content
    assert tokenizer.sha256 == hashlib.sha256(content).hexdigest()


def test_text_that_spells_a_special_token_is_text(tmp_path):
    tokenizer = JsonTokenizer(written(tmp_path))
    data = f"a{EOS}b".encode()
    tokens = tokenizer.encode_document(data)
    assert (tokens == 258).sum() == 1
    assert tokenizer.decode(tokens) == data


def test_an_eos_that_is_not_marked_as_special_is_refused(tmp_path):
    content = json.loads((written(tmp_path) / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    written(tmp_path, added_tokens=content["added_tokens"])
    with pytest.raises(ValueError, match="would get the special token 258"):
        JsonTokenizer(tmp_path)


def test_a_truncation_that_the_file_asks_for_is_not_done(tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    tokenizer = JsonTokenizer(written(tmp_path, truncation=truncation, padding=padding))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(b"a")) == 1


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path):
    tokenizer = JsonTokenizer(written(tmp_path))
    with pytest.raises(ValueError, match=r"byte 3 \(0xff\) is not UTF-8"):
        tokenizer.encode(b"abc\xff")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1.0]), "one row of integers"),
        (torch.tensor([[1]]), "one row of integers"),
        (torch.tensor([258, 1]), "token 0 is EOS"),
        (torch.tensor([1, 259]), "token 1 is 259"),
        (torch.tensor([-1]), "token 0 is -1"),
    ],
)
def test_tokens_that_are_no_document_are_not_decoded(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        JsonTokenizer(written(tmp_path)).decode(tokens)


def test_eos_comes_from_the_files_or_the_caller(tmp_path):
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    with pytest.raises(ValueError, match="do not name one end"):
        JsonTokenizer(tmp_path)
    assert JsonTokenizer(tmp_path, eos=258).eos == 258
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    assert JsonTokenizer(tmp_path).eos == 258
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"'</s>' is not in the vocabulary"):
        JsonTokenizer(tmp_path)
    with pytest.raises(ValueError, match="eos 300 is not in the vocabulary"):
        JsonTokenizer(tmp_path, eos=300)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        JsonTokenizer(tmp_path)
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        JsonTokenizer(tmp_path / "nowhere.json")


def test_a_tokenizer_belongs_to_a_model_that_has_its_ids_and_its_eos(tmp_path):
    tokenizer = JsonTokenizer(written(tmp_path))
    large, small = preset("qwen2.5-0.5b"), preset("bytes-0.09m")
    require_belongs(large, tokenizer, {"eos_token_id": 258})
    require_belongs(large, tokenizer, {"eos_token_id": [5, 258]})
    require_belongs(large, tokenizer, {})
    with pytest.raises(ValueError, match="largest id is 258, the model's vocabulary_size 257"):
        require_belongs(small, tokenizer, {})
    with pytest.raises(ValueError, match=r"with 258, config\.json with eos_token_id 2"):
        require_belongs(large, tokenizer, {"eos_token_id": 2})
