"""Model folders in a bucket: the same model as from a disk, each byte read once, and what a fault says."""

import bucket
import jax
import numpy as np
import pytest
import tiny_hf
from hf_compare import assert_same_weights

from grpojax import models
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.models.hf.weights import open_file
from grpojax.sharding import MeshConfig, make_mesh


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    with bucket.clients(tmp_path_factory.mktemp("server")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def folders(proxy, tmp_path_factory):
    """The same model on a disk and in the bucket, in three shards."""
    local = tmp_path_factory.mktemp("qwen3")
    tiny_hf.save(local, "qwen3", max_shard_size="60KB")
    tiny_hf.tokenizer(local)
    assert len(list(local.glob("*.safetensors"))) > 1
    return local, bucket.put_folder(local, "qwen3")


def assert_same_tokenizer(a, b):
    text = "Hello 12 + 3"
    assert a.get_vocab() == b.get_vocab() and a.encode(text) == b.encode(text) and a.chat_template == b.chat_template


@pytest.fixture
def read(monkeypatch):
    """Bytes of every part that is read."""
    sizes, part = [], files._part
    monkeypatch.setattr(files, "_part", lambda *a: sizes.append((a[1], a[2], a[3])) or part(*a))
    return sizes


@pytest.mark.in_ci("sizes1")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, (2, 2, 2), (1, 8, 1)])
def test_a_model_in_a_bucket_is_that_of_the_disk(folders, read, sizes):
    local, remote = folders
    if sizes == (1, 8, 1):
        mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    else:
        mesh = None if sizes is None else make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    here, there = models.load(local, mesh=mesh), models.load(remote, mesh=mesh)
    assert here.config == there.config
    assert_same_weights(here, there)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
    weights = sum(x.size * 4 for x in jax.tree.leaves(models.load(local)))
    tensors = [(file, start, stop) for file, start, stop in read if start > 8]
    assert len(set(tensors)) == len(tensors) and sum(stop - start for _, start, stop in tensors) == weights


def test_of_a_tensor_no_more_is_read_than_the_rows_asked_for(folders, read):
    local, remote = folders
    file = next(f for f in files.path(remote).glob("*.safetensors"))
    name = "model.layers.0.mlp.gate_proj.weight"
    with open_file(file) as there, open_file(files.path(local) / file.name) as here:
        read.clear()
        tensor, same = there.get_slice(name), here.get_slice(name)
        assert tensor.get_shape() == (38, 24) and tensor.get_dtype() == "F32" and read == []
        np.testing.assert_array_equal(tensor[3:14, 5:7], same[3:14, 5:7])
        np.testing.assert_array_equal(tensor[4:14, 0:24], same[4:14, 0:24])
        assert [stop - start for _, start, stop in read] == [11 * 24 * 4]
        np.testing.assert_array_equal(tensor[14:38, 0:3], same[14:38, 0:3])
        assert [stop - start for _, start, stop in read] == [11 * 24 * 4, 24 * 24 * 4]


def test_large_reads_come_in_parts(proxy, read, monkeypatch):
    content = bytes(range(251)) * 40
    files.write(f"{bucket.URL}/large", content)
    monkeypatch.setattr(files, "PART", 997)
    assert files.read_part(f"{bucket.URL}/large", 13, 10_001).tobytes() == content[13:10_001]
    assert len(read) == 11 and files.read_part(f"{bucket.URL}/large", 7, 7).size == 0
    assert files.size(f"{bucket.URL}/large") == len(content)


def test_tokenizer_and_config_come_along(folders):
    local, remote = folders
    tokenizer = models.load_tokenizer(remote)
    assert_same_tokenizer(tokenizer, models.load_tokenizer(local))
    assert hf.eos_ids(remote, tokenizer) == hf.eos_ids(local, tokenizer)
    config = hf.read_config(remote)
    assert config == hf.read_config(local)


def test_an_export_takes_what_it_needs_from_a_bucket(folders, tmp_path):
    local, remote = folders
    models.save(tmp_path / "out", models.load(local), source=remote)
    assert_same_tokenizer(models.load_tokenizer(tmp_path / "out"), models.load_tokenizer(local))


@pytest.mark.slow
def test_an_export_is_done_where_the_answer_to_its_last_request_is_lost(folders, proxy):
    """That request removes its mark. Asked again, the bucket has none, and that was an error once."""
    proxy.only, proxy.faults = "DELETE", iter(["torn"])
    try:
        models.save(f"{bucket.URL}/exported", models.load(folders[0]), source=folders[0])
    finally:
        proxy.only = ""
    assert next(proxy.faults, None) is None
    assert_same_weights(models.load(f"{bucket.URL}/exported"), models.load(folders[0]))


@pytest.mark.slow
def test_a_fault_that_passes_costs_nothing(folders, proxy):
    proxy.faults, met = iter([503, 429, "torn"]), proxy.met
    assert_same_weights(models.load(folders[1]), models.load(folders[0]))
    assert proxy.met == met + 3


def damaged(local, name, change):
    for file in sorted(local.iterdir()):
        content = change(file.name, file.read_bytes())
        if content is not None:
            files.write(f"{bucket.URL}/{name}/{file.name}", content)
    return f"{bucket.URL}/{name}"


def first(change):
    """Changes the first shard alone."""
    return lambda name, content: change(content) if name.startswith("model-00001") else content


CUT = {
    "no-shard": (lambda n, c: None if n.startswith("model-00002") else c, "model-00002-of.* not there"),
    "cut-off": (
        lambda n, c: c[:-5] if n.startswith("model-00001") else c,
        "model-00001.*its tensors are not all there",
    ),
    "empty": (first(lambda c: b""), "model-00001.*its header is not all there"),
    "head": (first(lambda c: b"\xff" * 99), "model-00001.*its header is not all"),
    "json": (first(lambda c: c[:8] + b"[" * (len(c) - 8)), "model-00001.*damaged"),
    "size": (first(lambda c: c.replace(b'"shape":[24]', b'"shape":[23]', 1)), "model-00001.*not of the size of its"),
    "config": (lambda n, c: None if n == "config.json" else c, "has no config.json"),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.slow
def test_a_damaged_folder_is_told(folders, name):
    change, message = CUT[name]
    with pytest.raises(UserError, match=f"{bucket.URL}/{name}.*{message}"):
        models.load(damaged(folders[0], name, change))


def test_what_is_not_there_or_not_allowed_is_named(folders, proxy):
    with pytest.raises(UserError, match="gs://bucket/nothing: no such folder in the bucket"):
        models.load(f"{bucket.URL}/nothing")
    with pytest.raises(UserError, match="s3://models/a: s3:// is not supported"):
        models.load("s3://models/a")
    with open_file(next(files.path(folders[1]).glob("*.safetensors"))) as file:
        tensor = file.get_slice("model.layers.0.mlp.gate_proj.weight")
        proxy.faults = iter([403])
        with pytest.raises(UserError, match=r"gs://bucket/qwen3/model-0000.*cannot be read: "):
            tensor[0:3, 0:3]
