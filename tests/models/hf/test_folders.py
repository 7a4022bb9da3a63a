"""Folders as people bring them: other names, adapters, pointers of Git LFS, damaged files."""

import functools
import json
import random
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
import transformers
from hf_compare import LENGTHS, assert_same_weights, our_logps, sequences, their, their_logps

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models import decoder, hf
from grpojax.models.hf import weights

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4a6f\nsize 9912\n"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B; then give models/Qwen3-0.6B"),
        ("models/Qwen3-0.6B", "hf download OWNER/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
        ("tests/Qwen3-0.6B", "hf download OWNER/Qwen3-0.6B --local-dir tests/Qwen3-0.6B"),
        ("../Qwen3-0.6B", "hf download OWNER/Qwen3-0.6B --local-dir ../Qwen3-0.6B"),
    ],
)
def test_a_model_that_is_not_there_is_answered_with_the_command_that_gets_it(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    with pytest.raises(UserError, match=f"{re.escape(said)}$"):
        models.load(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One that is whole, whose embedding is tied."""
    folder = tmp_path_factory.mktemp("whole") / "in"
    tiny_hf.save(folder, "qwen2-tied", vocab_size=400)
    tiny_hf.tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(whole):
    return models.load(whole)


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "in")


def rename(folder, change):
    """Gives the tensors other names; those that get None are left out."""
    tensors = {change(name): x for name, x in safetensors.numpy.load_file(folder / WEIGHTS).items()}
    tensors.pop(None, None)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def without_model(name):
    return name.removeprefix("model.")


def inside(name):
    name = name.replace(".mlp.", "._checkpoint_wrapped_module.mlp._orig_mod.")
    return name.replace(".norm.", "._fsdp_wrapped_module.norm.")


RENAMED = {
    "DDP": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "DDP of compile of DDP": lambda name: f"module._orig_mod.module.{name}",
    "wrapped layers": inside,
    "peft": lambda name: f"base_model.model.{name}",
    "trunk": without_model,
    "trunk in peft": lambda name: f"base_model.model.{without_model(name)}",
}


@pytest.mark.parametrize("how", RENAMED)
def test_names_that_wrappers_give_to_weights_are_read(loaded, folder, how):
    rename(folder, RENAMED[how])
    assert_same_weights(loaded, models.load(folder))


@pytest.mark.parametrize("place", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_takes_images(tmp_path, place):
    """In the names of the hub and in those of transformers 5. It is exported as a text model."""
    images = dict(
        hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = tiny_hf.config("gemma3").to_dict()
    whole = transformers.Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4, eos_token_id=1)
    made = tiny_hf.model(whole, auto=transformers.AutoModelForImageTextToText)
    made.save_pretrained(tmp_path / "in")

    def named(name):
        return re.sub(r"^(language_model\.model|model\.language_model)\.", place, name)

    rename(tmp_path / "in", named)
    model = models.load(tmp_path / "in")
    tokens = sequences(94)
    for ours, n, ids in zip(our_logps(model), LENGTHS, tokens, strict=True):
        np.testing.assert_allclose(ours, tiny_hf.logps(made, ids)[n[0] - 1 :], atol=1e-4, rtol=0)
    models.save(tmp_path / "out", model, source=tmp_path / "in")
    back = their(tmp_path / "out")
    assert type(back).__name__ == "Gemma3ForCausalLM"
    np.testing.assert_array_equal(tiny_hf.logps(back, tokens[3]), tiny_hf.logps(made, tokens[3]))


def test_a_config_of_few_fields_scores_as_in_transformers(tmp_path):
    """The defaults are transformers': base 10000 of the positions, all heads have keys and values of their own."""
    made = tiny_hf.save(
        tmp_path, "qwen2", num_key_value_heads=None, rope_parameters=None, rms_norm_eps=1e-6, hidden_act="swish"
    )
    few = dict(architectures=None, rope_parameters=None, rms_norm_eps=None, head_dim=None, layer_types=None)
    tiny_hf.edit_json(tmp_path / "config.json", quantization_config={}, use_sliding_window=True, **few)
    rename(tmp_path, lambda name: f"module.{name}")
    for ours, theirs in zip(our_logps(models.load(tmp_path)), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def moved(name, to):
    return lambda folder: (folder / name).rename(folder / to)


def written(name, content):
    def write(folder):
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return write


def every(*damages):
    return lambda folder: [damage(folder) for damage in damages]


def removed(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def put(**arrays):
    def damage(folder):
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
        safetensors.numpy.save_file(
            tensors | {name.replace("__", "."): x for name, x in arrays.items()}, folder / WEIGHTS
        )

    return damage


def twice(folder):
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    safetensors.numpy.save_file(tensors, folder / "a.safetensors")
    safetensors.numpy.save_file({"module.model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    written(f"{WEIGHTS}.index.json", {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})(folder)
    (folder / WEIGHTS).unlink()


ADAPTER = every(
    written("adapter_config.json", {"base_model_name_or_path": "some/base", "peft_type": "LORA"}),
    moved(WEIGHTS, "adapter_model.safetensors"),
)
BYTES = np.ones((24, 12), np.uint8)

# What happens to a folder whose embedding is tied, and what its reader says.
WEIGHT_DAMAGE = {
    "adapter": (every(ADAPTER, removed("config.json")), "adapter of 'some/base', .*; .* merge it:\npeft.AutoPeftModel"),
    "adapter with a config": (
        ADAPTER,
        "adapter of 'some/base'.*merge it, or remove adapter_.* if it is merged already",
    ),
    "adapter's weights": (moved(WEIGHTS, "adapter_model.safetensors"), "but an adapter, without the base.*\npeft"),
    "adapter, damaged": (written("adapter_config.json", "{"), "adapter_config.json is damaged"),
    "weights, pointer": (written(WEIGHTS, POINTER), f"{WEIGHTS} is a pointer of Git LFS .*: git lfs pull"),
    "config, pointer": (written("config.json", POINTER), "config.json is a pointer of Git LFS .*: git lfs pull"),
    "weights, empty": (written(WEIGHTS, ""), f"{WEIGHTS} is damaged: .*download it again"),
    "weights, a page": (written(WEIGHTS, "<!DOCTYPE html>" * 9), f"{WEIGHTS} is damaged: "),
    "weights, a folder": (every(removed(WEIGHTS), lambda f: (f / WEIGHTS).mkdir()), f"{WEIGHTS} cannot be read"),
    "config, nested too deeply": (written("config.json", "[" * 10**5), "config.json is damaged: "),
    "config, not UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json is damaged: "),
    "pickles": (moved(WEIGHTS, "pytorch_model.bin"), "pickled weights .pytorch_model.bin.*convert:\ntransformers.Auto"),
    "shards without index": (moved(WEIGHTS, "model-00001-of-00002.safetensors"), "need the index: download model.safe"),
    "consolidated": (moved(WEIGHTS, "consolidated.safetensors"), "layout of its makers' own: download the files named"),
    "consolidated pickle": (moved(WEIGHTS, "consolidated.00.pth"), "layout of its makers' own"),
    "another name": (moved(WEIGHTS, "foo.safetensors"), f"it has foo.safetensors: rename .* to {WEIGHTS}"),
    "GGUF": (moved(WEIGHTS, "model-q8.gguf"), "grpojax convert .*model-q8.gguf --to NEW_FOLDER"),
    "a trainer's files": (moved(WEIGHTS, "training_args.bin"), f"neither {WEIGHTS} nor .*download the weights too"),
    "files of no text": (
        every(removed(WEIGHTS), written(f"{WEIGHTS}.index.json", {"weight_map": {"x": 5}})),
        "index.json is damaged: it has no 'weight_map' of files",
    ),
    "two of one weight": (
        twice,
        "norm.weight in a.safetensors and module.model.norm.weight in b.* are the same weight",
    ),
    "adapter inside": (
        put(model__layers__0__mlp__up_proj__lora_A__default__weight=BYTES),
        "adapter that is not merged",
    ),
    "eight bits": (put(model__norm__weight=BYTES), "model.norm.weight U8\nquantised weights are not read"),
    "packed": (
        put(model__layers__0__mlp__up_proj__qweight=BYTES),
        "quantised weights are not read; take the folder of",
    ),
    "wide": (put(model__norm__weight=np.ones(24)), "model.norm.weight F64\nconvert: "),
    "another head": (
        put(lm_head__weight=np.zeros((400, 24), np.float32)),
        "lm_head.weight differs from .* tie_word_embeddings: true;\nset it to false",
    ),
    "a head of another size": (put(lm_head__weight=np.zeros((9, 24), np.float32)), "lm_head.weight differs from"),
    "no head": (
        lambda folder: tiny_hf.edit_json(folder / "config.json", tie_word_embeddings=False),
        "missing weights: lm_head.weight\nset tie_word_embeddings to true if",
    ),
}


@pytest.mark.parametrize("case", WEIGHT_DAMAGE)
def test_a_folder_whose_weights_or_config_cannot_be_read_says_what_to_do(folder, case):
    damage, message = WEIGHT_DAMAGE[case]
    damage(folder)
    with pytest.raises(UserError, match=message) as e:
        models.load(folder)
    assert str(folder) in str(e.value) and str(e.value).count("\n") <= 1


CONFIG = "tokenizer_config.json"
TOKENIZER_DAMAGE = {
    "cut off": (cut(CONFIG, 40), f"{CONFIG} is damaged: .*download it again"),
    "empty": (written(CONFIG, ""), f"{CONFIG} is damaged"),
    "a list": (written(CONFIG, "[]"), f"{CONFIG} is damaged: it holds no JSON object"),
    "pointer": (written(CONFIG, POINTER), f"{CONFIG} is a pointer of Git LFS"),
    "length": (written(CONFIG, {"model_max_length": "long"}), f"{CONFIG} is damaged"),
    "tokens": (written(CONFIG, {"added_tokens_decoder": [1]}), f"{CONFIG} is damaged"),
    "special tokens": (written("special_tokens_map.json", "{"), "special_tokens_map.json is damaged"),
    "added tokens": (written("added_tokens.json", POINTER), "added_tokens.json is a pointer of Git LFS"),
    "tokenizer": (cut("tokenizer.json", 999), "tokenizer.json is damaged: "),
    "tokenizer, empty": (written("tokenizer.json", "{}"), "tokenizer.json is damaged: "),
    "tokenizer, pointer": (written("tokenizer.json", POINTER), "tokenizer.json is a pointer of Git LFS .*git lfs pull"),
    "sentences, pointer": (
        every(removed("tokenizer.json"), written("tokenizer.model", POINTER)),
        "tokenizer.model is a pointer of Git LFS",
    ),
    "vocabulary, pointer": (
        every(removed("tokenizer.json"), written("vocab.json", POINTER)),
        "vocab.json is a pointer of Git LFS",
    ),
    "config": (written("config.json", "{"), "in/config.json is damaged"),
    "generation config": (written("generation_config.json", "{"), "generation_config.json is damaged"),
    "ends a mapping": (written("generation_config.json", {"eos_token_id": {}}), "eos_token_id={}: must be a token's"),
    "ends a text": (
        lambda f: tiny_hf.edit_json(f / "config.json", eos_token_id="<|end|>"),
        "config.json: eos_token_id='<",
    ),
    "ends with null": (
        written("generation_config.json", {"eos_token_id": [1, None]}),
        r"eos_token_id=\[1, None\]: must",
    ),
    "adapter": (every(ADAPTER, removed("config.json", "tokenizer.json")), "adapter of 'some/base'"),
}


@pytest.mark.parametrize("case", TOKENIZER_DAMAGE)
def test_a_folder_whose_tokenizer_cannot_be_read_says_which_file(folder, case):
    damage, message = TOKENIZER_DAMAGE[case]
    damage(folder)
    with pytest.raises(UserError, match=message) as e:
        models.load_tokenizer(folder)
    assert str(folder) in str(e.value) and str(e.value).count("\n") <= 1


def damage_bytes(rng: random.Random, name: str, whole: bytes) -> bytes:
    """Some bytes at one place changed, cut off, added or taken away; of weights, in the header."""
    content = bytearray(whole)
    at = rng.randrange(8 + int.from_bytes(whole[:8], "little") if name.endswith(".safetensors") else len(whole))
    how = rng.randrange(4)
    if how == 0:
        content[at] = rng.randrange(256)
    elif how == 1:
        del content[at:]
    elif how == 2:
        content[at:at] = rng.choice([b"0", b'"', b"-", b"\xff", b"{", b"null", b".5"])
    else:
        del content[at : at + rng.choice([1, 1, 4, 40])]
    return bytes(content)


@functools.cache
def wanted(config):
    return weights.tensors_of(decoder.abstract(config)[1], config)


def read_all(folder):
    """All but the numbers."""
    path, config = hf.model_folder(folder), hf.read_config(folder)
    found = weights.weights_on_disk(path)
    weights.resolve_head(path, config, found)
    weights.check_weights(path, config, wanted(config), found)
    hf.eos_ids(folder, models.load_tokenizer(folder))


def test_whatever_happens_to_a_file_a_folder_is_read_or_refused(folder, tmp_path):
    shards = {"a.safetensors": [], "b.safetensors": []}
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    for i, name in enumerate(tensors):
        shards[list(shards)[i % 2]].append(name)
    for file, names in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in names}, folder / file)
    index = {name: file for file, names in shards.items() for name in names}
    written(f"{WEIGHTS}.index.json", {"weight_map": index})(folder)
    (folder / WEIGHTS).unlink()
    read_all(folder)

    rng, refused = random.Random(4), 0
    files = [file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".json")]
    for _ in range(200):
        name = rng.choice(files)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(damage_bytes(rng, name, whole))
        try:
            read_all(folder)
        except UserError as e:
            refused += 1
            assert str(e).count("\n") <= 1 and len(str(e)) < 1500
        (folder / name).write_bytes(whole)
    assert refused > 100


def test_a_generation_config_that_cannot_be_read(folder):
    tokenizer = models.load_tokenizer(folder)
    for content, message in [("{", "is damaged"), (POINTER, "is a pointer of Git LFS")]:
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match=f"generation_config.json {message}"):
            hf.eos_ids(folder, tokenizer)


def test_a_file_in_place_of_a_folder(tmp_path):
    for name, message in [
        ("model.gguf", "model.gguf is a file; .*grpojax convert .* --to FOLDER"),
        ("x", "is a file; give"),
    ]:
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match=message):
            models.load(tmp_path / name)


def test_the_folder_above_a_model_names_those_inside(folder):
    with pytest.raises(UserError, match=f"has no config.json; give one of its folders: {folder}$"):
        models.load(folder.parent)


def test_a_source_with_more_layers_is_written_with_as_many_as_there_are(whole):
    raw = json.loads((whole / "config.json").read_text())
    assert raw["layer_types"] == ["full_attention"] * 3
    shorter = hf.from_hf(raw | {"num_hidden_layers": 2, "layer_types": None})
    assert hf.config_json.to_hf(shorter, "float32", raw)["layer_types"] == ["full_attention"] * 2
