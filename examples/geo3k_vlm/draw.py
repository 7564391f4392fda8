"""Draws the example's pictures and questions: `python examples/geo3k_vlm/draw.py`.

A picture is a rectangle on a board of 4 x 4 squares; the questions are its width (`w`) and its
height (`h`). Held out: rectangles of a colour that is not trained on.
"""

import json
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).parent
SQUARE, SQUARES = 8, 4
COLOURS = {"train": ("crimson", "seagreen", "royalblue"), "eval": ("purple",)}


def picture(width: int, height: int, colour: str) -> Image.Image:
    """A rectangle of that many squares, in the upper left corner."""
    image = Image.new("RGB", (SQUARE * SQUARES, SQUARE * SQUARES), "white")
    ImageDraw.Draw(image).rectangle((0, 0, SQUARE * width - 1, SQUARE * height - 1), fill=colour)
    return image


def rows(name: str) -> list[dict[str, str]]:
    """Questions, answers and names of pictures."""
    return [
        {"prompt": f"<image>{question}", "image": f"pictures/{colour}-{w}x{h}.png", "label": label}
        for colour in COLOURS[name]
        for w in range(1, SQUARES + 1)
        for h in range(1, SQUARES + 1)
        for question, label in (("w", f"{w}"), ("h", f"{h}"))
    ]


def main() -> None:
    """Write the files beside this one."""
    (HERE / "pictures").mkdir(exist_ok=True)
    for name, colours in COLOURS.items():
        for colour in colours:
            for w in range(1, SQUARES + 1):
                for h in range(1, SQUARES + 1):
                    picture(w, h, colour).save(HERE / "pictures" / f"{colour}-{w}x{h}.png")
        text = "".join(json.dumps(row) + "\n" for row in rows(name))
        (HERE / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
