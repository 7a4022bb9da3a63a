"""Chat templates as people's models have them: what they drop, open, write and end with."""

import datetime
import json
import random
import shutil

import pytest
from chat_templates import TEMPLATES, tokenizer_of

from grpojax import data
from grpojax.data import DataConfig, Tokenize
from grpojax.data.chat_template import variables_of, without_opening
from grpojax.host import agreement, settings
from grpojax.host.errors import UserError
from grpojax.models import hf


def tokenize_with(template, /, *, tags=(), add_bos=False, **options):
    tokenizer = tokenizer_of(template, tags=tags, add_bos=add_bos)
    return Tokenize(tokenizer, settings.build(DataConfig, {"train": "-", **options}))


# ------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (TEMPLATES["drops"], {"messages", "add_generation_prompt", "thinking"}),
        ("{% if not mood is defined %}{% set mood = 'calm' %}{% endif %}{{ mood }}", {"mood"}),
        ("{% macro show(m) %}{{ m }}{{ style }}{% endmacro %}{{ show(messages[0]) }}", {"messages", "style"}),
        ("{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}", {"messages"}),
        ("{% set ns = namespace(n=0) %}{{ ns.n }}{{ range(3) }}", set()),
    ],
)
def test_the_variables_of_a_template(template, reads):
    assert variables_of(template) == reads


def test_an_option_changes_the_prompt():
    without, off = tokenize_with("drops"), tokenize_with("drops", template_options={"thinking": False})
    assert off.text("1+1?") == without.text("1+1?") + "<think>\n\n</think>\n\n"
    assert off("1+1?")[: len(without("1+1?"))] == without("1+1?")
    assert tokenize_with("drops", template_options={"thinking": True})("1+1?") == without("1+1?")


@pytest.mark.parametrize("written", ["list", "files"])
def test_of_several_named_templates_the_default_or_the_only_one_is_used(tmp_path, written):
    """Both ways in which transformers has written them."""

    def tokenizer_with(**templates):
        folder = tmp_path / "_".join(templates)
        shutil.copytree(data.locate("builtin:tiny"), folder)
        (folder / "chat_template.jinja").unlink()
        if written == "list":
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        else:
            (folder / "additional_chat_templates").mkdir()
            for name, text in templates.items():
                (folder / f"additional_chat_templates/{name}.jinja").write_text(text)
        return hf.load_tokenizer(folder)

    for templates in ({"math": "<{{ messages[0].content }}>"}, {"rag": "", "default": "<{{ messages[0].content }}>"}):
        assert Tokenize(tokenizer_with(**templates), DataConfig(train="-")).text("Q") == "<Q>"
    several = tokenizer_with(rag="a", math="b")
    assert Tokenize(several, DataConfig(train="-", template="plain")).text("Q") == "Q"
    for use in (data.writes_day, lambda given: Tokenize(given, DataConfig(train="-"))):
        with pytest.raises(UserError, match="none is named default: math, rag\n.* or set data.template=plain"):
            use(several)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("drops", {"thinkin": 0}, "data.template_options.thinkin: the chat template does not .*; it reads thinking$"),
        ("plain", {"thinking": False}, "thinking: the chat template does not read it; it reads no variable"),
        # What the trainer or the tokenizer says is no option.
        ("bos", {"bos_token": "x"}, "bos_token: .* it reads no variable"),
        ("plain", {"add_generation_prompt": False}, "add_generation_prompt: .* it reads no variable"),
        ("dated", {"strftime_now": "x"}, "strftime_now: .* it reads no variable"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_read_is_refused(template, options, message):
    with pytest.raises(UserError, match=message):
        tokenize_with(template, template_options=options)


@pytest.mark.parametrize("given", [{"template_options": {"a": 1}}, {"today": "2026-01-05"}])
def test_options_need_a_chat_template(given):
    with pytest.raises(UserError, match=f"data.{next(iter(given))} needs a chat template"):
        tokenize_with("plain", template="plain", **given)


def test_a_template_that_is_none_is_refused():
    with pytest.raises(UserError, match="not a valid Jinja template"):
        tokenize_with("{% for %}")


def test_options_are_part_of_what_processes_and_runs_agree_on():
    given = [{}, {"template_options": {"thinking": False}}, {"template_options": {"thinking": True}}]
    given += [{"today": "2026-01-05"}, {"today": "2026-01-06"}]
    built = [settings.build(DataConfig, {"train": "-", **g}) for g in given]
    trees = [settings.to_dict(config) for config in built]
    assert len({agreement.digest(json.dumps(t, sort_keys=True).encode()) for t in trees}) == len(given)
    assert [settings.build(DataConfig, t) for t in trees] == built


# ------------------------------------------------------------------------------------------------------- day


@pytest.mark.parametrize("code", ["%d %b %Y", "%B %-d, %Y", "%Y-%m-%d", "%A", "%y%m%d 100%%", "%H:%M:%S"])
def test_a_day_is_written_as_transformers_writes_it(code):
    day = datetime.date(2026, 1, 5)
    template = "{{ strftime_now('CODE') }}".replace("CODE", code) + TEMPLATES["plain"]
    text = tokenize_with(template, today=day.isoformat()).text("Q")
    midnight = datetime.datetime(2026, 1, 5)
    assert text == midnight.strftime(code) + tokenize_with("plain").text("Q")


def test_today_is_the_day_unless_one_is_given():
    before = datetime.date.today()
    text = tokenize_with("dated").text("Q")
    tokenizer = tokenizer_of("dated")
    theirs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}], tokenize=False, add_generation_prompt=True
    )
    assert text == theirs or before != datetime.date.today()
    with pytest.raises(UserError, match="data.today=2026-01-05: the chat template writes no date"):
        tokenize_with("plain", today="2026-01-05")


# ------------------------------------------------------------------------------------------ earlier reasoning

REASONED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>one and one</think>2"},
    {"role": "user", "content": "And 2+2?"},
]


@pytest.mark.parametrize(
    ("opens", "closes"),
    [("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"), ("", "</think>"),
     ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("<|begin_of_thought|>", "<|end_of_thought|>")],
)  # fmt: skip
def test_reasoning_of_earlier_answers_may_be_dropped(opens, closes, caplog):
    template = TEMPLATES["drops"].replace("</think>')", f"{closes}')")
    chat = [REASONED[0], {"role": "assistant", "content": f"{opens}so\n{closes}\n2"}, REASONED[2]]
    tokenize = tokenize_with(template)
    for _ in range(2):
        assert "2<|end|>" in tokenize.text(chat) and "so" not in tokenize.text(chat)
    assert [r.getMessage() for r in caplog.records] == [
        "the chat template leaves the reasoning out of earlier answers and examples"
    ]


def test_an_argument_that_the_template_takes_for_reasoning_is_refused():
    call = '<think>so</think><tool_call>{"name": "f", "arguments": {"text": "a </think> b"}}</tool_call>'
    with pytest.raises(UserError, match="loses the assistant's"):
        tokenize_with("drops").text([REASONED[0], {"role": "assistant", "content": call}, REASONED[2]])


@pytest.mark.parametrize("answer", ["so it is 2", "<b>so</b> it is 2", "<think>so</think>3"])
def test_an_answer_that_is_lost_otherwise_is_refused(answer):
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content[-9:] if loop.first else '2' }}{% endfor %}"
    with pytest.raises(UserError, match="loses the assistant's"):
        tokenize_with(template)(
            [REASONED[0], {"role": "assistant", "content": answer}, {"role": "user", "content": "2"}]
        )


# --------------------------------------------------------------------------------------------------- the tail


@pytest.mark.parametrize(
    ("template", "options", "tail"),
    [
        ("plain", {}, ""),
        ("bos", {}, ""),
        ("words", {}, ""),
        ("dated", {}, ""),
        ("drops", {}, ""),
        ("drops", {"template_options": {"thinking": False}}, "<think>\n\n</think>\n\n"),
        ("opens", {}, "<think>\n"),
        ("fills", {}, "<think>\n"),
        (TEMPLATES["opens"].replace("<think>", "Let me see.\n<think>"), {}, "Let me see.\n<think>\n"),
        (TEMPLATES["opens"].replace("<think>", "[THINK]"), {}, "[THINK]\n"),
        ("plain", {"template": "plain", "instruction": "User: {prompt}\nAssistant: <think>"}, "<think>"),
        ("plain", {"template": "plain", "instruction": "<|user|>{prompt}<|end|><|assistant|><think>\n"}, "<think>\n"),
        ("plain", {"template": "plain", "instruction": "{prompt}\nAnswer:"}, ""),
        ("plain", {"template": "plain", "instruction": "{prompt} </b>"}, ""),
    ],
)  # fmt: skip
def test_what_a_prompt_ends_with_of_the_answer(template, options, tail):
    tokenize = tokenize_with(template, **options)
    ids = tokenize("1+1?")
    assert tokenize.tail(ids) == tail and tokenize.text("1+1?").endswith(tail)
    words = [tokenize.tokenizer.convert_tokens_to_ids(c) for c in "so"]
    both, plain = (tokenize.read(form, [ids], [words]) for form in ("with_prompt_tail", "with_special_tokens"))
    assert (both, plain) == ([tail + "so"], ["so"])


@pytest.mark.parametrize(
    ("answer", "tail", "rest"),
    [
        ("<think>\none\n</think>2", "<think>\n", "one\n</think>2"),
        ("<think>one</think>2", "<think>\n", "one</think>2"),
        ("\n<think>\none</think>2", "<think>\n", "one</think>2"),
        ("2", "<think>\n", "2"),
        ("\n2", "<think>\n", "\n2"),
        ("<think>\n\n</think>\n\n2", "<think>\n\n</think>\n\n", "2"),
        ("<think>so</think>2", "Let me see.\n<think>", "so</think>2"),
        ("Let me see.\n<think>so</think>2", "Let me see.\n<think>", "so</think>2"),
        ("[THINK]so", "[THINK]", "so"),
        (" 2", "", " 2"),
    ],
)
def test_an_answer_is_learned_from_where_its_prompt_ends(answer, tail, rest):
    assert without_opening(answer, tail) == rest


# ------------------------------------------------------------------------------------------- rendered before


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_that_were_rendered_before(template, caplog):
    ready = tokenize_with(template).text("What is 2 + 3?")
    with pytest.raises(UserError, match="own markers, as if rendered before: set data.template=plain"):
        tokenize_with(template)(ready)
    with pytest.raises(UserError, match="own markers"):
        tokenize_with(template)([*REASONED[:2], {"role": "user", "content": ready}])
    with pytest.raises(UserError, match="own markers"):
        tokenize_with(template, instruction=ready.replace("What is 2 + 3?", "{prompt}"))("What is 2 + 3?")
    insists = tokenize_with(template, template="chat")
    assert ready in insists.text(ready) and insists.text(ready)
    assert len([r for r in caplog.records if "data.template=plain" in r.getMessage()]) == 1
    for add_bos in (False, True):
        plain = tokenize_with(template, template="plain", add_bos=add_bos)
        assert plain.text(ready) == ready
        # As the template's own prompt, with the beginning that the tokenizer adds where there was none.
        own = tokenize_with(template)("What is 2 + 3?")
        assert plain(ready) == (own if own[0] == 0 or not add_bos else (0, *own))


@pytest.mark.parametrize(
    "question", ["What does <|end|> mean?", "<b>2</b> <i>3</i>?", "Who is the assistant?", "a: b:"]
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_is_not_taken_for_a_prompt(template, question):
    assert question in tokenize_with(template).text(question)


# ------------------------------------------------------------------------------------------------ properties

TEXTS = ["1+1?", " a  b ", "x<y", "</b>", "It is <think>", "2\n3", "{{ m }}", "%d"]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_the_templates_text_with_one_beginning_at_most(template, add_bos):
    """For random chats: ids spell what transformers renders, and what the sampler reads are these ids."""
    draw = random.Random(template)
    tokenize = tokenize_with(template, add_bos=add_bos, **({"today": "2026-01-05"} if template == "dated" else {}))
    problems = []
    for number in range(20):
        system = [{"role": "system", "content": "Be brief."}] * draw.randint(0, 1)
        earlier = [
            {"role": role, "content": draw.choice(TEXTS)}
            for _ in range(draw.randint(0, 2))
            for role in ("user", "assistant")
        ]
        chat = [*system, *earlier, {"role": "user", "content": draw.choice(TEXTS)}]
        ids = tokenize(chat)
        text = tokenize.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenize.tokenizer.decode(ids) == tokenize.text(chat)
        assert template == "dated" or tokenize.text(chat) == text
        assert ids.count(0) == (template == "bos")
        problems.append(data.Problem(number, ids, chat[-1]["content"], None, {}))
    prompts = data.to_prompts(problems, max(len(p.ids) for p in problems))
    for row, n, problem in zip(prompts.tokens.tolist(), prompts.lengths.tolist(), problems, strict=True):
        assert tuple(row[:n]) == problem.ids


@pytest.mark.parametrize("template", ["opens", "drops", "fills"])
def test_a_completion_read_with_all_is_the_end_of_what_the_sampler_saw(template):
    options = {"template_options": {"thinking": False}} if template == "drops" else {}
    tokenize = tokenize_with(template, tags=("<think>", "</think>"), **options)
    tokenizer, ids = tokenize.tokenizer, tokenize("1+1?")
    rows = [tokenizer.encode(text) for text in ("so</think>2", "", "<|user|>x")]
    whole = [tokenizer.decode([*ids, *row]) for row in rows]
    header = tokenizer.decode(ids).removesuffix(tokenize.tail(ids))
    assert [header + text for text in tokenize.read("with_both", [ids] * 3, rows)] == whole
    assert tokenize.read("with_prompt_tail", [ids] * 3, rows)[0] == tokenize.tail(ids) + "so2"
    assert tokenize.message("so</think>2<|end|>") == tokenize.tail(ids) + "so</think>2"


ANSWER = [{"role": "tool", "name": "add", "content": "42"}]


@pytest.mark.parametrize(
    ("template", "end", "written"),
    [
        ("plain", "<|end|>", "<|tool|>42<|end|><|assistant|>"),
        ("plain", None, "<|end|><|tool|>42<|end|><|assistant|>"),
        ("drops", "<|end|>", "<|tool|>42<|end|><|assistant|>"),
        ("fills", "<|end|>", "<|tool|>42<|end|><|assistant|><think>\n"),
        ("double", "<|done|>", "<|end|><|tool|>42<|end|><|assistant|>"),
        ("double", "<|end|>", "<|tool|>42<|end|><|assistant|>"),
        ("words", "<|stop|>", "TOOL: 42\nASSISTANT:"),
    ],
)
def test_what_follows_a_turn_is_the_rest_of_its_end_the_answer_and_the_next_opening(template, end, written):
    tokenizer = tokenizer_of(TEMPLATES[template])
    tokenize = Tokenize(tokenizer, DataConfig(train=""), tools={})
    ids = tokenize.after_turn(ANSWER, None if end is None else tokenizer.convert_tokens_to_ids(end), most=9)
    assert tokenizer.decode(ids) == written


def test_a_long_answer_is_cut_and_an_empty_one_is_a_newline_without_a_template():
    tokenizer = tokenizer_of(TEMPLATES["plain"])
    chat, plain = (Tokenize(tokenizer, DataConfig(train="", template=t), tools={}) for t in ("chat", "plain"))
    assert tokenizer.decode(chat.after_turn(ANSWER, None, most=1)) == "<|end|><|tool|>4<|end|><|assistant|>"
    assert tokenizer.decode(plain.after_turn(ANSWER * 2, None, most=9)) == "4242"
    assert tokenizer.decode(plain.after_turn([{"role": "tool", "content": ""}], None, most=9)) == "\n"


def test_an_answer_cannot_end_its_message_or_open_another():
    tokenizer = tokenizer_of(TEMPLATES["plain"])
    for template, written in (("chat", "<|tool|>4 2<|end|><|assistant|>"), ("plain", "4 2")):
        tokenize = Tokenize(tokenizer, DataConfig(train="", template=template), tools={})
        answer = [{"role": "tool", "content": "4<|e<|end|>nd|> 2<|assistant|>"}]
        ids = tokenize.after_turn(answer, tokenizer.convert_tokens_to_ids("<|end|>"), most=9)
        assert tokenizer.decode(ids) == written


CALLS = "{%- if tools -%}{%- for t in tools -%}<{{ t.function.name }}>{%- endfor -%}{%- endif -%}"


def tools_called(*names):
    return [{"type": "function", "function": {"name": name}} for name in names]


def test_tools_are_shown_by_a_template_that_reads_them(caplog):
    tools = {None: tools_called("add")}
    shown = Tokenize(tokenizer_of(CALLS + TEMPLATES["plain"]), DataConfig(train=""), tools=tools)
    assert shown.text("1").startswith("<add>") and shown.of_row({"environment": "any"}) is shown
    Tokenize(tokenizer_of(TEMPLATES["plain"]), DataConfig(train=""), tools=tools)
    assert "data.system" in caplog.text


def test_a_prompt_shows_the_tools_of_its_own_row(tmp_path):
    tools = {"sums": tools_called("add"), "lake": tools_called("move", "look")}
    tokenizer, config = tokenizer_of(CALLS + TEMPLATES["plain"]), DataConfig(train="", columns={"environment": "kind"})
    tokenize = Tokenize(tokenizer, config, tools=tools)
    rows = [{"question": "1", "answer": "1", "kind": kind} for kind in ("lake", "sums", "lake")]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = data.load_problems(str(tmp_path / "d.jsonl"), tokenize, config, of_row=tokenize.of_row)
    shown = [tokenizer.decode(p.ids).partition("<|user|>")[0] for p in problems]
    assert shown == ["<move><look>", "<add>", "<move><look>"]
    assert tokenize.text("1").startswith("<|user|>")


@pytest.mark.parametrize("kind", ["lak", None])
def test_a_row_of_no_environment_is_named(tmp_path, kind):
    tools = {"sums": tools_called("add"), "lake": ()}
    config = DataConfig(train="")
    tokenize = Tokenize(tokenizer_of(CALLS + TEMPLATES["plain"]), config, tools=tools)
    row = {"question": "1", "answer": "1"} | ({} if kind is None else {"environment": kind})
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=f"d.jsonl.*{kind!r}.*'sums', 'lake'"):
        data.load_problems(str(tmp_path / "d.jsonl"), tokenize, config, of_row=tokenize.of_row)


def test_whether_turns_can_be_answered_is_asked_for_each_environment():
    template = "{%- if tools and tools | length > 1 -%}" + GROWS + "{%- endif -%}" + TEMPLATES["plain"]
    tools = {"sums": tools_called("add"), "lake": tools_called("move", "look")}
    with pytest.raises(UserError, match="^environment.choices.lake: .*begins a chat with"):
        Tokenize(tokenizer_of(template), DataConfig(train=""), tools=tools)
    Tokenize(tokenizer_of(template), DataConfig(train=""), tools={"sums": tools["sums"]})


LATER = """\
{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}
{%- endfor -%}"""
GROWS = "{{- messages | length -}}"
SILENT = """\
{%- for m in messages if m.role != 'tool' -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
NUMBERS = """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{{ loop.index if m.role == 'tool' }}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

LAST = """\
{%- for m in messages -%}{%- if m.role != 'tool' or loop.last -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATES["closes"], "ends a turn with '<|end|>\\n<|stop|>'"),
        (TEMPLATES["returns"], "ends a turn with '<|done|>'"),
        (LATER + TEMPLATES["plain"], "no tools here"),
        (GROWS + TEMPLATES["plain"], "begins a chat with"),
        (SILENT, "does not write a tool's answer"),
        (NUMBERS, "after a later turn"),
        (LAST, "two answers of tools"),
    ],
    ids=["closes", "returns", "refuses", "grows", "silent", "numbers", "last"],
)
def test_a_template_that_changes_what_stands_before_an_answer_is_refused_at_the_start(template, why):
    with pytest.raises(UserError) as e:
        Tokenize(tokenizer_of(template), DataConfig(train=""), tools={})
    assert why in str(e.value) and "data.template=plain" in str(e.value)
    Tokenize(tokenizer_of(template), DataConfig(train=""))
