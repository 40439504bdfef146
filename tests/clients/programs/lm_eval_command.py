"""The command `lm_eval`: a task of generations from local data, by chats and by completions."""

import json
import os
import subprocess
from pathlib import Path

tasks = Path("tasks")
tasks.mkdir()
Path("data.jsonl").write_text("".join(json.dumps({"q": f"{n} and {n}?", "a": "Hello"}) + "\n" for n in range(4)))
files = {"test": str(Path("data.jsonl").resolve())}
task = {
    "task": "small", "dataset_path": "json", "dataset_kwargs": {"data_files": files},
    "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
(tasks / "small.yaml").write_text(json.dumps(task))
env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
for kind, path in (("local-chat-completions", "chat/completions"), ("local-completions", "completions")):
    given = f"model=m,base_url={os.environ['OPENAI_BASE_URL']}/{path},num_concurrent=2,tokenized_requests=False"
    command = [f"{os.environ['CLIENT_BINARIES']}/lm_eval", "--model", kind, "--model_args", given]
    command += ["--tasks", "small", "--include_path", str(tasks)]
    if kind == "local-chat-completions":
        command.append("--apply_chat_template")
    else:
        command[4] += f",tokenizer={os.environ['TOKENIZER']},tokenizer_backend=huggingface"
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout)
    assert ended.returncode == 0 and "exact_match" in ended.stdout
