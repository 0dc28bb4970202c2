"""Every refusal comes before anything heavy is imported; and a run says how long the last one took."""

import os
import sys
from pathlib import Path

import pytest
from command import dtypedoctor

PLANTED = "import os, sys\nopen(os.environ['PLANTED'], 'a').write(__name__)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "gemma4_grpo_fp16", "--device", "cuda"), "needs a CUDA device"),
        (("run", "gemma4_grpo_fp16", "--device", "gpu"), "did you mean 'cuda'?"),
        (("run", "gemma4_grpo_fp16", "--dtype", "fp16"), "did you mean 'float16'?"),
        (("run", "gemma4_grpo_fp16", "--model", "builtin:gemma4-tniy"), "did you mean 'gemma4-tiny'?"),
        (("run", "gemma4_grpo_fp16", "--model", "gemma4-tiny"), "did you mean 'builtin:gemma4-tiny'?"),
        (("run", "gemma4_grpo_fp61"), "did you mean 'gemma4_grpo_fp16'?"),
        (("bisect", "--model", "builtin:gemma4-tny"), "did you mean 'gemma4-tiny'?"),
        (("bisect", "--model", "gemma4-tiny"), "did you mean 'builtin:gemma4-tiny'?"),
        (("bisect", "--model", "builtin:gemma4-tiny", "--device", "cuda"), "needs a CUDA device"),
        (("bisect", "--model", "builtin:gemma4-tiny", "--workload", "generat"), "did you mean 'generate'?"),
        (("exec", "trian.py"), "did you mean 'train.py'?"),
        (("exec", "--try", "bflaot16", "train.py"), "did you mean 'bfloat16'?"),
        (("exec", "--ablate", "autocats", "train.py"), "did you mean 'autocast'?"),
        (("treat", "--with", "quant-state-dtpye", "train.py"), "did you mean 'quant-state-dtype'?"),
        (("report", "x", "--format", "hmtl"), "did you mean 'html'?"),
        (("inspect", "builtin:lama-tiny"), "did you mean 'llama-tiny'?"),
    ],
)
def test_a_slip_is_refused_before_a_process_imports_torch(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    """A planted torch notes who imports it, in this process or in one that it starts; no run directory is left."""
    libraries, note = tmp_path / "libraries", tmp_path / "note.txt"
    (libraries / "torch").mkdir(parents=True)
    (libraries / "torch" / "__init__.py").write_text(PLANTED)
    (libraries / "torch" / "version.py").write_text("cuda: str | None = None\nhip = None\n")
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "train.py").write_text("")
    path = os.pathsep.join([str(libraries), *sys.path])
    finished = dtypedoctor(*arguments, cwd=folder, HF_HUB_OFFLINE="1", PLANTED=str(note), PYTHONPATH=path)
    assert finished.code == 2, finished.err
    assert words in finished.err
    assert not note.exists()
    assert not list(folder.glob("runs/*"))
