"""Episodes of several turns: the policy draws a turn, its environment answers, and the policy draws the next one.

The devices draw in rounds (`grpojax.extensions.episodes.episode_sampler`). A round begins as soon as some answers are
there, and the other samples wait for theirs; what is drawn is the same whenever they come. What was drawn is never
encoded again: an answer is appended as the tokens that the chat template writes for it
(`grpojax.data.Tokenize.after_turn`).

With several processes each drives the environments of its own prompts. They exchange the answers before each round, so
that all run the same programs.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from grpojax import data
from grpojax.data.chat_template import template_of
from grpojax.evaluation import EvalConfig
from grpojax.evaluation.attempts import Drawn
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.extensions.episodes.environment_config import EnvironmentConfig
from grpojax.extensions.episodes.environment_types import Environments, Episode, Reply
from grpojax.extensions.episodes.episode_sampler import EpisodeSampler
from grpojax.extensions.episodes.open_episodes import Notes
from grpojax.host import processes
from grpojax.host.errors import UserError
from grpojax.programs import packing
from grpojax.programs.policy import Policy
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards import Rewards
from grpojax.run.batch import turns_of
from grpojax.run.recipe import Config
from grpojax.types import Array, Rollout, Samples

Place = tuple[int, int]  # a sample's indices in [P, G]

# The columns that reward functions get besides the data's: what `get_reward` of the episode's environment returned, the
# messages of the whole episode, its number of tokens (`Played.lengths`), and, where a function asks for them, the
# environments as they are at the end.
COLUMNS = ("environment_reward", "episode", "episode_tokens", "environments")

# What is counted of each episode, ``[P, G]`` int: turns, calls of tools, failures among these, and the failures that
# reached no tool.
COUNTS = ("turns", "calls", "failures", "malformed")

_LEAST_WAIT = 0.02  # seconds that a round waits for answers at least, as a round costs more than its shortest turn


def environments_of(config: EnvironmentConfig, tokenizer: Any) -> Environments:
    """The environments of a run."""
    from grpojax.extensions.episodes.instances import Workers

    workers: Any = Workers(config, template_of(tokenizer))
    return workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """Episodes that are over, ``[P, G]``.

    Attributes:
      problems: those of the prompts, with what ``reset`` added to them.
      rollout: the samples, with `grpojax.types.Rollout.sampled`.
      lengths: tokens of each, as ``rollout.max_tokens`` counts them: with what the environment answered, and the limit
        itself where an answer had no place any more.
      columns: `COLUMNS`, ``[P * G]`` each; with several processes only those of this one's prompts are known.
      counts: `COUNTS` by name.
      invalid: why an episode does not count, by place.
      events: how often something befell an episode that is to be known of, by its name in ``episode/...``.
    """

    problems: Sequence[data.Problem]
    rollout: Rollout
    lengths: Samples
    columns: Mapping[str, Sequence[Any]]
    counts: Mapping[str, Samples]
    invalid: Mapping[Place, str]
    events: Mapping[str, int]


class Begun(Protocol):
    """Episodes that are being played.

    Attributes:
      problems: those of the prompts, with what ``reset`` added to them.
    """

    @property
    def problems(self) -> Sequence[data.Problem]:
        """As above."""
        ...

    def finish(self, sync: Callable[[Any], object]) -> Played:
        """Plays all episodes to their ends; ``sync`` waits for the devices, during which the run may stop."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Players:
    """What plays a run's episodes.

    Attributes:
      policy: the model.
      environments: its environments.
      tokenize: messages to tokens.
      config: the recipe's section: most turns, and most tokens of an answer.
      turn_tokens: most tokens of a turn; 0 for those of an episode.
      longest_prompt: most tokens of a prompt.
      shows: whether a reward asks for the column ``environments``.
    """

    policy: Policy
    environments: Environments
    tokenize: data.Tokenize
    config: EnvironmentConfig
    turn_tokens: int
    longest_prompt: int
    shows: bool = False

    @classmethod
    def of(
        cls, recipe: Config, policy: Policy, environments: Environments, tokenize: data.Tokenize, rewards: Rewards
    ) -> "Players":
        """The players of a recipe.

        Raises:
          UserError: a reward is that of the environment, which has none.
        """
        assert recipe.environment is not None
        without = [name for name, has_reward in environments.rewarded.items() if not has_reward]
        if without and any(term.name == "environment" and term.weight for term in rewards.config.terms):
            path = recipe.environment.all_choices[without[0]].path or "functions"
            raise UserError(
                f"reward 'environment': {path} has no get_reward, so that no sample would count\n"
                "give the class one, or take another reward"
            )
        return cls(
            policy=policy,
            environments=environments,
            tokenize=tokenize,
            config=recipe.environment,
            turn_tokens=recipe.rollout.max_turn_tokens,
            longest_prompt=recipe.data.max_prompt_tokens,
            shows=rewards.asks_for("environments"),
        )

    def begin(
        self,
        params: Any,
        problems: Sequence[data.Problem],
        key: Array,
        config: SamplerConfig,
        *,
        notes: Notes | None = None,
    ) -> Begun:
        """Opens the environments of some problems and dispatches their first turns; arguments as of `Playing`."""
        return Playing(self, params, problems, key, config, notes=notes)

    def in_evaluation(self, params: Any, config: EvalConfig, sync: Callable[[Any], object]) -> dict[str, Any]:
        """Arguments of `grpojax.evaluation.evaluate` for problems that are played."""

        def play(batch: Sequence[data.Problem]) -> Drawn:
            played = self.begin(params, batch, jax.random.key(config.seed), config.sampler).finish(sync)
            return Drawn(played.rollout, played.columns, played.problems, self.records(played))

        return {"play": play, "more": COLUMNS}

    def records(self, played: Played) -> list[EpisodeRecord]:
        """What is kept of episodes, ``[P * G]``."""
        special = functools.partial(self.tokenize.read, "with_special_tokens", ())
        found = []
        for p, g in np.ndindex(played.rollout.lengths.shape):
            of = turns_of(played.rollout, p, g, special)
            counts = {name: int(x[p, g]) for name, x in played.counts.items() if name != "turns"}
            turns, tokens = tuple(of["turns"]), tuple(of["sampled"])
            found.append(EpisodeRecord(turns=turns, tokens=tokens, invalid=played.invalid.get((p, g)), **counts))
        return found

    def columns_with(self, columns: Iterable[str]) -> list[str]:
        """The columns that reward functions get in a run of episodes, with those of the data.

        Raises:
          UserError: the data has one of the same name.
        """
        there = [*columns]
        if twice := sorted({*there} & {*COLUMNS}):
            raise UserError(
                f"the data has a column {twice[0]!r}, the name of what rewards get of an episode\nlist the columns "
                "that they need in data.columns, under other names"
            )
        return [*there, *COLUMNS]


class Playing:
    """Episodes that are being played: an environment for each sample is open, and the first turns are dispatched.

    Args:
      players: what plays them.
      params, key, config: as of `EpisodeSampler`.
      problems: ``[P]``; their number must divide over the batch shards, or be a divisor of that.
      notes: where the open episodes are noted; None for nowhere.

    Raises:
      UserError: ``reset`` gives different texts to samples of a prompt, or too long a text.
    """

    def __init__(
        self,
        players: Players,
        params: Any,
        problems: Sequence[data.Problem],
        key: Array,
        config: SamplerConfig,
        *,
        notes: Notes | None = None,
    ):
        self._players, self._environments, self._key = players, players.environments, key
        group, first = config.group, data.to_prompts(problems, players.longest_prompt, config.group).first_sample
        every = [(p, g) for p in range(len(problems)) for g in range(group)]
        self._episodes = {(p, g): (problems[p].uid, int(first[p]) + g) for p, g in every}
        self._places = {episode: place for place, episode in self._episodes.items()}
        self._mine = {(p, g) for p in processes.rows(len(problems)).tolist() for g in range(group)}
        rows = {self._episodes[at]: _row(problems[at[0]]) for at in every}
        mine = {episode: row for episode, row in rows.items() if self._places[episode] in self._mine}
        self._repeats = {e for e, row in rows.items() if self._environments.deterministic(row)}
        self._notes, self._differs, self._resumed = notes, set[Episode](), 0
        if notes is not None:
            self._resumed = sum(notes.was_open(e) for e in rows if e not in self._repeats)
            notes.open(mine)
        added = dict(self._environments.open(mine))
        for episode, row in mine.items():
            self._note(episode, row, added[episode])
        self._added = self._shared(added)
        try:
            self.problems = [self._asked(p, problem, group) for p, problem in enumerate(problems)]
            self._check_positions(problems, config.max_tokens)
            prompts = data.to_prompts(self.problems, self._length(), group)
            self.sampler = EpisodeSampler(players.policy, params, prompts, key, config, turn_tokens=players.turn_tokens)
        except BaseException:
            self.close()
            raise
        shape = len(problems), group
        self._counts = {name: np.zeros(shape, np.int32) for name in COUNTS}
        self._chats = {at: [*_messages(self.problems[at[0]])] for at in every}
        self._begins, self._cut = np.zeros(shape, np.int32), np.zeros(shape, bool)
        self._drawn, self._waiting = set(every), set[Place]()  # whose turn is drawn, and whose environment works
        self._invalid: dict[Place, str] = {}
        self._round_s = _LEAST_WAIT
        # ``lengths`` and ``stopped`` of the first turns, from where an episode may begin again.
        self._first: tuple[np.ndarray, np.ndarray] | None = None
        self._cut_back, self._redrawn = False, 0
        # What the environments of this process said of episodes that were over: rewards, and snapshots.
        self._given, self._shown = dict[Episode, float | None](), dict[Episode, Any]()

    def close(self) -> None:
        """Drops the episodes' environments."""
        self._environments.close([self._episodes[at] for at in sorted(self._mine)])

    def finish(self, sync: Callable[[Any], object]) -> Played:
        """Plays all episodes to their ends; ``sync`` waits for the devices, during which the run may stop."""
        try:
            while True:
                since = time.perf_counter()
                sync(self.sampler.dispatched)
                out = self.sampler.fetch()
                if self._first is None:
                    self._first = out.lengths.copy(), out.stopped.copy()
                self._round_s = max(_LEAST_WAIT, time.perf_counter() - since)
                self._hand_in(out)
                answers, counts = self._answers(out, sync)
                if self._notes is not None:
                    self._notes.write(self._episodes[at] for at in (self._drawn | self._waiting) & self._mine)
                while not counts.any():
                    if (played := self._played(out)) is not None:
                        return played
                    answers, counts = self._answers(out, sync)
                if self._cut_back:
                    self.sampler.cut_back(out)
                    self._cut_back = False
                self.sampler.go_on(answers, counts)
        finally:
            self.close()
            del self.sampler  # with its caches: a filter may draw another rollout next

    def _hand_in(self, out: Rollout) -> None:
        """Gives the turns that were drawn to the environments. An episode is over without it where its turn is its last
        one, or was cut because the episode is too long."""
        turns = dict[Place, str]()
        for at in sorted(self._drawn):
            self._counts["turns"][at] += 1
            ids = out.tokens[at][self._begins[at] : out.lengths[at] - int(out.stopped[at])].tolist()
            (text,) = self._players.tokenize.read("with_special_tokens", (), [ids])
            self._chats[at].append({"role": "assistant", "content": text})
            too_long = not out.stopped[at] and out.lengths[at] == out.tokens.shape[-1]
            if self._counts["turns"][at] < self._players.config.max_turns and not too_long:
                before = [*self.problems[at[0]].ids, *out.tokens[at][: self._begins[at]].tolist()]
                turns[at] = self._players.tokenize.tail(before) + text  # such as <think>: no call is read in reasoning
        self._drawn, self._waiting = set(), self._waiting | set(turns)
        mine = {self._episodes[at]: text for at, text in turns.items() if at in self._mine}
        if mine:
            self._environments.play(mine)

    def _answers(self, out: Rollout, sync: Callable[[Any], object]) -> tuple[np.ndarray, np.ndarray]:
        """``(tokens [P, G, T], counts [P, G])`` to append, of the answers that are there. Waits for some, during which
        the run may stop (``sync``); there are none if all episodes are over."""
        answers, counts = np.zeros(out.tokens.shape, np.int32), np.zeros(out.lengths.shape, np.int32)
        while self._waiting and not counts.any():
            again = set[Place]()
            for episode, answer in sorted(self._replies(out, sync).items()):
                at = self._places[episode]
                self._waiting.discard(at)
                if answer["again"]:
                    again.add(at)
                    continue
                for name in ("calls", "failures", "malformed"):
                    self._counts[name][at] += answer[name]
                if answer["invalid"] is not None:
                    self._invalid[at] = answer["invalid"]
                ids = answer["ids"]
                if out.lengths[at] + len(ids) < out.tokens.shape[-1]:
                    answers[at][: len(ids)], counts[at] = ids, len(ids)
                elif ids:
                    self._cut[at] = True  # no token of a next turn would have a place
            self._begin_again(again, out)
        self._drawn = {(int(p), int(g)) for p, g in np.argwhere(counts)}
        self._begins = np.where(counts, out.lengths + counts, self._begins)
        return answers, counts

    def _begin_again(self, again: set[Place], out: Rollout) -> None:
        """Takes episodes back to where their first turn was drawn, with samples ``out``, and hands that turn in again.
        From there they are drawn with the same random numbers; what their environments answer may differ."""
        if not again:
            return
        assert self._first is not None, "a round was drawn"
        for at in again:
            first = int(self._first[0][at])
            out.lengths[at], out.stopped[at] = first, self._first[1][at]
            out.tokens[at][first:], out.logps[at][first:], out.sampled[at][first:] = 0, 0.0, False
            self._chats[at] = [*_messages(self.problems[at[0]])]
            for counted in self._counts.values():
                counted[at] = 0
            self._begins[at], self._cut[at] = 0, False
            self._given.pop(self._episodes[at], None), self._shown.pop(self._episodes[at], None)
        self._redrawn += len(again)
        self._cut_back, self._drawn = True, again
        self._hand_in(out)

    def _appended(self, at: Place, reply: Reply, out: Rollout) -> list[int]:
        """The tokens to append to a sample, as many as can be of use; empty if its episode is over."""
        if reply.invalid is None and not reply.again:
            self._note(self._episodes[at], self._chats[at][-1]["content"], [reply.messages, reply.done])
        self._chats[at] += reply.messages
        if reply.invalid is not None or reply.done or not reply.messages:
            return []
        end = int(out.tokens[at][out.lengths[at] - 1]) if out.stopped[at] else None
        tokenize = self._players.tokenize.of_row(self.problems[at[0]].columns)
        ids = tokenize.after_turn(reply.messages, end, most=self._players.config.max_tool_tokens)
        return ids[: out.tokens.shape[-1]]

    def _replies(self, out: Rollout, sync: Callable[[Any], object]) -> Mapping[Episode, dict[str, Any]]:
        """Some of the replies, the same on all processes: those that are there after as long as a round takes. Tokens
        stand for their messages, which may be long, and which only the process that plays the episode keeps."""
        while True:
            sync(())  # tools may take long; all processes come here equally often
            until, mine = time.perf_counter() + self._round_s, dict[Episode, Reply]()
            wanted = len(self._waiting & self._mine)
            while len(mine) < wanted and (left := until - time.perf_counter()) > 0:
                mine |= self._environments.replies(left)
            answers = dict[Episode, dict[str, Any]]()
            for episode, reply in mine.items():
                ids = self._appended(self._places[episode], reply, out)
                answers[episode] = {
                    "ids": ids,
                    "calls": reply.calls,
                    "failures": reply.failures,
                    "malformed": reply.malformed,
                    "invalid": reply.invalid,
                    "again": reply.again,
                }
            if shared := self._shared(answers):
                return shared

    def _note(self, episode: Episode, action: Any, observation: Any) -> None:
        """Notes what an environment that states to be deterministic has answered to an action."""
        if self._notes is not None and episode in self._repeats and self._notes.differs(episode, action, observation):
            self._differs.add(episode)

    def _shared(self, mine: Mapping[Episode, Any]) -> dict[Episode, Any]:
        """What all processes have, by episode. All must call it, also one that has all episodes of few prompts."""
        if jax.process_count() == 1:
            return dict(mine)
        every = processes.meet(json.dumps([(*episode, value) for episode, value in mine.items()]))
        return {(uid, sample): value for text in every for uid, sample, value in json.loads(text)}

    def _played(self, out: Rollout) -> Played | None:
        """The episodes, which are over; None if some of them begin again."""
        mine = {self._episodes[at]: at for at in sorted(self._mine)}
        self._given |= _asked(self._environments.rewards, mine, self._given)
        if self._players.shows:
            self._shown |= _asked(self._environments.snapshots, mine, self._shown)
        lost = {episode: None for episode, reply in self._environments.replies(0.0).items() if reply.again}
        if again := {self._places[episode] for episode in self._shared(lost)}:
            self._begin_again(again, out)
            return None
        # An episode may have become invalid without a reply that says so: at its reset, or after its last turn.
        gone = {e: "end" for e, x in self._given.items() if _is_nan(x)}
        gone |= {e: "end" for e, x in self._shown.items() if x is None}
        for episode, reason in self._shared(gone).items():
            self._invalid.setdefault(self._places[episode], reason)
        # 0 for one that is invalid, which gets no reward in the end: None would be counted as a reward that is missing.
        known = {at: 0.0 if _is_nan(x := self._given[e]) else x for e, at in mine.items()}
        lengths = np.where(self._cut, out.tokens.shape[-1], out.lengths)
        columns = (
            known,
            {at: self._chats[at] for at in mine.values()},
            {at: int(lengths[at]) for at in mine.values()},
            {mine[e]: x for e, x in self._shown.items()},
        )
        return Played(
            problems=self.problems,
            rollout=dataclasses.replace(out, stopped=out.stopped & ~self._cut),
            lengths=lengths,
            columns={name: [of.get(at) for at in self._episodes] for name, of in zip(COLUMNS, columns, strict=True)},
            counts=self._counts,
            invalid=self._invalid,
            events={
                "redrawn/resumed": self._resumed,
                "redrawn/neighbour": self._redrawn,
                "replay_differs": len(self._shared(dict.fromkeys(self._differs))),
            },
        )

    # ------------------------------------------------------------------------------------------------ prompts

    def _asked(self, p: int, problem: data.Problem, group: int) -> data.Problem:
        """A problem with what ``reset`` added. A sample whose ``reset`` failed has no text, and gets that of the
        others: it will not count."""
        every = [self._added[self._episodes[p, g]] for g in range(group)]
        texts = [added for added in every if added]
        if not texts:
            return problem
        first = texts[0]
        if any(other != first for other in texts):
            raise UserError(
                f"environment: reset gave different texts to samples of problem {problem.uid}, which share a prompt: "
                f"{str(first)[:60]!r} and others\ndraw what differs from a column of the row, such as a seed"
            )
        chat = _messages(problem)
        if isinstance(first, str):
            chat = [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + first}]
        else:
            chat = [*chat, *first]
        asked = chat[-1]["content"] if problem.chat is None and len(chat) == 1 else chat
        ids = self._players.tokenize.of_row(problem.columns)(asked)
        if len(ids) > self._players.longest_prompt:
            raise UserError(
                f"environment: the prompt of problem {problem.uid} has {len(ids)} tokens with what reset added, over "
                f"data.max_prompt_tokens={self._players.longest_prompt}: raise that, or shorten the text of reset"
            )
        text = chat[-1]["content"]
        return dataclasses.replace(problem, ids=ids, prompt=text, chat=None if isinstance(asked, str) else chat)

    def _check_positions(self, given: Sequence[data.Problem], longest: int) -> None:
        """Raises `UserError` if samples of a prompt that grew could become longer than the model's positions."""
        most = self._players.policy.config.max_positions
        for before, problem in zip(given, self.problems, strict=True):
            if len(problem.ids) > len(before.ids) and len(problem.ids) + longest > most:
                raise UserError(
                    f"environment: the prompt of problem {problem.uid} has {len(problem.ids)} tokens with what reset "
                    f"added; with {longest} of a sample that is over the model's max_position_embeddings={most}\n"
                    "lower rollout.max_tokens, or shorten the text of reset"
                )

    def _length(self) -> int:
        return packing.bucket(max(len(p.ids) for p in self.problems), self._players.longest_prompt)


def _asked(
    ask: Callable[[Sequence[Episode]], Sequence[Any]], episodes: Iterable[Episode], known: Mapping[Episode, Any]
) -> dict[Episode, Any]:
    """What an environment says of the episodes of which it is not known."""
    wanted = [episode for episode in episodes if episode not in known]
    return dict(zip(wanted, ask(wanted), strict=True))


def _is_nan(x: float | None) -> bool:
    return x is not None and math.isnan(x)


def _row(problem: data.Problem) -> dict[str, Any]:
    """The columns that ``reset`` gets."""
    return {**problem.columns, "prompt": problem.prompt, "gold": problem.gold}


def _messages(problem: data.Problem) -> list[Mapping[str, Any]]:
    """A problem as a chat."""
    if problem.chat is None or isinstance(problem.chat, str):
        return [{"role": "user", "content": problem.prompt}]
    return [*problem.chat]
