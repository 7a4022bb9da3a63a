"""The figures of `grpojax bench`."""

from grpojax.models import DecoderConfig
from grpojax.models.flops import forward_flops
from grpojax.tools import cli


def test_flops_are_counted_on_tokens_in_use():
    c = DecoderConfig(
        family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=2, rope_theta=1e4,
    )  # fmt: skip
    # A prompt of 3 with completions of 1 and 2 tokens: 6 tokens, seen keys 6 + (1 + 3) + (3 + 6).
    weights = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)
    want = 2 * (6 * weights + 2 * 19 * 4 * 2 + 3 * 11 * 4)
    assert forward_flops(c, [3], [[1, 2]]) == want


def test_bench_prints_a_table(recipe, tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = [
        "bench",
        str(recipe),
        f"run.dir={tmp_path / 'run'}",
        "mesh.data=8",
        "--steps",
        "2",
        "--json",
        str(out),
    ]
    assert cli.main(arguments) == 0
    assert "of matmul rate" in capsys.readouterr().out and out.exists()
