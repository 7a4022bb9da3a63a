"""Files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(file: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)
