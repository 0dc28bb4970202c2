"""The modes that see operators: the compiler is not loaded for them, and never compiles them."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from patience import PATIENCE

LOOKED_AT = """
    import sys, torch
    from pathlib import Path
    from dtypedoctor.instrument.optrace import OpWindow
    from dtypedoctor.instrument.operators import keep_compiler_out
    from dtypedoctor.instrument.instruments import Instruments
    from dtypedoctor.trace.events import Op
    from dtypedoctor.trace.reader import read_trace
    from dtypedoctor.trace.writer import TraceWriter
    from dtypedoctor.worker.on_import import after_import
    writer = TraceWriter(Path(sys.argv[1]))
    instruments = Instruments(writer, windows=[OpWindow(call=call, step=0, until="next-call") for call in (1, 2)])
    after_import("torch._dynamo", keep_compiler_out)
    instruments.start()
"""
"""The routine look and the op trace are both open in the first two calls."""

COMPILES = """
    net = torch.nn.Linear(4, 4)
    net(torch.ones(2, 4))
    assert "torch._dynamo" not in sys.modules
    class Late(torch.nn.Module):
        def forward(self, x):
            return torch.compile(lambda y: net(y).relu() + 1, backend="eager")(x)
    Late()(torch.ones(2, 4)).sum().backward()
    counters = torch._dynamo.utils.counters
    instruments.stop()
    writer.close()
    print(len(read_trace(Path(sys.argv[1])).all(Op)) > 0, counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_by_the_program_alone_and_compiles_nothing_of_the_doctors(tmp_path: Path) -> None:
    """Also where it comes while a mode is open: torch runs the call uncompiled then, and no function of the watch is compiled for it."""
    source = textwrap.dedent(LOOKED_AT) + textwrap.dedent(COMPILES)
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.stdout == "True 0 {}\n", done.stderr
