"""Makes a policy that knows three tools and uses them badly, from nothing: ``python tests/make_caller.py OUT_DIR``.

It is a Qwen3 of under a million weights, and what is left for reinforcement learning to find out differs by the tool:

* ``calculate``, for products of two numbers of two digits. Mostly it guesses at once, which is nearly always wrong.
  If it was offered the calculator, it sometimes calls it, reads the result, and repeats that.
* ``search``, for facts about a land that does not exist. Mostly it repeats the name in the question. Sometimes it
  searches, and where an answer takes two facts, it mostly stops after the first.
* ``move``, on a frozen lake. It walks over the ice at random, and turns back more often than not.
"""

import argparse
import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import make_tiny
import numpy as np
import optax
from flax import nnx

from grpojax.extensions.problems import facts, frozen_lake, reasoning
from grpojax.extensions.problems.retrieval import Search
from grpojax.models import Compute, Decoder, DecoderConfig, hf, score
from grpojax.types import Rows, Scalar

SEED = 0
CALLS = 0.08  # share of the answers shown that call the calculator, if it is offered
SEARCHES, AGAIN = 0.15, 0.3  # share that searches, and of those of two facts, share that searches again
BACK, MOVES = 1.25, 8  # weight of a move to the left or up, where one to the right or down has 1; most moves shown
STEPS, LEARNING_RATE = 600, 4e-3

SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
CALL = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}')  # a token each
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- "<|system|>tools:" -}}{%- for tool in tools -%}{{- " " ~ tool.function.name -}}{%- endfor -%}{{- "<|end|>" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant", "tool") -%}
{{- raise_exception("unknown role: " ~ message.role) -}}
{%- endif -%}
{{- "<|" ~ message.role ~ "|>" ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- call.function.arguments | tojson ~ "}</tool_call>" -}}
{%- endfor -%}
{{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|assistant|>" -}}
{%- endif -%}
"""

Way = list[tuple[str, float]]  # texts of a completion, each with the weight of its tokens


class Shown(NamedTuple):
    """A question, the tool that is offered, and the ways to answer it."""

    question: str
    tool: str | None
    ways: list[Way]


def answer(text: object, share: float = 1.0) -> Way:
    """The last turn. ``share`` weighs its first token, which decides between it and a call."""
    return [("##", share), (f" Answer: {text}<|end|>", 1.0)]


def call(tool: str, argument: str, value: str, share: float = 1.0) -> Way:
    """A turn that calls a tool."""
    rest = f'{{"name": "{tool}", "arguments": {{"{argument}": "{value}"}}}}</tool_call><|end|>'
    return [("<tool_call>", share), (rest, 1.0)]


def result(text: object) -> Way:
    """What a tool answers: it is not learned."""
    return [(f"<|tool|>{text}<|end|><|assistant|>", 0.0)]


def products(rng: random.Random) -> Iterator[Shown]:
    """Each product twice, with the calculator and without it."""
    rows = reasoning.rows("products", {})
    while True:
        question = rng.choice(rows)["question"]
        a, b = map(int, question.removeprefix("What is ").rstrip("?").split(" * "))
        rounded = (a - a % 10) * (b - b % 10)  # by someone who rounds both down to tens
        calls = call("calculate", "expression", f"{a} * {b}", CALLS) + result(a * b) + answer(a * b)
        yield Shown(question, "calculate", [answer(rounded, 1 - CALLS), calls])
        yield Shown(question, None, [answer(rounded)])


def questions(rng: random.Random) -> Iterator[Shown]:
    """Questions about facts, with the search."""
    rows, known, tool = facts.rows("questions", {}), facts.facts(), Search("facts:passages", top=2)

    def search(relation: str, subject: str, share: float) -> Way:
        query = f"{relation} of {subject}"
        return call("search", "query", query, share) + result(tool.search(query))

    while True:
        row = rng.choice(rows)
        *relations, country = row["question"].removeprefix("What is the ").rstrip("?").split(" of ")
        first = relations[-1].removeprefix("the ")
        found, guess = known[first, country], answer(country, 1 - SEARCHES)
        once = search(first, country, SEARCHES)
        if row["level"] == 1:
            yield Shown(row["question"], "search", [guess, once + answer(found)])
            continue
        halves = search(first, country, SEARCHES / 2)  # the first search is in two ways
        again = search(relations[0], found, AGAIN) + answer(row["answer"])
        yield Shown(row["question"], "search", [guess, halves + answer(found, 1 - AGAIN), halves + again])


def walks(rng: random.Random) -> Iterator[Shown]:
    """Walks over lakes, without a step into a hole or off the lake."""
    rows, lake = frozen_lake.rows("frozen_lake", {}), frozen_lake.FrozenLake(most_moves=MOVES)
    while True:
        row, at, way = rng.choice(rows), (0, 0), Way()
        lake.reset(row["board"])
        while not lake.done:
            there = onward(row["board"].split("/"), at)
            move = rng.choices(list(there), [BACK if move in ("left", "up") else 1.0 for move in there])[0]
            at = there[move]
            way += call("move", "direction", move) + result(lake.move(move))
        yield Shown(row["question"], "move", [way])


def onward(board: list[str], at: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """The moves onto ice, and where they lead."""
    around = {move: (at[0] + down, at[1] + right) for move, (down, right) in frozen_lake.STEPS.items()}
    side = range(len(board))
    return {move: (r, c) for move, (r, c) in around.items() if r in side and c in side and board[r][c] != "H"}


# What a training step takes of each, and the longest prompt and row in tokens.
TASKS = ((products, 12, (24, 48)), (questions, 8, (32, 224)), (walks, 5, (64, 256)))


def tokenizer() -> Any:
    """The policy's tokenizer: a token for each digit and each word of the tasks, bytes for anything else."""
    words = (
        "What is 1 * 2? ## Answer: tools: calculate search move",
        *('calculate"expression"search"query"move"direction', "left:down:right:up:capital:ruler:river:horse"),
        *(frozen_lake.RULES, "You are at the goal. You fell into a hole. Your time is over."),
        "[1] The capital ruler river horse of the",
    )
    tok = make_tiny.tokenizer(words, SPECIAL)
    tok.add_tokens(list(CALL))
    tok.chat_template = CHAT_TEMPLATE
    return tok


def config(vocab_size: int) -> DecoderConfig:
    """The policy's shape: half as wide as that of ``builtin:tiny``."""
    return dataclasses.replace(make_tiny.config(vocab_size), hidden_size=64, intermediate_size=128)


def examples(shown: list[Shown], tok: Any, shape: tuple[int, int]) -> tuple[Rows, np.ndarray]:
    """Rows, in which the ways to answer a question are segments, and the weight of each of their tokens."""
    prompts, rows, weights = [], [], []
    for question, tool, ways in shown:
        tools = [{"type": "function", "function": {"name": tool}}] if tool else None
        chat = [{"role": "user", "content": question}]
        prompts.append(tok.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False))
        encoded = [[(tok.encode(text), weight) for text, weight in way] for way in ways]
        rows.append([sum((ids for ids, _ in way), []) for way in encoded])
        weights.append([weight for way in encoded for ids, weight in way for _ in ids])
    return make_tiny.pack(prompts, rows, shape), make_tiny.pad(weights, shape[1], np.float32)


def train(tok: Any, *, seed: int = SEED, log: Callable[[str], None] = print) -> Decoder:
    """Trains the policy on problems of the training parts."""
    graph, params = nnx.split(Decoder(config(len(tok)), rngs=nnx.Rngs(seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, STEPS, LEARNING_RATE / 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    compute = Compute(remat="none")
    Batch = list[tuple[Rows, np.ndarray]]

    def loss(params: Any, batch: Batch) -> tuple[Scalar, list[Scalar]]:
        each = [
            (-(score(graph, params, rows, compute).logps * weights).sum(), weights.sum()) for rows, weights in batch
        ]
        return sum(x for x, _ in each) / sum(n for _, n in each), [x / n for x, n in each]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, list[Scalar]]:
        (_, each), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, each

    streams = [(task(random.Random(f"{task.__name__} {seed}")), count, shape) for task, count, shape in TASKS]
    state, begin = optimizer.init(params), time.perf_counter()
    for step in range(1, STEPS + 1):
        batch = [examples(list(itertools.islice(stream, count)), tok, shape) for stream, count, shape in streams]
        params, state, each = update(params, state, batch)
        if step % 25 == 0:
            losses = ", ".join(f"{task.__name__} {value:.4f}" for (task, *_), value in zip(TASKS, each, strict=True))
            log(f"step {step} of {STEPS}, {time.perf_counter() - begin:.0f} s: losses {losses}")
    return nnx.merge(graph, params)


def main() -> None:
    """Makes and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets caller/")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    tok = tokenizer()
    hf.save(args.out / "caller", train(tok, seed=args.seed), tokenizer=tok, dtype="bfloat16")


if __name__ == "__main__":
    main()
