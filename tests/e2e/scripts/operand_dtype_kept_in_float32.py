# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: gates, op: aten.mm.default, phase: forward, step: 1, raised_in: gates}
# born: keep-in-fp32
# born_fqn: gates
# why: the class keeps `gates` in float32 when loaded in float16, and its forward does not cast what goes in

import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class NowcastConfig(PretrainedConfig):
    model_type = "nowcast"

    def __init__(self, stations=16, width=32, **kwargs):
        super().__init__(**kwargs)
        self.stations, self.width = stations, width


class Nowcast(PreTrainedModel):
    config_class = NowcastConfig
    _keep_in_fp32_modules = ["gates"]

    def __init__(self, config):
        super().__init__(config)
        self.enter = nn.Linear(config.stations, config.width)
        self.gates = nn.Linear(config.width, config.width, bias=False)
        self.leave = nn.Linear(config.width, config.stations)
        self.post_init()

    def forward(self, readings):
        h = torch.tanh(self.enter(readings))
        return self.leave(h * torch.sigmoid(self.gates(h)))


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    Nowcast(NowcastConfig()).save_pretrained(folder)
    model = Nowcast.from_pretrained(folder, dtype=torch.float16).eval()
readings = torch.randn(8, 16, dtype=torch.float16)
with torch.no_grad():
    print("next hour:", model(readings).float().mean(0)[:4].tolist())
