"""Makes a policy that knows a tool and rarely uses it, from nothing: ``python tests/make_caller.py OUT_DIR``.

The task is products of two numbers of two digits, ``What is 37 * 48?``. The policy is a Qwen3 of under a million
weights that was shown two ways of answering. Mostly it guesses at once, which is nearly always wrong. If it was offered
a calculator, it sometimes calls it in the form of Qwen and Hermes, reads the result, and repeats that. Which of the two
pays is left for reinforcement learning to find out.
"""

import argparse
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import make_tiny
import numpy as np
import optax
from flax import nnx

from grpojax.environments import reasoning
from grpojax.models import Compute, Decoder, hf, score
from grpojax.types import Rows, Scalar

SEED = 0
CALLS = 0.08  # share of the answers shown that call the calculator, if it is offered
STEPS, LEARNING_RATE, PROBLEMS = 1000, 3e-3, 32
PROMPT, ROW = 24, 80  # longest in tokens

SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
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


def guess(a: int, b: int) -> int:
    """The product of someone who rounds both numbers down to tens."""
    return (a - a % 10) * (b - b % 10)


def call(a: int, b: int) -> str:
    """The turn that asks the calculator."""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{a} * {b}"}}}}</tool_call>'


def problems() -> list[tuple[int, int]]:
    """The factors of all problems of the training part."""
    rows = reasoning.rows("products", {})
    return [tuple(map(int, row["question"].removeprefix("What is ").rstrip("?").split(" * "))) for row in rows]


def tokenizer() -> Any:
    """The policy's tokenizer: a token for each digit and each word of the task, bytes for anything else."""
    tok = make_tiny.tokenizer([f"What is 1 * 2? ## Answer: tools: calculate {call(1, 2)}"], SPECIAL)
    tok.add_tokens(["<tool_call>", "</tool_call>"])
    tok.chat_template = CHAT_TEMPLATE
    return tok


def examples(drawn: list[tuple[int, int]], tok: Any) -> tuple[Rows, np.ndarray]:
    """Each problem twice: with the calculator, where the guess and the call are rows' segments, and without it.

    Returns:
      Rows and the weight of each of their tokens. What the tool answers has none.
    """
    tools = [{"type": "function", "function": {"name": "calculate"}}]
    prompts, rows, weights = [], [], []
    for a, b in drawn:
        chat = [{"role": "user", "content": f"What is {a} * {b}?"}]
        at_once = tok.encode(f"## Answer: {guess(a, b)}<|end|>")
        turn, answer = tok.encode(f"{call(a, b)}<|end|>"), tok.encode(f"## Answer: {a * b}<|end|>")
        result = tok.encode(f"<|tool|>{a * b}<|end|><|assistant|>")
        for offered in (tools, None):
            prompts.append(tok.apply_chat_template(chat, tools=offered, add_generation_prompt=True, return_dict=False))
            rows.append([at_once, turn + result + answer] if offered else [at_once])
            called = [CALLS] * len(turn) + [0.0] * len(result) + [1.0] * len(answer)
            weights.append([1 - CALLS] * len(at_once) + called if offered else [1.0] * len(at_once))
    return make_tiny.pack(prompts, rows, (PROMPT, ROW)), make_tiny.pad(weights, ROW, np.float32)


def train(tok: Any, *, seed: int = SEED, log: Callable[[str], None] = print) -> Decoder:
    """Trains the policy on products of the training part."""
    graph, params = nnx.split(Decoder(make_tiny.config(len(tok)), rngs=nnx.Rngs(seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, STEPS, LEARNING_RATE / 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    compute = Compute(remat="none")

    def loss(params: Any, rows: Rows, weights: np.ndarray) -> Scalar:
        return -(score(graph, params, rows, compute).logps * weights).sum() / weights.sum()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, rows: Rows, weights: np.ndarray) -> tuple[Any, Any, Scalar]:
        value, grads = jax.value_and_grad(loss)(params, rows, weights)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def stream() -> Iterator[tuple[int, int]]:
        rng, known = random.Random(seed), problems()
        while True:
            yield rng.choice(known)

    state, drawn, begin = optimizer.init(params), stream(), time.perf_counter()
    for step in range(1, STEPS + 1):
        params, state, value = update(params, state, *examples(list(itertools.islice(drawn, PROBLEMS)), tok))
        if step % 100 == 0:
            log(f"step {step} of {STEPS}, {time.perf_counter() - begin:.0f} s: loss {value:.4f}")
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
