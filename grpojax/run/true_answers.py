"""The true answer in place of the one that a sample gave: which tokens to score, and what their scores come to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpojax.rewards.answers import extract
from grpojax.types import Rollout, Samples, Tokens


@dataclasses.dataclass(frozen=True)
class Marker:
    """Where a text has its last marker: ``[start, end)`` in characters, and how many there are in all.

    Without any, both are the text's length.
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
        # Only the last one's place matters, so that overlapping ones need not be told apart.
        found += [(place, place + len(literal))] * text.count(literal)
    return Marker(*max(found), len(found)) if found else Marker(len(text), len(text), 0)


@dataclasses.dataclass(frozen=True)
class Spliced:
    """A sample's tokens with the true answer at their end.

    Attributes:
      ids: the tokens.
      scored: how many of the last ones count.
      markers: how many the sample had.
    """

    ids: tuple[int, ...]
    scored: int
    markers: int


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
    apart from them and from each other, the answer with the blanks that the sample has before its own. After a sample
    without a marker, one is put on a line of its own.

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
    return Spliced((*before, *head, *answer), scored, place.count)


def _tokens_within(ids: list[int], text: str, end: int, decode: Any) -> int:
    """The most tokens whose text is the beginning of ``text`` up to ``end`` at the latest."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(ids[:middle])) <= end else (low, middle - 1)
    while low and not text.startswith(decode(ids[:low])):  # a character of several tokens
        low -= 1
    return low


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """True answers after the reasoning of some groups.

    Attributes:
      tokens: ``[n, G, T]`` int32.
      lengths: ``[n, G]`` int32; 0 where nothing is to be scored.
      mask: ``[n, G, T]`` bool, the tokens that count.
      markers: ``[n, G]`` how many markers each sample had.
    """

    tokens: Tokens
    lengths: Samples
    mask: Tokens
    markers: Samples


def splice_groups(
    rollout: Rollout,
    gold: Sequence[str],
    tokenizer: Any,
    *,
    marker: str | None,
    include_marker: bool,
    missing: str,
    multiple: int = 16,
) -> Answers:
    """`splice` of every sample of a rollout ``[n, G, ...]``; with ``missing="zero"`` not of those without a marker.

    T is over the rollout's by ``multiple`` times a power of 2, so that few programs are compiled.
    """
    n, group, most = rollout.tokens.shape
    made: dict[tuple[int, int], Spliced] = {}
    for p in range(n):
        for g in range(group):
            ids = rollout.tokens[p, g, : rollout.lengths[p, g] - int(rollout.stopped[p, g])].tolist()
            made[p, g] = splice(ids, gold[p], tokenizer, marker=marker, include_marker=include_marker)
    over = max(0, max(len(s.ids) for s in made.values()) - most)
    size = most + multiple * (1 << (max(1, -(-over // multiple)) - 1).bit_length())
    tokens, mask = np.zeros((n, group, size), np.int32), np.zeros((n, group, size), bool)
    lengths, markers = np.zeros((n, group), np.int32), np.zeros((n, group), np.int32)
    for (p, g), spliced in made.items():
        markers[p, g] = spliced.markers
        if spliced.markers or missing == "append":
            length = lengths[p, g] = len(spliced.ids)
            tokens[p, g, :length] = spliced.ids
            mask[p, g, length - spliced.scored : length] = True
    return Answers(tokens=tokens, lengths=lengths, mask=mask, markers=markers)


def likelihoods(logps: Tokens, mask: Tokens, kind: str) -> Samples:
    """``exp mean`` ("per_token") or ``exp sum`` ("joint") of the log-probs where ``mask``, ``[n, G]``; 0 of none.

    Example:
      >>> logps, mask = np.log([[[0.5, 0.2, 0.8]]]), np.ones((1, 1, 3), bool)
      >>> likelihoods(logps, mask, "joint").round(4).tolist(), likelihoods(logps, mask, "per_token").round(4).tolist()
      ([[0.08]], [[0.4309]])
    """
    total, count = np.where(mask, logps, 0.0).sum(-1), mask.sum(-1)
    value = np.exp(total / np.maximum(count, 1) if kind == "per_token" else total)
    return np.where(count > 0, value, 0.0).astype(np.float32)
