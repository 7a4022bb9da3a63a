"""The ids of a tokenizer beside the rows of an embedding; log-probs against transformers' with the same rows masked."""

import dataclasses
import json
import types

import hf_compare
import hypothesis
import numpy as np
import pytest
import tiny_hf
from hypothesis import strategies as st
from plain_decoder import BASE

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf


def with_ids(*ids):
    """What is read of a tokenizer: tokens and their ids."""
    vocabulary = {f"<{i}>": i for i in ids}
    return types.SimpleNamespace(get_vocab=lambda: vocabulary)


@pytest.mark.parametrize(
    ("ids", "unused"),
    [
        (range(53), ()),
        (range(52), ((52, 53),)),
        (range(40), ((40, 53),)),
        ([0, 1, 4, 5, 52], ((2, 4), (6, 52))),
        ([3, 4], ((0, 3), (5, 53))),
    ],
)
def test_unused_rows(ids, unused):
    assert hf.fit_tokenizer(BASE, with_ids(*ids)) == dataclasses.replace(BASE, unused_rows=unused)


def test_a_config_that_was_json_is_the_same_static_argument():
    config = dataclasses.replace(BASE, unused_rows=((40, 53),))
    again = DecoderConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and hash(again) == hash(config)


@hypothesis.given(st.sets(st.integers(0, 52), min_size=1))
def test_every_row_is_a_token_or_unused(ids):
    ranges = hf.fit_tokenizer(BASE, with_ids(*ids)).unused_rows
    assert sorted([*ids, *(i for start, stop in ranges for i in range(start, stop))]) == list(range(53))
    assert all(stop < start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize(("ids", "said"), [
    (range(54), "ids for 54 tokens, and its embedding 53 rows.*'<53>'"),
    ([1, 2, 60, 70], "ids for 71 tokens, and its embedding 53 rows.*'<60>'"),
])  # fmt: skip
def test_an_id_beyond_the_embedding_is_refused_with_both_sizes(ids, said):
    with pytest.raises(UserError, match=f"runs/model: .*{said}") as refused:
        hf.fit_tokenizer(BASE, with_ids(*ids), "runs/model")
    assert str(refused.value).count("\n") == 1


def test_the_builtin_tokenizer_counts_its_added_tokens():
    """Its vocabulary was rounded up to a multiple of 64."""
    folder = data.locate("builtin:tiny")
    tokenizer = hf.load_tokenizer(folder)
    config = hf.read_config(folder)
    assert hf.fit_tokenizer(config, tokenizer).unused_rows == ((len(tokenizer), config.vocab_size),)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(30)])
    assert hf.fit_tokenizer(config, tokenizer) == config
    tokenizer.add_tokens(["<extra_30>"])
    with pytest.raises(UserError, match="385 tokens, and its embedding 384 rows.*'<extra_30>'"):
        hf.fit_tokenizer(config, tokenizer)


@pytest.mark.parametrize("name", ["qwen2-tied", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_log_probs_equal_those_of_transformers_with_the_rows_masked(name, tmp_path):
    """Also after a save, which keeps the rows; unmasked, the planted ones take nearly all of the probability."""
    from with_torch import torch

    made = tiny_hf.model(tiny_hf.config(name))
    with torch.no_grad():
        made.lm_head.weight[80:] *= 30
        made.lm_head.weight[7] *= 30
    made.save_pretrained(tmp_path / "in")
    tokenizer = with_ids(*range(7), *range(8, 80))
    loaded = hf.load(tmp_path / "in", tokenizer=tokenizer)
    assert loaded.config.unused_rows == ((7, 8), (80, 94))
    hf.save(tmp_path / "out", loaded, source=tmp_path / "in")
    assert hf.read_config(tmp_path / "out") == hf.read_config(tmp_path / "in")
    hf_compare.assert_same_torch(hf_compare.their(tmp_path / "out"), made)

    tokens = [[i if i < 80 and i != 7 else i % 7 for i in row] for row in hf_compare.sequences(94)]
    rows = hf_compare.plain_rows(tokens)
    masked, leaks = [], []
    for row, (prompt, _) in zip(tokens, hf_compare.LENGTHS, strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = made(ids).logits.float()
        leaks.append(logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[prompt - 1 :, 0].numpy())
        logits[..., 80:], logits[..., 7] = -torch.inf, -torch.inf
        masked.append(logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[prompt - 1 :, 0].numpy())
    for ours, theirs, leaking in zip(hf_compare.our_logps(loaded, rows=rows), masked, leaks, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        assert np.abs(leaking - theirs).max() > 1
