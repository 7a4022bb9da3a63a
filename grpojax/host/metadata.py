"""The server that gives a machine of Google's cloud its metadata.

``GCE_METADATA_HOST`` names another server, as in Google's own libraries; or else ``GCE_METADATA_IP``, which jax reads.
"""

import os
import urllib.request
from pathlib import Path

_HOST = "metadata.google.internal"
_PRODUCT = Path("/sys/class/dmi/id/product_name")  # names the kind of machine, without the network


def server() -> str:
    """The server's host, whether or not it exists."""
    return os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or _HOST


def likely() -> bool:
    """Whether there is a server, by the environment and the machine's files. It sends no request."""
    if server() != _HOST:
        return True
    try:
        return "Google" in _PRODUCT.read_text(encoding="utf-8")
    except OSError:
        return False


def get(name: str, seconds: float) -> str:
    """A value of ``instance/``.

    Raises:
      OSError: there is no such value (`urllib.error.HTTPError` with code 404), or no answer in this number of seconds.
    """
    url = f"http://{server()}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=seconds) as answer:
        return answer.read().decode(errors="replace")
