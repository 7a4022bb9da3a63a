"""What is on disk."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runs import opened

from grpojax.host.errors import UserError
from grpojax.records.checkpoint import Checkpoints
from grpojax.run import recipe as config
from grpojax.train import train


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_items_are_named_by_role(recipe, tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "data.validation=null", "rewards.0.name=answer_format"]
    assert train(opened(config.load(recipe, overrides)))
    saved = tmp_path / "run" / "checkpoints" / "1"
    assert {p.name for p in saved.iterdir() if p.is_dir()} == {"policy_params", "policy_opt_state", "meta"}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        checkpoints.restore_params({}, 7)
    checkpoints.close()


def test_the_best_checkpoint_is_still_known_after_a_restart(tmp_path):
    state = {"reference": {"w": np.zeros(3, np.float32)}}
    for steps in ([1, 2], [3, 4, 5]):
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best="eval/reward")
        for step in steps:
            checkpoints.save(step, state, {"step": step})
            checkpoints.score(step, {"eval/reward": 1.0 if step == 1 else 0.5})
            checkpoints.wait()
        assert checkpoints.good() == 1 and checkpoints.good(before=1) is None
        checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).steps() == [1, 5]


def test_a_role_is_not_taken_for_part_of_another_whose_name_it_begins(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy_old": {"w": np.zeros(3, np.float32)}}, {"step": 1})
    checkpoints.wait()
    with pytest.raises(UserError, match="step 1 has no policy_params"):
        checkpoints.restore({"policy": {"w": jax.ShapeDtypeStruct((3,), np.float32)}})
    checkpoints.close()


def test_a_reader_leaves_a_save_under_way_alone(tmp_path):
    state = {"reference": {"w": np.zeros(3, np.float32)}}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"step": 1})
    checkpoints.close()
    under_way = tmp_path / "2.orbax-checkpoint-tmp-7"
    under_way.mkdir()
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.steps() == [1] and under_way.exists()
    reader.close()


FAILS = """
import resource, sys
import numpy as np
from grpojax.records.checkpoint import Checkpoints, SaveError
checkpoints = Checkpoints(sys.argv[1] + "/checkpoints")
many = {str(n): np.random.default_rng(n).normal(size=(64, 256)) for n in range(8)}
checkpoints.save(1, {"policy": many}, {})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
for step in (2, 3):
    try:
        checkpoints.save(step, {"policy": many}, {})
        checkpoints.wait()
    except SaveError as e:
        print(e)
print(checkpoints.steps())
checkpoints.close()
"""


@pytest.mark.slow
def test_a_save_that_fails_raises_and_prints_nothing(tmp_path):
    """Orbax, asyncio and tensorstore each have a traceback for it."""
    done = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], capture_output=True, text=True)
    *failed, steps = done.stdout.splitlines()
    assert (done.stderr, done.returncode, steps) == ("", 0, "[1]")
    assert len(failed) == 2 and all("File too large" in line for line in failed)


def test_what_several_devices_saved_is_read_by_one(tmp_path):
    """Without a mesh nothing says where arrays lie; the devices that saved them may not be there."""
    x = np.arange(12, dtype=np.float32)
    split = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": {"w": jax.device_put(x, split)}}, {"step": 1})
    checkpoints.wait()
    abstract = {"policy": {"w": jax.ShapeDtypeStruct(x.shape, x.dtype)}}
    restored = checkpoints.restore(abstract)[0]["policy"]["w"], checkpoints.restore_params(abstract["policy"])["w"]
    checkpoints.close()
    for got in restored:
        assert got.sharding.device_set == {jax.local_devices()[0]}
        np.testing.assert_array_equal(got, x)
