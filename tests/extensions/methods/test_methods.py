"""Two resolved methods compared, of variants that need more than the core."""

import pytest
import resolved_methods
from resolved_methods import tree
from variant_examples import built, in_core

from grpojax import variants
from grpojax.records.method_diff import differences, in_a_line

NAMES = [name for name in variants.names() if built(name).objective.has_ratio]


@pytest.mark.parametrize("name", [name for name in NAMES if not in_core(name)])
def test_a_method_is_described_in_plain_json_with_all_its_options(name):
    resolved_methods.check_described(name)


def test_every_two_variants_differ_in_more_than_their_names():
    resolved_methods.check_apart(NAMES)


@pytest.mark.parametrize("name", ["nthr", "token_critic"])
def test_every_option_of_another_value_is_named(name):
    resolved_methods.check_options(name)


@pytest.mark.parametrize(("a", "b", "line"), [
    (tree("nthr", eta=1.0), tree("nthr"), "options.eta: 1.0 -> none"),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("gt_likelihood"),
     "advantage.likelihood_of_all_fail: none -> "
     "reward=likelihood_of_all_fail(fail_reward=0.0, everywhere=False, relative=False)"),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("token_critic"),
     "advantage.add_token_bias: none -> add_token_bias(bound=None, center=False); "
     "critic: none -> loss=BiasLoss, signal=token_bias, targets=center | scale | to_tokens"),
])  # fmt: skip
def test_methods_differ_from_their_controls_in_a_line(a, b, line):
    assert in_a_line(differences(a, b)) == line
