"""The tokenizer of a Hugging Face folder, how its ids fit the model's, and the tokens that end a completion."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.folder import (
    check_tokenizer_files,
    damaged,
    model_folder,
    read_json,
    refuse_adapter,
)
from grpojax.models.hf.in_bucket import small_files

# Words, digits, spaces, punctuation, code and several scripts: what tokenizers split differently.
_PROBE = (
    "Hello world! It's 12345.67 + 89 =\n\n\t def f(x):\r\n    return x**2  # \\boxed{42}"
    " naïve A\u030angstro\u0308m, 你好 мир 🙂"
)


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The tokenizer saved in a folder, token for token.

    ``AutoTokenizer`` rebuilds a tokenizer by its model type, which splits a custom one's text differently; so
    ``tokenizer.json`` is loaded as it stands, but for a truncation or a padding in it, which are of how it was used.

    Raises:
      UserError: the folder holds no tokenizer, or a damaged one, or ``tokenizer_config.json`` changes how
        ``tokenizer.json`` splits text.
    """
    import transformers  # slow to import

    named = model_folder(path)
    path = small_files(named) if files.in_bucket(named) else Path(named)
    file = path / "tokenizer.json"
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        refuse_adapter(named)
        run = (
            f"; it is a run: grpojax export {named} --to FOLDER"
            if (files.path(path) / "metrics.jsonl").exists()
            else ""
        )
        raise UserError(f"{named} holds no tokenizer (no tokenizer.json){run}")
    check_tokenizer_files(named, path)
    if not file.exists():
        try:
            return _with_template(transformers.AutoTokenizer.from_pretrained(path))
        except Exception as e:  # whatever the tokenizers of transformers raise
            raise UserError(f"{named}: the tokenizer cannot be read: {' '.join(str(e).split())[:200]}") from None
    import tokenizers

    try:
        saved = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises nothing narrower
        raise damaged(named / file.name, e) from None
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        tokenizer.encode(_PROBE)
    except Exception as e:  # whatever a strange value in tokenizer_config.json makes transformers raise
        raise damaged(named / "tokenizer_config.json", e) from None
    for each in (saved, tokenizer.backend_tokenizer):
        if each is saved and (each.truncation or each.padding):
            log.info("%s: its truncation and padding are not used", named / file.name)
        each.no_truncation()
        each.no_padding()
    if tokenizer.encode(_PROBE, add_special_tokens=False) != saved.encode(_PROBE, add_special_tokens=False).ids:
        raise UserError(f"{named}: tokenizer_config.json makes transformers split text unlike tokenizer.json by itself")
    return _with_template(tokenizer)


def _with_template(tokenizer: Any) -> Any:
    """The tokenizer, whose chat template is the only one that it has by name, if there is one."""
    if isinstance(named := tokenizer.chat_template, dict) and len(named) == 1:
        (tokenizer.chat_template,) = named.values()
    return tokenizer


def fit_tokenizer(config: DecoderConfig, tokenizer: Any, where: str | os.PathLike = "the model") -> DecoderConfig:
    """The config with its ``unused_rows``: those rows of the embedding that are no token's id.

    Args:
      config: the model's.
      tokenizer: of transformers; its added tokens count.
      where: what to call the model in errors.

    Raises:
      UserError: a token's id is beyond the embedding.
    """
    rows, vocabulary = config.vocab_size, tokenizer.get_vocab()
    ids = sorted({*vocabulary.values()})
    if ids and ids[-1] >= rows:
        first = min((i, token) for token, i in vocabulary.items() if i >= rows)
        raise UserError(
            f"{where}: its tokenizer has ids for {ids[-1] + 1} tokens, and its embedding {rows} rows (vocab_size); the "
            f"first token without a row is {first[1][:40]!r}\ntake the tokenizer that the model was trained with, or "
            f"resize_token_embeddings({ids[-1] + 1}) with transformers and save both again"
        )
    gaps = zip([-1, *ids], [*ids, rows], strict=True)
    return dataclasses.replace(config, unused_rows=tuple((a + 1, b) for a, b in gaps if a + 1 < b))


def decode_all(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Token ids as texts, special tokens left out.

    A fast tokenizer makes them all at once, on as many cores as there are, while Python goes on with other threads.
    """
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(list(rows), skip_special_tokens=True)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The UTF-8 bytes that each token adds to a text; of a token that is a part of a character its own bytes.

    The first token has no space in front where the decoder takes that away.

    Example:
      >>> from grpojax import data
      >>> tokenizer = load_tokenizer(data.locate("builtin:tiny"))
      >>> token_bytes(tokenizer, tokenizer.encode("3 é"))
      [b'3', b' ', b'\\xc3', b'\\xa9']
    """
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    if decoder is None:
        return [tokenizer.decode([i], skip_special_tokens=False).encode() for i in ids]

    def one(token: str) -> bytes:
        text = decoder.decode(["a", token])[1:]  # behind another, since some decoders change the first one
        if _REPLACED not in text:
            return text.encode()
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return bytes(_of_alphabet()[c] for c in token) if set(token) <= _of_alphabet().keys() else text.encode()

    found = [one(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    if found and found[0].startswith(b" ") and not tokenizer.decode(ids[:1]).startswith(" "):
        found[0] = found[0][1:]
    return found


_REPLACED = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def _of_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def eos_ids(path: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, as the generation config, the config, the tokenizer and its chat template
    have it.

    Sorted; empty where none of them names one.
    """
    return tuple(sorted({i for ids in _named_ends(path, tokenizer).values() for i in ids}))


def ends_note(path: str | os.PathLike, tokenizer: Any) -> str | None:
    """A line that says what ends a completion, where the files of a folder disagree; None where they do not."""
    named = {source: set(ids) for source, ids in _named_ends(path, tokenizer).items() if ids}
    every = sorted(set().union(*named.values()))
    if all(ids == set(every) for ids in named.values()):
        return None
    who = {i: ", ".join(source for source, ids in named.items() if i in ids) for i in every}
    shown = [f"{tokenizer.convert_ids_to_tokens(i)!r} ({who[i]})" for i in every]
    return f"{path}: completions end at {' or '.join(shown)}"


def check_ends(path: str | os.PathLike, ids: Sequence[int], *, no_end: bool, setting: str) -> None:
    """Raises `UserError` for a folder without a token that ends a completion, unless that is meant; or where it is
    meant and there is one.

    Args:
      path: the folder.
      ids: as of `eos_ids`.
      no_end: whether completions are meant to have no end.
      setting: what says so, for the message.
    """
    if not ids and not no_end:
        raise UserError(
            f"{path} names no token that ends a completion (eos_token_id): give it one in generation_config.json, or "
            f"set {setting} to cut every completion at the most tokens"
        )
    if ids and no_end:
        raise UserError(f"{setting}: {path} has tokens that end a completion, {list(ids)}; leave it out")


def _named_ends(path: str | os.PathLike, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """The tokens that end a completion, by who names them."""
    path = model_folder(path)
    found: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        found[name] = read_json(path / name).get("eos_token_id") if (path / name).exists() else None
    found |= {"tokenizer": tokenizer.eos_token_id, "chat template": turn_end(tokenizer)}
    listed = {name: ids if isinstance(ids, list) else [ids] for name, ids in found.items()}
    return {name: tuple(int(i) for i in ids if i is not None) for name, ids in listed.items()}


def turn_end(tokenizer: Any) -> int | None:
    """The token with which the chat template ends an assistant's message; None where it has none.

    Example:
      >>> from grpojax import data
      >>> tokenizer = load_tokenizer(data.locate("builtin:tiny"))
      >>> tokenizer.convert_ids_to_tokens(turn_end(tokenizer))
      '<|end|>'
    """
    if not tokenizer.chat_template:
        return None
    reply, again = "answer-1", "question-2"
    chat = [{"role": "user", "content": "question-1"}, {"role": "assistant", "content": reply}]
    added = set(tokenizer.added_tokens_decoder)

    def after(chat: list[dict[str, str]]) -> list[int]:
        """The added tokens behind the answer; none where the template refuses the chat."""
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
            behind = text.rsplit(reply, 1)[1]
        except Exception:  # whatever a template raises
            return []
        return [i for i in tokenizer.encode(behind, add_special_tokens=False) if i in added]

    last, earlier = after(chat), after([*chat, {"role": "user", "content": again}])
    # What follows any answer: a template may write more at the end of a chat, or at the beginning of a question.
    both = os.path.commonprefix([last, earlier])
    return next(iter(both[-1:] or last[:1]), None)
