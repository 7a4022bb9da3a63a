"""``grpojax convert`` writes a folder that ``grpojax sample`` opens."""

import gguf_files
import pytest
import tiny_hf

from grpojax.cli import main as cli


@pytest.mark.slow
def test_convert_then_sample(tmp_path, capsys):
    made = tiny_hf.model(tiny_hf.config("llama-tied"))
    file, out = gguf_files.write_model(tmp_path / "m.gguf", made), str(tmp_path / "out")
    assert cli.main(["convert", str(file), "--to", out, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert cli.main(["sample", out, "--prompt", "ab", "--max-tokens", "2"]) == 0
    assert cli.main(["convert", str(file), "--to", out]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
