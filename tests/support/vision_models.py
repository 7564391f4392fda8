"""Small random models that see images, of Qwen's VL kinds, and pictures for them."""

import io
import json
from pathlib import Path
from typing import Any

SPECIAL = [
    *("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *"0123456789", *" ?=:\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
PATCH, MERGE = 4, 2


def write_model(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0, wider: int = 1) -> Path:
    """A model with a vision tower of two blocks, its tokenizer and its image processor.

    Args:
        folder: to write to.
        kind: `qwen2_5_vl` or `qwen3_vl`.
        seed: of its weights.
        wider: so many times as wide as the smallest; kernels of GPUs want heads of 64.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    vocabulary = {token: k for k, token in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    text: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32 * wider,
        "intermediate_size": 64 * wider,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4 * wider, 2 * wider, 2 * wider],
        },
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32 * wider,
        "intermediate_size": 48 * wider,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 32 * wider,
    }
    if kind == "qwen3_vl":
        text |= {"head_dim": 16 * wider}
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"window_size": 4 * PATCH * MERGE, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        # Larger than a checkpoint's first weights: what a model sees is to change what it says.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.2 / wider**0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def picture(colour: str = "red", width: int = 24, height: int = 16) -> bytes:
    """A PNG with a figure of that colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((2, 2, width - 8, height - 4), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
