"""Runs whose samples are episodes of several turns, with environments of the test's own."""

import dataclasses
import json
import re
import time
import zlib

import numpy as np
import pytest
import spies
from fake_environments import Fake
from runs import numbers, opened

from grpojax.data import Tokenize
from grpojax.extensions.episodes import players
from grpojax.host.errors import UserError
from grpojax.records import evaluations
from grpojax.records.samples import read_samples
from grpojax.run import parts
from grpojax.run.recipe import load
from grpojax.train import train

PLAYED = (
    "environment={name: 'a:B', max_turns: 4, max_tool_tokens: 4}", "rollout.max_tokens=32", "train.steps=3",
    "rollout.max_turn_tokens=6", "rewards=[{name: environment}, {name: 'tiny_run:parity'}]", "train.eval_every=3",
    "data.validation=null", "train.checkpoint_every=1",
)  # fmt: skip


def played(monkeypatch, recipe, directory, *overrides, fake=None, devices=1):
    fake = fake or Fake()
    monkeypatch.setattr(players, "environments_of", lambda *_: fake)
    return opened(load(recipe, [*PLAYED, f"run.dir={directory}", *overrides]), devices)


@pytest.mark.slow
def test_samples_are_episodes_whose_log_probs_are_the_trainer_s(recipe, tmp_path, monkeypatch):
    fake = Fake()
    begin, begun, batches = players.Players.begin, [], []
    monkeypatch.setattr(
        players.Players, "begin", lambda *given, **more: begun.append(begin(*given, **more)) or begun[-1]
    )
    trainer = played(monkeypatch, recipe, tmp_path / "run", fake=fake)
    assert train(trainer, lambda updates: batches.append(updates.batch.rollout))
    assert len(begun) >= 3 and not any(hasattr(rollout, "sampler") for rollout in begun)  # nor its caches
    assert fake.closed and not fake.open_now and fake.most == 32
    lines = numbers(tmp_path / "run")
    assert max(line["sampling/logp_difference_max"] for line in lines if "reward" in line) < 1e-4
    _, samples = read_samples(tmp_path / "run", 3)
    last = batches[-1]
    assert lines[-1]["episode/turns"] == np.mean([len(s["turns"][::2]) for s in samples]) > 1.5
    for name in ("failures", "malformed"):
        assert lines[-1][f"episode/{name}"] == sum(s[name] for s in samples) / sum(s["calls"] for s in samples)
    assert lines[-1]["completions/mean_length"] == last.sampled.sum(-1).mean() < last.lengths.mean()
    assert lines[-1]["episode/answer_tokens"] == (last.lengths - last.sampled.sum(-1)).mean() > 1
    for s in samples:
        own, answered = s["turns"][::2], s["turns"][1::2]
        assert s["length"] == sum(s["sampled"][::2]) and len(s["ids"]) == sum(s["sampled"])
        assert s["completion"] == "\n".join(own).replace("<eos>", "").replace("<pad>", "")
        assert all(a.isdigit() for a in answered) and s["prompt"] in s["rendered_prompt"]
        assert s["rewards"]["environment"] == len(own) - (len(own) == 4)  # the last turn is not played
        assert all(n <= 6 for n in s["sampled"][::2]) and all(n <= 4 for n in s["sampled"][1::2])
        assert s["calls"] == len(answered) or len(s["ids"]) > 24 or s["calls"] == len(answered) + 1


@pytest.mark.slow
def test_it_makes_no_difference_when_answers_come(recipe, tmp_path, monkeypatch):
    for name, late in (("at_once", None), ("late", 0)):
        assert train(played(monkeypatch, recipe, tmp_path / name, fake=Fake(late=late)))
    assert numbers(tmp_path / "at_once") == numbers(tmp_path / "late")
    assert read_samples(tmp_path / "at_once", 3) == read_samples(tmp_path / "late", 3)


@pytest.mark.slow
def test_episodes_of_one_turn_are_plain_samples_bit_for_bit(recipe, tmp_path, monkeypatch):
    plain = "rewards=[{name: 'tiny_run:parity'}]", "rollout.max_turn_tokens=0"
    one = "environment={name: 'a:B', max_turns: 1}"
    assert train(played(monkeypatch, recipe, tmp_path / "one", *plain, one))
    assert train(played(monkeypatch, recipe, tmp_path / "plain", *plain, "environment=null"))
    of_one = [{k: v for k, v in line.items() if not k.startswith("episode/")} for line in numbers(tmp_path / "one")]
    assert of_one == numbers(tmp_path / "plain")


class Stops(Fake):
    """Asks the run to stop in the middle of the second step's episodes."""

    trainer = None

    def replies(self, timeout=None):
        found = super().replies(timeout)
        if self.trainer.state.step == 1 and len(found) < 20:
            self.trainer.control.ask("SIGTERM")
        return found


def stopped_and_resumed(monkeypatch, recipe, directory, before, after):
    """The metrics of a run that was stopped while episodes were open, and went on with other environments."""
    before.trainer = played(monkeypatch, recipe, directory, fake=before)
    assert not train(before.trainer) and not before.open_now
    again = played(monkeypatch, recipe, directory, fake=after)
    assert again.state.step == 1 and train(again)
    return [line for line in numbers(directory) if "reward" in line]


@pytest.mark.slow
def test_open_episodes_are_played_again_bit_for_bit_after_a_resume(recipe, tmp_path, monkeypatch):
    assert train(played(monkeypatch, recipe, tmp_path / "whole"))
    found = stopped_and_resumed(monkeypatch, recipe, tmp_path / "parts", Stops(), Fake())
    assert found == [line for line in numbers(tmp_path / "whole") if "reward" in line]
    assert read_samples(tmp_path / "parts", 2) == read_samples(tmp_path / "whole", 2)


@pytest.mark.slow
def test_other_answers_of_what_states_that_it_is_deterministic_are_counted(recipe, tmp_path, monkeypatch, caplog):
    _, second, third = stopped_and_resumed(monkeypatch, recipe, tmp_path, Stops(), Fake(salt="x"))
    answered = second["episode/replay_differs"]
    assert 12 < answered < 32  # those that have had an answer before the stop
    assert f"{answered:.0f} of 32 episodes" in caplog.text and "deterministic = True" in caplog.text
    assert not any("redrawn" in name for name in second) and "episode/replay_differs" not in third


@pytest.mark.slow
def test_open_episodes_of_what_is_not_deterministic_are_counted_as_drawn_again(recipe, tmp_path, monkeypatch, caplog):
    repeats = {"repeats": False}
    first, second, third = stopped_and_resumed(
        monkeypatch, recipe, tmp_path, Stops(**repeats), Fake(salt="x", **repeats)
    )
    assert 0 < second["episode/redrawn/resumed"] < 32
    assert not any("redrawn" in name or "differs" in name for line in (first, third) for name in line)
    assert "episode/replay_differs" not in second


@pytest.mark.parametrize(
    ("max_turns", "late", "devices"),
    [
        pytest.param(4, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, 0, 8, marks=pytest.mark.slow),
        (1, None, 1),
    ],
)
@pytest.mark.slow
def test_what_begins_again_is_drawn_by_the_same_random_numbers(recipe, tmp_path, monkeypatch, max_turns, late, devices):
    """Where the answers are the same, nothing differs, of others either; lost are first, later and last turns."""
    how = f"environment.max_turns={max_turns}", "rollout.max_turn_tokens=5"
    assert train(played(monkeypatch, recipe, tmp_path / "calm", *how))
    fake = Fake(late=late, loses=lambda uid, sample, when: (uid + sample) % 3 == 0 and when in (1, 2, 3, "end"))
    assert train(played(monkeypatch, recipe, tmp_path / "lossy", *how, fake=fake, devices=devices))
    lines, calm = numbers(tmp_path / "lossy"), numbers(tmp_path / "calm")
    redrawn = [line.pop("episode/redrawn/neighbour") for line in lines if "reward" in line]
    if devices == 1:
        assert read_samples(tmp_path / "lossy", 3) == read_samples(tmp_path / "calm", 3) and lines == calm
    else:
        for line in (*lines, *calm):
            line.pop("useful_token_fraction", None)  # a mesh has rows of its own
        assert lines == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in calm]
    assert sum(redrawn) == len(fake.lost) and {when for _, when in fake.lost} == {*range(1, max_turns), "end"}


@pytest.mark.slow
def test_what_begins_again_goes_on_by_its_new_answers(recipe, tmp_path, monkeypatch):
    """Its first turn is that of the others' run, and what is drawn for the others is the same."""

    class Other(Fake):
        def play(self, turns):
            for episode, text in turns.items():
                self._salt = "x" if (episode, 2) in self.lost else ""
                super().play({episode: text})

    assert train(played(monkeypatch, recipe, tmp_path / "calm", "train.steps=1"))
    fake = Other(loses=lambda uid, sample, when: sample == 1 and when == 2)
    assert train(played(monkeypatch, recipe, tmp_path / "lossy", "train.steps=1", fake=fake))
    (_, calm), (_, lossy) = (read_samples(tmp_path / name, 1) for name in ("calm", "lossy"))
    again = {episode for episode, _ in fake.lost}
    assert len(again) > 3
    for a, b in zip(calm, lossy, strict=True):
        is_again = (a["uid"], a["sample"]) in again
        a, b = (s["turns"][:1] if is_again else {**s, "advantage": 0, "loss": 0} for s in (a, b))
        assert a == b
    assert any(a["turns"] != b["turns"] for a, b in zip(calm, lossy, strict=True))
    for s in (s for s in lossy if (s["uid"], s["sample"]) in again):
        answered = [zlib.crc32((text.removesuffix("<eos>") + "x").encode()) for text in s["turns"][::2]]
        assert s["turns"][1::2] == [str(n)[: 1 + n % 7][:4] for n in answered][: len(s["turns"]) // 2]


@pytest.mark.slow
def test_a_run_may_stop_while_tools_work(recipe, tmp_path, monkeypatch):
    class Hangs(Fake):
        """Has no reply, and asks the run to stop."""

        def replies(self, timeout=None):
            time.sleep(timeout)
            asked.append(1)
            assert len(asked) < 20
            trainer.control.ask("SIGTERM")
            return {}

    fake, asked = Hangs(), []
    trainer = played(monkeypatch, recipe, tmp_path / "run", fake=fake)
    assert not train(trainer) and not fake.open_now


@pytest.mark.slow
def test_the_reward_of_an_environment_that_has_none_is_refused_at_once(recipe, tmp_path, monkeypatch):
    fake = Fake()
    fake.rewarded = {None: False}
    with pytest.raises(UserError, match="reward 'environment': a:B has no get_reward"):
        played(monkeypatch, recipe, tmp_path / "run", fake=fake)
    only_measured = "rewards=[{name: environment, weight: 0}, {name: 'tiny_run:parity'}]"
    played(monkeypatch, recipe, tmp_path / "other", only_measured, fake=fake)


def test_a_prompt_that_grows_over_the_positions_of_the_model_is_refused(recipe, tmp_path, monkeypatch):
    fake = Fake(resets=lambda row, sample: " x")
    trainer = played(monkeypatch, recipe, tmp_path / "run", "data.max_prompt_tokens=16", fake=fake)
    monkeypatch.setattr(trainer.policy, "config", dataclasses.replace(trainer.policy.config, max_positions=36))
    with pytest.raises(UserError, match="max_position_embeddings=36") as e:
        train(trainer)
    assert "rollout.max_tokens" in str(e.value) and not fake.open_now


@pytest.mark.slow
def test_an_invalid_episode_has_no_reward_and_is_counted(recipe, tmp_path, monkeypatch):
    fake = Fake(invalid=lambda uid, sample: sample == 2)
    assert train(played(monkeypatch, recipe, tmp_path / "run", fake=fake))
    _, samples = read_samples(tmp_path / "run", 3)
    gone = [s for s in samples if s["sample"] == 2]
    assert all(s["reward"] is None and set(s["rewards"].values()) == {None} for s in gone)
    last = numbers(tmp_path / "run")[-1]
    kinds = {k: n for k, n in last.items() if k.startswith("rewards/invalid/")}
    assert kinds == {"rewards/invalid/environment/timeout": 8} and len(gone) == 8
    assert last["episode/invalid"] == 8 / len(samples)


@pytest.mark.slow
def test_what_reset_returns_is_in_the_prompt(recipe, tmp_path, monkeypatch):
    fake = Fake(resets=lambda row, sample: f" x{row['gold']}")
    assert train(played(monkeypatch, recipe, tmp_path / "run", "data.max_prompt_tokens=16", fake=fake))
    _, samples = read_samples(tmp_path / "run", 3)
    assert all(s["prompt"].endswith(f"= x{s['gold']}") for s in samples)


@pytest.mark.slow
def test_a_reset_that_fails_makes_only_its_own_episode_invalid(recipe, tmp_path, monkeypatch):
    """It has no text, and the samples of its prompt have one; with a single turn no reply tells of it."""
    fake = Fake(resets=lambda row, sample: None if sample == 1 else " x", lost=lambda uid, sample: sample == 1)
    how = "data.max_prompt_tokens=16", "environment={name: 'a:B', max_turns: 1}"
    assert train(played(monkeypatch, recipe, tmp_path / "run", *how, fake=fake))
    _, samples = read_samples(tmp_path / "run", 3)
    assert all(s["prompt"].endswith(" x") for s in samples)
    assert [s["reward"] is None for s in samples] == [s["sample"] == 1 for s in samples]
    assert numbers(tmp_path / "run")[-1]["rewards/invalid/environment/end"] == 8


@pytest.mark.slow
def test_an_invalid_episode_has_no_reward_in_an_evaluation(recipe, tmp_path, monkeypatch):
    held_out = (
        f"data.validation={recipe.parent}/sums.jsonl",
        "train.eval_limit=8",
        "train.steps=1",
        "train.eval_every=1",
    )
    fake = Fake(invalid=lambda uid, sample: uid % 2)
    assert train(played(monkeypatch, recipe, tmp_path / "run", *held_out, fake=fake))
    lines = [line for line in numbers(tmp_path / "run") if "eval/reward" in line]
    assert [line["eval/invalid"] for line in lines] == [4, 4]
    for attempt in map(json.loads, (tmp_path / "run" / "eval" / "step_1.jsonl").read_text().splitlines()):
        (sample,) = attempt["samples"]
        given = [sample["reward"], *sample["rewards"].values()]
        assert len(given) == 3 and {x is None for x in given} == {bool(attempt["uid"] % 2)}


@pytest.mark.slow
def test_prompts_show_the_tools_of_their_own_row(recipe, tmp_path, monkeypatch):
    """In training and in evaluation, also with what `reset` adds."""
    rows = [{"question": f"{a}1 * 12 =", "answer": "1", "environment": "ab"[a % 2]} for a in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    how = (
        f"data={{train: '{tmp_path}/rows.jsonl', validation: '{tmp_path}/rows.jsonl', max_prompt_tokens: 64}}",
        "environment={choices: {a: {name: 'a:B'}, b: {name: 'b:C'}}, name: null, format: hermes}",
        "model.path=builtin:caller", "rewards=[{name: environment}]",
        "train.steps=1", "train.eval_every=1", "rollout.prompts=4", "rollout.group=2",
    )  # fmt: skip
    fake = Fake(resets=lambda row, sample: " 3")
    fake.tools = {
        name: tuple({"type": "function", "function": {"name": tool}} for tool in tools)
        for name, tools in {"a": ["calculate"], "b": ["calculate", "calculate_all"]}.items()
    }
    trainer = played(monkeypatch, recipe, tmp_path / "run", *how, fake=fake)
    asked, evaluated = [], []
    in_evaluation = players.Playing.__init__

    def watched(self, *args, **options):
        in_evaluation(self, *args, **options)
        evaluated.extend(self.problems)

    monkeypatch.setattr(players.Playing, "__init__", watched)
    assert train(trainer, lambda updates: asked.extend(updates.batch.problems))
    tokenizer = trainer.policy.tokenizer
    of = {name: Tokenize(tokenizer, trainer.config.data, tools={None: tools}) for name, tools in fake.tools.items()}
    assert of["a"](rows[0]["question"]) != of["b"](rows[0]["question"])
    for problems, more in (
        (trainer.source.problems, ""),
        (trainer.held_out.problems, ""),
        (asked, " 3"),
        (evaluated, " 3"),
    ):
        assert {p.columns["environment"] for p in problems} == {"a", "b"}
        for p in problems:
            assert p.ids == of[p.columns["environment"]](p.columns["question"] + more)


@pytest.mark.slow
def test_an_environment_reads_a_turn_with_what_the_template_began(recipe, tmp_path, monkeypatch):
    read = []
    fake = Fake()
    play = fake.play
    fake.play = lambda turns: (read.extend(turns.values()), play(turns))
    monkeypatch.setattr(Tokenize, "tail", lambda self, ids: f"<think>{len(ids)} ")
    trainer = played(monkeypatch, recipe, tmp_path / "run", "train.steps=1", fake=fake)
    prompts = []
    assert train(trainer, lambda updates: prompts.extend(len(p.ids) for p in updates.batch.problems))
    before = [int(re.match(r"<think>(\d+) ", text)[1]) for text in read]
    first = len(prompts) * trainer.config.rollout.group
    assert sorted(before[:first]) == sorted(prompts * trainer.config.rollout.group)
    assert len(before) > first and min(before[first:]) > min(prompts)
    (_, samples) = read_samples(tmp_path / "run", 1)
    assert not any("<think>" in text for s in samples for text in s["turns"])


@pytest.mark.parametrize(
    ("resets", "overrides", "value", "remedy"),
    [
        (lambda row, sample: str(sample), (), "'0'", "seed"),
        (lambda row, sample: "x" * 30, (), "34 tokens", "data.max_prompt_tokens"),
    ],
)
def test_a_reset_that_does_not_fit_is_refused(recipe, tmp_path, monkeypatch, resets, overrides, value, remedy):
    fake = Fake(resets=resets)
    with pytest.raises(UserError, match=value) as e:
        train(played(monkeypatch, recipe, tmp_path / "run", *overrides, fake=fake))
    assert remedy in str(e.value) and not fake.open_now


@pytest.mark.parametrize(
    "variant",
    [
        "grpo",
        "{name: llds, llds_coef: 0.1}",
        pytest.param("gspo", marks=pytest.mark.exhaustive),
        pytest.param("nthr", marks=pytest.mark.exhaustive),
    ],
)
def test_the_loss_is_of_the_policy_s_own_tokens(recipe, tmp_path, monkeypatch, variant):
    """Of each sample as many tokens have a weight as the policy drew, and lengths count them. What is compared with the
    limit counts all tokens, as the limit does: this penalty is minus their number."""
    batches, seen, signals = [], spies.record(monkeypatch), []
    overlong = "{name: soft_overlong, weight: 0.0, options: {max_tokens: 24, buffer: 24, factor: 24}}"
    how = (
        f"variant={variant}",
        "train.ppo_epochs=2",
        "rollout.max_tokens=24",
        f"rewards=[{{name: 'tiny_run:length'}}, {overlong}]",
    )
    make = parts.signals_of
    monkeypatch.setattr(parts, "signals_of", lambda given: signals.append(make(given)) or signals[-1])
    trainer = played(monkeypatch, recipe, tmp_path / "run", *how)
    assert train(trainer, lambda updates: batches.append(updates.batch.rollout))
    *_, packed = [args[-1] for name, args in seen if "update" in name]
    weights, own = np.asarray(packed.arrays["weights"]), batches[-1].sampled
    assert (weights > 0).sum() == own.sum() < batches[-1].lengths.sum() == (np.asarray(packed.segments) > 0).sum()
    if variant == "grpo":  # the mean over samples of means over their own tokens
        each = np.repeat(1 / 32 / own.sum(-1).ravel(), own.sum(-1).ravel())
        np.testing.assert_allclose(np.sort(weights[weights > 0]), np.sort(each), rtol=1e-6)
    if "llds" in variant:  # its actions are turns
        starts = own & ~np.pad(own[..., :-1], ((0, 0), (0, 0), (1, 0)))
        assert np.asarray(packed.arrays["action_starts"]).sum() == starts.sum() > 40
    _, samples = read_samples(tmp_path / "run", 3)
    assert all(s["rewards"]["tiny_run:length"] == s["length"] for s in samples)
    full = [24 if s["calls"] > len(s["turns"][1::2]) else len(s["ids"]) for s in samples]  # an answer had no place
    penalties = [-s["rewards"]["soft_overlong"] for s in samples]
    assert penalties == pytest.approx(full, rel=1e-6) and signals[-1].full_lengths.ravel().tolist() == full
    assert signals[-1].lengths.ravel().tolist() == [s["length"] for s in samples] and any(
        len(s["ids"]) < n == 24 for s, n in zip(samples, full, strict=True)
    )


@pytest.mark.slow
def test_held_out_problems_are_played_too(recipe, tmp_path, monkeypatch):
    held_out = f"data.validation={recipe.parent}/sums.jsonl", "train.eval_limit=8", "train.eval_every=2"
    held_out = *held_out, "train.eval_samples=4", "train.eval_temperature=1.0"
    fake = Fake(invalid=lambda uid, sample: uid == 3)
    assert train(played(monkeypatch, recipe, tmp_path / "run", *held_out, fake=fake))
    found = [line for line in numbers(tmp_path / "run") if "eval/reward" in line]
    assert len(found) == 3 and all(line["eval/rewards/environment"] > 0 for line in found) and not fake.open_now
    samples = [s for a in evaluations.read(tmp_path / "run" / "eval" / "step_3.jsonl") for s in a.samples]
    each = [s.episode for s in samples]
    assert found[-1]["eval/episode/turns"] == np.mean([len(e.turns[::2]) for e in each]) > 1
    assert found[-1]["eval/episode/answer_tokens"] == np.mean([sum(e.tokens[1::2]) for e in each])
    assert found[-1]["eval/episode/calls"] == np.mean([e.calls for e in each])
    assert [e.invalid for e in each] == ["timeout" if i // 4 == 3 else None for i in range(32)]
    assert all(s.tokens == sum(s.episode.tokens[::2]) for s in samples)
    written = ["\n".join(e.turns[::2]).replace("<eos>", "").replace("<pad>", "") for e in each]
    assert [s.completion for s in samples] == written


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (("rollout.ahead=1",), "rollout.ahead=1"),
        (("rollout.overlap=0.5", "variant.importance=truncate"), "rollout.overlap=0.5"),
        (("rollout.decode_slots=2",), "rollout.decode_slots=2"),
        (("rollout.cache_dtype=int8", "rollout.uncorrected=true"), "int8"),
        (("variant=ppo",), "'ppo'"),
        (("variant=remax",), "'remax'"),
        (("variant=xrpo",), "'xrpo'"),
        (("variant=grpo_process",), "'grpo_process'"),
        (("variant=gt_likelihood",), "'gt_likelihood'"),
        (("variant=grpo_lambda_traces",), "variant.ratio=trace"),
        (("variant=gtpo",), "'gtpo'"),
        (("variant={name: llds, answer_weight: 0.5}", "train.ppo_epochs=2"), "variant.answer_weight=0.5"),
        (("environment=null",), "max_turn_tokens=6"),
        (("environment=null", "rollout.max_turn_tokens=0"), "'environment'"),
    ],
)
def test_what_episodes_do_not_go_with_is_refused(recipe, overrides, value):
    with pytest.raises(UserError, match=value):
        load(recipe, [*PLAYED, *overrides])
