"""The tokenizer inside of a GGUF file: byte-level BPE, its special tokens and its chat template."""

from typing import Any, Protocol

from grpojax.host.console import log
from grpojax.host.errors import UserError

# What `tokenizer.ggml.token_type` says of a token.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

# The way of splitting text before the merges that `tokenizer.ggml.pre` names -> the most digits in a piece of Llama 3's
# pattern; None: GPT-2's own pattern; 0: that pattern, with each digit a piece.
GPT2, DIGITS = None, 0
PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": DIGITS,
    "llama-bpe": 3,
    "llama-v3": 3,
    "llama3": 3,
    "qwen2": 1,
    "deepseek-r1-qwen": 1,
}


class Metadata(Protocol):
    """What is read of a file: its fields, and what it is called in errors."""

    path: Any

    def get(self, key: str, default: Any = None) -> Any:
        """A field, or ``default``."""

    def need(self, key: str) -> Any:
        """A field; raises `UserError` where there is none."""


def special_ids(file: Metadata) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``; None where the file has none.

    ``eos_token_id`` is a list where the end of a turn or of a message is another token.
    """

    def get(name: str) -> int | None:
        return file.get(f"tokenizer.ggml.{name}_token_id")

    ends = list(dict.fromkeys(i for i in (get("eos"), get("eot"), get("eom")) if i is not None))
    eos = None if not ends else ends[0] if len(ends) == 1 else ends
    return {"bos_token_id": get("bos"), "eos_token_id": eos, "pad_token_id": get("padding")}


def tokenizer_of(file: Metadata) -> Any:
    """The file's tokenizer, as transformers' `PreTrainedTokenizerFast`.

    Raises:
      UserError: it is not byte-level BPE, splits text in a way that is not known here, or is damaged.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models
    from transformers import PreTrainedTokenizerFast

    if (model := file.need("tokenizer.ggml.model")) != "gpt2":
        raise UserError(f"{file.path}: its tokenizer is {model!r}; only byte-level BPE ('gpt2') is supported")
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"{file.path}: tokenizer.ggml.pre={pre!r} is not known; known: {', '.join(PRE_TOKENIZERS)}")
    if pre == "default":
        log.warning("%s does not say how it splits text (tokenizer.ggml.pre); it is split as GPT-2 does", file.path)
    tokens = file.need("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    llama3 = PRE_TOKENIZERS[pre] == 3
    try:
        vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
        core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=llama3))
    except Exception as e:  # tokenizers raises nothing narrower
        raise UserError(f"{file.path}: its tokenizer is damaged: {e}") from None
    core.pre_tokenizer, core.decoder = _splitting(PRE_TOKENIZERS[pre]), decoders.ByteLevel()
    if PRE_TOKENIZERS[pre] == 1:
        core.normalizer = tokenizers.normalizers.NFC()
    core.add_special_tokens([AddedToken(t, normalized=False) for t in _of_kind(CONTROL, tokens, kinds)])
    core.add_tokens([AddedToken(t, normalized=False) for t in _of_kind(USER_DEFINED, tokens, kinds)])
    named = {f"{ours}_token": _token(file, theirs) for ours, theirs in _NAMED.items()}
    if file.get("tokenizer.ggml.add_bos_token", llama3) and named["bos_token"] is not None:
        _begin_with(core, named["bos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.need(f"{file.need('general.architecture')}.context_length")),
        **{name: token for name, token in named.items() if token is not None},
    )


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _token(file: Metadata, name: str) -> str | None:
    i, tokens = file.get(f"tokenizer.ggml.{name}_token_id"), file.need("tokenizer.ggml.tokens")
    if i is not None and i >= len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.{name}_token_id={i}, but there are {len(tokens)} tokens")
    return None if i is None else tokens[i]


def _of_kind(kind: int, tokens: list[str], kinds: list[int]) -> list[str]:
    return [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]


def _splitting(digits: int | None) -> Any:
    """A value of `PRE_TOKENIZERS` as the step before the merges."""
    import tokenizers
    from tokenizers import pre_tokenizers

    if digits is GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if digits == DIGITS:
        each = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([each, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pieces = (
        "(?i:'(?:[smdt]|re|ve|ll))",  # an English ending
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with what stands before it
        rf"\p{{N}}{{1,{digits}}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation to the end of its line
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # of spaces before a word, the last one is the word's
        r"\s+",
    )
    split = pre_tokenizers.Split(tokenizers.Regex("|".join(pieces)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _begin_with(core: Any, bos: str) -> None:
    """Has every text begin with the token ``bos``."""
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, core.token_to_id(bos))]
    )
