"""A critic's head beside a model in a bucket."""

import bucket
import tiny_hf

from grpojax.extensions.methods import critic_model
from grpojax.models import hf

proxy = bucket.proxy


def test_a_folder_without_a_head_has_one_of_zeros(proxy, tmp_path):
    tiny_hf.save(tmp_path / "qwen3", "qwen3")
    remote = bucket.put_folder(tmp_path / "qwen3", "critic")
    assert not critic_model.read_head(remote, hf.read_config(remote)).any()
