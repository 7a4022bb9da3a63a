"""A critic's tokenizer with ids beyond its embedding."""

import beyond_vocabulary
import pytest
from refusals import RECIPE, check_said
from tiny_run import make_teacher

from grpojax.cli import main as cli

folder = beyond_vocabulary.folder


@pytest.mark.slow
def test_a_critic_reads_every_token_of_the_policy(folder, tmp_path, capsys):
    """The policy has a row for each of the tokens that both tokenizers have, and the critic has not."""
    sizes = dict(vocab_size=512, hidden_size=8, intermediate_size=8, head_dim=4)
    policy = make_teacher(folder, tmp_path / "policy", **sizes)
    capsys.readouterr()
    data_file, where = f"data.train={folder / 'sums.jsonl'}", f"run.dir={tmp_path / 'run'}"
    given = ["variant=ppo", f"critic.path={folder}", data_file, "data.validation=null", "rollout.prompts=2", where]
    assert cli.main(["train", RECIPE, f"model.path={policy}", *given]) == 2
    check_said(f"critic.path='{folder}': its tokenizer has ids for 454 tokens, and its embedding 384 rows", capsys)
