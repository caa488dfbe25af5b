"""Write an FP8 checkpoint that vLLM serves, and check every tensor of it.

    python examples/checkpoint_for_vllm.py [SOURCE [DESTINATION]]

The default source is the small model of the repository. The model is never built: tensors stream
from SOURCE to DESTINATION, so checkpoints of any size work.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

import fp8kit

SOURCE = Path(__file__).resolve().parent / "nano"


def main(source: str | Path = SOURCE, destination: str | Path | None = None) -> None:
    """Quantize, verify, and print how to serve the result."""
    if destination is None:
        destination = Path(tempfile.mkdtemp()) / "model-fp8"
    recipe = fp8kit.Recipe("FP8_DYNAMIC", target="vllm")
    print(fp8kit.quantize_checkpoint(source, destination, recipe))
    print(fp8kit.verify_checkpoint(source, destination))
    path = shlex.quote(str(destination))
    print(f"\nvllm serve {path}\npython -m sglang.launch_server --model-path {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
