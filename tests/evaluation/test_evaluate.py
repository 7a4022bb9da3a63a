"""Estimates against enumeration, paired tests against every sign, and the command with its resumption and refusals."""

import doctest
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from grpojax import data, rewards
from grpojax.evaluation import evaluate
from grpojax.host.errors import UserError
from grpojax.programs.sampler import SamplerConfig
from grpojax.records import metrics as tracking
from grpojax.run import recipe as config
from grpojax.run.trainer import Trainer
from grpojax.tools import cli
from grpojax.types import Rollout

DATA = "builtin:arithmetic/test.jsonl"


def test_doctests():
    result = doctest.testmod(evaluate)
    assert result.failed == 0 and result.attempted >= 5


# ------------------------------------------------------------------------------------------- pure functions


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (7, 0), (7, 1), (7, 3), (7, 5), (7, 7)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c):
    """Resampling with replacement would give 1 - (1 - c/n)^k: 0.367 in place of 3/7 for n=7, c=1, k=3."""
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        want = np.mean([any(s) for s in itertools.combinations(right, k)])
        assert float(evaluate.pass_at_k(n, c, k)) == pytest.approx(want, abs=1e-12), k
        if k > 1 and 0 < c < n:
            assert 1 - (1 - c / n) ** k < want  # biased low


def test_pass_at_k_over_many_samples_and_arrays():
    n, c, k = 1000, np.array([0, 1, 3, 400, 999, 1000]), 500
    want = [1 - math.comb(n - int(x), k) / math.comb(n, k) for x in c]
    np.testing.assert_allclose(evaluate.pass_at_k(n, c, k), want, rtol=1e-12)
    np.testing.assert_allclose(evaluate.pass_at_k(np.array([3, 5]), np.array([1, 1]), 2), [2 / 3, 2 / 5])
    for bad in [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)]:
        with pytest.raises(ValueError, match="needs 1 <= k <= n"):
            evaluate.pass_at_k(*bad)


def vote_in_loops(votes, correct, k):
    """Every k-subset holds a vote; the answers that tie share it."""
    shares = []
    for subset in itertools.combinations(range(len(votes)), k):
        counts = {}
        for i in subset:
            if votes[i] is not None:
                counts[votes[i]] = counts.get(votes[i], 0) + 1
        winners = [a for a, m in counts.items() if m == max(counts.values())]
        verdicts = [np.mean([c for v, c in zip(votes, correct, strict=True) if v == w]) for w in winners]
        shares.append(np.mean(verdicts) if winners else 0.0)
    return np.mean(shares)


@pytest.mark.parametrize("seed", range(12))
def test_a_majority_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    votes = [None if v == 4 else f"a{v}" for v in rng.integers(0, 5, n)]
    correct = [v in ("a0", "a3") for v in votes]
    if seed == 11:
        correct = rng.integers(0, 2, n).astype(bool).tolist()  # one vote, two verdicts
    for k in range(1, n + 1):
        want = vote_in_loops(votes, correct, k)
        assert evaluate.majority_at_k(votes, correct, k) == pytest.approx(want, abs=1e-12), (n, k)


def test_a_majority_of_very_many():
    """550 of 1000 agree on the right answer: a vote of 999 is right for sure, one of 101 in about 84.9 %."""
    votes, correct = ["x"] * 550 + ["y"] * 450, [True] * 550 + [False] * 450
    assert evaluate.majority_at_k(votes, correct, 999) == pytest.approx(1.0, abs=1e-12)
    want = sum(math.comb(550, i) * math.comb(450, 101 - i) for i in range(51, 102)) / math.comb(1000, 101)
    assert evaluate.majority_at_k(votes, correct, 101) == pytest.approx(want, rel=1e-10)
    with pytest.raises(ValueError, match="maj@2 of 1 votes"):
        evaluate.majority_at_k(["x"], [True], 2)


def test_bootstrap_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = 0
    for i in range(400):
        low, high = evaluate.bootstrap(rng.random(100) < 0.3, resamples=400, seed=i)
        covered += low <= 0.3 <= high
    assert 0.91 < covered / 400 < 0.98
    x = rng.random(50)
    assert evaluate.bootstrap(x, seed=3) == evaluate.bootstrap(x, seed=3) != evaluate.bootstrap(x, seed=4)
    low, high = evaluate.bootstrap(x)
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 50**0.5, rel=0.1)
    assert evaluate.bootstrap([1.0] * 9) == (1.0, 1.0)


def test_the_paired_test_counts_every_sign():
    rng = np.random.default_rng(0)
    for n_samples in (1, 4, 6):
        for _ in range(8):
            a, b = rng.integers(0, n_samples + 1, (2, 11)) / n_samples
            signs = np.array(list(itertools.product([-1, 1], repeat=11)))
            sums = np.rint(np.abs(signs @ (b - a)) * 60)
            want = np.mean(sums >= np.rint(abs((b - a).sum()) * 60))
            got = evaluate.paired_test(a, b)
            assert got.p == pytest.approx(want, abs=1e-12)
            assert got.better == (b > a).sum() and got.worse == (b < a).sum()
            assert got.low <= got.difference <= got.high


def test_with_one_sample_the_paired_test_is_mcnemars_and_beats_an_unpaired_one():
    """18 problems won and 5 lost of 500: p = 0.0106. Without the pairs, 0.4 would hide it."""
    a = np.array([0] * 18 + [1] * 5 + [1] * 300 + [0] * 177)
    b = np.array([1] * 18 + [0] * 5 + [1] * 300 + [0] * 177)
    got = evaluate.paired_test(a, b)
    assert got.p == pytest.approx(2 * sum(math.comb(23, i) for i in range(6)) / 2**23, rel=1e-9)
    assert got.p < 0.011 and (got.better, got.worse) == (18, 5) and 0 < got.low < 13 / 500 < got.high
    unpaired = (2 * 0.63 * 0.37 / 500) ** 0.5
    assert got.high - got.low < 0.4 * 2 * 1.96 * unpaired
    assert evaluate.paired_test(a, a) == evaluate.Comparison(difference=0, low=0, high=0, p=1, better=0, worse=0)
    assert evaluate.paired_test(b, a).p == got.p
    assert 0 < evaluate.paired_test(np.zeros(400), np.ones(400)).p < 1e-12
    with pytest.raises(ValueError, match="must be a fraction"):
        evaluate.paired_test([0.1234567], [0.0])


# ------------------------------------------------------------------------------------------------- verdicts


def judge(*terms):
    return evaluate.judge_of(rewards.RewardsConfig(terms=tuple(rewards.RewardConfig(**t) for t in terms)))


def test_the_judge_is_the_runs_own_where_it_has_one():
    form = {"name": "answer_format"}
    assert judge(form, {"name": "answer", "options": {"marker": "Result:"}}).correct("Result: 7", "7")
    assert judge({"name": "math_answer", "options": {"marker": "Result:"}}).correct("Result: 14/2", "7")
    assert not judge(form).correct("Result: 7", "7")  # no known marker
    assert judge(form).correct("#### 1/2", "0.5") and not judge({"name": "answer"}).correct("#### 1/2", "0.5")
    choice = judge({"name": "choice", "options": {"letters": "ABCD"}})
    assert choice.correct("#### B) a dog", "b") and not judge(form).correct("#### B) a dog", "b")


def test_votes_have_one_spelling_without_a_look_at_the_gold_answer():
    plain = judge({"name": "answer_format"})
    votes = [plain.vote(f"#### {x}") for x in ("1/2", r"\frac{1}{2}", "0.50", "$.5$")]
    assert votes == ["1/2"] * 4
    assert [plain.vote(x) for x in ("#### 1,234.0", "#### New  York", "nothing", "#### ")] == ["1234", "new york", None, None]  # fmt: skip
    same = ["72", "$72", "72 dollars", "x=72", "x = \\$72.00", "**72**", "144/2"]
    assert {plain.vote(f"#### {x}") for x in same} == {"72"}
    assert [plain.vote(f"#### {x}") for x in ("12.5", "25/2", "12.5%", "12.50 percent")] == ["25/2"] * 2 + ["25/2%"] * 2
    assert [plain.vote(f"#### {x}") for x in ("y = 2x+1", "2x + 1", "6=7", "5 squared")] == ["2x+1", "2x+1", "6=7", "5 squared"]  # fmt: skip
    exact = judge({"name": "answer"})
    assert [exact.vote(f"#### {x}") for x in ("$72", "72.0", "72 dollars")] == ["72", "72", "72 dollars"]
    choice = judge({"name": "choice"})
    assert [choice.vote(f"#### {x}") for x in ("B", "(b)", "B) a dog", "dog")] == ["B", "B", "B", None]


def test_batches_are_the_same_wherever_an_evaluation_goes_on():
    problems = [data.Problem(i, (1, 2), f"q{i}", "7", {}) for i in range(10)]
    seen = []

    def sample(prompts):
        seen.append(prompts.uids.tolist())
        ids = np.ones((len(prompts.uids), 1, 3), np.int32)
        return Rollout(tokens=ids, logps=ids, lengths=ids[..., 0], stopped=ids[..., 0] > 0)

    def uids(start):
        seen.clear()
        batches = evaluate.attempts(
            problems, sample, str, judge({"name": "answer"}), size=4, max_prompt_tokens=8, start=start
        )
        return [[a.uid for a in batch] for batch in batches]

    assert uids(0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and seen[2] == [8, 9, 8, 9]
    assert uids(6) == [[6, 7], [8, 9]] and seen == [[4, 5, 6, 7], [8, 9, 8, 9]]
    assert uids(8) == [[8, 9]] and seen == [[8, 9, 8, 9]]


def attempt(uid, *correct, vote="7", tokens=5, stopped=True):
    return evaluate.Attempt(uid=uid, prompt=f"q{uid}", gold="7", samples=tuple(
        evaluate.Sample(completion="#### 7", answer="7", vote=vote, correct=c, tokens=tokens, stopped=stopped) for c in correct
    ))  # fmt: skip


def test_metrics_are_means_over_problems():
    done = [attempt(0, True, False), attempt(1, False, False, tokens=8, stopped=False)]
    settings = evaluate.EvalConfig(sampler=SamplerConfig(group=2), ks=(1, 2))
    got = {name: m["value"] for name, m in evaluate.summary(done, settings).items()}
    assert got == {"accuracy": 0.25, "mean_length": 6.5, "clipped_ratio": 0.5, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25}  # fmt: skip
    assert "avg@2" in evaluate.table(evaluate.summary(done, settings), settings, 2)


def test_a_verdict_that_could_not_be_computed_is_counted(monkeypatch):
    """Accuracy is the same as if it were wrong, and says so."""
    monkeypatch.setattr(rewards.answers.pool, "shared", lambda: Lost())
    problems = [data.Problem(i, (1, 2), f"q{i}", gold, {}) for i, gold in enumerate(["y", "7"])]
    texts = iter(["#### sin(x)^3", "#### 7"])

    def sample(prompts):
        ids = np.ones((len(prompts.uids), 1, 3), np.int32)
        return Rollout(tokens=ids, logps=ids, lengths=ids[..., 0], stopped=ids[..., 0] > 0)

    plain = judge({"name": "math_answer"})
    assert plain.correct("#### sin(x)^3", "y") is None and not rewards.check_answer("#### sin(x)^3", "y")
    (done,) = evaluate.attempts(problems, sample, lambda _: next(texts), plain, size=2, max_prompt_tokens=8)
    assert [(s.correct, s.unjudged) for a in done for s in a.samples] == [(False, True), (True, False)]
    settings = evaluate.EvalConfig(sampler=SamplerConfig(group=1))
    metrics = evaluate.summary(done, settings)
    assert metrics["unjudged"] == {"value": 1} and metrics["accuracy"]["value"] == 0.5
    assert "unjudged" in evaluate.table(metrics, settings, 2)


class Lost:
    def call(self, *_):
        return None


# ------------------------------------------------------------------------------------------------ the command


def run(*arguments):
    return cli.main(["eval", *map(str, arguments)])


TINY = (
    "builtin:tiny",
    "--data",
    DATA,
    "--limit",
    10,
    "--samples",
    4,
    "--k",
    "1,2",
    "--max-tokens",
    24,
    "--batch",
    16,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "whole"
    assert run(*TINY, "--out", out) == 0
    return out


def test_the_command_writes_lines_and_a_summary(whole, capsys):
    done = evaluate.read(whole)
    assert [a.uid for a in done] == list(range(10)) and all(len(a.samples) == 4 for a in done)
    assert all(s.correct == rewards.check_answer(s.completion, a.gold) for a in done for s in a.samples)
    summary = json.loads((whole / "summary.json").read_text())
    accuracy = np.mean([s.correct for a in done for s in a.samples])
    assert summary["problems"] == 10 and summary["metrics"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1 and set(summary["metrics"]) > {"pass@1", "pass@2", "maj@2"}
    assert len({s.completion for s in done[0].samples}) > 1
    assert run(*TINY, "--out", whole) == 0  # all there already
    out = capsys.readouterr().out
    assert "going on after 10 of 10" in out and "avg@4" in out and "maj@2" in out and "compiled" not in out


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.55])
def test_half_way_the_same_command_goes_on_to_the_same_file(whole, tmp_path, keep, capsys):
    """Cut inside a line, in the middle of a batch of four problems or in the first one."""
    want = (whole / "problems.jsonl").read_bytes()
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    (tmp_path / "problems.jsonl").write_bytes(want[: int(keep * len(want))])
    lines = want[: int(keep * len(want))].count(b"\n")
    batch = 16 if keep < 0.5 else 17  # four problems at a time all the same
    assert run(*TINY, "--out", tmp_path, "--batch", batch) == 0
    assert (tmp_path / "problems.jsonl").read_bytes() == want
    assert (tmp_path / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert (f"going on after {lines} of 10" in capsys.readouterr().out) == (lines > 0)


@pytest.mark.parametrize(("options", "message"), [
    (["--seed", 5], "eval.seed: 0 -> 5"),
    (["--limit", 9], "data.problems: 10 -> 9"),
    (["--temperature", 0.5], "eval.sampler.temperature: 1.0 -> 0.5"),
    (["data.instruction='Now: {prompt}'"], "data.instruction:"),
    (["rewards=[{name: answer}]"], "judge.Answer"),
    (["--samples", "0"], "--samples 0: must be at least 1"),
    (["--samples", "2000"], "samples=2000: must be at most 1000"),
    (["--k", "8"], "k=8: must be between 1 and samples=4"),
    (["--k", "two"], "--k 'two': give whole numbers"),
    (["--k", ""], "--k '': give whole numbers"),
    (["--temperature", "0"], "samples=4 at temperature 0 would all be the same"),
    (["--top-p", "0"], "top_p=0.0: must be over 0"),
    (["--batch", "0"], "batch=0: must be at least 1"),
    (["--limit", "-1"], "limit=-1: must be at least 0"),
    (["--max-tokens", "0"], "max_tokens=0: must be at least 1"),
    (["--step", "3"], "--step and --best are for a run directory"),
    (["--best"], "--step and --best are for a run directory"),
    (["--data", "nowhere.jsonl"], "data file 'nowhere.jsonl' does not exist"),
    (["train.steps=3"], "override 'train.steps=3' says nothing to an evaluation"),
    (["model.path=x"], "override 'model.path=x' says nothing"),
    (["model={path: x}"], "override 'model={path: x}' says nothing"),
    (["data.promt=x"], "data.promt: unknown key; did you mean 'prompt'"),
    (["data.answer=null"], "data.eval needs gold answers"),
])  # fmt: skip
def test_refusals(whole, options, message, capsys):
    before = (whole / "problems.jsonl").read_bytes()
    assert run(*TINY, "--out", whole, *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error
    assert (whole / "problems.jsonl").read_bytes() == before


@pytest.mark.parametrize(("override", "message"), [
    ("train.eval_samples=0", "eval_samples=0: must be at least 1"),
    ("train.eval_samples=1001", "eval_samples=1001: must be at most 1000"),
    ("train.eval_samples=4", "eval_samples=4 would all be the same at eval_temperature=0"),
    ("train.eval_samples=few", "train.eval_samples='few'"),
    ("train.eval_temperature=-1", "eval_temperature=-1.0: must be at least 0"),
    ("train.eval_temprature=1", "train.eval_temprature: unknown key; did you mean 'eval_temperature'"),
    ("data.answer=null", "data.eval needs gold answers"),
])  # fmt: skip
def test_config_values(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config.load(Path(__file__).parents[2] / "configs" / "quickstart.yaml", [override])


def test_places_that_are_not_an_evaluations(whole, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    for arguments, message in [
        ([*TINY, "--out", tmp_path], "exists and holds no evaluation"),
        ([*TINY, "--out", tmp_path / "thesis.txt"], "exists and holds no evaluation"),
        ([tmp_path / "nothing", "--data", DATA], "is no run directory and no Hugging Face folder"),
        (["builtin:tiny"], "builtin:tiny has no problems for evaluation; give --data FILE"),
    ]:
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") <= 2
    with open(whole / "problems.jsonl", "ab") as busy:
        import fcntl

        fcntl.flock(busy, fcntl.LOCK_EX)
        assert run(*TINY, "--out", whole) == 2
    assert "another evaluation is writing there" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- runs, comparison


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run of four steps that evaluates two samples a problem."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    overrides = ["train.steps=4", "train.eval_every=2", "train.checkpoint_every=2", "train.eval_samples=2",
                 "train.eval_temperature=1.0", "mesh.data=8"]  # fmt: skip
    trainer = Trainer(config.load(recipe, [f"run.dir={directory}", *overrides]))
    assert trainer.run()
    trainer.report()
    return directory


def test_training_leaves_lines_of_each_evaluation(trained):
    metrics = [x for x in tracking.read_metrics(trained) if "eval/accuracy" in x]
    assert [x["step"] for x in metrics] == [0, 2, 4]
    for x in metrics:
        done = evaluate.read(trained / "eval" / f"step_{x['step']}.jsonl")
        assert len(done) == 8 and len(done[0].samples) == 2
        assert x["eval/mean_length"] == np.mean([s.tokens for a in done for s in a.samples])
        assert {"eval/pass@2", "eval/maj@2", "eval/clipped_ratio"} < x.keys()


def test_a_run_is_evaluated_at_any_checkpoint_as_it_was_in_training(trained, capsys):
    same = ["--samples", 2, "--limit", 8]
    assert run(trained, *same) == 0
    newest = trained / "eval" / "step_4" / "problems.jsonl"
    assert newest.read_bytes() == (trained / "eval" / "step_4.jsonl").read_bytes()
    assert run(trained, "--step", 2, *same) == 0
    assert evaluate.read(trained / "eval" / "step_2") == evaluate.read(trained / "eval" / "step_2.jsonl")
    capsys.readouterr()
    assert run(trained, "--step", 3, *same) == 2
    assert "has no checkpoint of step 3; it has 2, 4" in capsys.readouterr().err


@pytest.mark.parametrize(("scores", "step"), [((0.5, 0.25), 2), ((0.25, 0.5), 4), ((0.5, 0.5), 4)])
def test_the_best_checkpoint_is_that_of_the_highest_accuracy(trained, monkeypatch, scores, step):
    lines = [{"step": 0, "eval/accuracy": 0.9}, {"step": 1, "reward": 1.0}]
    lines += [{"step": s, "eval/accuracy": x} for s, x in zip((2, 4), scores, strict=True)]
    monkeypatch.setattr(tracking, "read_metrics", lambda _: lines)
    assert evaluate.read_target(str(trained), best=True).step == step


def test_two_evaluations_are_compared(tmp_path, capsys):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    evaluate.write(a, [attempt(i, i % 3 == 0, False) for i in range(12)])
    evaluate.write(b, [attempt(i, True) for i in reversed(range(12))])
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    for text in (
        "12 problems in both",
        "avg@2",
        "+83.3 points",
        "better on 12 problems and worse on 0: p = 0.000488",
    ):
        assert text in out, out
    evaluate.write(b, [attempt(i, True) for i in range(11)])
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "has 12 problems" in (error := capsys.readouterr().err) and "11 are in both" in error
    a.write_text(a.read_text().replace('"q3"', '"other"'))
    evaluate.write(b, [attempt(i, True) for i in range(12)])
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "problem 3 is not the same" in capsys.readouterr().err
    b.write_text('{"uid": 3}\n')
    for bad, message in ((b, "b.jsonl:1: no line of an evaluation"), (tmp_path / "c", "No such file")):
        with pytest.raises(UserError, match=message):
            evaluate.read(bad)


def test_scores_of_many_denominators_are_compared_by_random_signs():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, 300) / 999, rng.integers(0, 998, 300) / 997
    c = evaluate.paired_test(a, b)
    assert 0.01 < c.p <= 1
    assert evaluate.paired_test(a, np.minimum(b + 0.5, 1.0).round(3)).p < 0.01


def test_a_problem_that_stands_twice_is_refused(tmp_path):
    sample = evaluate.Sample(completion="2", answer="2", vote="2", correct=True, tokens=1, stopped=True)
    attempt = evaluate.Attempt(uid=0, prompt="1+1", gold="2", samples=(sample,))
    evaluate.write(tmp_path / "a.jsonl", [attempt])
    evaluate.write(tmp_path / "b.jsonl", [attempt, attempt])
    with pytest.raises(UserError, match="b.jsonl: a problem stands in it twice"):
        evaluate.compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
