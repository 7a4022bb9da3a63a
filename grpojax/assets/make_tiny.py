"""Makes the quickstart's task and its policy from nothing: ``python -m grpojax.assets.make_tiny OUT_DIR``.

The task is arithmetic told as small stories. The policy is a Qwen3 of under a million weights that has seen
two ways of answering: at once, as it does when decoding greedily and where it mostly errs, and line by line,
rarer and nearly always right. Reinforcement learning has to find that out.
"""

import argparse
import functools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from grpojax.models import Compute, Decoder, DecoderConfig, score
from grpojax.types import Rows

SEED = 0
TRAIN_PROBLEMS, TEST_PROBLEMS = 4096, 256  # half of each is easy
DIRECT = 0.65  # share of answers given at once
# (prompt, row) tokens by hardness
SHAPES = {False: (32, 24), True: (48, 48)}
BATCH, STEPS, LEARNING_RATE = 32, 2000, 3e-3
MOST, OPERAND = 40, 15  # no count in a story is larger, nor any number that is added or taken away

# ------------------------------------------------------------------------------------------------ the problems

PEOPLE = {name: ("she", "her") for name in ("Mia", "Anna", "Lena", "Sara", "Nora", "Emma", "Ruth", "Zoe")} | {
    name: ("he", "him") for name in ("Tom", "Ben", "Max", "Leo", "Sam", "Paul", "Omar", "Finn")
}
THINGS = (
    "apples", "pears", "plums", "nuts", "eggs", "shells", "stamps", "cards", "coins", "beads", "marbles", "stickers",
    "buttons", "pencils", "books", "flowers",
)  # fmt: skip
HOLDERS = ("boxes", "bags", "baskets", "jars", "trays", "bowls")


class Problem(NamedTuple):
    question: str
    steps: tuple[str, ...]  # "3 + 4 = 7", the last one ends in the answer
    answer: int

    def completion(self, direct: bool) -> str:
        return "\n".join((() if direct else self.steps) + (f"## Answer: {self.answer}",))


class _Story:
    """A problem being told: the count so far, the sentences and the steps. Counts stay within 1 to MOST."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.name, self.other, self.third = rng.sample(list(PEOPLE), 3)
        self.things = rng.choice(THINGS)
        self.he, self.him = PEOPLE[self.name]
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.count = 0

    def tell(self, *choices: str, **numbers: int) -> None:
        words = {"N": self.name, "O": self.other, "R": self.third, "t": self.things, "he": self.he, "him": self.him}
        sentence = self.rng.choice(choices).format(**words, **numbers)
        self.sentences.append(sentence[0].upper() + sentence[1:])

    def step(self, a: int, op: str, b: int) -> int:
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        self.steps.append(f"{a} {op} {b} = {result}")
        return result

    def open(self, packed: bool) -> None:
        holder = self.rng.choice(HOLDERS)
        if packed:
            a, b = self.rng.randint(2, 6), self.rng.randint(2, 6)
            self.tell(
                f"{{N}} has {{a}} {holder} with {{b}} {{t}} each.", f"{{N}} buys {{a}} {holder} of {{b}} {{t}}.",
                a=a, b=b,
            )  # fmt: skip
            self.count = self.step(a, "*", b)
        else:
            self.count = self.rng.randint(4, MOST - 10)
            self.tell("{N} has {n} {t}.", "{N} starts with {n} {t}.", n=self.count)

    def gain(self) -> None:
        n = self.rng.randint(2, min(OPERAND, MOST - self.count))
        self.tell("{he} finds {n} more.", "{O} gives {him} {n} more.", "then {he} buys {n} more.", n=n)
        self.count = self.step(self.count, "+", n)

    def lose(self) -> None:
        n = self.rng.randint(2, min(OPERAND, self.count - 1))
        self.tell("{he} gives {n} to {O}.", "{he} loses {n} of them.", "then {he} sells {n}.", n=n)
        self.count = self.step(self.count, "-", n)

    def ask(self) -> None:
        self.tell("how many {t} does {N} have now?", "how many {t} does {he} have in the end?")

    def ask_times(self) -> None:
        k = self.rng.randint(2, min(4, MOST // self.count))
        self.tell("{R} has {k} times as many. How many {t} does {R} have?", k=k)
        self.count = self.step(self.count, "*", k)

    def ask_together(self) -> None:
        n = self.rng.randint(2, min(OPERAND, MOST - self.count))
        self.tell("{R} has {n}. How many {t} do they have together?", n=n)
        self.count = self.step(self.count, "+", n)

    def ask_difference(self) -> None:
        n = self.rng.randint(2, min(OPERAND, self.count - 1))
        self.tell("{R} has {n}. How many more {t} does {N} have?", n=n)
        self.count = self.step(self.count, "-", n)


def problem(rng: random.Random, hard: bool) -> Problem:
    """Draws one problem: one step if easy, otherwise two or three."""
    size = rng.choice((2, 3)) if hard else 1
    story = _Story(rng)
    story.open(packed=rng.random() < 0.4)
    while True:
        room, left = MOST - story.count, size - len(story.steps)
        asks = [story.ask_together] * (room > 1) + [story.ask_difference] * (story.count > 2)
        asks += [story.ask_times] * (story.count <= MOST // 2)
        if left == 0:
            story.ask()
        elif left == 1 and asks and rng.random() < 0.4:
            rng.choice(asks)()
        else:
            moves = [story.gain] * (room > 1) + [story.lose] * (story.count > 2)
            rng.choice(moves)()
            continue
        return Problem(" ".join(story.sentences), tuple(story.steps), story.count)


def stream(seed: str, exclude: set[str]) -> Iterator[tuple[Problem, bool]]:
    """Problems and whether they are hard, turn by turn; no question twice, none of ``exclude``."""
    rng, seen, hard = random.Random(seed), set(exclude), False
    while True:
        drawn = problem(rng, hard)
        if drawn.question not in seen:
            seen.add(drawn.question)
            yield drawn, hard
            hard = not hard


def splits(seed: int = SEED) -> dict[str, list[tuple[Problem, bool]]]:
    """The two splits; no question is in both."""
    draw = stream(f"task {seed}", set())
    return {"test": [next(draw) for _ in range(TEST_PROBLEMS)], "train": [next(draw) for _ in range(TRAIN_PROBLEMS)]}


def jsonl(problems: list[tuple[Problem, bool]]) -> str:
    rows = ({"question": p.question, "answer": str(p.answer), "part": ("easy", "hard")[h]} for p, h in problems)
    return "".join(json.dumps(row) + "\n" for row in rows)


# ------------------------------------------------------------------------------------------------ the tokenizer

SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
# A digit is a token, and so are an operator with its spaces and a word with the space before it.
PIECES = r"\d| [-+*=] | ?[A-Za-z]+|#+|[^A-Za-z\d#]"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant") -%}
{{- raise_exception("unknown role: " ~ message.role) -}}
{%- endif -%}
{{- "<|" ~ message.role ~ "|>" ~ message.content ~ "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|assistant|>" -}}
{%- endif -%}
"""


def tokenizer(texts: Iterable[str]):
    """A transformers tokenizer with a token for each word of ``texts``; anything else is spelled in bytes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), to_bytes])
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*SPECIAL, *letters, *sorted(words - set(letters))]
    core = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, merges=[], ignore_merges=True))
    core.pre_tokenizer, core.decoder = split, decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE,
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- the policy


def config(vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3", vocab_size=-(-vocab_size // 64) * 64, hidden_size=128, intermediate_size=256, num_layers=4,
        num_heads=4, num_kv_heads=2, head_dim=32, rope_theta=1e4, qk_norm=True, max_positions=1024,
    )  # fmt: skip


def examples(problems: list[Problem], tok, shape: tuple[int, int]) -> tuple[Rows, np.ndarray]:
    """Rows of one lane that hold both answers to a problem back to back, and the weight of each token.

    Segment 1 is the answer at once, segment 2 the one line by line.
    """
    n, (longest_prompt, longest_row) = len(problems), shape
    prompts, lengths = np.zeros((n, longest_prompt), np.int32), np.zeros(n, np.int32)
    tokens, segments, offsets = (np.zeros((n, longest_row), np.int32) for _ in range(3))
    for i, p in enumerate(problems):
        chat = [{"role": "user", "content": p.question}]
        ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts[i, : len(ids)], lengths[i] = ids, len(ids)
        at = 0
        for segment in (1, 2):
            ids = tok.encode(p.completion(direct=segment == 1) + tok.eos_token)
            here = slice(at, at := at + len(ids))
            tokens[i, here], segments[i, here], offsets[i, here] = ids, segment, range(len(ids))
    rows = Rows(
        prompts=prompts[None], prompt_lengths=lengths[None], tokens=tokens[None], segments=segments[None],
        offsets=offsets[None], row_prompt=np.arange(n, dtype=np.int32)[None],
    )  # fmt: skip
    return rows, np.select([rows.segments == 1, rows.segments == 2], [DIRECT, 1 - DIRECT]).astype(np.float32)


def train(tok, exclude: set[str], test: list[tuple[Problem, bool]], *, seed: int = SEED, log=print) -> Decoder:
    """Trains the policy on fresh problems, none of them in ``exclude``."""
    graph, params = nnx.split(Decoder(config(len(tok)), rngs=nnx.Rngs(seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, STEPS, LEARNING_RATE / 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    compute = Compute(remat="none")

    def loss(params, batch):
        logps = [(score(graph, params, rows, compute).logps * weights).sum() for rows, weights in batch]
        return -sum(logps) / sum(weights.sum() for _, weights in batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    logps_of = jax.jit(lambda params, rows: score(graph, params, rows, compute).logps)

    def by_part(problems):
        """Easy and hard ones apart, each with a shape of its own: less padding."""
        return [examples([p for p, h in problems if h == hard], tok, SHAPES[hard]) for hard in (False, True)]

    held_out = by_part(test)

    def report() -> str:
        """How often a sample at temperature 1 is the reference to the letter, given the style it begins in."""
        parts = []
        for part, (rows, _) in zip(("easy", "hard"), held_out, strict=True):
            logps = np.asarray(logps_of(params, rows))
            for segment, style in ((1, "at once"), (2, "line by line")):
                later = (rows.segments == segment) & (rows.offsets > 0)
                parts.append(f"{part} {style} {np.exp((logps * later).sum(-1)).mean():.2f}")
        return ", ".join(parts)

    state = optimizer.init(params)
    draw = stream(f"policy {seed}", exclude)
    begin = time.perf_counter()
    for step in range(1, STEPS + 1):
        params, state, value = update(params, state, by_part([next(draw) for _ in range(BATCH)]))
        if step % 100 == 0:
            log(f"step {step} of {STEPS}, {time.perf_counter() - begin:.0f} s: loss {value:.3f}; right: {report()}")
    return nnx.merge(graph, params)
