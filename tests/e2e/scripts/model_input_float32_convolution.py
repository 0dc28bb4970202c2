# expect: {id: model-input-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: features.0, op: [aten.conv2d.default, aten.convolution.default], phase: forward, step: 1,
#   raised_in: features.0}
# born: model-input
# why: the image tensor stays float32 while the network was halved

import torch
from torch import nn


class LeafNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.classify = nn.Linear(16, 5)

    def forward(self, photo):
        return self.classify(self.features(photo).mean(dim=(2, 3)))


@torch.no_grad()
def predict(net, photos):
    return net(photos).argmax(-1).tolist()


torch.manual_seed(0)
net = LeafNet().half().eval()
pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
photos = (pixels.float() / 255 - 0.45) / 0.22
print("classes:", predict(net, photos))
