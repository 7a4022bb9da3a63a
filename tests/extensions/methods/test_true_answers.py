"""The true answer spliced into samples, and its likelihood against transformers'."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_hf
from hf_compare import their
from runs import draw, numbers, opened

from grpojax import data, variants
from grpojax.extensions.methods import displacement
from grpojax.extensions.methods.splicing import (
    Marker,
    answer_tokens,
    find_marker,
    splice,
    splice_groups,
    with_answers,
)
from grpojax.extensions.methods.true_answers import likelihoods
from grpojax.host.errors import UserError
from grpojax.models import flops, hf
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.run.minibatch import whole
from grpojax.train import train
from grpojax.types import Rollout


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load_tokenizer(str(data.locate("builtin:tiny")))


@pytest.mark.parametrize(
    ("text", "marker", "want"),
    [
        ("#### 3, no: #### 4", None, Marker(12, 16, 2)),
        ("## Answer: 3", None, Marker(0, 10, 1)),
        (r"#### 3 \boxed {4}", None, Marker(7, 15, 2)),
        (r"\boxed{4} #### 3", r"\boxed{}", Marker(0, 7, 1)),
        ("it is: 3", "is:", Marker(3, 6, 1)),
        ("no answer", None, Marker(9, 9, 0)),
        ("#### 3", "is:", Marker(6, 6, 0)),
    ],
)
def test_the_last_marker(text, marker, want):
    assert find_marker(text, marker) == want


def test_what_is_sampled_stays_up_to_the_marker(tokenizer):

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    ids = encode("5 + 3 = 8\n#### 7, or\n####  9")
    got = splice(ids, "25", tokenizer)
    assert (got.markers, got.scored) == (2, 4)  # two blanks, two digits
    assert tokenizer.decode(got.ids) == "5 + 3 = 8\n#### 7, or\n####  25"
    assert list(got.ids[: -got.scored - 4]) == ids[: -3 - 4]
    with_marker = splice(ids, "25", tokenizer, include_marker=True)
    assert (with_marker.ids, with_marker.scored) == (got.ids, 8)
    cut = splice(encode("8\n####"), "25", tokenizer)
    assert tokenizer.decode(cut.ids) == "8\n#### 25" and cut.scored == 3
    missing = splice(encode("5 + 3"), "25", tokenizer)
    assert tokenizer.decode(missing.ids) == "5 + 3\n#### 25" and (missing.scored, missing.markers) == (3, 0)


def test_a_marker_within_a_token_and_characters_of_several():
    made = tiny_hf.tokenizer()
    text = "你好 🙂 The answer to 89 is 12"
    ids = made.encode(text, add_special_tokens=False)
    got = splice(ids, "7", made, marker="swer")  # " answer" is one token
    assert made.decode(got.ids) == "你好 🙂 The answer 7" and list(got.ids[:4]) == ids[:4]
    box = splice(made.encode(r"It's \boxed{42}", add_special_tokens=False), "7", made)
    assert made.decode(box.ids) == r"It's \boxed{7" and box.scored == 1


def test_a_marker_that_begins_in_the_token_that_ends_a_character():
    pieces = [b"a", "🙂".encode()[:3], "🙂".encode()[3:] + b"##", b"## 5"]

    class Bytes:
        def decode(self, ids, skip_special_tokens=True):
            return b"".join(pieces[i] for i in ids).decode(errors="replace")

        def encode(self, text, add_special_tokens=False):
            pieces.append(text.encode())
            return [len(pieces) - 1]

    got = splice(range(4), "7", Bytes())
    assert Bytes().decode(got.ids) == "a🙂#### 7" and got.ids[0] == 0 and 1 not in got.ids


def test_likelihoods():
    """Golden; a k-th root with the wrong number of tokens would give 0.53."""
    logps = np.log([[[0.5, 0.2, 0.8, 0.5], [0.9, 0.9, 0.9, 1e-9]]])
    mask = np.array([[[True, True, True, False]] * 2])
    np.testing.assert_allclose(likelihoods(logps, mask, "joint"), [[0.08, 0.729]], rtol=1e-6)
    np.testing.assert_allclose(likelihoods(logps, mask, "per_token"), [[0.43088694, 0.9]], rtol=1e-6)
    np.testing.assert_allclose(likelihoods(logps, mask, "mean"), [[0.5, 0.9]], rtol=1e-6)
    np.testing.assert_allclose(likelihoods(logps, mask, "log"), [[-2.52572864, -0.31608155]], rtol=1e-6)
    for kind, nothing in (("joint", 0.0), ("per_token", 0.0), ("mean", 0.0), ("log", -np.inf)):
        assert likelihoods(logps, mask & False, kind).tolist() == [[nothing, nothing]]


def trainer_of(recipe, directory, variant, *more, devices=1, eos_ids=None):
    overrides = [f"run.dir={directory}", f"variant={variant}", "data.validation=null", "rewards.0.name=tiny_run:parity"]
    return opened(config.load(recipe, [*overrides, *more]), devices, eos_ids)


def late(trainer):
    """A rollout's likelihoods, what is logged of them, and the samples."""
    batch = draw(trainer).with_rewards()
    made, logged = learn.signals_after_rewards(trainer, trainer.state.networks, batch, batch.total)
    return made["likelihood"], logged, batch


def expected(recipe, batch, tokenizer, **options):
    """One sample after the other, by transformers."""
    made = their(recipe.parent)
    out = np.zeros(batch.total.shape)
    for p, problem in enumerate(batch.problems):
        for g in range(out.shape[1]):
            n = int(batch.rollout.lengths[p, g]) - int(batch.rollout.stopped[p, g])
            spliced = splice(batch.rollout.tokens[p, g, :n].tolist(), problem.gold, tokenizer, **options)
            logps = tiny_hf.logps(made, [*problem.ids, *spliced.ids]).numpy()[-spliced.scored :]
            out[p, g] = np.exp(logps.mean())
    return out


@pytest.mark.exhaustive("extensions/methods/test_influence.py::test_a_ragged_run_compiles_few_programs")
def test_a_ragged_run_compiles_few_programs(recipe, tmp_path):
    """Twelve steps in which the groups that fail as a whole, and the samples' lengths, differ."""
    variant = {"name": "gt_likelihood", "kl_coef": 0.0}
    trainer = trainer_of(recipe, tmp_path, variant, "rollout.temperature=0.9", "rollout.max_tokens=24")
    try:
        likelihood = []
        for step in range(12):
            batch = draw(trainer).with_rewards()
            lengths = np.minimum(batch.rollout.lengths, 2 * step + 1)
            fails = np.arange(8)[:, None] > step * 5 % 8
            batch = dataclasses.replace(
                batch, rollout=dataclasses.replace(batch.rollout, lengths=lengths),
                by_name={name: np.where(fails, 0.0, 1.0 * x + [1, 0, 0, 0]) for name, x in batch.by_name.items()},
            )  # fmt: skip
            made, _ = learn.signals_after_rewards(trainer, trainer.state.networks, batch, batch.total)
            likelihood.append(made["likelihood"])
        assert trainer.programs.score.jitted()._cache_size() <= 3
        assert len({int(np.isfinite(x).sum()) for x in likelihood}) > 5
    finally:
        trainer.close()


def check_too_long(trainer):
    """A sample whose spliced text does not fit is neither rewarded nor punished, and the others are compared alone."""
    policy = trainer.policy
    policy.config = dataclasses.replace(
        policy.config, max_positions=max(len(p.ids) for p in trainer.source.problems) + 9
    )
    got, logged, batch = late(trainer)
    long = ~np.isfinite(got)
    assert logged["ground_truth/too_long"] == long.sum() and 0 < long.sum() < long.size - 8
    minis = learn.pack(trainer, batch)
    networks = trainer.state.networks
    minis, signals = learn.score(trainer, networks, minis)
    minis, batch, _ = learn.weigh(trainer, networks, minis, batch, signals)
    advantages = batch.advantages
    weights = whole(policy.device, minis, [m.rows.arrays["weights"] for m in minis])
    assert not advantages[long].any() and not weights[long].any() and weights[~long].any(-1).all()
    sums = np.where(long, 0, advantages[..., 0]).sum(1)
    np.testing.assert_allclose(sums, 0, atol=1e-5)


@pytest.mark.slow
def test_likelihood_is_that_of_transformers(recipe, tmp_path):
    """Of the spliced text, read as one sequence; half of the samples have no marker."""
    import with_torch  # noqa: F401

    trainer = trainer_of(recipe, tmp_path / "a", {"name": "gt_likelihood", "groups": "all", "marker": "e"})
    try:
        got, logged, batch = late(trainer)
        want = expected(recipe, batch, trainer.policy.tokenizer, marker="e")
        lengths = batch.rollout.lengths
        least = flops.forward_flops(trainer.policy.config, [len(p.ids) for p in batch.problems], lengths)
        assert learn.work(trainer, dataclasses.replace(batch, taught=lengths), 1)["late"] > least
        np.testing.assert_allclose(got, want, rtol=2e-4)
        texts = [
            trainer.policy.texts([batch.rollout.tokens[p, g, : batch.rollout.lengths[p, g]].tolist()])[0]
            for p, g in np.ndindex(got.shape)
        ]
        assert logged["ground_truth/missing_marker"] == sum("e" not in t for t in texts) > 0
        assert logged["ground_truth/repeated_marker"] == sum(t.count("e") > 1 for t in texts)
        assert logged["ground_truth/scored"] == got.size
        check_too_long(trainer)
    finally:
        trainer.close()


@pytest.mark.slow
def test_only_groups_that_fail_ask_for_it(recipe, tmp_path):
    """On eight devices as on one; the parity of sums of tokens is rewarded."""
    variant = {"name": "gt_likelihood", "marker": "e", "missing": "zero", "fail_reward": 0.0}
    results = []
    for devices in (1, 8):
        trainer = trainer_of(recipe, tmp_path / str(devices), variant, "rollout.group=2", devices=devices)
        try:
            got, _, batch = late(trainer)
            without = [
                "e" not in trainer.policy.texts([batch.rollout.tokens[p, g, : batch.rollout.lengths[p, g]].tolist()])[0]
                for p, g in np.ndindex(got.shape)
            ]
        finally:
            trainer.close()
        fails = (batch.total == 0).all(1)
        assert 0 < fails.sum() < len(fails)
        assert (np.isfinite(got) == fails[:, None]).all()
        assert ((got == 0) == np.reshape(without, got.shape))[fails].all()
        results.append(got)
    np.testing.assert_allclose(*results, rtol=1e-4)


@pytest.mark.slow
def test_it_trains_and_says_what_it_found(recipe, tmp_path):
    trainer = trainer_of(recipe, tmp_path, {"name": "gt_likelihood", "groups": "all"}, "train.steps=2", eos_ids=())
    assert train(trainer)
    lines = [line for line in numbers(tmp_path) if "reward" in line]
    assert all(line["ground_truth/scored"] == 32 and line["grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ({"marker": " "}, "marker=' '"),
        ({"answer_term": 1.0}, "answer_term=1.0: .*train_on='spliced'"),
        ({"answer_term": -1.0, "train_on": "spliced"}, "answer_term=-1.0: 0 or more"),
        ({"likelihood": "log", "missing": "zero"}, "take missing='append'"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}, "kl_in=loss"),
    ],
)
def test_what_is_refused(recipe, tmp_path, variant, said):
    with pytest.raises(UserError, match=said):
        trainer_of(recipe, tmp_path, {"name": "gt_likelihood", **variant}).close()


def test_no_true_answers(recipe, tmp_path):
    with pytest.raises(UserError, match="set data.answer"):
        trainer_of(recipe, tmp_path, {"name": "gt_likelihood", "groups": "all"}, "data.answer=null")


def test_joint_likelihoods_of_a_group_keep_their_ratios():
    """Of products under the least float32; what has no tokens is 0, and a group of such is 0."""
    logps = np.log([[[1e-30] * 3, [1e-30] * 3, [1e-30, 1e-30, 1e-31]], [[0.5] * 3] * 3])
    mask = np.array([[[True] * 3, [True] * 2 + [False], [True] * 3], [[False] * 3] * 3])
    mask[0, 1] = False
    assert likelihoods(logps, mask, "joint").tolist() == [[0.0] * 3] * 2
    got = likelihoods(logps, mask, "joint", relative=True)
    np.testing.assert_allclose(got, [[1, 0, 0.1], [0, 0, 0]], rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "stopped", "marker", "want"),
    [
        ("3 + 4 = 8 #### 8", True, None, "3 + 4 = 8 #### 7<eos>"),
        (r"so $\boxed{8}$, I think", True, None, r"so $\boxed{7}<eos>"),
        (r"so \boxed{8", False, None, r"so \boxed{7}<eos>"),
        ("3 + 4", False, None, "3 + 4\n#### 7<eos>"),
        ("3 + 4", True, r"\boxed{}", "3 + 4\n\\boxed{7}<eos>"),
    ],
)
def test_spliced_text_ends_as_a_sample_does(tokenizer, text, stopped, marker, want):
    """With the brace that closes a box, and the token that ends a sample; of these none is the answer's."""
    ids, eos = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
    ids += [eos] if stopped else []
    rollout = Rollout(
        tokens=np.array([[ids]], np.int32), logps=np.zeros((1, 1, len(ids)), np.float32),
        lengths=np.array([[len(ids)]], np.int32), stopped=np.array([[stopped]]),
    )  # fmt: skip
    answers = splice_groups(rollout, ["7"], tokenizer, marker=marker, include_marker=False, missing="append", eos=eos)
    made = with_answers(rollout, np.array([0]), answers)
    learned = made.tokens[0, 0, : made.lengths[0, 0]].tolist()
    assert tokenizer.decode(learned[:-1]) + "<eos>" == want and learned[-1] == eos and made.stopped.all()
    assert tokenizer.decode(answers.tokens[0, 0][answers.mask[0, 0]].tolist()).strip() == "7"
    # Without a token that ends samples, one that was cut goes on as one that was cut.
    bare = splice_groups(rollout, ["7"], tokenizer, marker=marker, include_marker=False, missing="append")
    made = with_answers(rollout, np.array([0]), bare)
    assert made.stopped.all() == stopped == (eos in made.tokens[0, 0, : made.lengths[0, 0]])


@pytest.mark.parametrize(
    ("text", "marker", "want"),
    [
        ("3 + 4 = 7\n#### 7\nDone", None, " 7"),
        ("#### 8, no\n#### 12", None, " 12"),
        (r"\boxed{\frac{1}{2}} it is", None, r"\frac{1}{2}}"),
        (r"\boxed{4", None, "4"),
        ("it is: 12", "is:", " 12"),
        ("nothing", None, ""),
        ("####", None, ""),
    ],
)
def test_the_tokens_of_an_answer(tokenizer, text, marker, want):
    """What LLDS-MA weighs less: up to the end of the line or the closing brace, and never the end of the sample."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = np.array([[ids, [0] * len(ids)]], np.int32)
    rollout = Rollout(
        tokens=tokens, logps=np.zeros(tokens.shape, np.float32), lengths=np.array([[len(ids), 0]], np.int32),
        stopped=np.array([[True, False]]),
    )  # fmt: skip
    mask = answer_tokens(rollout, tokenizer, marker)
    assert tokenizer.decode(tokens[0, 0][mask[0, 0]].tolist()) == want and not mask[0, 1].any()


def test_a_weight_of_answers_that_nothing_reads_is_refused(recipe, tmp_path):
    variant = "variant={name: llds, answer_weight: 0.5, llds_coef: 0.0}"
    with pytest.raises(UserError, match="llds_coef=0 turns off"):
        config.load(recipe, [f"run.dir={tmp_path}", variant]).method  # noqa: B018


def test_answers_weigh_less_in_llds_alone(monkeypatch):
    """LLDS-MA's weights of a run's rows: β on the answer, and the loss's own as without."""
    advantages, live = np.array([[[1.0, 1, 1], [-1, -1, -1]]]), np.ones((1, 2, 3), bool)
    answer = np.array([[[False, False, True]] * 2])
    monkeypatch.setattr(displacement, "answer_tokens", lambda *given: answer)
    part = SimpleNamespace(variant=variants.llds(answer_weight=0.25), policy=SimpleNamespace(tokenizer=None))
    batch = SimpleNamespace(rollout=None, advantages=advantages, live=live, minibatches=[np.arange(1)])
    rows, _ = displacement.Displacement.weigh(part, batch)
    assert set(rows) == {"displacement_weights"}
    np.testing.assert_allclose(rows["displacement_weights"][0], [[1 / 3, 1 / 3, 1 / 12], [0, 0, 0]], rtol=1e-6)
