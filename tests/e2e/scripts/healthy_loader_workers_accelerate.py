# expect: {id: null, family: healthy, raises: null}
# why: worker processes feed the loop; accelerate with bf16 and a scheduler

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        t = torch.linspace(0, 6.28, 32)
        return torch.sin((1 + index % 4) * t)[None], index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 7, stride=2)
        self.out = nn.Linear(8, 4)

    def forward(self, wave):
        return self.out(torch.relu(self.conv(wave)).amax(-1))


def main():
    torch.manual_seed(26)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(Waves(), batch_size=16, shuffle=True, num_workers=1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for epoch in range(2):
        for wave, kind in loader:
            loss = nn.functional.cross_entropy(net(wave), kind)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print("epoch", epoch, loss.item())


if __name__ == "__main__":
    main()
