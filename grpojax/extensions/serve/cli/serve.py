"""``grpojax serve``: an OpenAI-compatible server, for agents that are written elsewhere."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    serve = command("serve", run, "Serves a model over HTTP, as OpenAI's API for chats and completions.")
    serve.add_argument("model", help="Hugging Face folder, PEFT folder, run directory, or builtin:tiny")
    serve.add_argument("--step", type=int, help="checkpoint of a run; the newest by default")
    serve.add_argument("--base", metavar="FOLDER", help="the base of adapters, instead of the one that they name")
    serve.add_argument("--name", help="the model's name in requests; the last part of MODEL by default")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    serve.add_argument("--batch", type=int, default=32, help="completions that are decoded at a time")
    serve.add_argument("--max-tokens", type=int, default=1024, help="most tokens of a completion, also of a request")
    serve.add_argument("--seed", type=int, default=0, help="seed of requests without one")
    serve.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the computation")
    serve.add_argument("--no-end", action="store_true", help="for a model without a token that ends a completion")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM."""
    import signal
    import threading
    from pathlib import Path

    from grpojax.cli.engine import Engine
    from grpojax.data import BUILTIN
    from grpojax.extensions.serve import openai_api
    from grpojax.extensions.serve.batcher import Batcher
    from grpojax.host.compile_cache import keep_compiled
    from grpojax.host.console import log
    from grpojax.host.errors import UserError

    for name in ("batch", "max_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    keep_compiled()
    engine = Engine(args.model, step=args.step, base=args.base, dtype=args.dtype, no_end=args.no_end).load()
    batcher = Batcher(engine, most=args.batch, seed=args.seed)
    name = args.name or Path(args.model.removeprefix(BUILTIN)).absolute().name
    how = {"given": args.model, "max_tokens": args.max_tokens, "most": args.batch}
    api = openai_api.Api(engine, batcher.submit, name=name, **how)
    try:
        server = openai_api.Server((args.host, args.port), api)
    except (OSError, OverflowError) as e:
        raise UserError(f"cannot listen on {args.host}:{args.port}: {e}; give another --host or --port") from None

    def stop(*_: object) -> None:
        threading.Thread(target=server.shutdown).start()  # it waits for the loop that this handler interrupts

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    log.info("serving %s at http://%s:%d/v1", name, *server.server_address[:2])
    with server:
        server.serve_forever()
        batcher.close()
        server.wait_for_answers(10.0)
    return 0
