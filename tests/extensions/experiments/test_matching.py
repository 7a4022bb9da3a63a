"""In what two resolved methods differ besides what they are about."""

import copy

import pytest

from grpojax.extensions.experiments import matching

TREE = {
    "variant": "grpo",
    "options": {"ddof": 1},
    "advantage": "center(by=group) | scale(by=group, ddof=1, eps=0.0001)",
    "objective": {
        "surrogate": "clipped(low=0.2, high=0.2, dual=None)", "ratio": "token", "aggregate": "sequence_mean",
        "constant": None, "count_empty": True, "kl_coef": 0.0, "kl_kind": "k3", "kl_in": "loss",
    },
    "filter": None,
    "retire": None,
    "critic": None,
    "needs": [],
}  # fmt: skip
MECHANISM = {"advantage": TREE["advantage"] + " | penalize_all_fail(c=0.3)"}
NO_SCALE = {"advantage": "center(by=group)"}
OTHER_DDOF = {"advantage": TREE["advantage"].replace("ddof=1", "ddof=0"), "options": {"ddof": 0}}
SUM = {"objective.aggregate": "sequence_sum"}
KL = {"objective.kl_coef": 0.04}
CLIP = {"objective.surrogate": "clipped(low=0.2, high=0.28, dual=None)"}
FILTER = {"filter": {"max_rollouts": 3, "metric": None}}


def changed(*changes):
    tree = copy.deepcopy(TREE)
    for change in changes:
        for name, value in change.items():
            section, _, key = name.partition(".")
            if key:
                tree[section][key] = value
            else:
                tree[section] = value
    return tree


@pytest.mark.parametrize(("changes", "wanted"), [
    ((), {}),
    ((MECHANISM,), {}),
    ((MECHANISM, SUM), {"aggregation": ("sequence_mean", "sequence_sum")}),
    ((MECHANISM, KL), {"KL": ("0", "0.04 k3 in loss")}),
    ((MECHANISM, CLIP),
     {"clip of clipped": ("low=0.2, high=0.2, dual=None", "low=0.2, high=0.28, dual=None")}),
    ((MECHANISM, FILTER), {"filter": ("none", "{max_rollouts: 3}")}),
    ((NO_SCALE, {"objective.aggregate": "constant", "objective.constant": 40.0}),
     {"aggregation": ("sequence_mean", "constant 40")}),
    ((OTHER_DDOF, SUM), {"ddof": ("1", "0"), "aggregation": ("sequence_mean", "sequence_sum")}),
    (({"advantage": MECHANISM["advantage"].replace("ddof=1", "ddof=0")},), {"ddof": ("1", "0")}),
    # One of them by itself is what the methods are about.
    ((SUM,), {}), ((KL,), {}), ((CLIP,), {}), ((FILTER,), {}), ((OTHER_DDOF,), {}),
    # No scale, no ddof; another surrogate, another clip; a KL of weight 0 is none of any kind.
    ((NO_SCALE,), {}),
    (({"objective.surrogate": "cispo(weight_max=5)"},), {}),
    ((MECHANISM, {"objective.kl_kind": "k2"}), {}),
    # Names, options and needs repeat what stands in the chain and the objective.
    ((SUM, {"variant": "luspo", "options": {"x": 1}, "needs": ["entropy"]}), {}),
    ((SUM, {"retire": {"share": 1.0}}), {"aggregation": ("sequence_mean", "sequence_sum")}),
])  # fmt: skip
def test_what_is_unmatched(changes, wanted):
    assert matching.unmatched(TREE, changed(*changes)) == wanted
    swapped = {name: (b, a) for name, (a, b) in wanted.items()}
    assert matching.unmatched(changed(*changes), TREE) == swapped
