"""GGUF files become folders that score as the model that was written, in transformers and here."""

import json

import gguf
import gguf_files
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
import transformers
from hf_compare import assert_same_torch, our_logps, their, their_logps

from grpojax import models
from grpojax.extensions.gguf.gguf_file import convert
from grpojax.host import console
from grpojax.host.errors import UserError
from grpojax.models import hf

NAMES = ["llama-tied", "llama", "llama-attention-bias", "qwen2", "qwen2-tied", "qwen3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_scores_as_the_model_in_the_file(tmp_path, name):
    made = tiny_hf.model(tiny_hf.config(name))
    convert(gguf_files.write_model(tmp_path / "m.gguf", made), tmp_path / "out")
    assert_same_torch(made, their(tmp_path / "out", dtype="auto"))
    if name in ("llama", "qwen2-tied"):  # the others differ in weights alone
        for ours, theirs in zip(our_logps(models.load(tmp_path / "out")), their_logps(made), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_q_and_k_are_unpermuted_for_llama_alone(tmp_path):
    """Golden rows: with two heads of four, llama.cpp's order 0 2 1 3 | 4 6 5 7 comes back as 0 to 7."""
    sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    for name, want in (("llama-tied", [0, 1, 2, 3, 4, 5, 6, 7]), ("qwen2-tied", [0, 2, 1, 3, 4, 6, 5, 7])):
        made = tiny_hf.model(tiny_hf.config(name, **sizes))
        rows = np.repeat(np.float32([0, 2, 1, 3, 4, 6, 5, 7])[:, None], 8, 1)
        file = gguf_files.write_model(tmp_path / f"{name}.gguf", made, add={"blk.0.attn_q.weight": rows})
        convert(file, tmp_path / name)
        got = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")[
            "model.layers.0.self_attn.q_proj.weight"
        ]
        assert got[:, 0].tolist() == want


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantised_weights_are_what_the_gguf_package_makes_of_them(tmp_path, kind):
    made = tiny_hf.model(tiny_hf.config("qwen2-tied", hidden_size=32, intermediate_size=64, num_hidden_layers=1))
    kind, name = gguf.GGMLQuantizationType[kind], "blk.0.ffn_down.weight"
    convert(gguf_files.write_model(tmp_path / "m.gguf", made, quantised={name: kind}), tmp_path / "out")
    original = gguf_files.tensors(made)[name]
    want = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    assert 0 < np.abs(want - original).max() < 0.1
    got = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(got, want)


def test_llama_3s_stretched_positions(tmp_path):
    """The file has a factor for each frequency; three of the four are worked out by hand, one lies between."""
    rope = tiny_hf._LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    made = tiny_hf.model(
        tiny_hf.config("llama3", hidden_size=32, rope_parameters=rope, max_position_embeddings=256)
    )  # 4 heads of 8: wavelengths 6.28, 167, 4443, 118142 of 8192 positions
    between = (8192 / 4442.88 - 1) / 3
    factors = np.float32([1, 1, 1 / (between + (1 - between) / 8), 8])
    convert(gguf_files.write_model(tmp_path / "m.gguf", made, add={"rope_freqs.weight": factors}), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert written == {k: v for k, v in rope.items()}
    wrong = gguf_files.write_model(tmp_path / "w.gguf", made, add={"rope_freqs.weight": factors * np.float32(1.01)})
    with pytest.raises(UserError, match="are not Llama 3's for 8192 positions"):
        convert(wrong, tmp_path / "wrong")


def test_the_tokenizer_and_its_template(tmp_path):
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    ends = dict(tokenizer__ggml__eot_token_id=3, tokenizer__ggml__eom_token_id=2)
    convert(gguf_files.write_model(tmp_path / "m.gguf", made, **ends), tmp_path / "out")
    ours = models.load_tokenizer(tmp_path / "out")
    assert ours.tokenize("bc abab 12<|end|><tool>a") == ["bc", "Ġab", "ab", "Ġ", "1", "2", "<|end|>", "<tool>", "a"]
    assert ours.decode(ours.encode("<|begin|>ab 12<tool>"), skip_special_tokens=True) == "ab 12<tool>"
    assert len(ours) == len(gguf_files.TOKENS) and "[PAD60]" not in ours.get_vocab()
    assert ours.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|begin|>ab<|end|>"
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 1, 1)
    assert hf.eos_ids(tmp_path / "out", ours) == (1, 2, 3)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 3, 2], "pad_token_id": 1}
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 3, 2]


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("gpt-2", "ab 123\n\n bc", ["ab", "Ġ", "1", "2", "3", "Ċ", "Ċ", "Ġ", "bc"]),
    ("qwen2", "it's 12", ["i", "t", "'", "s", "Ġ", "1", "2"]),
    ("llama-bpe", "ab!\n12", ["<|begin|>", "ab", "!", "Ċ", "1", "2"]),
])  # fmt: skip
def test_ways_of_splitting(tmp_path, pre, text, pieces):
    """Llama 3's texts begin with its BOS, unless the file says otherwise."""
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    bos = None if pre == "llama-bpe" else False
    changes = dict(tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=bos)
    convert(gguf_files.write_model(tmp_path / "m.gguf", made, **changes), tmp_path / "out")
    ours = models.load_tokenizer(tmp_path / "out")
    assert ours.convert_ids_to_tokens(ours.encode(text)) == pieces


def test_a_file_that_does_not_say_how_it_splits_is_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(console.log, "warning", lambda text, *args: said.append(text % args))
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    for name, pre in (("none", None), ("default", "default"), ("named", "gpt-2")):
        file = gguf_files.write_model(tmp_path / f"{name}.gguf", made, tokenizer__ggml__pre=pre)
        convert(file, tmp_path / name)
    assert len(said) == 2
    assert "none.gguf does not say how it splits text" in said[0] and "default.gguf does not say" in said[1]


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("llama-bpe", "it's 12345, ok?\n x  y", ["it", "'s", " ", "123", "45", ",", " ok", "?\n", " x", " ", " y"]),
    ("qwen2", "I'LL 12\r\n\r\nx", ["I", "'LL", " ", "1", "2", "\r\n\r\n", "x"]),
    ("smollm", "it's 12, ok", ["it", "'s", " ", "1", "2", ",", " ok"]),
    ("gpt-2", "it's 12, ok", ["it", "'s", " 12", ",", " ok"]),
])  # fmt: skip
def test_pieces_before_the_merges(pre, text, pieces):
    from grpojax.extensions.gguf import gguf_tokenizer

    step = gguf_tokenizer._splitting(gguf_tokenizer.PRE_TOKENIZERS[pre])
    assert [text[a:b] for _, (a, b) in step.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("changes", "message"), [
    (dict(drop=["blk.1.ffn_up.weight"]), "missing tensors: blk.1.ffn_up.weight"),
    (dict(drop=["token_embd.weight"]), "missing tensors: token_embd.weight"),
    (dict(add={"blk.0.ffn_up_exps.weight": np.ones((2, 3), np.float32)}), "unknown tensors: blk.0.ffn_up_exps.weight"),
    (dict(add={"blk.0.ffn_norm.weight": np.ones(5, np.float32)}), r"ffn_norm.weight \[5\] \(expected \[24\]\)"),
    (dict(llama__block_count=None), "the metadata lack 'llama.block_count'"),
    (dict(llama__rope__scaling__type="yarn"), "llama.rope.scaling.type='yarn' is not supported"),
    (dict(llama__attention__head_count_kv=[2, 2, 1]), "layers with different numbers of heads"),
    (dict(llama__attention__head_count_kv=3), "m.gguf: .*head_count=4 .*head_count_kv=3\n.*convert it again"),
    (dict(tokenizer__ggml__model="llama"), "its tokenizer is 'llama'"),
    (dict(tokenizer__ggml__pre="mystery"), "tokenizer.ggml.pre='mystery' is not known"),
    (dict(tokenizer__ggml__merges=["q !b"]), "its tokenizer is damaged"),
    (dict(tokenizer__ggml__eos_token_id=999), "eos_token_id=999, but there are 94 tokens"),
    (dict(split__count=3), "is one of 3 parts"),
])  # fmt: skip
def test_files_that_cannot_be_converted(tmp_path, changes, message):
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    file = gguf_files.write_model(tmp_path / "m.gguf", made, **changes)
    with pytest.raises(UserError, match=message):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_architecture_and_files_that_are_none(tmp_path):
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    file = gguf_files.write(tmp_path / "m.gguf", "mamba", gguf_files.fields(made), gguf_files.tensors(made))
    with pytest.raises(UserError, match="unknown architecture 'mamba'; known: llama, qwen2, qwen3"):
        convert(file, tmp_path / "out")
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:2000])
    for name in ("text", "cut"):
        with pytest.raises(UserError, match="is no GGUF file, or is damaged"):
            convert(tmp_path / f"{name}.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="no such file"):
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        convert(file, tmp_path / "full")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match=r"pip install 'grpojax\[gguf\]'"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
