"""Pages of the guide that are made from the code each time the site is built, so that they cannot go stale.

mkdocs calls `on_config`, `on_files` and `on_page_markdown` (``hooks:`` in mkdocs.yml). `pages` has the pages without
mkdocs, for tests. ``python docs/generate.py`` writes tables of functions and code into the committed pages (`written`).
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import pkgutil
import posixpath
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

from grpojax import variants
from grpojax.cli import main as cli
from grpojax.extensions.plan import plan_search, plan_table
from grpojax.extensions.plan.plan_shapes import SHAPES
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run import alarms, exclusions
from grpojax.run import recipe as recipes
from grpojax.run.recipe import Config

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.append(str(ROOT))  # the registered comparisons are code of the checkout; mkdocs takes the path away again
from configs.experiments import verdicts  # noqa: E402

TEXTS = DOCS / "variants.yaml"

# Pages that stand elsewhere, since people look for them there.
ELSEWHERE = {
    "scale/tpu_scripts.md": "tpu_scripts/README.md",
    "understand/contributing.md": "CONTRIBUTING.md",
    "reference/changelog.md": "CHANGELOG.md",
}
# Committed pages link to files of the repository, so that their links work on GitHub too. The site links to the page
# that it has in place of such a file.
IN_PLACE = (
    {file: page for page, file in ELSEWHERE.items()}
    | {"docs/variants.yaml": "variants/index.md", "grpojax/run/recipe.py": "reference/recipe.md"}
    | {f"configs/variants/{name}.yaml": f"variants/{name}.md" for name in variants.names()}
)
# Committed pages with tables of functions or with code.
WRITTEN = ("reference/functions.md", "reference/trainer.md", "understand/step.md")


def pages() -> dict[str, str]:
    """Every generated page: its path below ``docs/`` and its Markdown."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    made |= {
        "reference/recipe.md": recipe_page(),
        "reference/commands.md": commands_page(),
        "scale/what_fits.md": what_fits_page(),
        "variants/index.md": variants_page(),
        "assets/layers.svg": layers_figure(),
        "assets/experiments.svg": experiments_figure(),
    }
    return made | {f"variants/{name}.md": variant_page(name) for name in variants.names()}


# ------------------------------------------------------------------------------------------------ docstrings


def sections(text: str | None) -> dict[str, str]:
    """A docstring in Google's style: the text before the first section under "", each section under its name."""
    found, name = collections.defaultdict(list), ""
    for line in inspect.cleandoc(text or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Example):", line):
            name = line[:-1]
        else:
            found[name].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip() for name, lines in found.items()}


def items(text: str) -> dict[str, str]:
    """The entries ``name, name: what`` of a section."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        start = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def markdown(text: str) -> str:
    """Text of a docstring as Markdown: single backticks for code, and links for public functions."""

    def link(found: re.Match) -> str:
        package = importlib.import_module(f"grpojax.{found[2]}")
        documented = found[3] in getattr(package, "__all__", [found[3]]) and hasattr(package, found[3])
        return f"[`{found[1]}`][{found[1]}]" if documented else found[0]

    pure = "advantages|credit|losses|allocation|diagnostics|masked"
    return re.sub(rf"`(grpojax\.({pure})\.(\w+))`", link, text.replace("``", "`"))


def cell(text: str) -> str:
    """Text for a cell of a table; Python's None is YAML's null there."""
    return re.sub(r"(?<!`)\bNone\b(?!`)", "`null`", " ".join(markdown(text).split()).replace("|", "\\|"))


# ------------------------------------------------------------------------------------------------ the recipe


def meanings(config: type) -> dict[str, str]:
    """What each field of a dataclass means, by its docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed([c for c in config.__mro__ if dataclasses.is_dataclass(c)]):
        found |= items(sections(base.__doc__).get("Attributes", ""))
    return found


def parts_of(kind: Any) -> Iterator[type]:
    """The dataclasses in a type, such as that of ``RetireConfig | None``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
    for inner in typing.get_args(kind):
        yield from parts_of(inner)


def type_text(kind: Any) -> str:
    """A type as a reader of YAML knows it."""
    if kind is type(None):
        return "null"
    if kind is Any:
        return "anything"
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value).lower() for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(each) for each in inner))
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"list of {type_text(inner[0])}"
        return f"[{', '.join(type_text(each) for each in inner)}]"
    if origin is dict:
        return "mapping"
    if dataclasses.is_dataclass(kind):
        return "mapping"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        kind.__name__, kind.__name__
    )


def default_text(field: dataclasses.Field) -> str:
    """A field's default in YAML; nothing where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`"
    value = field.default
    if value is dataclasses.MISSING:
        return "must be given"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def keys(config: type, prefix: str) -> list[str]:
    """A section's keys as lines of Markdown, with those of the mappings in it after them, of each kind once."""
    hints, known = typing.get_type_hints(config), meanings(config)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    below: dict[type, list[str]] = {}
    for field in dataclasses.fields(config):
        name = f"{prefix}.{field.name}" if prefix else field.name
        meaning = known.get(field.name)
        if meaning is None:
            raise ValueError(f"{config.__name__}.{field.name}: missing from the docstring's section Attributes")
        kind = type_text(hints[field.name])
        lines.append(f"| `{name}` | {cell(kind)} | {cell(default_text(field))} | {cell(meaning)} |")
        for inner in parts_of(hints[field.name]):
            if inner not in below:
                below[inner] = ["", f"#### `{name}`", "", markdown(summary(inner)), "", *keys(inner, name)]
    return lines + [line for inner in below.values() for line in inner]


def summary(config: type) -> str:
    """What a class's docstring says before its sections."""
    return sections(config.__doc__).get("", "")


def recipe_section(config: type, name: str) -> list[str]:
    """One section of a recipe: its keys, and which of them exclude others."""
    lines = [markdown(summary(config)), "", *keys(config, name)]
    fields = {field.name for field in dataclasses.fields(config)}
    rows = [
        row
        for scope in exclusions.TABLE
        for row in exclusions.rows(scope)
        if re.search(rf"`{name}\b", row.settings) and fields.issuperset(re.findall(rf"`{name}\.(\w+)", row.settings))
    ]
    if rows:
        lines += ["", "What does not go together ([all such pairs](../exclusions.md)):", ""]
        lines += [f"- {row.settings}: {row.why}." for row in rows]
    return lines


def recipe_page() -> str:
    """Every key of every recipe."""
    lines = [
        "# Recipe keys",
        "",
        "A recipe is one YAML file. Every key can be replaced on the command line by its dotted name, as in "
        "`train.steps=100` or `rollout.retire.share=0.9`. With `base: other.yaml` at its top, a recipe states only "
        "what it changes of another one. A key that does not exist is an error. This page is made from the "
        "dataclasses that read the recipe. Options of `variant` are on the [variants' pages](../variants/index.md).",
        "",
        "## `grpojax train`",
        "",
    ]
    lines += _sections(Config)
    lines += ["", "## `grpojax sft`", "", "`model`, `run`, `optimizer`, `tracking`, `mesh` and `profile` are as above."]
    hints = typing.get_type_hints(SFTConfig)
    for name in ("data", "train"):
        lines += ["", f"### `{name}` of sft", "", *recipe_section(hints[name], name)]
    lines += ["", "## `grpojax dpo`", "", "As `grpojax sft`, but for `train`:"]
    lines += ["", "### `train` of dpo", "", *recipe_section(typing.get_type_hints(DPOConfig)["train"], "train")]
    return "\n".join(lines) + "\n"


def _sections(config: type) -> list[str]:
    """The top-level keys of a recipe, and then those of its sections."""
    hints, known = typing.get_type_hints(config), meanings(config)
    table = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines: list[str] = []
    for field in dataclasses.fields(config):
        kind, name = hints[field.name], field.name
        table.append(f"| `{name}` | {cell(type_text(kind))} | {cell(default_text(field))} | {cell(known[name])} |")
        section = next((k for k in reversed(list(parts_of(kind)))), None)  # of rewards, the mapping and not the list
        if section is not None:
            lines += ["", f"### `{name}`", "", *recipe_section(section, name)]
    return [*table, *lines]


# ------------------------------------------------------------------------------------------------ commands


def commands() -> dict[str, str]:
    """Every command and its line of help."""
    found: dict[str, str] = {}

    def command(name: str, run: Any, text: str, **options: Any) -> argparse.ArgumentParser:
        found[name] = text
        parser = argparse.ArgumentParser()
        parser.add_argument("overrides", nargs="*")
        return parser

    for module in cli.COMMANDS:
        module.register(command)
    return found


def help_of(name: str) -> str:
    """What ``grpojax NAME --help`` prints, 100 columns wide."""
    out, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue().rstrip()


def commands_page() -> str:
    """What each command's ``--help`` prints."""
    known = commands()
    lines = [
        "# Commands",
        "",
        "Each command prints this with `--help`. A recipe's settings (`a.b=c`) may stand before or after options. "
        "`--debug` after any command shows the traceback of an error.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`grpojax {name}`](#{name}) | {text} |" for name, text in known.items()),
    ]
    for name in known:
        lines += ["", f"## {name}", "", "```text", help_of(name), "```"]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------ plans

RECIPE = "configs/gsm8k_qwen2.5_0.5b.yaml"
DEVICES = ("rtx4090", "a100", "h100", "h100:8", "v5e-8", "v6e-8", "v5p-8", "v5p-64")


def what_fits_page() -> str:
    """The published models on some devices, by shapes."""
    config = recipes.load(ROOT / RECIPE)
    sizes = config.rollout
    lines = [
        "# What fits what",
        "",
        "```",
        f"grpojax plan {RECIPE} --models all --devices {','.join(DEVICES)}",
        "```",
        "",
        f"The recipe is GSM8K with {sizes.prompts} prompts of up to {config.data.max_prompt_tokens} tokens and "
        f"{sizes.group} samples each of up to {sizes.max_tokens}, and a KL to a reference. A cell has the GiB that a "
        "chip needs, of those in the head, and the least seconds of a step; or what every chip lacks. The command also "
        "prints the mesh and the micro-batches with which it fits, and what binds a step; `--json` has everything.",
        "",
        "All of it is estimated from shapes and data sheets ([how far to trust it](planning.md#how-far-to-trust-it)), "
        f"and nearly nothing of it has been run. Micro-batches have at least {plan_search.LEAST} positions where these "
        f"fit. LoRA is of rank {plan_table.RANK} on all linear layers. A rollout samples with weights of 16 bits, also "
        "on a base of eight; `rollout.weights=int8` in the command halves them. What lacks little fits with fewer "
        "`rollout.prompts`, a smaller `rollout.decode_slots`, or a shorter `rollout.max_tokens`.",
        "",
        plan_table.markdown(plan_table.cells(config, list(SHAPES), DEVICES)),
    ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------ variants


def texts() -> dict[str, dict[str, str]]:
    """``docs/variants.yaml``: of each variant its idea, its formula, and what was measured."""
    return yaml.safe_load(TEXTS.read_text(encoding="utf-8"))


def _get(name: str) -> variants.Variant:
    """A variant at its defaults, with something for what must be given."""
    required = {k: 1.0 for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty}
    return variants.get(name, **required)


EVIDENCE = {
    "deployed": "used to train a named, released model",
    "replicated": "reproduced by others than its authors",
    "ablated": "studied at length by its own authors",
    "single team": "reported by one team",
}


def variants_page() -> str:
    """All variants in one table."""
    known = texts()
    lines = [
        "# Variants",
        "",
        "A variant is a method: how rewards become advantages, which loss is minimised, and what else is computed for "
        "it. A recipe names one, with options where they differ from the defaults:",
        "",
        "```yaml",
        "variant: {name: dapo, clip_high: 0.3}",
        "```",
        "",
        "[Choosing a variant](../start/variant.md) starts from your problem. Evidence is graded: "
        + "; ".join(f"*{grade}* means {text}" for grade, text in EVIDENCE.items())
        + ".",
        "",
        "| variant | idea | evidence | source |",
        "|---|---|---|---|",
    ]
    for name in variants.names():
        variant = _get(name)
        lines.append(
            f"| [`{name}`]({name}.md) | {cell(known[name]['idea'])} | {variant.evidence} | {cell(variant.citation)} |"
        )
    lines += [
        "",
        "Formulas use these letters: `r_i` is the reward of sample `i` of a group, `A` an advantage, `π` the policy, "
        "`ρ = π / π_old` the ratio to the policy before the update, `sg[...]` a constant for the gradient, `H` the "
        "entropy of a token's distribution in nats, `|o_i|` the number of tokens of a sample. `mean` and `std` are "
        "over the group unless they say otherwise.",
        "",
        "Every variant also takes the options of the [objective](../reference/functions.md#losses): `kl_coef`, "
        "`aggregate`, `entropy_coef`, `importance`, `ratio_denominator` and others. "
        "[Methods of your own](../start/variant.md#a-variant-of-your-own) are one class or one function in one file.",
    ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "must be given"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value}`"


def _links(citation: str) -> str:
    """A citation, its arXiv ids as links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", citation)


def _control(name: str) -> str:
    """What a variant is compared with."""
    control = variants.control(name)
    if control is None:
        return "none; it differs from GRPO in more than one mechanism" if name != "grpo" else "none"
    other, options = control
    given = ", ".join(f"`{option}: {_value(value).strip('`')}`" for option, value in options.items())
    return ("itself" if other == name else f"[`{other}`]({other}.md)") + (f", with {given}" if given else "")


def variant_page(name: str) -> str:
    """One variant: idea, formula, source, options, recipe, control, measurements."""
    variant, text = _get(name), texts()[name]
    said = sections(getattr(variants, name).__doc__)
    _, _, notes = said.get("", "").partition("\n\n")
    recipe = ROOT / "configs" / "variants" / f"{name}.yaml"
    lines = [f"# {name}", "", text["idea"], "", "```text", text["formula"].rstrip(), "```", ""]
    if notes:
        lines += [markdown(notes), ""]
    lines += [
        f"- **Source**: {_links(variant.citation)}",
        f"- **Evidence**: {variant.evidence}, {EVIDENCE[variant.evidence]}",
        f"- **Not verified**: {markdown(variant.unverified) or 'nothing; all of it was checked against the source'}",
    ]
    if variant.needs:
        needs = "; ".join(f"`{need}`, {variants.NEEDS[need]}" for need in variant.needs)
        lines.append(f"- **Needs**: {markdown(needs)}")
    if variant.keep is not None:
        kept = "drops groups that teach nothing, and draws others in their place"
        lines.append(
            f"- **Filter**: {kept if variant.resample else 'leaves groups that teach nothing out of the loss'}"
        )
    lines.append(f"- **Control**: {_control(name)}")
    lines += ["", "## As the code has it", "", "```text", *str(variant).splitlines()[1:], "```", ""]
    lines += ["## Options", "", "| option | default | meaning |", "|---|---|---|"]
    meaning = meanings(variants.section(name))
    lines += [f"| `{k}` | {_value(v)} | {cell(meaning[k])} |" for k, v in variants.parameters(name).items()]
    if recipe.exists():
        lines += ["", "## Recipe", "", f"`configs/variants/{name}.yaml`, over the quickstart's task:", "", "```yaml"]
        lines += [recipe.read_text(encoding="utf-8").rstrip(), "```", ""]
        lines += ["```", f"grpojax train configs/variants/{name}.yaml", "```"]
    lines += ["", "## Measured", "", text.get("measured", NOT_MEASURED)]
    return "\n".join(lines) + "\n"


NOT_MEASURED = (
    "Its formulas are tested against plain numpy loops and against numbers worked out by hand or taken from its source "
    "([how numbers are proven](../understand/numbers.md)). We have not compared it with another method."
)


# ------------------------------------------------------------------------------------------------ functions

DIRECTIVES = re.compile(r"^<!-- (::: .*?)-->$", re.M | re.S)


def written(markdown: str) -> str:
    """The page with a table of functions before each comment that has ``:::``, and with the code of a function after
    each like ``<!-- code: grpojax.train:step -->``, for readers on GitHub."""

    def code(found: re.Match) -> str:
        return f"{found[1]}\n```python\n{code_of(pkgutil.resolve_name(found[2]))}\n```\n"

    markdown = re.sub(r"^(<!-- code: (\S+) -->)\n(?:```python\n.*?^```\n)?", code, markdown, flags=re.M | re.S)

    def both(found: re.Match) -> str:
        return f"{functions_table(found[2])}\n\n{found[1]}"

    return re.sub(rf"(?:(?:^\|[^\n]*\n)+\n)?({DIRECTIVES.pattern})", both, markdown, flags=re.M | re.S)


def code_of(function: types.FunctionType) -> str:
    """The source of a function without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    docstring = tree.body[0]
    lines = source.splitlines()
    return "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def functions_table(directives: str) -> str:
    """What mkdocstrings shows for these directives: each name with the first paragraph of its docstring."""
    lines = ["| name | what it is |", "|---|---|"]
    for directive in directives.split("::: ")[1:]:
        path, _, options = directive.partition("\n")
        thing = pkgutil.resolve_name(path.strip())
        members = (yaml.safe_load(options) or {}).get("options", {}).get("members")
        found = [(path.rpartition(".")[2].strip(), thing)]
        if inspect.ismodule(thing):
            found = [(name, getattr(thing, name)) for name in members or public(thing)]
        for name, each in found:
            what = " ".join((inspect.getdoc(each) or "").partition("\n\n")[0].split())
            if what and hasattr(each, "__name__"):  # and not the alias of a type
                what = re.sub(r":+$", ".", what).replace("``", "`").replace("|", "\\|")
                lines.append(f"| `{name}` | {what} |")
    return "\n".join(lines)


def public(module: types.ModuleType) -> list[str]:
    """The names that a module gives away: its ``__all__``, or what it defines itself."""
    own = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


# ------------------------------------------------------------------------------------------------ alarms, layers


def alarms_table() -> str:
    """Every alarm, as ``docs/start/trouble.md`` has it: what has happened, and the remedy."""
    lines = ["| alarm | what has happened | remedy |", "|---|---|---|"]
    for name, (what, remedy) in alarms.SAID.items():
        remedy = re.sub(r"\b(?:optimizer|rollout|variant|critic|rewards)\.[a-z_.]*[a-z_0-9]", r"`\g<0>`", cell(remedy))
        lines.append(f"| `{name}` | {cell(what)} | {remedy} |")
    return "\n".join(lines)


def experiments_figure() -> str:
    """The differences in accuracy of all registered rows that are whole, with intervals and margins."""
    found = verdicts.whole_rows(verdicts.kept_in(ROOT / "notebooks" / "results" / "registered.jsonl"))
    rows = [(row, c) for row, compared in found.items() for c in compared if c["outcome"] == "accuracy"]
    line, top, left, right = 34, 26, 330, 750
    reach = max(abs(c[end]) for _, c in rows for end in ("low", "high")) * 1.05
    bottom = top + line * len(rows)

    def x(value: float) -> str:
        return f"{(left + right) / 2 + value / reach * (right - left) / 2:.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 34}" role="img" '
        'aria-label="Differences in accuracy of the registered comparisons" class="figure">',
        f'<path d="M{x(0)} {top - 8} V{bottom}"/>',
    ]
    for n, (row, c) in enumerate(rows):
        y = top + line * n + line // 2
        name, other = verdicts.short(c["method"]).removeprefix(f"{row}/"), verdicts.short(c["other"]).rpartition("/")[2]
        out += [
            f'<text x="0" y="{y - 2}" class="mono">{escape(name)}</text>',
            f'<text x="0" y="{y + 12}" class="small">{escape(f"{row}, compared with {other}")}</text>',
            *(f'<path d="M{x(v)} {y - 13} V{y + 13}" class="dashed"/>' for v in (-c["margin"], c["margin"])),
            f'<path d="M{x(c["low"])} {y} H{x(c["high"])}"/>',
            f'<circle cx="{x(c["difference"])}" cy="{y}" r="5" class="{c["verdict"]}"/>',
        ]
    out += [f'<text x="{x(v)}" y="{bottom + 20}" class="small middle">{v:+.1f}</text>' for v in (-0.3, -0.1, 0.1, 0.3)]
    out += [f'<text x="{x(0)}" y="{bottom + 20}" class="small middle">0</text>', "</svg>"]
    return "\n".join(out) + "\n"


def layers() -> list[list[set[str]]]:
    """The layers that ``tests/test_imports.py`` holds the imports to, nearest to the mathematics first."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            return ast.literal_eval(node.value)
    raise ValueError("tests/test_imports.py has no LAYERS")


def layers_figure() -> str:
    """The layers as a picture: a package imports only from rows above its own."""
    width, row, top, left = 760, 58, 30, 118
    rows = layers()
    pure = {name for layer in rows[:4] for branch in layer for name in branch} - {"host", "extension"}
    height = top + row * len(rows) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="The layers of grpojax" class="figure">',
        f'<text x="{left}" y="18" class="small">A package imports only from rows above its own.</text>',
    ]
    for n, layer in enumerate(rows):
        names = [name for branch in layer for name in sorted(branch)]
        step = (width - left) / len(names)
        y = top + n * row
        for k, name in enumerate(names):
            kind = "pure" if name in pure else "machine"
            x = left + k * step
            out.append(f'<rect x="{x:.0f}" y="{y}" width="{step - 8:.0f}" height="{row - 10}" rx="5" class="{kind}"/>')
            out.append(f'<text x="{x + (step - 8) / 2:.0f}" y="{y + 30}" class="name">{escape(name)}</text>')
    split = top + 4 * row
    out += [
        f'<text x="0" y="{top + 28}" class="small">mathematics</text>',
        f'<text x="0" y="{top + 44}" class="small">(imports jax)</text>',
        f'<text x="0" y="{split + 28}" class="small">the machine</text>',
        "</svg>",
    ]
    return "\n".join(out) + "\n"


# ------------------------------------------------------------------------------------------------ mkdocs


def on_config(config: Any) -> Any:
    """Puts a page for each variant into the navigation."""
    for entry in config["nav"]:
        if "Variants" in entry:
            entry["Variants"] += [{"All methods": [{name: f"variants/{name}.md"} for name in variants.names()]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    file = importlib.import_module("mkdocs.structure.files").File
    for path, content in pages().items():
        files.append(file.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adds what only the site has: figures, the functions' docstrings, and links to generated pages.

    A committed page has the first two in comments, which GitHub does not show: ``<!-- figure: step -->``, with a
    caption after the name if it needs one, and ``<!-- ::: grpojax.losses -->``. A figure becomes part of the page
    itself, so that it takes the page's colours, light or dark.
    """

    def figure(found: re.Match) -> str:
        return files.get_file_from_path(f"assets/{found[1]}.svg").content_string.strip() + f"\n\n{found[2]}"

    markdown = re.sub(r"^<!-- figure: (\w+)\s+(.*?)-->$", figure, markdown, flags=re.M | re.S)
    # In a table, GitHub takes a pipe in code only with a backslash, which Python-Markdown would show.
    markdown = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), markdown)
    return relinked(DIRECTIVES.sub(r"\1", markdown), page.file.src_path)


def relinked(markdown: str, page: str) -> str:
    """A page's Markdown with links to the site's pages where it links to files of the repository (`IN_PLACE`)."""
    folder = posixpath.dirname(ELSEWHERE.get(page, f"docs/{page}"))

    def link(found: re.Match) -> str:
        file = posixpath.normpath(posixpath.join(folder, found[1]))
        if file not in IN_PLACE:
            return found[0]
        return f"]({posixpath.relpath(IN_PLACE[file], posixpath.dirname(page) or '.')}{found[2]})"

    return re.sub(r"\]\(([\w./-]+)((?:#[\w-]+)?)\)", link, markdown)


def check(known: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``docs/variants.yaml``: variants without a text, and texts without a variant."""
    return sorted(set(known) ^ set(variants.names()))


if __name__ == "__main__":
    for name in WRITTEN:
        text = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(written(text), encoding="utf-8")
