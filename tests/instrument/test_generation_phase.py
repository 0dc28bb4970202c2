"""``generate`` of transformers is a phase of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from patience import PATIENCE

GENERATES = """
    import sys
    from pathlib import Path
    import torch
    from dtypedoctor.trace.reader import read_trace
    from dtypedoctor.trace.writer import TraceWriter
    from dtypedoctor.worker.process_watch import ProcessWatch
    writer = TraceWriter(Path(sys.argv[1]))
    watch = ProcessWatch(writer)
    watch.start()
    assert "transformers" not in sys.modules
    from transformers import GPT2Config, GPT2LMHeadModel
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)
    watch.finish(None)
    writer.close()
    trace = read_trace(Path(sys.argv[1]))
    print({trace.sites[sample.site].phase for sample in trace.samples})
"""


@pytest.mark.release
@pytest.mark.slow
def test_the_first_call_in_a_program_that_imports_transformers_later_is_a_generation(tmp_path: Path) -> None:
    """The first module is called from inside of it, which is too late to begin to follow it."""
    command = [sys.executable, "-c", textwrap.dedent(GENERATES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1:] == ["{'generate'}"], done.stderr
