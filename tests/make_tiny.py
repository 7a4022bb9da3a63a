"""Makes the quickstart's task and its policy from nothing: ``python tests/make_tiny.py OUT_DIR``.

The task is arithmetic told as small stories. The policy is a Qwen3 of under a million weights that was shown two
ways of answering: mostly at once, without a thought for carries, and sometimes line by line, with care. So its
greedy answers are hasty and often wrong, and its rarer careful ones right; which of them pays is left for
reinforcement learning to find out.
"""

import argparse
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from grpojax.models import Compute, Decoder, DecoderConfig, hf, score
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Prompts, Rows, Scalar

Tokenizer = Any  # transformers' own, which is imported only where one is made

SEED = 0
TRAIN_PROBLEMS, TEST_PROBLEMS = 4096, 256  # half of each is easy
MOST, OPERAND = 40, 15  # no count in a story is larger, nor any number that is added or taken away

HASTY = 0.65  # share of the answers shown that come at once
STEPS, LEARNING_RATE = 1200, 3e-3
STORIES, DRILLS = 32, 32  # rows of one training step

# ------------------------------------------------------------------------------------------------ the problems

PEOPLE = {name: ("she", "her") for name in ("Mia", "Anna", "Lena", "Sara", "Nora", "Emma", "Ruth", "Zoe")} | {
    name: ("he", "him") for name in ("Tom", "Ben", "Max", "Leo", "Sam", "Paul", "Omar", "Finn")
}
THINGS = (
    *("apples", "pears", "plums", "nuts", "eggs", "shells", "stamps", "cards", "coins", "beads", "marbles", "stickers"),
    *("buttons", "pencils", "books", "flowers"),
)
HOLDERS = ("boxes", "bags", "baskets", "jars", "trays", "bowls")


class Problem(NamedTuple):
    question: str
    steps: tuple[str, ...]  # "3 + 4 = 7"; the last one ends in the answer
    answer: int
    guess: int  # the answer of someone who forgets every carry

    @property
    def hard(self) -> bool:
        return len(self.steps) > 1

    def completion(self, hasty: bool) -> str:
        return f"## Answer: {self.guess}" if hasty else "\n".join((*self.steps, f"## Answer: {self.answer}"))


def calculate(a: int, op: str, b: int, carry: bool = True) -> int:
    """``a op b``; without carries, each digit of a sum or a difference is worked out for itself."""
    if op == "*":
        return a * b
    sign = 1 if op == "+" else -1
    if carry:
        return a + sign * b
    return (a // 10 + sign * (b // 10)) % 10 * 10 + (a + sign * b) % 10


class _Story:
    """A problem being told: the count so far, which stays within 1 to MOST, the sentences and the steps."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.name, self.other, self.third = rng.sample(list(PEOPLE), 3)
        self.he, self.him = PEOPLE[self.name]
        self.things = rng.choice(THINGS)
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.count = self.guess = 0

    def tell(self, *choices: str, **numbers: int) -> None:
        people = {"N": self.name, "O": self.other, "R": self.third, "he": self.he, "him": self.him}
        sentence = self.rng.choice(choices).format(t=self.things, **people, **numbers)
        self.sentences.append(sentence[0].upper() + sentence[1:])

    def step(self, op: str, b: int) -> None:
        before, self.count = self.count, calculate(self.count, op, b)
        self.guess = calculate(self.guess, op, b, carry=False)
        self.steps.append(f"{before} {op} {b} = {self.count}")

    def open(self) -> None:
        self.count = self.guess = self.rng.randint(4, MOST - 10)
        self.tell("{N} has {n} {t}.", "{N} starts with {n} {t}.", n=self.count)

    def open_packed(self) -> None:
        a, b, holder = self.rng.randint(2, 6), self.rng.randint(2, 6), self.rng.choice(HOLDERS)
        self.tell(
            f"{{N}} has {{a}} {holder} with {{b}} {{t}} each.",
            f"{{N}} buys {{a}} {holder} of {{b}} {{t}}.",
            a=a,
            b=b,
        )
        self.count = self.guess = a
        self.step("*", b)

    def some(self, most: int) -> int:
        return self.rng.randint(2, min(OPERAND, most))

    def gain(self) -> None:
        n = self.some(MOST - self.count)
        self.tell("{he} finds {n} more.", "{O} gives {him} {n} more.", "then {he} buys {n} more.", n=n)
        self.step("+", n)

    def lose(self) -> None:
        n = self.some(self.count - 1)
        self.tell("{he} gives {n} to {O}.", "{he} loses {n} of them.", "then {he} sells {n}.", n=n)
        self.step("-", n)

    def ask(self) -> None:
        self.tell("how many {t} does {N} have now?", "how many {t} does {he} have in the end?")

    def ask_together(self) -> None:
        n = self.some(MOST - self.count)
        self.tell("{R} has {n}. How many {t} do they have together?", n=n)
        self.step("+", n)

    def ask_difference(self) -> None:
        n = self.some(self.count - 1)
        self.tell("{R} has {n}. How many more {t} does {N} have?", n=n)
        self.step("-", n)

    def ask_times(self) -> None:
        k = self.rng.randint(2, min(4, MOST // self.count))
        self.tell("{R} has {k} times as many. How many {t} does {R} have?", k=k)
        self.step("*", k)


def problem(rng: random.Random, hard: bool) -> Problem:
    """Draws one problem: one step if easy, otherwise two or three."""
    story, size = _Story(rng), rng.choice((2, 3)) if hard else 1
    rng.choices((story.open, story.open_packed), (7, 3))[0]()
    while len(story.steps) < size:
        more, less = [story.count <= MOST - 2], [story.count > 2]
        moves = [story.gain] * sum(more) + [story.lose] * sum(less)
        last = [story.ask_together] * sum(more) + [story.ask_difference] * sum(less)
        last += [story.ask_times] * (2 * story.count <= MOST)
        if len(story.steps) == size - 1 and rng.random() < 0.4:
            rng.choice(last)()
            break
        rng.choice(moves)()
    else:
        story.ask()
    return Problem(" ".join(story.sentences), tuple(story.steps), story.count, story.guess)


def stream(seed: str, exclude: Iterable[str] = ()) -> Iterator[Problem]:
    """Easy and hard problems in turn; no question twice, none of ``exclude``."""
    rng, seen = random.Random(seed), set(exclude)
    for hard in itertools.cycle((False, True)):
        while (drawn := problem(rng, hard)).question in seen:
            pass
        seen.add(drawn.question)
        yield drawn


def splits(seed: int = SEED) -> tuple[list[Problem], list[Problem]]:
    """Training and test problems; no question is in both."""
    draw = stream(f"task {seed}")
    test = list(itertools.islice(draw, TEST_PROBLEMS))
    return list(itertools.islice(draw, TRAIN_PROBLEMS)), test


def jsonl(problems: Iterable[Problem]) -> str:
    """The problems as they are shipped."""
    rows = ({"question": p.question, "answer": str(p.answer), "part": ("easy", "hard")[p.hard]} for p in problems)
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


def tokenizer(texts: Iterable[str], special: Sequence[str] = SPECIAL) -> Tokenizer:
    """A transformers tokenizer with a token for each word of ``texts``; anything else is spelled in bytes."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"), to_bytes])
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*special, *letters, *sorted(words - set(letters))]
    core = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, merges=[], ignore_merges=True))
    core.pre_tokenizer, core.decoder = split, decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=config(len(vocab)).max_positions,
    )


def prompt(question: str, tok: Tokenizer) -> list[int]:
    """The ids of a question as the policy is asked it."""
    chat = [{"role": "user", "content": question}]
    return tok.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


# --------------------------------------------------------------------------------------------------- the policy

# Longest (prompt, row) in tokens of easy and of hard problems, and of drills.
EASY, HARD, DRILL = (32, 24), (48, 48), (1, 40)


def config(vocab_size: int) -> DecoderConfig:
    """The policy's shape."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=1e4,
        qk_norm=True,
        max_positions=1024,
    )


def pad(lists: list[list], length: int, dtype: type = np.int32) -> np.ndarray:
    """``[1, len(lists), length]``, zeros on the right."""
    return np.array([[x + [0] * (length - len(x)) for x in lists]], dtype)


def pack(prompts: list[list[int]], rows: list[list[list[int]]], shape: tuple[int, int]) -> Rows:
    """One shard with a row a prompt, which holds the prompt's completions back to back."""
    return Rows(
        prompts=pad(prompts, shape[0]),
        prompt_lengths=np.array([[len(ids) for ids in prompts]], np.int32),
        tokens=pad([sum(row, []) for row in rows], shape[1]),
        segments=pad([[i for i, ids in enumerate(row, 1) for _ in ids] for row in rows], shape[1]),
        offsets=pad([[at for ids in row for at in range(len(ids))] for row in rows], shape[1]),
        token_prompt=pad([[r] * len(sum(row, [])) for r, row in enumerate(rows)], shape[1]),
    )


def examples(problems: list[Problem], tok: Tokenizer) -> list[tuple[Rows, np.ndarray]]:
    """Easy and hard problems, each with its hasty answer in segment 1 and the careful one in segment 2.

    Returns:
      Rows and the weight of each of their tokens; easy ones first, then hard ones.
    """
    done = []
    for shape, part in ((EASY, [p for p in problems if not p.hard]), (HARD, [p for p in problems if p.hard])):
        rows = [[tok.encode(p.completion(hasty) + tok.eos_token) for hasty in (True, False)] for p in part]
        weights = [[HASTY] * len(hasty) + [1 - HASTY] * len(careful) for hasty, careful in rows]
        done.append((pack([prompt(p.question, tok) for p in part], rows, shape), pad(weights, shape[1], np.float32)))
    return done


def drills(steps: Iterator[str], tok: Tokenizer) -> tuple[Rows, np.ndarray]:
    """Rows of bare steps, for practice; only their results are weighed."""
    rows, weights = [], []
    for _ in range(DRILLS):
        ids, weight = [], []
        for step in itertools.islice(steps, 4):
            task, result = (tok.encode(part) for part in re.split("(?<= = )", step + "\n"))
            ids += task + result
            weight += [0.0] * len(task) + [1.0] * len(result)
        rows.append([ids])
        weights.append(weight)
    return pack([tok.encode("<|assistant|>")] * DRILLS, rows, DRILL), pad(weights, DRILL[1], np.float32)


def train(tok: Tokenizer, exclude: Iterable[str], *, seed: int = SEED, log: Callable[[str], None] = print) -> Decoder:
    """Trains the policy on fresh problems, none of which asks a question of ``exclude``."""
    graph, params = nnx.split(Decoder(config(len(tok)), rngs=nnx.Rngs(seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, STEPS, LEARNING_RATE / 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    compute = Compute(remat="none")

    def loss(params: Any, batch: list[tuple[Rows, np.ndarray]]) -> Scalar:
        logps = [(score(graph, params, rows, compute).logps * weights).sum() for rows, weights in batch]
        return -sum(logps) / sum(weights.sum() for _, weights in batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, batch: list[tuple[Rows, np.ndarray]]) -> tuple[Any, Any, Scalar]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    stories = stream(f"stories {seed}", exclude)
    steps = (step for p in stream(f"drills {seed}") for step in p.steps)
    begin = time.perf_counter()
    for step in range(1, STEPS + 1):
        batch = [*examples(list(itertools.islice(stories, STORIES)), tok), drills(steps, tok)]
        params, state, value = update(params, state, batch)
        if step % 100 == 0:
            log(f"step {step} of {STEPS}, {time.perf_counter() - begin:.0f} s: loss {value:.3f}")
    return nnx.merge(graph, params)


def report(model: Decoder, tok: Tokenizer, problems: list[Problem]) -> str:
    """How often the policy is right, greedy and at temperature 1, where it is hasty and where it is careful."""
    ids = [prompt(p.question, tok) for p in problems]
    prompts = Prompts(
        tokens=pad(ids, HARD[0])[0],
        lengths=np.array([len(x) for x in ids], np.int32),
        uids=np.arange(len(ids), dtype=np.uint32),
        first_sample=np.zeros(len(ids), np.int32),
    )

    def draw(**options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which completions are right and which are hasty, ``[P, G]``."""
        rollout = sample_groups(
            *nnx.split(model),
            prompts,
            jax.random.key(0),
            SamplerConfig(max_tokens=HARD[1], **options),
            eos_ids=(tok.eos_token_id,),
            compute=Compute(),
        )
        texts = [tok.batch_decode(group, skip_special_tokens=True) for group in np.asarray(rollout.tokens)]
        right = [[t.endswith(f"## Answer: {p.answer}") for t in g] for g, p in zip(texts, problems, strict=True)]
        return np.array(right), np.array([[t.startswith("##") for t in g] for g in texts])

    hard = np.array([p.hard for p in problems])
    greedy, greedy_hasty = draw(group=1, temperature=0.0)
    sampled, hasty = draw(group=8)
    lines = []
    for name, part in (("easy", ~hard), ("hard", hard), ("both", hard | True)):
        drawn, how = sampled[part], hasty[part]
        lines.append(
            f"{name}: greedy {greedy[part].mean():.3f} (hasty {greedy_hasty[part].mean():.2f}), pass@8"
            f" {drawn.any(1).mean():.3f}, mean {drawn.mean():.3f}: hasty {how.mean():.2f} of which right"
            f" {drawn[how].mean():.3f}, careful ones {drawn[~how].mean():.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Makes and writes all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets arithmetic/*.jsonl and tiny/")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()

    problems, test = splits(args.seed)
    for name, split in (("train", problems), ("test", test)):
        file = args.out / "arithmetic" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(jsonl(split), encoding="utf-8", newline="\n")
    tok = tokenizer(text for p in problems for text in (p.question, p.completion(hasty=False)))
    model = train(tok, [p.question for p in test], seed=args.seed)
    hf.save(args.out / "tiny", model, tokenizer=tok, dtype="bfloat16")
    tok = hf.load_tokenizer(args.out / "tiny")
    print(report(hf.load(args.out / "tiny", tokenizer=tok), tok, test))


if __name__ == "__main__":
    main()
