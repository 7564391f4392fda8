"""Write sums to compute, with their answers, as JSONL: prompts made by reasoning-gym.

    python examples/smollm2/data.py [--model FOLDER] [--out FOLDER]

Two sets: of two or three numbers of one or two digits (train.jsonl, eval.jsonl), and of up to five
numbers of up to three digits (hard-train.jsonl, hard-eval.jsonl). 256 sums of each are held out,
and neither is trained on one of them. Each prompt has the model's chat template applied, default
system prompt included.
"""

import argparse
import json
from pathlib import Path
from typing import Any

Problem = dict[str, str]

HERE = Path(__file__).resolve().parent
HELD_OUT = 256
EASY = {"size": 4600, "max_terms": 3, "max_digits": 2}
HARD = {"size": 24000, "max_terms": 5, "max_digits": 3}


def sums(**settings: int) -> list[Problem]:
    """Distinct sums: `{"sum", "label"}`."""
    import reasoning_gym

    settings = {"seed": 7, "min_terms": 2, "min_digits": 1} | settings
    problems = reasoning_gym.create_dataset("chain_sum", **settings)
    distinct = {p["question"].partition(":")[2].strip(): p["answer"] for p in problems}
    return [{"sum": text, "label": answer} for text, answer in distinct.items()]


def files(easy: list[Problem], hard: list[Problem]) -> dict[str, list[Problem]]:
    """The sums of each file, by its name."""
    known = {p["sum"] for p in easy}
    hard_held = [p for p in hard if p["sum"] not in known][:HELD_OUT]
    held = {p["sum"] for p in easy[:HELD_OUT] + hard_held}
    return {
        "eval.jsonl": easy[:HELD_OUT],
        "train.jsonl": easy[HELD_OUT:],
        "hard-eval.jsonl": hard_held,
        "hard-train.jsonl": [p for p in hard if p["sum"] not in held],
    }


def row(tokenizer: Any, problem: Problem) -> dict[str, str]:
    """One line of a file."""
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
    options.out.mkdir(parents=True, exist_ok=True)
    for name, problems in files(sums(**EASY), sums(**HARD)).items():
        lines = "".join(json.dumps(row(tokenizer, p)) + "\n" for p in problems)
        (options.out / name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
