"""A folder's tokenizer, token for token, and the tokens that end a completion."""

import json

import pytest
import tiny_hf
import tokenizers
import transformers

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models import hf


def assert_same_tokenizer(loaded, saved):
    for text in tiny_hf.TEXTS:
        assert loaded.encode(text) == saved.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == text
    chat = [{"role": "user", "content": "7 x 6?"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>7 x 6?<|end|>\n"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


@pytest.mark.parametrize("clean_up", [False, True])
def test_texts_are_those_of_each_row_by_itself(tmp_path, clean_up):
    """Also where transformers takes out blanks before punctuation, which it does with BPE if made to."""
    tiny_hf.tokenizer(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    tokenizer.clean_up_tokenization_spaces = clean_up
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    rows = [tokenizer.encode(text) for text in (*tiny_hf.TEXTS, "so , is it ?")] + [[], [1, 0, 5]]
    assert hf.decode_all(tokenizer, rows) == [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


def test_bytes_of_tokens_of_sentencepiece_are_those_of_the_text():
    byte = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["<unk>", "▁a", "▁", "b", *byte]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    each = tokenizers.decoders
    made.decoder = each.Sequence([each.Replace("▁", " "), each.ByteFallback(), each.Fuse(), each.Strip(" ", 1, 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    ids = [1, 3, 1, *(4 + x for x in "é".encode()), 2, 4 + 0xF0, 2]  # the last character is not whole
    parts = hf.token_bytes(tokenizer, ids)
    assert parts == [b"a", b"b", b" a", b"\xc3", b"\xa9", b" ", b"\xf0", b" "]
    assert b"".join(parts).decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=True)
    assert hf.token_bytes(tokenizer, []) == []


def test_a_tokenizer_round_trips_token_for_token(tmp_path):
    tiny_hf.save(tmp_path / "in", vocab_size=400)
    tiny_hf.tokenizer(tmp_path / "in")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "in/tokenizer.json"))
    loaded = models.load_tokenizer(tmp_path / "in")
    assert_same_tokenizer(loaded, saved)

    model = models.load(tmp_path / "in")
    models.save(tmp_path / "copied", model, source=tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    models.save(tmp_path / "saved", model, tokenizer=loaded)
    for folder in ("copied", "saved"):
        assert_same_tokenizer(models.load_tokenizer(tmp_path / folder), saved)
    described = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"  # the one name that both transformers know
    written = json.loads((tmp_path / "saved/config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], written["bos_token_id"]) == (1, 0, None)


def test_a_folder_without_tokenizer_json_goes_to_auto_tokenizer(tmp_path):
    tiny_hf.save(tmp_path, vocab_size=400)
    made = tiny_hf.tokenizer(tmp_path)
    made.backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    loaded = models.load_tokenizer(tmp_path)
    assert isinstance(loaded, transformers.Qwen2Tokenizer)
    assert loaded.get_vocab().items() >= made.get_vocab().items()


def test_tokenizers_that_cannot_be_loaded(tmp_path):
    tiny_hf.save(tmp_path, vocab_size=400)
    with pytest.raises(UserError, match="holds no tokenizer"):
        models.load_tokenizer(tmp_path)
    tiny_hf.tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    content["added_tokens_decoder"] = {"400": {"content": "def", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="makes transformers split text unlike tokenizer.json"):
        models.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes()[:999])
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        models.load_tokenizer(tmp_path)


def test_eos_ids_are_those_of_every_file(tmp_path):
    tokenizer = tiny_hf.tokenizer()
    assert hf.eos_ids(tmp_path, tokenizer) == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert hf.eos_ids(tmp_path, tokenizer) == (1, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert hf.eos_ids(tmp_path, tokenizer) == (1, 4, 9)
    tokenizer.eos_token = tokenizer.chat_template = None
    (tmp_path / "config.json").write_text("{}")
    assert hf.eos_ids(tmp_path, tokenizer) == (4, 9)
