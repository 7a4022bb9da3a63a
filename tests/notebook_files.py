"""The notebooks, and what they print."""

from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent.parent / "notebooks"


def printed_by(name):
    """What a notebook prints when it is run from its own folder."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
