# expect: {id: model-input-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: '0', op: aten.addmm.default, phase: forward, step: 1, raised_in: '0'}
# born: model-input
# why: numpy arrays are float64 and nobody converts them for the float32 network

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(4)
rooms = rng.integers(1, 9, size=(128, 1))
area = rng.normal(120, 30, size=(128, 1))
age = rng.uniform(0, 90, size=(128, 1))
table = np.concatenate([rooms, area / 100, age / 50], axis=1)
price = table @ np.array([[0.4], [2.0], [-0.7]]) + rng.normal(0, 0.1, size=(128, 1))

torch.manual_seed(4)
regressor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(regressor.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.from_numpy(table), torch.from_numpy(price)), batch_size=32)

for epoch in range(2):
    for features, target in loader:
        loss = nn.functional.mse_loss(regressor(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: mse {loss.item():.4f}")
