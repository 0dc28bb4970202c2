"""Updates that bfloat16 loses: what is said first of them, and that the advice, taken literally, ends it."""

import re
from pathlib import Path
from typing import Any

import pytest
from command import forked, report_of

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32)).to(torch.bfloat16)
{frozen}
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-6)
for step in range(8):
    ids = torch.randint(0, 32, (4, 8))
    {forward}
    nn.functional.cross_entropy(out.float().flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
print(*sorted({{str(p.dtype) for p in net.parameters() if not p.requires_grad}}))
"""


def examined(folder: Path, text: str) -> tuple[dict[str, Any], str]:
    """The report of a script, and what it printed."""
    folder.mkdir()
    (folder / "train.py").write_text(text, encoding="utf-8")
    done = forked("exec", "--out", "run", "train.py", cwd=folder)
    return report_of(folder / "run"), done.out


@pytest.mark.release
@pytest.mark.parametrize(
    "given",
    ["[p for p in net.parameters() if p.requires_grad]", "[net[1].weight, net[1].bias, net[3].weight, net[3].bias]"],
)
def test_where_a_part_is_frozen_only_what_trains_is_widened(given: str, tmp_path: Path) -> None:
    """The line to add and the region around the forward pass remove the finding; the frozen part stays as it is."""
    text = SCRIPT.format(frozen="net[0].requires_grad_(False)", forward="out = net(ids)")
    text = text.replace("[p for p in net.parameters() if p.requires_grad]", given)
    report, _ = examined(tmp_path / "stalls", text)
    (advice,) = report["do_this"]
    assert advice["edits"] == []
    assert "Before AdamW is made (train.py:8)" in advice["text"]
    assert "costs 6.38 KiB more for 816 trained weights" in advice["text"]
    region = re.search(r"`(with torch\.autocast\(.*\):)`", advice["text"])
    assert region is not None
    mended = text.replace("opt = ", f"{advice['code']}\nopt = ").replace(
        "out = net(ids)", f"{region[1]} out = net(ids)"
    )
    after, printed = examined(tmp_path / "mended", mended)
    assert [finding["id"] for finding in after["findings"]] == []
    assert printed == "torch.bfloat16\n"
