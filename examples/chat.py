"""Talk to a language model in FP8, quantized while it loads.

    python examples/chat.py [MODEL] [--tokens 40]

MODEL is a directory with a bf16 checkpoint, by default the small Llama of the repository, which
continues code. The chat ends at an empty line or at the end of the input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import fp8kit

NANO = Path(__file__).resolve().parent / "nano"


def main() -> None:
    """Load the model and answer line by line, each token as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(NANO))
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=torch.bfloat16,
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        quantization_config=fp8kit.Fp8KitConfig("FP8_DYNAMIC"),
    )
    print(model.hf_quantizer.report.summary())
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    history: list[dict[str, str]] = []
    for line in sys.stdin:
        if not line.strip():
            break
        history.append({"role": "user", "content": line.rstrip("\n")})
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(
                history, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:  # a base model without a chat template continues text
            ids = tokenizer(line.rstrip("\n"), return_tensors="pt", return_token_type_ids=False)
        ids = ids.to(model.device)
        out = model.generate(
            **ids, max_new_tokens=given.tokens, do_sample=False, pad_token_id=0, streamer=streamer
        )
        answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        history.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
