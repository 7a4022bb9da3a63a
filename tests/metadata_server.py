"""The metadata server of a TPU VM, played on loopback."""

import contextlib
import http.server
import threading

ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"


def worker(index, endpoints, hosts="1,1,1", **more):
    """Attributes of one host of a slice, as a plain TPU VM has them."""
    env = {"ACCELERATOR_TYPE": "v4-16", "HOST_BOUNDS": hosts, "WORKER_ID": str(index), **more}
    lines = "".join(f"{name}: '{value}'\n" for name, value in env.items())
    return {"agent-worker-number": str(index), "worker-network-endpoints": endpoints, "tpu-env": lines}


@contextlib.contextmanager
def serving(attributes, *, first=()):
    """Its ``host:port``, and a list of what it was asked; ``first`` are statuses that it answers before all else."""
    asked, statuses = [], list(first)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path.removeprefix(ATTRIBUTES))
            text = attributes.get(asked[-1]) if self.headers.get("Metadata-Flavor") == "Google" else None
            self.send_response(statuses.pop(0) if statuses else 404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
