"""`dtypedoctor parity`: the example of its page, its exit codes, its report, and what is no rollout."""

import json
import re
from pathlib import Path

import pytest
import torch
from command import Finished, forked, python
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"<!-- fires -->\n```python\n(.+?)```", PAGE, re.DOTALL)
[SHOWN] = re.findall(r"```text\n(GAP.+?) …\n```", PAGE, re.DOTALL)
ROW = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-1.0, -2.0]}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "policy"
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **size)).save_pretrained(folder)
    return folder


def scored(tmp_path: Path, folder: Path, *rows: object, options: tuple[str, ...] = ()) -> Finished:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    return forked("parity", folder, "rollouts.jsonl", *options, cwd=tmp_path)


def test_the_example_of_the_page_fails_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(EXAMPLE)
    assert python("generate.py", cwd=tmp_path).code == 0
    done = forked("parity", "policy", "rollouts.jsonl", cwd=tmp_path)
    assert done.code == 10, done.err
    assert " ".join(SHOWN.split()) in " ".join(done.out.split())


def test_the_same_example_with_raw_log_probabilities_is_the_same(tmp_path: Path) -> None:
    raw = EXAMPLE.replace("output_scores", "output_logits").replace("drawn.scores", "drawn.logits")
    assert raw.count("logits") == EXAMPLE.count("logits") + 2
    (tmp_path / "generate.py").write_text(raw)
    assert python("generate.py", cwd=tmp_path).code == 0
    done = forked("parity", "policy", "rollouts.jsonl", "--format", "json", cwd=tmp_path)
    report = json.loads(done.out)
    assert (done.code, report["kind"], report["status"], report["verdict"]) == (0, "parity", "healthy", "same")
    assert report["gap"]["outside"] == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "rollouts.jsonl:2:"),
        ([1], "rollouts.jsonl:2: a JSON object is wanted"),
        ({**ROW, "logprobs": [-1.0]}, "rollouts.jsonl:2: logprobs: has 1 values for 2 tokens"),
        ({**ROW, "logprobs": [-1.0, 0.5]}, "rollouts.jsonl:2: logprobs[1]: 0.5 is above 0"),
        ({**ROW, "logprobs": [-1.0, None]}, "rollouts.jsonl:2: logprobs[1]: a finite number"),
        ({**ROW, "completion_ids": [7, "a"]}, "rollouts.jsonl:2: completion_ids: a list of token ids"),
        ({**ROW, "completion_ids": [7, 32]}, "rollouts.jsonl:2: token id 32 is beyond the vocabulary"),
        ({**ROW, "prompt_ids": []}, "rollouts.jsonl:2: the prompt has no token"),
        ({**ROW, "top_p": 0}, "rollouts.jsonl:2: temperature is at least 0"),
        ({"prompt_ids": [1], "completion_ids": [2]}, "rollouts.jsonl:2: has no 'logprobs'"),
    ],
)
def test_what_is_no_rollout_is_named_by_its_line(row: object, words: str, policy: Path, tmp_path: Path) -> None:
    done = scored(tmp_path, policy, ROW, row)
    assert (done.code, words in done.err) == (2, True), done.err


def test_an_empty_file_and_a_missing_folder_are_usage_errors(policy: Path, tmp_path: Path) -> None:
    assert "has no completion" in scored(tmp_path, policy, "").err
    assert "no such folder" in scored(tmp_path, tmp_path / "nowhere", ROW).err
    (tmp_path / "empty").mkdir()
    done = scored(tmp_path, tmp_path / "empty", ROW)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err


def test_the_names_of_other_engines_are_known(policy: Path, tmp_path: Path) -> None:
    """Those of SGLang and vLLM, with the ways in which they write log-probabilities."""
    sglang = {
        "prompt_ids": [5, 6],
        "output_ids": [7, 8],
        "meta_info": {"output_token_logprobs": [[-1.0, 7, "a"], [-2.0, 8, None]]},
    }
    vllm = {
        "prompt_token_ids": [5, 6],
        "token_ids": [7, 8],
        "logprobs": [{"7": {"logprob": -1.0}, "9": {"logprob": -3.0}}, {"8": {"logprob": -2.0}}],
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": None},
    }
    reports = [
        json.loads(scored(tmp_path, policy, row, options=("--format", "json")).out) for row in (ROW, sglang, vllm)
    ]
    assert reports[0]["gap"]["tokens"] == 2
    assert [report["gap"] for report in reports] == [reports[0]["gap"]] * 3
