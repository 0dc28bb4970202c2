# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: null, op: aten.sum.dim_IntList, phase: forward, step: 2}
# shows: "1 nan"
# why: there is no module at all; squared distances fit into float16, their sum over the coordinates does not, and a softmax of -inf follows

import torch

torch.manual_seed(0)


def squared_distances(homes, points):
    apart = (homes[:, None] - points[None]).clamp(-250, 250)
    return (apart * apart).sum(-1)


points = torch.nn.Parameter(torch.randn(6, 96).half())
optimizer = torch.optim.SGD([points], lr=1e-3)

for evening, spread in enumerate((3, 30, 3)):
    homes = (torch.randn(40, 96) * spread).half()
    distances = squared_distances(homes, points)
    choice = torch.softmax(-distances, dim=-1)
    loss = (choice * distances).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(evening, loss.item())
