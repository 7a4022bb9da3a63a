"""The policy without its unlikely tokens, against transformers'."""

import numpy as np
import pytest
from hf_compare import their
from runs import draw, opened

from grpojax.extensions.methods.proxy import ratios
from grpojax.host.errors import UserError
from grpojax.run import learn
from grpojax.run import recipe as recipes


def run_of(recipe, directory, *overrides, devices=1):
    given = [f"run.dir={directory}", "data.validation=null", "rewards.0.name=tiny_run:parity", *overrides]
    return opened(recipes.load(recipe, given), devices)


def ratios_of(run):
    try:
        batch = draw(run)
        _, signals = learn.score(run, run.state.networks, learn.pack(run, batch))
        return batch, signals["proxy_ratios"]
    finally:
        run.close()


def test_ratios_of_a_distribution_that_is_written_out():
    """The likeliest has 0.5, so that all under 0.05 are noise; what is at the border stays."""
    logits = np.log(np.array([[0.5, 0.3, 0.1, 0.05, 0.03, 0.02]], np.float32)).repeat(6, 0) + 7
    got = ratios(logits, np.arange(6), 0.099)
    np.testing.assert_allclose(got, [1 / 0.95] * 4 + [0, 0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_ratios_are_those_of_transformers(recipe, tmp_path, devices):
    """At a temperature, on one device and on eight, with positions taken in pieces."""
    import with_torch  # noqa: F401
    from with_torch import torch

    options = ["variant={name: lp_reg, noise: 0.3}", "rollout.temperature=0.7"]
    batch, got = ratios_of(run_of(recipe, tmp_path, *options, devices=devices))
    made = their(recipe.parent)
    for (p, g), n in np.ndenumerate(batch.rollout.lengths):
        prompt, tokens = batch.problems[p].ids, batch.rollout.tokens[p, g, :n].tolist()
        with torch.no_grad():
            logits = made(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        q = logits.softmax(-1).numpy()
        kept = np.where(q >= 0.3 * q.max(-1, keepdims=True), q, 0)
        want = (kept / kept.sum(-1, keepdims=True) / q)[np.arange(n), tokens]
        # A token whose share is that of the border within rounding may fall on either side.
        near = np.abs(q[np.arange(n), tokens] / q.max(-1) - 0.3) < 1e-4
        np.testing.assert_allclose(np.where(near, 0, got[p, g, :n]), np.where(near, 0, want), rtol=1e-3)
    assert (got == 0).any() and (got > 1).any()


def test_noise_is_a_share(recipe, tmp_path):
    with pytest.raises(UserError, match="noise=1.5: must be over 0 and under 1"):
        recipes.load(recipe, [f"run.dir={tmp_path}", "variant={name: lp_reg, noise: 1.5}"])
