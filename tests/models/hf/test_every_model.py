"""Every causal language model of transformers is read and gives its numbers, or is refused in two lines."""

import copy
import json

import every_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
import transformers
from flax import nnx
from hf_compare import LENGTHS, our_logps, plain_rows, sequences, their, their_logps
from with_torch import torch

from grpojax import models
from grpojax.models import Compute
from grpojax.models.hf import from_hf
from grpojax.models.hf.config_json import read_config
from grpojax.models.hf.families import FAMILIES as READ

FAMILIES = sorted(READ)
OF_TEXT = ["gemma3", "qwen3_5"]  # read by their text part, as `test_folders` and `test_hybrid` show
BLOCKS = ("glm4", "hunyuan_v1_dense", "qwen2_moe")  # between them every kind of block that CI trains here


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return every_model.look_at_all(tmp_path_factory.mktemp("every"))


@pytest.mark.slow
def test_those_that_are_read_are_those_that_are_compared(found):
    assert sorted(kind for kind, f in found.items() if f.read) == sorted(FAMILIES + OF_TEXT)


@pytest.mark.slow
def test_an_unknown_family_is_refused_by_its_model_type_and_what_is_unknown(found):
    """In milliseconds: only config.json is there."""
    for kind, f in found.items():
        if not f.read:
            assert f.error.startswith("unknown ") and "model_type='" in f.error, f.error
            assert len(every_model.reason(f.error)) > 5, kind


@pytest.mark.slow
def test_the_tables_of_the_guide_say_so(found):
    text = every_model.PAGE.read_text(encoding="utf-8")
    headings = every_model.rows(text)
    today = {kind: "Read" if f.read else "Refused" for kind, f in found.items()}
    assert {kind: headings.get(kind, today[kind]) for kind in today} == today  # those that are new there are not listed
    assert {kind for kind in headings if headings[kind] == "Read"} == set(FAMILIES + OF_TEXT)
    if f"transformers {transformers.__version__}." in text:
        assert text == every_model.page(found), "run: python tests/every_model.py"


def test_those_of_which_no_config_is_made():
    for kind in every_model.NOT_MADE:
        with pytest.raises(Exception, match="alidation"):
            every_model.config(kind)


def made_model(kind, folder, config=None):
    """A small random model of a kind, saved to a folder."""
    if config is None:
        config = every_model.small(kind, full=True)
    made = tiny_hf.model(config)
    made.save_pretrained(folder)
    return made


def stepped(model, rate):
    """Our model after a step of gradient ascent on the log-probs of the completions."""
    rows = plain_rows(sequences(model.config.vocab_size))
    graph, params = nnx.split(model)

    def total(params):
        logps = models.score(graph, params, rows, Compute()).logps
        return jnp.where(rows.segments > 0, logps, 0.0).sum()

    grads = jax.jit(jax.grad(total))(params)
    return nnx.merge(graph, jax.tree.map(lambda x, g: x + rate * g, params, grads))


def their_step(made, rate):
    for tokens, (prompt, _) in zip(sequences(made.config.vocab_size), LENGTHS, strict=True):
        scores = made(torch.tensor([tokens])).logits.log_softmax(-1)
        scores[0, :-1].gather(-1, torch.tensor(tokens)[1:, None])[prompt - 1 :].sum().backward()
    with torch.no_grad():
        for p in made.parameters():
            p += rate * p.grad
    return made


@pytest.mark.in_ci(*BLOCKS)
@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_scores_and_learns_as_transformers_does(tmp_path, kind):
    made = made_model(kind, tmp_path / "in")
    before = {name: x.clone() for name, x in made.state_dict().items()}
    model = models.load(tmp_path / "in")
    for ours, theirs in zip(our_logps(model), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)

    models.save(tmp_path / "out", stepped(model, 0.01), source=tmp_path / "in")
    ours, theirs = their(tmp_path / "out", dtype="auto").state_dict(), their_step(made, 0.01).state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], atol=1e-4, rtol=1e-4, msg=lambda text, name=name: name + text
        )
    moved = [name for name in theirs if (theirs[name] - before[name]).abs().max() > 1e-3]
    assert len(moved) > 0.8 * len(theirs)  # biases of keys do not move


# Fields of any config that are not about the forward of a model, or that say how its result is wrapped.
_NOT_ASKED = {
    *("architectures", "model_type", "transformers_version", "return_dict", "dtype", "torch_dtype", "vocab_size"),
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_local_experts"),
}


def alternatives(name, value):
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 0.5, value / 2, 0]
    if value is None:
        return [True, 1, 2.0]
    if isinstance(value, dict):
        return [{**value, key: new} for key in value for new in alternatives(key, value[key])]
    if isinstance(value, list) and name != "layer_types":
        return [value[::-1]] if value[::-1] != value else []
    return []


@pytest.mark.exhaustive(
    "models/hf/test_config_values.py::test_a_config_with_anything_in_it_is_read_as_transformers_does_or_refused"
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_not_read_changes_no_number(tmp_path, kind):
    """Each field of a config in turn, with other values: refused here or there, or the numbers are transformers'."""
    made = made_model(kind, tmp_path / "base")
    raw = json.loads((tmp_path / "base/config.json").read_text())
    base, weights = read_config(tmp_path / "base"), made.state_dict()
    want, counts = their_logps(made), {"same": 0, "other": 0}
    for name in sorted(raw.keys() - _NOT_ASKED):
        for value in alternatives(name, raw[name]):
            changed = raw | {name: value}
            try:
                config, ours = type(made.config).from_dict(copy.deepcopy(changed)), from_hf(changed)
                other = tiny_hf.model(config)
                theirs = their_logps(other)
            except Exception:  # refused by one of both, with any error of transformers'
                continue
            if ours == base:
                counts["same"] += 1
                other.load_state_dict(weights)
                for a, b in zip(their_logps(other), want, strict=True):
                    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=f"{name}={value}")
            else:
                counts["other"] += 1
                folder = tmp_path / f"{name}-{counts['other']}"
                other.save_pretrained(folder)
                (folder / "config.json").write_text(json.dumps(changed))
                for a, b in zip(our_logps(models.load(folder)), theirs, strict=True):
                    np.testing.assert_allclose(a, b, atol=1e-4, err_msg=f"{name}={value}")
    assert min(counts.values()) > 3, counts
