"""Chat templates of several kinds, and a tokenizer of letters that has one of them."""

import tokenizers
import transformers

PLAIN = """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

TEMPLATES = {
    "plain": PLAIN,
    "bos": "{{- bos_token -}}" + PLAIN,
    "dated": "{{- '<|system|>It is ' ~ strftime_now('%d %b %Y') ~ '.<|end|>' -}}" + PLAIN,
    # The reasoning of all answers but the last is left out.
    "drops": """\
{%- for m in messages -%}
{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content -%}
<|{{ m.role }}|>{{ text }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{%- if thinking is defined and not thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}""",
    "opens": """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\n' -}}{%- endif -%}""",
    # An earlier answer stands after an empty reasoning.
    "fills": """\
{%- for m in messages -%}<|{{ m.role }}|>{%- if m.role == 'assistant' -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{{- m.content -}}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\n' -}}{%- endif -%}""",
    # A chat that is over ends with the tokenizer's own end too.
    "closes": """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{{- '\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- else -%}{{- eos_token -}}{%- endif -%}""",
    # An answer ends with a mark of its own before that of the message.
    "double": """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- if m.role == 'assistant' -%}<|done|>{%- endif -%}<|end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    # The last answer of a chat ends otherwise than those before it.
    "returns": """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}
{%- if m.role == 'assistant' and loop.last -%}<|done|>{%- else -%}<|end|>{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    # No special tokens but the tokenizer's own end.
    "words": """\
{%- for m in messages -%}{{ m.role | upper }}: {{ m.content }}
{{- eos_token if m.role == 'assistant' else '\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}""",
}

MARKS = ["<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|done|>", "<|stop|>"]


def tokenizer_of(template, *, tags=(), bos="<|begin|>", eos="<|stop|>", add_bos=False):
    """A fast tokenizer of letters; ``tags`` are special tokens too, ``add_bos`` has it begin texts by itself."""
    special = [*MARKS, *tags]
    letters = ["\n", *map(chr, range(32, 127))]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({c: i for i, c in enumerate([*special, *letters])}, unk_token="?")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    core.add_special_tokens(special)
    if add_bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, special.index(bos))]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    made.chat_template = TEMPLATES.get(template, template)
    return made
