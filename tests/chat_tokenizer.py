"""A tokenizer of letters with a chat template of the test's own."""

from grpojax.data import DataConfig, Tokenize


class Fake:
    """A tokenizer of letters with a chat template of our own; 1 is its BOS."""

    def __init__(self, template=None, bos=1, eos=2):
        self.chat_template, self.bos_token_id, self.eos_token_id = template, bos, eos

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return self.chat_template(turns)

    def encode(self, text, *, add_special_tokens):
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return first + [1 if c == "^" else ord(c) for c in text]

    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i < 3))


def dialog(turns):
    return "^" + "".join(f"<{t['role']}>{t['content']}" for t in turns) + "<assistant>"


def prompts_of(tokenizer, **options):
    tokenize = Tokenize(tokenizer, DataConfig(train="", **options))
    return tokenize.text("Q"), tokenize("Q")


def chatml(turns):
    return "".join(f"<{t['role'][0]}>{t['content']}" for t in turns) + "<a>"
