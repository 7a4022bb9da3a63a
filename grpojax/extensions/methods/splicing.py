"""Puts the true answer in place of the one that a sample gives: texts and tokens, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpojax.rewards.answers import extract
from grpojax.run.minibatch import room
from grpojax.types import PerPrompt, Rollout, Samples, Tokens


@dataclasses.dataclass(frozen=True)
class Marker:
    """The position of a text's last marker: ``[start, end)`` in characters, and the number of all markers.

    Without a marker, both are the text's length.
    """

    start: int
    end: int
    count: int


def find_marker(text: str, marker: str | None) -> Marker:
    r"""The last marker of a text.

    Args:
      text: a completion.
      marker: as in `grpojax.rewards.answers.extract_answer`.

    Example:
      >>> find_marker("#### 3, no: #### 4", None)
      Marker(start=12, end=16, count=2)
      >>> find_marker(r"so \boxed{4}", None)
      Marker(start=3, end=10, count=1)
    """
    found: list[tuple[int, int]] = []
    if marker is None or marker.startswith(r"\boxed"):
        found += [m.span() for m in extract.BOX.finditer(text)]
    for literal in extract.MARKERS if marker is None else () if marker.startswith(r"\boxed") else (marker,):
        place = text.rfind(literal)
        # Only the last one's position matters, so overlapping ones need not be separated.
        found += [(place, place + len(literal))] * text.count(literal)
    return Marker(*max(found), len(found)) if found else Marker(len(text), len(text), 0)


def answer_tokens(rollout: Rollout, tokenizer: Any, marker: str | None) -> Tokens:
    r"""``[P, G, T]`` bool: the tokens of the answers that samples give.

    They begin with the first token that has a character after the last marker. They end with the line, or with the
    brace that closes the box. A sample without a marker has none.

    Args:
      rollout: ``[P, G, ...]``.
      tokenizer: of the policy.
      marker: as in `find_marker`.
    """

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=True)

    mask = np.zeros(rollout.tokens.shape, bool)
    for p, g in np.argwhere(rollout.lengths > 0).tolist():
        ids = rollout.tokens[p, g, : rollout.lengths[p, g] - int(rollout.stopped[p, g])].tolist()
        text = decode(ids)
        place = find_marker(text, marker)
        if not place.count:
            continue
        end = text.find("\n", place.end)
        if text[place.end - 1] == "{":
            closing = extract.closing_brace(text, place.end)
            end = -1 if closing is None else closing + 1
        first = _tokens_within(ids, text, place.end, decode)
        last = len(ids) if end < 0 else _tokens_within(ids, text, end - 1, decode) + 1
        mask[p, g, first:last] = True
    return mask


@dataclasses.dataclass(frozen=True)
class Spliced:
    """A sample's tokens with the true answer at their end.

    Attributes:
      ids: the tokens, up to the answer's last.
      scored: number of the last tokens that count.
      markers: number of markers that the sample had.
      closing: text that closes the marker after the answer: the brace of a box, or nothing.
    """

    ids: tuple[int, ...]
    scored: int
    markers: int
    closing: tuple[int, ...] = ()


def splice(
    ids: Sequence[int],
    gold: str,
    tokenizer: Any,
    *,
    marker: str | None = None,
    include_marker: bool = False,
) -> Spliced:
    """Puts the true answer where a sample gives its own.

    The sampled ids stay as they are up to the token in which the last marker begins. Marker and answer are tokenised
    separately from them and from each other; the answer has the blanks that the sample has before its own. If a sample
    has no marker, one is added on a new line.

    Args:
      ids: sampled tokens, without the one that ends the sample.
      gold: the true answer.
      tokenizer: of the policy.
      marker, include_marker: as in the variant ``gt_likelihood``.
    """

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=True)

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    ids = list(ids)
    text = decode(ids)
    place = find_marker(text, marker)
    if not place.count:
        before, boxed = ids, marker is not None and marker.startswith(r"\boxed")
        written = "\n\\boxed{" if boxed else f"\n{marker or '####'}"
        blanks = "" if boxed else " "
    else:
        before = ids[: _tokens_within(ids, text, place.start, decode)]
        written = text[len(decode(before)) : place.end]
        rest = text[place.end :]
        given = rest.lstrip(" \t")
        boxed = written.endswith("{")
        blanks = rest[: len(rest) - len(given)] if given else "" if boxed else " "
    head, answer = encode(written), encode(blanks + gold)
    scored = len(answer) + (len(head) if include_marker else 0)
    return Spliced((*before, *head, *answer), scored, place.count, tuple(encode("}")) if boxed else ())


def _tokens_within(ids: list[int], text: str, end: int, decode: Any) -> int:
    """The largest number of tokens whose text is the beginning of ``text`` and ends at ``end`` or before."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(ids[:middle])) <= end else (low, middle - 1)
    while low and not text.startswith(decode(ids[:low])):  # one character takes several tokens
        low -= 1
    return low


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplicedAnswers:
    """True answers, placed after the reasoning of some groups' samples.

    Attributes:
      tokens: ``[n, G, T]`` int32. After the answer a box is closed, and the token that ends a sample follows.
      lengths: ``[n, G]`` int32; 0 if nothing is scored.
      mask: ``[n, G, T]`` bool, the tokens that count.
      markers: ``[n, G]`` how many markers each sample had.
      stopped: ``[n, G]`` bool, whether the text has the token that ends a sample.
    """

    tokens: Tokens
    lengths: Samples
    mask: Tokens
    markers: Samples
    stopped: Samples


def splice_groups(
    rollout: Rollout,
    gold: Sequence[str],
    tokenizer: Any,
    *,
    marker: str | None,
    include_marker: bool,
    missing: str,
    eos: int | None = None,
) -> SplicedAnswers:
    """`splice` for every sample of a rollout ``[n, G, ...]``. With ``missing="zero"``, samples without a marker are
    left out.

    A sample that stopped ends with its own last token, and one that was cut ends with ``eos``. Without an ``eos`` it
    has no end. T is that of `room`, so that few programs are compiled.
    """
    n, group, most = rollout.tokens.shape
    made: dict[tuple[int, int], Spliced] = {}
    ends: dict[tuple[int, int], list[int]] = {}
    for p, g in np.ndindex(n, group):
        ids = rollout.tokens[p, g, : rollout.lengths[p, g]].tolist()
        ends[p, g] = [ids.pop()] if rollout.stopped[p, g] else [] if eos is None else [eos]
        made[p, g] = splice(ids, gold[p], tokenizer, marker=marker, include_marker=include_marker)
    size = room(most, max(len(s.ids) + len(s.closing) + len(ends[at]) for at, s in made.items()))
    tokens, mask = np.zeros((n, group, size), np.int32), np.zeros((n, group, size), bool)
    lengths, markers = np.zeros((n, group), np.int32), np.zeros((n, group), np.int32)
    for at, spliced in made.items():
        markers[at] = spliced.markers
        if spliced.markers or missing == "append":
            whole = [*spliced.ids, *spliced.closing, *ends[at]]
            lengths[at], answered = len(whole), len(spliced.ids)
            tokens[at][: len(whole)] = whole
            mask[at][answered - spliced.scored : answered] = True
    stopped = np.array([[bool(ends[p, g]) for g in range(group)] for p in range(n)])
    return SplicedAnswers(tokens=tokens, lengths=lengths, mask=mask, markers=markers, stopped=stopped)


def with_answers(rollout: Rollout, chosen: PerPrompt, answers: SplicedAnswers | None) -> Rollout:
    """A rollout with spliced samples in place of the drawn ones.

    Args:
      rollout: ``[P, G, T]``.
      chosen: ``[n]`` the groups that have answers.
      answers: the answers of these groups. A sample of length 0 stays as it was drawn. None if no group has any.

    Returns:
      ``[P, G, T']`` with T' of `room`. A spliced sample is ``stopped`` if it has the token that ends a sample.
      ``logps`` of tokens that were not drawn are NaN.
    """
    most = rollout.tokens.shape[2]
    wider = ((0, 0), (0, 0), (0, (room(most) if answers is None else answers.tokens.shape[2]) - most))
    tokens, logps, lengths = np.pad(rollout.tokens, wider), np.pad(rollout.logps, wider), rollout.lengths.copy()
    stopped = rollout.stopped.copy()
    if answers is not None:
        put = answers.lengths > 0
        tokens[chosen] = np.where(put[..., None], answers.tokens, tokens[chosen])
        logps[chosen] = np.where(put[..., None], np.nan, logps[chosen])
        lengths[chosen] = np.where(put, answers.lengths, lengths[chosen])
        stopped[chosen] = np.where(put, answers.stopped, stopped[chosen])
    return Rollout(tokens=tokens, logps=logps, lengths=lengths, stopped=stopped)


def side_by_side(some: SplicedAnswers, more: SplicedAnswers) -> SplicedAnswers:
    """The samples of both in one group; ``more`` has no longer texts."""
    wider = ((0, 0), (0, 0), (0, some.tokens.shape[2] - more.tokens.shape[2]))
    fields = [f.name for f in dataclasses.fields(SplicedAnswers)]
    pairs = {name: (getattr(some, name), getattr(more, name)) for name in fields}
    return SplicedAnswers(
        **{name: np.concatenate([a, np.pad(b, wider) if b.ndim == 3 else b], 1) for name, (a, b) in pairs.items()}
    )
