"""Every entry point of the mathematics refuses an array of another shape, by its name."""

import functools
import inspect

import jax
import numpy as np
import pytest

from grpojax import advantages as A
from grpojax import credit as C
from grpojax import losses as L
from grpojax import shapes

# Different primes, so that no wrong shape passes for a right one; P G is flattened to B.
SIZES = {"P": 2, "G": 3, "T": 5, "D": 7, "W": 11, "V": 13, "B": 6}


def array(axes, kind=np.float32):
    return np.ones([SIZES[letter] for letter in axes.split()], kind)


def mean(x):
    return x


def surrogate(make, *more, **given):
    """A surrogate as a function of named arrays."""

    def call(log_ratios, advantages, **arrays):
        return make(log_ratios, advantages, **arrays, **given)

    names = ("log_ratios", "advantages", *more)
    return call, {name: ("B T", np.float32) for name in names}


def same(*names, masks=(), ints=(), axes="B T"):
    kinds = dict.fromkeys(names, np.float32) | dict.fromkeys(masks, bool) | dict.fromkeys(ints, np.int32)
    return {name: (axes, kind) for name, kind in kinds.items()}


ALL_TERMS = L.Objective(kl_coef=0.1, llds_coef=0.1, covariance="clip", entropy_coef=0.1, importance="mask")
NTHR = {"probs": ("P G T W", np.float32), "hidden": ("P G T D", np.float32), "columns": ("P G T", np.int32)}
NTHR |= {"mask": ("P G T", bool)}

# Function of an `__all__`, how it is called with named arrays, and the axes and the type of each.
FUNCTIONS = {
    "adapt_entropy_coef": (functools.partial(L.adapt_entropy_coef, target=0.2), same("coef", "entropy", axes="")),
    "cispo": surrogate(L.cispo(), "logps"),
    "clip_cov": (
        functools.partial(L.clip_cov, jax.random.key(0)),
        same("cov", masks=("mask", "skip"), ints=("token_index",)),
    ),
    "clipped": surrogate(L.clipped()),
    "covariance": (L.covariance, same("logps", "advantages", masks=("mask",))),
    "covariance_mask": (
        functools.partial(L.covariance_mask, jax.random.key(0), objective=ALL_TERMS),
        same("logps", "advantages", "weights", "old_logps", ints=("segments", "token_index")),
    ),
    "displacement": (L.displacement, same("log_ratios", masks=("mask",), ints=("actions", "segments"))),
    "displacement_weights": (
        functools.partial(L.displacement_weights, answer_weight=0.5),
        same("advantages", masks=("mask", "answer")),
    ),
    "dpo_loss": (L.dpo_loss, same("chosen", "rejected", "ref_chosen", "ref_rejected", axes="B")),
    "dppo_kl": surrogate(L.dppo_kl(), "logps"),
    "dppo_tv": surrogate(L.dppo_tv(), "logps"),
    "geometric": surrogate(L.geometric(), sequence_mean=mean),
    "importance_correction": (
        L.importance_correction,
        same("train_logps", "sampler_logps", masks=("mask",), ints=("segments",)),
    ),
    "kl": (
        functools.partial(L.kl, kind="unbiased"),
        same("logps", "ref_logps", "log_ratios", masks=("mask",)),
    ),
    "kl_cov": (L.kl_cov, same("cov", masks=("mask",))),
    "kl_cov_penalty": (L.kl_cov_penalty, same("log_ratios", masks=("selected",))),
    "log_difference": (L.log_difference, same("logps", "behavior_logps", masks=("mask",))),
    "log_ratio": (L.log_ratio, same("logps", "behavior_logps", masks=("mask",), ints=("segments",))),
    "loss_weights": (functools.partial(L.loss_weights, how="prompt_mean"), same(masks=("mask",), axes="P G T")),
    "off_policy_mask": (
        functools.partial(L.off_policy_mask, limit=0.5),
        same("logps", "sampler_logps", "advantages", masks=("mask",), ints=("segments",)),
    ),
    "policy_loss": (
        functools.partial(L.policy_loss, objective=ALL_TERMS),
        same(
            "logps", "advantages", "weights", "old_logps", "ref_logps", "sampler_logps", "displacement_weights",
            "entropy", masks=("covariance_mask",), ints=("actions", "segments"),
        ),
    ),
    "reinforce": surrogate(L.reinforce(), "logps"),
    "sft_loss": (L.sft_loss, same("logps", "weights")),
    "soft_adaptive": surrogate(L.soft_adaptive()),
    "unclipped": surrogate(L.unclipped()),
    "value_loss": (functools.partial(L.value_loss, clip=0.2), same("values", "returns", "weights", "old_values")),
    "vespo": surrogate(L.vespo(), "logps"),
    "group_vocabulary": (
        functools.partial(C.group_vocabulary, size=4),
        same(masks=("mask",), ints=("tokens",), axes="P G T"),
    ),
    "influence": (C.influence, NTHR | same("weights", axes="P G T")),
    "nthr_scores": (C.nthr_scores, NTHR | same("sign", axes="P G")),
    "token_bias_loss": (C.token_bias_loss, same("bias", "advantages", "weights")),
}  # fmt: skip
# Any shape is right.
ELEMENTWISE = {"bounded_bias"}

SAMPLES = {
    "best_margin": A.best_margin(),
    "center": A.center(),
    "center_by_length": A.center_by_length(),
    "distill": A.distill(),
    "entropy_filter": C.entropy_filter(),
    "entropy_penalty": C.entropy_penalty(),
    "floor": A.floor(-1.0),
    "likelihood_of_all_fail": A.likelihood_of_all_fail(),
    "max_rl": A.max_rl(),
    "pass_at_k": A.pass_at_k(2),
    "penalize_all_fail": A.penalize_all_fail(1.0),
    "process_rewards": A.process_rewards(),
    "rescale_live": A.rescale_live(),
    "scale": A.scale(),
    "sharpen_novelty": C.sharpen_novelty(),
    "subtract_greedy": A.subtract_greedy(),
    "subtract_kl": A.subtract_kl(0.1),
    "to_tokens": A.to_tokens(),
    "token_rewards": A.token_rewards(kl_coef=0.1),
    "virtual_best": A.virtual_best(),
    "weigh_signs": A.weigh_signs(),
    "whiten": A.whiten(),
}
TOKENS = {
    "add_token_bias": C.add_token_bias(),
    "answer_term": A.answer_term(),
    "compensate_rare_tokens": C.compensate_rare_tokens(),
    "conflict_weights": C.conflict_weights(),
    "entropy_mask": C.entropy_mask(),
    "entropy_of_equal_groups": C.entropy_of_equal_groups(),
    "entropy_shaping": C.entropy_shaping(),
    "nthr": C.nthr(),
    "protect_rare_tokens": C.protect_rare_tokens(),
}
ALONG = {"gae": (A.gae(), ("mask", "values")), "token_returns": (A.token_returns(), ("mask",))}

BOOLS, INTS = ("valid", "mask"), ("lengths", "full_lengths", "tokens", "columns")
AXES = {"greedy_rewards": "P", "hidden": "P G T D", "probs": "P G T W"}
AXES |= dict.fromkeys(
    ("rewards", "outcome", "valid", "lengths", "full_lengths", "likelihood", "influence_means"), "P G"
)


def every_signal(**other):
    kinds = dict.fromkeys(BOOLS, bool) | dict.fromkeys(INTS, np.int32)
    fields = A.Signals.__dataclass_fields__
    given = {name: array(AXES.get(name, "P G T"), kinds.get(name, np.float32)) for name in fields}
    return A.Signals(**given | other)


def wrong_shapes(x, axes):
    """Of each kind once: an axis less or more, another size of each axis that is not the array's own."""
    if x.ndim:
        yield x[..., 0]
    yield x[None]
    for axis, letter in enumerate(axes.split()):
        if letter not in "DW":
            yield np.concatenate([x, x.take([0], axis)], axis)


def test_every_entry_point_is_in_the_table():
    transforms = {*SAMPLES, *TOKENS, *ALONG, "chain"}
    tabled = {*FUNCTIONS, *ELEMENTWISE, *transforms}
    public = {
        name
        for module in (L, A, C)
        for name in module.__all__
        if callable(getattr(module, name)) and inspect.getmodule(getattr(module, name)).__name__.startswith("grpojax")
    }
    assert public - tabled == {
        "Objective",
        "Signals",
        "described",
        "text_of",
        *("need", "per_sample", "per_token"),  # what transforms begin with
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    call, arrays = FUNCTIONS[name]
    right = {key: array(axes, kind) for key, (axes, kind) in arrays.items()}
    jax.eval_shape(lambda: call(**right))  # the table itself
    for key, x in right.items():
        for wrong in wrong_shapes(x, arrays[key][0]):
            if len(right) == 1 and wrong.ndim == x.ndim:
                continue  # no other array to compare its sizes with
            if name == "token_bias_loss" and key == "advantages" and wrong.shape == x.shape[:-1]:
                continue  # one number a sample
            # Of an array and what came before it, one is wrong: the error names the second.
            with pytest.raises(ValueError, match=rf"{name}.*: \w+ has shape \(.*\), wanted (\[|a number)"):
                call(**right | {key: wrong})


@pytest.mark.parametrize("name", [*SAMPLES, *TOKENS])
def test_transforms(name):
    transform = (SAMPLES | TOKENS)[name]
    values = array("P G" if name in SAMPLES else "P G T")
    jax.eval_shape(lambda: transform(values, every_signal()))
    for wrong in (values[0], values[None], np.ones(4, np.float32)):
        if name in ("floor", "whiten") and wrong.ndim == 3:
            continue
        with pytest.raises(ValueError, match=rf"{name}.* takes \[P, G.*, got \({wrong.shape[0]},"):
            transform(wrong, every_signal())
    for field in ("lengths", "mask", "rewards"):
        for wrong in wrong_shapes(getattr(every_signal(), field), AXES.get(field, "P G T")):
            with pytest.raises(ValueError, match=rf"{name}: signals\.\w+ has shape .*, wanted \[P, G"):
                transform(values, every_signal(**{field: wrong}))


@pytest.mark.parametrize("field", [name for name in A.Signals.__dataclass_fields__ if name != "extra"])
def test_chain_looks_at_every_signal(field):
    for wrong in wrong_shapes(getattr(every_signal(), field), AXES.get(field, "P G T")):
        with pytest.raises(ValueError, match=r"chain: signals\.\w+ has shape .*, wanted \[P"):
            A.chain()(array("P G"), every_signal(**{field: wrong}))


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("axes", ["B T", "P G T", "T"])
def test_transforms_along_tokens(name, axes):
    transform, fields = ALONG[name]
    kinds = {"mask": bool}
    signals = {field: array(axes, kinds.get(field, np.float32)) for field in fields}
    assert jax.eval_shape(lambda: transform(array(axes), A.Signals(**signals))).shape == array(axes).shape
    for field in fields:
        for wrong in wrong_shapes(signals[field], axes):
            with pytest.raises(ValueError, match=rf"{name}.*(has shape|, got)"):
                transform(array(axes), A.Signals(**signals | {field: wrong}))


def test_chain_says_what_to_do():
    for rewards in (array("B"), array("P G T")):
        with pytest.raises(ValueError, match=r"chain takes rewards \[P, G\], got .*rewards\.reshape"):
            A.chain(A.center())(rewards)
    flat = A.Signals(mask=array("B T", bool))
    with pytest.raises(ValueError, match=r"signals\.mask has shape \(6, 5\), wanted \[P, G, T\] with P = 6, G = 5"):
        A.center()(array("B T"), flat)  # tokens that were meant for samples
    for result in (lambda values, signals: values.mean(1), lambda values, signals: values[..., :1]):
        with pytest.raises(ValueError, match=r"<lambda>: its result has shape"):
            A.chain(result)(array("P G"))
        with pytest.raises(ValueError, match=r"<lambda>: its result has shape"):
            A.chain(reward=result)(array("P G"))


def test_transforms_without_a_chain():
    """What the rewards alone say is enough; else the error says where the rest comes from."""
    rewards = np.array([[1, 0, np.nan], [2, 2, 2]], np.float32)
    for given in ((), (None,), (A.Signals(),)):
        np.testing.assert_array_equal(A.center()(rewards, *given), [[0.5, -0.5, 0], [0, 0, 0]])
    for transform, field in ((A.scale(), "rewards"), (A.pass_at_k(1), "outcome"), (A.rescale_live(), "rewards")):
        with pytest.raises(ValueError, match=rf"needs signals\.{field}, which is missing: chain\(.*fills it in"):
            transform(rewards)
    with pytest.raises(ValueError, match=r"gae needs signals\.mask, which is missing"):
        A.gae()(rewards)


def test_the_square_that_was_broadcast_in_silence():
    """One advantage a sample of as many samples as tokens: every sample's tokens would have those of all samples."""
    square = np.ones((5, 5), np.float32)
    arrays = {"logps": -square, "weights": square / 25, "advantages": np.arange(5, dtype=np.float32)}
    with pytest.raises(ValueError, match=r"advantages has shape \(5,\), wanted \[\.\.\., T\] = \(5, 5\); one number a"):
        L.policy_loss(objective=L.Objective(), **arrays)
    for make in (L.clipped(), L.unclipped(), L.soft_adaptive()):
        with pytest.raises(ValueError, match=r"advantages has shape \(5,\), wanted \[\.\.\.\] = \(5, 5\)"):
            make(square, arrays["advantages"])


@pytest.mark.parametrize(
    "result", [lambda r, a: (r * a).mean(), lambda r, a: (r * a)[:, 0], lambda r, a: (r * a)[None]]
)
def test_a_surrogate_of_your_own_gives_a_loss_for_each_token(result):
    square = np.ones((5, 5), np.float32)
    with pytest.raises(
        ValueError, match=r"surrogate <lambda>: its result has shape .*, wanted \[\.\.\., T\] = \(5, 5\)"
    ):
        L.policy_loss(square, objective=L.Objective(surrogate=result), advantages=square, weights=square)


def test_letters_are_one_size_throughout():
    sizes = shapes.check("f", "... T", x=np.ones((2, 3, 5)), y=None)
    assert sizes == {"...": (2, 3), "T": 5}
    assert shapes.check("f", "...", sizes, x=np.ones((2, 3)))["..."] == (2, 3)
    with pytest.raises(ValueError, match=r"f: x has shape \(2, 3, 7\), wanted \[\.\.\., T\] = \(2, 3, 5\)"):
        shapes.check("f", "... T", sizes, x=np.ones((2, 3, 7)))
    with pytest.raises(ValueError, match=r"f: x has shape \(\), wanted \[\.\.\., T\]"):
        shapes.check("f", "... T", x=1.0)
    with pytest.raises(ValueError, match=r"f: x has shape \(1,\), wanted a number, \[\]"):
        shapes.check("f", "", x=[1.0])
