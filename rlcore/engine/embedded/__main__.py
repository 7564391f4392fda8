"""`python -m rlcore.engine.embedded`: start the embedded engine on one model folder.

The command line is read before torch is imported, so that `--help` and a bad path answer at once.
"""

import argparse
import os
import sys
from pathlib import Path

from rlcore.errors import EngineError


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The checked command line."""
    parser = argparse.ArgumentParser(prog="python -m rlcore.engine.embedded", description=__doc__)
    parser.add_argument("--model-path", required=True, type=Path, help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", default=1, type=int, help="torch threads on CPU")
    parser.add_argument(
        "--max-running-requests", default=512, type=int, help="requests generated at a time"
    )
    parser.add_argument(
        "--context-length", default=None, type=int, help="prompt and answer, tokens (the model's)"
    )
    parser.add_argument("--weight-version", default="default", help="reported until an update")
    parser.add_argument(
        "--random-seed", default=0, type=int, help="seeds requests without sampling_seed"
    )
    parser.add_argument(
        "--enable-return-routed-experts",
        action="store_true",
        help="record which experts each token is sent to, for requests that ask",
    )
    arguments = parser.parse_args(argv)
    for name in ("threads", "max_running_requests"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; 2 when the model cannot be served."""
    arguments = parse_arguments(argv)
    try:
        if not (arguments.model_path / "config.json").is_file():
            raise EngineError(
                f"--model-path {arguments.model_path} is not a Hugging Face model folder: it has "
                "no config.json."
            )
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
        from rlcore.engine.embedded.start import serve

        return serve(arguments)
    except EngineError as error:
        sys.stderr.write(f"EngineError: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
