"""Write sums to compute, with their answers, as JSONL: prompts made by reasoning-gym.

    python examples/smollm2/data.py [--model FOLDER] [--out FOLDER]

Each prompt has the model's chat template applied, default system prompt included. The first 256 of
the distinct sums are held out (eval.jsonl), the others are trained on (train.jsonl).
"""

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HELD_OUT = 256


def sums() -> list[dict[str, str]]:
    """Distinct sums of two or three numbers of one or two digits: `{"sum", "label"}`."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset(
        "chain_sum", size=4600, seed=7, min_terms=2, max_terms=3, min_digits=1, max_digits=2
    )
    distinct = {p["question"].partition(":")[2].strip(): p["answer"] for p in problems}
    return [{"sum": text, "label": answer} for text, answer in distinct.items()]


def row(tokenizer: Any, problem: dict[str, str]) -> dict[str, str]:
    """One line of the data file."""
    question = f"Compute {problem['sum']} Reply with the number only."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return {"prompt": prompt, "label": problem["label"]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Sums for SmolLM2.")
    parser.add_argument("--model", type=Path, default=HERE / "out" / "model")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    options = parser.parse_args()
    if not (options.model / "tokenizer.json").exists():
        raise SystemExit(f"{options.model} holds no tokenizer: run convert.py first")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [row(tokenizer, problem) for problem in sums()]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        lines = "".join(json.dumps(r) + "\n" for r in part)
        (options.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
