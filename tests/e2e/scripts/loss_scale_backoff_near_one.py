# expect: {id: loss-scale-exhausted, family: scaling, raises: null}
# at: {op: null, step: 1}
# shows: 'updates 0 of 10'
# why: the backoff factor is so close to one that the scale never comes down to where gradients fit into float16

import torch
from torch import nn


class Clouds(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.enc = nn.Conv2d(3, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.dec = nn.Conv2d(width, 1, 1)

    def forward(self, scene):
        x = torch.relu(self.enc(scene))
        return self.dec(x + torch.relu(self.mid(x)))


def main():
    torch.manual_seed(33)
    net = Clouds()
    opt = torch.optim.SGD(net.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.95)
    updates = 0
    for step in range(10):
        scene = torch.rand(4, 3, 24, 24)
        cover = (scene.mean(1, keepdim=True) > 0.5).float()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = net(scene)
        loss = nn.functional.binary_cross_entropy_with_logits(guess.float(), cover, reduction="sum")
        opt.zero_grad()
        scaler.scale(loss).backward()
        old = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        updates += int(scaler.get_scale() >= old)
        print(step, f"{loss.item():.1f}", f"{scaler.get_scale():.0f}")
    print("updates", updates, "of 10")


if __name__ == "__main__":
    main()
