"""Load what a run saved as any user would, and let it answer the held-out rows, beside the model it came from.

    python recipes/SmolLM2-135M/answer.py --config CONFIG [--OPTION VALUE ...]

Takes the options of the training run. An adapter is loaded with peft on top of its base model. Answers are greedy, so
that the two differ by their weights alone.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dro.rewards import load_reward
from trl_dro.tasks import build_task
from trl_dro.train_arguments import parse_loudly


def answer(model: Any, tokenizer: Any, prompts: list[Any], max_new_tokens: int) -> list[list[dict[str, str]]]:
    """Greedy completions of conversational prompts, as messages."""
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


def main(argv: Sequence[str]) -> None:
    script, config, model_args, _ = parse_loudly(argv)
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir, padding_side="left")
    _, held_out = build_task(
        script.task,
        train_size=script.task_train_size,
        eval_size=script.task_eval_size,
        seed=script.task_seed,
        prompt_template=script.task_prompt_template,
        task_kwargs=script.task_kwargs,
        conversational=True,
    )
    if model_args.use_peft:
        from peft import AutoPeftModelForCausalLM

        trained = AutoPeftModelForCausalLM.from_pretrained(config.output_dir, dtype=torch.float32)
    else:
        trained = AutoModelForCausalLM.from_pretrained(config.output_dir, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    prompts, length = list(held_out["prompt"]), config.max_completion_length
    before, after = (answer(model.eval(), tokenizer, prompts, length) for model in (base, trained))
    table = Table("question", "before", "after", title="Held-out, greedy", title_justify="left")
    for prompt, *answers in zip(prompts[: script.show_completions], before, after, strict=False):
        table.add_row(*(escape(messages[-1]["content"]) for messages in (prompt, *answers)))
    Console().print(table)
    columns = {name: held_out[name] for name in held_out.column_names if name != "prompt"}
    for name in script.reward_funcs:
        reward = load_reward(name)
        means = [sum(scores) / len(scores) for scores in (reward(answers, **columns) for answers in (before, after))]
        print(f"held-out {name}, greedy: {means[0]:.3f} before, {means[1]:.3f} after")


if __name__ == "__main__":
    main(sys.argv[1:])
